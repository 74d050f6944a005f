"""Where the queries of a call stand on the canvas, and who sees whom: what a mask and the running denoiser tell."""

# B batch, H query heads, Q queries, S keys, N sink columns in front of the keys, T canvas positions
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sinklab.attention import RunningCanvas, real_queries, running_canvas, visible_queries


@dataclass(frozen=True, eq=False)
class Sight:
    """Who may see whom before any intervention; worked out when first asked for."""

    mask: Tensor | None
    shape: tuple[int, int, int]
    """(batch, queries, keys) of the call."""
    is_causal: bool
    running: RunningCanvas | None
    """The canvas that was announced for this call; None when none was, or when it does not fit the call."""

    @cached_property
    def visible_BHS(self) -> Tensor:
        """Queries that may see each key, int64 (B, 1 or H, S)."""
        with torch.no_grad():
            return visible_queries(self.mask, *self.shape, is_causal=self.is_causal, own_Q=self._own_Q)

    @cached_property
    def real_BQ(self) -> Tensor | None:
        """False for padding queries; None: all are real."""
        with torch.no_grad():
            return real_queries(self.mask, *self.shape, is_causal=self.is_causal, own_Q=self._own_Q)

    @property
    def visible_BS(self) -> Tensor:
        """Queries that may see each key, int64 (B, S), in the head that sees most."""
        return self.visible_BHS.amax(1)

    @cached_property
    def columns_Q(self) -> Tensor | None:
        """Canvas positions of the queries, int64 on the CPU; None when no canvas was announced."""
        return None if self.running is None else _columns(self.running)

    @property
    def prefix(self) -> int | None:
        """Sink columns in front of the keys; None when no canvas was announced."""
        return None if self.running is None else self.shape[2] - self.running.ids_BS.shape[1]

    @property
    def _own_Q(self) -> Tensor | None:
        return None if self.columns_Q is None else self.columns_Q + (self.prefix or 0)


class SightCache:
    """The sight of a mask, kept for a forward: all layers are given the same mask."""

    def __init__(self) -> None:
        self._known: dict[tuple, tuple[RunningCanvas | None, Sight]] = {}

    def clear(self) -> None:
        self._known.clear()

    def of(self, mask: Tensor | None, batch: int, queries: int, keys: int, is_causal: bool) -> Sight:
        running = running_canvas()
        # Mask and canvas are kept beside it, so that their ids cannot be taken by others while it is known.
        key = (id(mask), id(running), batch, queries, keys, is_causal)
        if key not in self._known:
            fits = running is not None and _fits(running, batch, queries, keys)
            self._known[key] = (running, Sight(mask, (batch, queries, keys), is_causal, running if fits else None))
        return self._known[key][1]


def _fits(running: RunningCanvas, batch: int, queries: int, keys: int) -> bool:
    """Whether a call of these sizes can be an evaluation of this canvas (another model may run inside the block)."""
    rows, length = running.ids_BS.shape
    return rows == batch and length <= keys and len(_columns(running)) == queries


def _columns(running: RunningCanvas) -> Tensor:
    columns, length = running.columns, running.ids_BS.shape[1]
    if isinstance(columns, Tensor):
        return columns.cpu()
    return torch.arange(length)[columns if columns is not None else slice(None)]
