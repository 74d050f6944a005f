"""Edits that take away named canvas positions: `MaskPositions`, and `TruncateContext` from some step on."""

# B batch, H query heads, S keys, M keys taken away; a position is a canvas column, sink columns not counted
from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from sinklab.probing.call import AttentionCall
from sinklab.probing.choosing import as_columns
from sinklab.probing.editing import KeyHandler, Selection, head_numbers, layer_names, whole_numbers
from sinklab.probing.log import InterventionLog
from sinklab.probing.removing import REMOVALS
from sinklab.probing.tap import Listener
from sinklab.registry import interventions


@interventions.register("mask_positions")
@dataclass(frozen=True)
class MaskPositions:
    """Take the same canvas positions from every query, whatever they receive.

    Positions count the columns of the canvas (left padding included), without the model's sink columns in front. A
    position that is not there yet (an autoregressive model) is taken when it comes.

    Raises ValueError for values outside those listed, and in the run for positions the canvas never has.
    """

    positions: tuple[int, ...]
    """Canvas positions, from 0."""
    removal: str = "mask"
    """"mask", "zero_value" or "evict", as for `MaskSinks`."""
    layers: tuple[int | str, ...] | None = None
    """Layers to edit: numbers in the order of execution (-1 is the last), module paths or patterns; None for all."""
    heads: tuple[int, ...] | None = None
    """Query heads to edit; None for all."""
    steps: tuple[int | None, ...] | None = None
    """(start, stop): only in steps start, …, stop - 1 of the sequence; stop None means to the end."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "positions", tuple(sorted(set(whole_numbers("positions", self.positions)))))
        object.__setattr__(self, "layers", layer_names(self.layers))
        if not self.positions:
            raise ValueError("positions name the keys to take away, got none: leave out the edit")
        object.__setattr__(self, "heads", head_numbers(self.heads))
        if self.steps is not None:
            object.__setattr__(self, "steps", _span(self.steps))
        if self.removal not in REMOVALS:
            near = difflib.get_close_matches(str(self.removal), REMOVALS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "choose one of them"
            raise ValueError(f"removal is one of {REMOVALS}, got {self.removal!r}: {hint}")

    def handler(self, log: InterventionLog, forwards_per_step: int) -> Listener:
        """The listener that carries this edit out and writes into the log."""
        return _PositionHandler(self, log, forwards_per_step, self.positions, self.steps or (0, None))


@interventions.register("truncate_context")
@dataclass(frozen=True)
class TruncateContext:
    """From a step on, hide the canvas positions start, …, stop - 1 from every query: mid-sequence truncation.

    Queries at these positions still run and see the others; what they write is read by nobody. The share of attention
    the stretch held is `realised_BLH` of the first entry of the log.

    Raises ValueError for an empty stretch or negative numbers, and in the run for positions the canvas never has.
    """

    start: int
    """First hidden canvas position."""
    stop: int
    """The position after the last hidden one."""
    step: int
    """The first step in which they are hidden, counted from 0 in each sequence."""
    removal: ClassVar[str] = "mask"

    def __post_init__(self) -> None:
        whole_numbers("start, stop and step", (self.start, self.stop, self.step))
        if self.stop <= self.start:
            raise ValueError(
                f"start and stop enclose the positions to hide, got {self.start} and {self.stop}: stop is larger"
            )

    def handler(self, log: InterventionLog, forwards_per_step: int) -> Listener:
        """The listener that carries this edit out and writes into the log."""
        return _PositionHandler(self, log, forwards_per_step, tuple(range(self.start, self.stop)), (self.step, None))


def _span(steps: tuple[int | None, ...]) -> tuple[int | None, ...]:
    steps = tuple(steps)
    if len(steps) == 2 and steps[0] is not None:
        whole_numbers("steps", steps if steps[1] is not None else steps[:1])
        if steps[1] is None or steps[1] > steps[0]:
            return steps
    raise ValueError(f"steps is (first, the one after the last), None for to the end; got {steps}: write (4, 8)")


class _PositionHandler(KeyHandler):
    def __init__(
        self,
        options: MaskPositions | TruncateContext,
        log: InterventionLog,
        forwards_per_step: int,
        positions: tuple[int, ...],
        steps: tuple[int | None, ...],
    ) -> None:
        self.positions, (self.first, self.end) = positions, steps
        self.longest = 0
        log.on_end.append(self._refuse_missing)
        super().__init__(options, log, forwards_per_step)

    def taken(self, call: AttentionCall) -> Selection | None:
        first = self.first or 0
        if self.step < first or (self.end is not None and self.step >= self.end):
            return None
        prefix = self.log.note_prefix(call)
        length = call.key_BKSD.shape[2] - prefix
        self.longest = max(self.longest, length)
        if call.visibility.running is not None:
            self._refuse_missing()
        batch, every = call.query_BHQD.shape[:2]
        there = [prefix + position for position in self.positions if position < length]
        gone_S = torch.zeros(prefix + length, dtype=torch.bool)
        gone_S[there] = True
        # Padding is nobody's key, and counts as nothing taken.
        gone_B1S = (gone_S & (call.visibility.visible_BS > 0).cpu()).unsqueeze(1).to(call.query_BHQD.device)
        heads = self.heads_of(call)
        gone_BHS = gone_B1S.expand(-1, every, -1)
        if len(heads) < every:
            edited_H = torch.zeros(every, dtype=torch.bool, device=gone_B1S.device)
            edited_H[heads] = True
            gone_BHS = gone_BHS & edited_H[:, None]
        columns_BHM = as_columns(gone_B1S).expand(-1, len(heads), -1)
        return Selection(gone_BHS, columns_BHM, torch.full((batch, len(heads)), math.nan, device=gone_B1S.device))

    def why_idle(self) -> tuple[str, str]:
        if not self.first:
            return super().why_idle()
        return f"it begins at step {self.first} (the first is 0), and no sequence came so far", "begin earlier"

    def _refuse_missing(self) -> None:
        if 0 < self.longest <= self.positions[-1]:
            raise ValueError(
                f"{self.label}: there is no position {self.positions[-1]}, the canvas had {self.longest} (sink columns "
                f"not counted): name positions from 0 to {self.longest - 1}"
            )
