"""What the blocks and the states of the queries do to sinks: moves at block borders, heads whose sinks split."""

# T steps, G states of a query (masked, committed, prompt), L layers, H heads
from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np


@dataclass(frozen=True)
class BlockEffects:
    """Moves of main sinks where a new block begins, against those inside a block. Several samples add up."""

    border_moves: int
    border_pairs: int
    """successive steps of a head with a block border between them"""
    inside_moves: int
    inside_pairs: int

    @property
    def border_rate(self) -> float:
        """Moves per pair of steps across a border; NaN without any border."""
        return self.border_moves / self.border_pairs if self.border_pairs else float("nan")

    @property
    def inside_rate(self) -> float:
        """Moves per pair of steps inside a block."""
        return self.inside_moves / self.inside_pairs if self.inside_pairs else float("nan")

    @property
    def ratio(self) -> float:
        """How many times likelier a move is at a border; NaN without moves inside a block or without a border."""
        return self.border_rate / self.inside_rate if self.inside_moves else float("nan")

    def __add__(self, other: BlockEffects) -> BlockEffects:
        return BlockEffects(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(self)))


def block_effects(main: Any, blocks: Any, counted: Any = None) -> BlockEffects:
    """Compare moves at block borders with those inside (Rulli et al., Fig. 6b).

    main: (..., step, layer, head) key of the main sink, -1 where the step does not exist.
    blocks: (..., step) block that each step works on (any numbers; a change is a border).
    counted: boolean like main, steps to look at (``Motion.counted``); None: all that exist.
    Raises ValueError when the shapes do not fit.
    """
    place, block = np.asarray(main), np.asarray(blocks)
    if place.ndim < 3 or block.shape != place.shape[:-2]:
        raise ValueError(
            f"block_effects needs main (..., step, layer, head) and blocks (..., step): got {place.shape} and "
            f"{block.shape}."
        )
    here = place >= 0 if counted is None else np.asarray(counted, dtype=bool) & (place >= 0)
    pairs = here[..., 1:, :, :] & here[..., :-1, :, :]
    moved = pairs & (place[..., 1:, :, :] != place[..., :-1, :, :])
    border = (block[..., 1:] != block[..., :-1])[..., None, None]
    return BlockEffects(
        int((moved & border).sum()),
        int((pairs & border).sum()),
        int((moved & ~border).sum()),
        int((pairs & ~border).sum()),
    )


@dataclass(frozen=True)
class SplitSinks:
    """Heads that give queries of different states different main sinks. Several samples add up."""

    split_L: np.ndarray
    """(layer,) number of (step, head) where masked and unmasked queries have different main sinks"""
    pairs_L: np.ndarray
    """(layer,) number of (step, head) that have both"""
    committed: tuple[int, int]
    """(different, there) of masked against committed queries"""
    prompt: tuple[int, int]
    """(different, there) of masked against prompt queries"""

    @property
    def share(self) -> float:
        """Share of (step, layer, head) whose sinks split; NaN when none has both kinds of queries."""
        total = int(self.pairs_L.sum())
        return float(self.split_L.sum()) / total if total else float("nan")

    @property
    def share_by_layer(self) -> np.ndarray:
        """(layer,) the same in each layer."""
        return self.split_L / np.where(self.pairs_L > 0, self.pairs_L, np.nan)

    def __add__(self, other: SplitSinks) -> SplitSinks:
        if self.pairs_L.shape != other.pairs_L.shape:
            raise ValueError(f"The same layers add up: got {len(self.pairs_L)} and {len(other.pairs_L)} layers.")
        return SplitSinks(
            self.split_L + other.split_L,
            self.pairs_L + other.pairs_L,
            (self.committed[0] + other.committed[0], self.committed[1] + other.committed[1]),
            (self.prompt[0] + other.prompt[0], self.prompt[1] + other.prompt[1]),
        )


def split_sinks(main_by_state: Any, share_by_state: Any = None, floor: Any = 0.0) -> SplitSinks:
    """Where masked and unmasked queries look at different main sinks (Rulli et al., Fig. 6a).

    main_by_state: (..., step, state, layer, head) key of the main sink of the queries of each state (masked,
        committed, prompt), -1 where there are no such queries. The unmasked queries are the committed ones where there
        are any, else those of the prompt.
    share_by_state: like it, mean weight that the main sink gets from them; with it only sinks over ``floor`` count
        (number, or an array broadcastable to (..., step, state, layer, head)); without it any greatest key does.
    Raises ValueError when the shapes do not fit.
    """
    main = np.asarray(main_by_state)
    if main.ndim < 4 or main.shape[-3] != 3:
        raise ValueError(
            "split_sinks needs (..., step, state, layer, head) with three states (masked, committed, prompt): got "
            f"shape {main.shape}."
        )
    if share_by_state is not None:
        share = np.asarray(share_by_state, dtype=np.float32)
        if share.shape != main.shape:
            raise ValueError(f"One share per main sink: got shapes {share.shape} and {main.shape}.")
        main = np.where(share > floor, main, -1)
    masked, committed, prompt = np.moveaxis(main, -3, 0)
    unmasked = np.where(committed >= 0, committed, prompt)
    axes = (*range(masked.ndim - 2), masked.ndim - 1)

    def compared(other: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        both = (masked >= 0) & (other >= 0)
        return (both & (masked != other)).sum(axes), both.sum(axes)

    split_L, pairs_L = compared(unmasked)
    one, two = compared(committed), compared(prompt)
    return SplitSinks(split_L, pairs_L, (int(one[0].sum()), int(one[1].sum())), (int(two[0].sum()), int(two[1].sum())))
