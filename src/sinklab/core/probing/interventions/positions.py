"""Edits by position: `MaskPositions`, `TruncateContext` from some step on, `WindowAttention` and
`LoneRows`.
"""

# B batch, H query heads, Q queries, S keys, M keys taken away; a position is a canvas column, sink
# columns not counted
from dataclasses import KW_ONLY, dataclass

import torch

from sinklab.core.errors import limited
from sinklab.core.probing.call import AttentionCall
from sinklab.core.probing.intervention import InterventionLog
from sinklab.core.probing.interventions.base import CallSite, LayerIntervention
from sinklab.core.probing.interventions.keys import Choice, KeyHandler, Selection, check_values
from sinklab.core.probing.interventions.queries import check_queries, own_keys, query_positions
from sinklab.core.probing.interventions.removal import REMOVALS, as_columns, restricted
from sinklab.core.probing.listener import Listener
from sinklab.core.probing.scope import whole_numbers
from sinklab.core.registry import interventions


@interventions.register("mask_positions")
@dataclass(frozen=True)
class MaskPositions(LayerIntervention):
    """Take the same canvas positions from every query, whatever they receive.

    Positions count the columns of the canvas (left padding included), without the model's sink
    columns in front. A position that is not there yet (an autoregressive model) is taken when it
    comes.

    Raises ValueError for values outside those listed, and in the run for positions the canvas never
    has.
    """

    positions: tuple[int, ...] = ()
    """Canvas positions, from 0."""
    _: KW_ONLY
    added: tuple[int, ...] = ()
    """Added sinks to take as well, from 0: the model's own columns in front of the canvas."""
    removal: str = limited("mask", one_of=REMOVALS)
    """"mask", "zero_value", "evict", "mean_value" or "pool_value", as for `MaskSinks`."""
    queries: str | None = None
    """Queries it applies to: "all", "from32", "masked", "committed" or "prompt", as for
    `MaskSinks`.
    """
    values: str | None = None
    """With removal="mean_value": a file of `save_reference_values`."""
    steps: tuple[int | None, ...] | None = None
    """(start, stop): only in steps start, …, stop - 1 of the sequence; stop None means to the
    end.
    """

    def __post_init__(self) -> None:
        for name in ("positions", "added"):
            object.__setattr__(
                self, name, tuple(sorted(set(whole_numbers(name, getattr(self, name)))))
            )
        if not (self.positions or self.added):
            raise ValueError("positions name the keys to take away, got none: leave out the edit")
        if self.steps is not None:
            object.__setattr__(self, "steps", _span(self.steps))
        super().__post_init__()
        check_queries(self.queries, self.removal)
        check_values(self.values, self.removal)

    @property
    def extent(self) -> tuple[int, int]:
        """The first step in which it acts, and the last position that it names."""
        return (self.steps or (0,))[0] or 0, max(self.positions, default=-1)

    def handler(self, log: InterventionLog, forwards_per_step: int) -> Listener:
        return _PositionHandler(self, log, forwards_per_step, self)


@interventions.register("truncate_context")
@dataclass(frozen=True)
class TruncateContext:
    """Mid-sequence truncation: no query sees positions start, …, stop - 1 from a step on.

    These are canvas positions. Queries at them still run and see the others; their tokens are never
    attended. The share of attention the stretch held is `realised_BLH` of the first entry of the
    log.

    Raises ValueError for an empty stretch or negative numbers, and in the run for positions the
    canvas never has.
    """

    start: int
    """First blocked canvas position."""
    stop: int
    """The position after the last blocked one."""
    step: int
    """The first step in which they are blocked, counted from 0 in each sequence."""

    def __post_init__(self) -> None:
        whole_numbers("start, stop and step", (self.start, self.stop, self.step))
        if self.stop <= self.start:
            raise ValueError(
                f"stop is larger than start, but start={self.start} and stop={self.stop}: raise "
                "stop"
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
    raise ValueError(
        f"steps is (first, the one after the last), None for to the end; got {steps}: write (4, 8)"
    )


class _PositionHandler(KeyHandler):
    options: MaskPositions

    def __init__(
        self, options: MaskPositions, log: InterventionLog, forwards_per_step: int, edit: object
    ) -> None:
        self.first, (_, self.stop) = options.extent[0], options.steps or (0, None)
        self.longest = 0
        super().__init__(options, log, forwards_per_step, edit)

    def selection(self, call: AttentionCall, site: CallSite) -> Selection | None:
        if site.step < self.first or (self.stop is not None and site.step >= self.stop):
            return None
        length = call.key_BKSD.shape[2] - site.prefix
        self.longest = max(self.longest, length)
        if call.visibility.running is not None:
            self._check_positions()
        every, heads = call.query_BHQD.shape[1], site.heads
        gone_S = torch.zeros(site.prefix + length, dtype=torch.bool)
        gone_S[
            [site.prefix + position for position in self.options.positions if position < length]
        ] = True
        if (last := max(self.options.added, default=-1)) >= site.prefix:
            raise ValueError(
                f"{self.label}: there is no added sink {last}, the model has {site.prefix}: leave "
                "out added"
            )
        gone_S[list(self.options.added)] = True
        # Padding is never attended, and counts as nothing taken.
        gone_B1S = (
            (gone_S & (call.visibility.visible_BHS.amax(1) > 0).cpu())
            .unsqueeze(1)
            .to(call.query_BHQD.device)
        )
        gone_BHS = gone_B1S.expand(-1, every, -1)
        if len(heads) < every:
            edited_H = torch.zeros(every, dtype=torch.bool, device=gone_B1S.device)
            edited_H[heads] = True
            gone_BHS = gone_BHS & edited_H[:, None]
        return Selection(gone_BHS, Choice.unasked(as_columns(gone_B1S).expand(-1, len(heads), -1)))

    def end(self) -> None:
        self._check_positions()
        super().end()

    def why_idle(self) -> tuple[str, str]:
        if not self.first:
            return super().why_idle()
        return (
            f"it begins at step {self.first} (the first is 0), and no sequence came so far",
            "begin earlier",
        )

    def _check_positions(self) -> None:
        last = self.options.extent[1]
        if 0 < self.longest <= last:
            raise ValueError(
                f"{self.label}: there is no position {last}, the canvas had {self.longest} (sink "
                f"columns not counted): name positions from 0 to {self.longest - 1}"
            )


@interventions.register("window_attention")
@dataclass(frozen=True)
class WindowAttention(LayerIntervention):
    """Query i sees key j only if |i - j| <= radius, counted in canvas positions.

    Under a cache the denoiser announces the positions of the queries; a model that announces
    nothing (transformers' own `generate`) runs the last of the positions that are seen. The mask it
    makes is (Q, S), one for all heads and layers.

    Raises ValueError for a negative radius or position, and in a forward whose queries do not fit
    the canvas.
    """

    radius: int
    """Positions seen on either side; 0 leaves a query its own key."""
    keep: tuple[int, ...] = ()
    """Canvas positions every query may see all the same, such as the first four (StreamingLLM,
    2309.17453).
    """
    keep_prefix: bool = True
    """Whether the model's own sink columns in front stay visible."""

    def __post_init__(self) -> None:
        whole_numbers("radius", (self.radius,))
        object.__setattr__(self, "keep", whole_numbers("keep", self.keep))
        super().__post_init__()

    def edit(self, call: AttentionCall, site: CallSite) -> AttentionCall:
        """The call with its mask narrowed to the window."""
        device, every = call.query_BHQD.device, call.query_BHQD.shape[1]
        position_S = torch.arange(call.key_BKSD.shape[2], device=device) - site.prefix
        near_QS = (query_positions(call, site.prefix)[:, None] - position_S).abs() <= self.radius
        near_QS |= torch.isin(position_S, torch.tensor(self.keep, dtype=torch.long, device=device))
        near_QS[:, : site.prefix] = self.keep_prefix
        near_11QS = near_QS[None, None]
        if len(site.heads) < every:
            free_H = torch.ones(every, dtype=torch.bool, device=device)
            free_H[site.heads] = False
            near_11QS = near_11QS | free_H[:, None, None]
        return restricted(call, near_11QS)[0]


@interventions.register("lone_rows")
@dataclass(frozen=True, kw_only=True)
class LoneRows(LayerIntervention):
    """Let these queries see their own key alone, as the first does under a causal mask.

    All others see the same keys as before.

    The constraint of the sink token (2601.19657, Eq. 6) on a token of the text. The mask it makes
    is (Q, S), one for all heads and layers.

    Raises ValueError for no row, a negative one, and in the run for one that the canvas never has.
    """

    rows: tuple[int, ...] = (0,)
    """Canvas positions of the queries."""
    keep_prefix: bool = True
    """Whether they still see the model's own sink columns in front."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", tuple(sorted(set(whole_numbers("rows", self.rows)))))
        if not self.rows:
            raise ValueError(
                "rows name the queries that are to see themselves alone, got none: leave out the "
                "edit"
            )
        super().__post_init__()

    def edit(self, call: AttentionCall, site: CallSite) -> AttentionCall:
        """The call with these rows of its mask left to their own key; the same one if none of them
        runs.
        """
        device, every = call.query_BHQD.device, call.query_BHQD.shape[1]
        positions_Q = query_positions(call, site.prefix)
        canvas = call.key_BKSD.shape[2] - site.prefix
        if call.visibility.running is not None and self.rows[-1] >= canvas:
            raise ValueError(
                f"rows are canvas positions 0 to {canvas - 1}, got {self.rows[-1]}: name one of "
                "those"
            )
        lone_Q = torch.isin(positions_Q, torch.tensor(self.rows, device=device))
        if not bool(lone_Q.any()):
            return call
        own_QS = own_keys(positions_Q, site.prefix, call.key_BKSD.shape[2])
        keep_QS = ~lone_Q[:, None] | own_QS
        if self.keep_prefix:
            keep_QS[:, : site.prefix] = True
        keep_11QS = keep_QS[None, None]
        if len(site.heads) < every:
            free_H = torch.ones(every, dtype=torch.bool, device=device)
            free_H[site.heads] = False
            keep_11QS = keep_11QS | free_H[:, None, None]
        return restricted(call, keep_11QS, own_QS=own_QS)[0]
