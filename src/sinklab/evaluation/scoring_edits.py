"""Interventions where there are no steps: a text is read once, and sinks are chosen in a clean pass over it."""

# B rows of a forward, H query heads, S keys
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sinklab.data.rows import place_generator
from sinklab.probing import Edit, InterventionLog, Listener, MaskPositions, MaskSinks, TruncateContext, intervene
from sinklab.probing.choosing import Chooser

Place = tuple[int, ...]
"""What a row's random control is drawn by: (seed, group, number)."""


def scoring_edits(edits: Sequence[Edit], *, is_diffusion: bool) -> tuple[Edit, ...]:
    """The edits as scoring carries them out.

    `MaskSinks` chooses in a clean pass over the same row (source "clean_pass") whatever its source is, and in an
    autoregressive model by the attention of all queries (selector "received"): the last row of a whole text says
    nothing of the queries before it. The other edits stay as they are.

    Raises:
        ValueError: for an edit that begins after the first step.
    """
    return tuple(_for_one_pass(edit, is_diffusion) for edit in edits)


def _for_one_pass(edit: Any, is_diffusion: bool) -> Edit:
    if isinstance(edit, MaskSinks):
        changes: dict[str, Any] = {"source": "clean_pass"}
        if edit.removal != "evict":
            changes["limit"] = None
        if not is_diffusion:
            changes["selector"] = "received"
        return replace(edit, **changes)
    first = edit.step if isinstance(edit, TruncateContext) else 0
    if isinstance(edit, MaskPositions) and edit.steps is not None:
        first = edit.steps[0] or 0
    if first > 0:
        raise ValueError(
            f"a text is scored in one step, but {edit.name} begins at step {first} and would change nothing; leave out "
            "its step"
        )
    return edit


def is_random(edits: Sequence[Edit]) -> bool:
    """Whether an edit draws: then equal rows may differ."""
    return any(isinstance(edit, MaskSinks) and edit.control == "random" for edit in edits)


def check_positions(edits: Sequence[Any], lengths: Sequence[int]) -> None:
    """Raise ValueError for named positions that the shortest of texts of these lengths does not have."""
    shortest = min(lengths, default=None)
    if shortest is None:
        return
    for edit in edits:
        last = edit.stop - 1 if isinstance(edit, TruncateContext) else -1
        last = edit.positions[-1] if isinstance(edit, MaskPositions) else last
        if last >= shortest:
            raise ValueError(
                f"{edit.name} names position {last}, but the shortest text to score has {shortest} tokens; name "
                f"positions below {shortest}, or leave out the short texts"
            )


@contextmanager
def edited(model: Any, edits: Sequence[Edit], places: Sequence[Place]) -> Iterator[InterventionLog | None]:
    """The edits over one batch; None without any. What rows draw depends on their places alone, not on the batch."""
    if not edits:
        yield None
        return
    drawn = [
        _Drawn(edit, tuple(places)) if isinstance(edit, MaskSinks) and is_random([edit]) else edit for edit in edits
    ]
    # what was really taken away is not read here, and would cost a pass over the scores
    with intervene(model, *drawn, measure=False) as log:
        yield log


@dataclass(frozen=True)
class _Drawn:
    """A random control whose rows have generators of their own."""

    edit: MaskSinks
    places: tuple[Place, ...]

    def editor(self, log: InterventionLog, forwards_per_step: int) -> Listener:
        listener: Any = self.edit.editor(log, forwards_per_step)
        listener.chooser = _RowChooser(self.edit, log, self.places)
        return listener


class _RowChooser(Chooser):
    def __init__(self, options: MaskSinks, log: InterventionLog, places: tuple[Place, ...]) -> None:
        super().__init__(options, log)
        self.places, self.drawn = places, 0

    def _order(self, score_BHS: Tensor) -> Tensor:
        heads, keys = score_BHS.shape[1:]
        rows = []
        for place in self.places:
            generator = place_generator(self.options.seed, *place, self.drawn)
            # key by key: padding behind a row does not move what its keys get
            rows.append(torch.rand(keys, heads, generator=generator).T)
        self.drawn += 1
        return torch.stack(rows).to(score_BHS.device)
