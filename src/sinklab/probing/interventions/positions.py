"""Edits that take away named canvas positions: `MaskPositions`, and `TruncateContext` from some step on."""

# B batch, H query heads, S keys, M keys taken away; a position is a canvas column, sink columns not counted
from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass

import torch

from sinklab.errors import one_of
from sinklab.probing.call import AttentionCall
from sinklab.probing.interventions.base import LayerIntervention
from sinklab.probing.interventions.keys import KeyHandler, Selection
from sinklab.probing.interventions.removal import REMOVALS, as_columns
from sinklab.probing.log import InterventionLog
from sinklab.probing.scope import whole_numbers
from sinklab.probing.tap import Listener
from sinklab.registry import interventions


@interventions.register("mask_positions")
@dataclass(frozen=True)
class MaskPositions(LayerIntervention):
    """Take the same canvas positions from every query, whatever they receive.

    Positions count the columns of the canvas (left padding included), without the model's sink columns in front. A
    position that is not there yet (an autoregressive model) is taken when it comes.

    Raises ValueError for values outside those listed, and in the run for positions the canvas never has.
    """

    positions: tuple[int, ...]
    """Canvas positions, from 0."""
    _: KW_ONLY
    removal: str = "mask"
    """"mask", "zero_value" or "evict", as for `MaskSinks`."""
    steps: tuple[int | None, ...] | None = None
    """(start, stop): only in steps start, …, stop - 1 of the sequence; stop None means to the end."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "positions", tuple(sorted(set(whole_numbers("positions", self.positions)))))
        if not self.positions:
            raise ValueError("positions name the keys to take away, got none: leave out the edit")
        if self.steps is not None:
            object.__setattr__(self, "steps", _span(self.steps))
        one_of("removal", self.removal, REMOVALS)
        super().__post_init__()

    @property
    def extent(self) -> tuple[int, int]:
        """The first step in which it acts, and the last position that it names."""
        return (self.steps or (0,))[0] or 0, self.positions[-1]

    def handler(self, log: InterventionLog, forwards_per_step: int) -> Listener:
        return _PositionHandler(self, log, forwards_per_step, self)


@interventions.register("truncate_context")
@dataclass(frozen=True)
class TruncateContext:
    """From a step on, hide the canvas positions start, …, stop - 1 from every query: mid-sequence truncation.

    Queries at these positions still run and see the others; what they write is never attended. The share of attention
    the stretch held is `realised_BLH` of the first entry of the log.

    Raises ValueError for an empty stretch or negative numbers, and in the run for positions the canvas never has.
    """

    start: int
    """First hidden canvas position."""
    stop: int
    """The position after the last hidden one."""
    step: int
    """The first step in which they are hidden, counted from 0 in each sequence."""

    def __post_init__(self) -> None:
        whole_numbers("start, stop and step", (self.start, self.stop, self.step))
        if self.stop <= self.start:
            raise ValueError(
                f"start and stop enclose the positions to hide, got {self.start} and {self.stop}: stop is larger"
            )

    @property
    def extent(self) -> tuple[int, int]:
        """The first step in which it acts, and the last position that it names."""
        return self.step, self.stop - 1

    def handler(self, log: InterventionLog, forwards_per_step: int) -> Listener:
        """The listener that carries this intervention out and writes into the log."""
        hidden = MaskPositions(tuple(range(self.start, self.stop)), steps=(self.step, None))
        return _PositionHandler(hidden, log, forwards_per_step, self)


def _span(steps: tuple[int | None, ...]) -> tuple[int | None, ...]:
    steps = tuple(steps)
    if len(steps) == 2 and steps[0] is not None:
        whole_numbers("steps", steps if steps[1] is not None else steps[:1])
        if steps[1] is None or steps[1] > steps[0]:
            return steps
    raise ValueError(f"steps is (first, the one after the last), None for to the end; got {steps}: write (4, 8)")


class _PositionHandler(KeyHandler):
    options: MaskPositions

    def __init__(self, options: MaskPositions, log: InterventionLog, forwards_per_step: int, edit: object) -> None:
        self.first, (_, self.stop) = options.extent[0], options.steps or (0, None)
        self.longest = 0
        super().__init__(options, log, forwards_per_step, edit)

    def selection(self, call: AttentionCall) -> Selection | None:
        if self.step < self.first or (self.stop is not None and self.step >= self.stop):
            return None
        prefix = self.log.prefix_of(call)
        length = call.key_BKSD.shape[2] - prefix
        self.longest = max(self.longest, length)
        if call.visibility.running is not None:
            self._refuse_missing()
        batch, every = call.query_BHQD.shape[:2]
        there = [prefix + position for position in self.options.positions if position < length]
        gone_S = torch.zeros(prefix + length, dtype=torch.bool)
        gone_S[there] = True
        # Padding is never attended, and counts as nothing taken.
        gone_B1S = (gone_S & (call.visibility.visible_BS > 0).cpu()).unsqueeze(1).to(call.query_BHQD.device)
        heads = self.heads_of(call)
        gone_BHS = gone_B1S.expand(-1, every, -1)
        if len(heads) < every:
            edited_H = torch.zeros(every, dtype=torch.bool, device=gone_B1S.device)
            edited_H[heads] = True
            gone_BHS = gone_BHS & edited_H[:, None]
        columns_BHM = as_columns(gone_B1S).expand(-1, len(heads), -1)
        return Selection(gone_BHS, columns_BHM, torch.full((batch, len(heads)), math.nan, device=gone_B1S.device))

    def end(self) -> None:
        self._refuse_missing()
        super().end()

    def why_idle(self) -> tuple[str, str]:
        if not self.first:
            return super().why_idle()
        return f"it begins at step {self.first} (the first is 0), and no sequence came so far", "begin earlier"

    def _refuse_missing(self) -> None:
        last = self.options.positions[-1]
        if 0 < self.longest <= last:
            raise ValueError(
                f"{self.label}: there is no position {last}, the canvas had {self.longest} (sink columns "
                f"not counted): name positions from 0 to {self.longest - 1}"
            )
