"""Edits by position: `WindowAttention` and `LoneRows`, which say what queries see, and short names
of `BlockKeys` for named positions.
"""

# B batch, H query heads, Q queries, S keys; a position is a canvas column, sink columns not counted
from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from sinklab.core.errors import Checked
from sinklab.core.probing.call import AttentionCall
from sinklab.core.probing.interventions.base import CallSite, LayerIntervention
from sinklab.core.probing.interventions.block_keys import BlockKeys
from sinklab.core.probing.interventions.mask_sinks import not_default, removal_of
from sinklab.core.probing.interventions.queries import near_keys, query_positions
from sinklab.core.probing.interventions.removals import Mask, Removal, restricted
from sinklab.core.probing.interventions.selectors import Positions
from sinklab.core.probing.scope import whole_numbers
from sinklab.core.registry import interventions, registered, removals


def mask_positions_fields(edit: Any) -> dict[str, Any] | None:
    """Fields of `MaskPositionsOptions` that make this edit, those that differ from the defaults;
    None if none do.
    """
    if not isinstance(edit, BlockKeys) or not isinstance(edit.keys, Positions):
        return None
    given = {
        "positions": edit.keys.positions,
        "added": edit.keys.added,
        "removal": edit.how,
        "queries": edit.queries,
        "steps": edit.steps,
        "layers": edit.layers,
        "heads": edit.heads,
    }
    if edit != MaskPositions(**given):
        return None
    return not_default(MaskPositionsOptions, given)


@interventions.register("mask_positions", mask_positions_fields)
@dataclass(frozen=True)
class MaskPositionsOptions(Checked):
    """Short name of `BlockKeys` for the same canvas positions in every head, whatever they receive.

    Raises ValueError for no position, and in the run for positions the canvas never has.
    """

    positions: tuple[int, ...] = ()
    """Canvas positions, from 0."""
    _: KW_ONLY
    layers: tuple[int | str, ...] | None = None
    heads: tuple[int, ...] | None = None
    added: tuple[int, ...] = ()
    """Added sinks to take as well, from 0."""
    removal: Removal = registered(removals, Mask())  # noqa: RUF009
    """`BlockKeys.how`."""
    queries: str | None = None
    values: str | None = None
    """With the removal "mean_value": its file."""
    steps: tuple[int | None, ...] | None = None

    def made(self) -> BlockKeys:
        """The edit."""
        return BlockKeys(
            Positions(self.positions, self.added),
            when="now",
            how=removal_of(self.removal, self.values),
            queries=self.queries,
            steps=self.steps,
            layers=self.layers,
            heads=self.heads,
        )


def MaskPositions(positions: Any = (), **options: Any) -> BlockKeys:
    """`BlockKeys` for canvas positions, by the fields of `MaskPositionsOptions`. Raises ValueError
    as that does.
    """
    return MaskPositionsOptions(positions, **options).made()


@interventions.register("truncate_context", lambda edit: None)
@dataclass(frozen=True)
class TruncateContextOptions:
    """Short name of `BlockKeys` for truncation in the middle of a run: no query sees positions
    start, …, stop - 1 from a step on.

    These are canvas positions. Queries at them still run and see the others; their tokens are never
    attended. The share of attention the stretch held is `removed_BLH` of the first entry of the
    log.

    Raises ValueError for an empty stretch or negative numbers, and in the run for positions the
    canvas never has.
    """

    start: int
    """First blocked canvas position."""
    stop: int
    """The position after the last blocked one."""
    step: int
    """First step in which they are blocked, counted from 0 in each sequence."""

    def made(self) -> BlockKeys:
        """The edit."""
        whole_numbers("start, stop and step", (self.start, self.stop, self.step))
        if self.stop <= self.start:
            raise ValueError(
                f"stop is larger than start, but start={self.start} and stop={self.stop}: raise "
                "stop"
            )
        return MaskPositions(tuple(range(self.start, self.stop)), steps=(self.step, None))


def TruncateContext(start: int, stop: int, step: int) -> BlockKeys:
    """`BlockKeys` for a stretch of positions from a step on; see `TruncateContextOptions`."""
    return TruncateContextOptions(start, stop, step).made()


def _only_heads(keep_QS: Tensor, call: AttentionCall, site: CallSite) -> Tensor:
    """What queries may see, (1, 1 or H, Q, S), with the heads that are not edited left free."""
    every = call.query_BHQD.shape[1]
    if len(site.heads) == every:
        return keep_QS[None, None]
    free_H = torch.ones(every, dtype=torch.bool, device=keep_QS.device)
    free_H[site.heads] = False
    return keep_QS | free_H[None, :, None, None]


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
        device = call.query_BHQD.device
        keys = call.key_BKSD.shape[2]
        position_S = torch.arange(keys, device=device) - site.prefix
        positions_Q = query_positions(call, site.prefix)
        near_QS = near_keys(positions_Q, site.prefix, keys, self.radius)
        near_QS |= torch.isin(position_S, torch.tensor(self.keep, dtype=torch.long, device=device))
        near_QS[:, : site.prefix] = self.keep_prefix
        return restricted(call, _only_heads(near_QS, call, site))[0]


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
        positions_Q = query_positions(call, site.prefix)
        canvas = call.key_BKSD.shape[2] - site.prefix
        if call.visibility.running is not None and self.rows[-1] >= canvas:
            raise ValueError(
                f"rows are canvas positions 0 to {canvas - 1}, got {self.rows[-1]}: name one of "
                "those"
            )
        lone_Q = torch.isin(positions_Q, torch.tensor(self.rows, device=positions_Q.device))
        if not bool(lone_Q.any()):
            return call
        own_QS = near_keys(positions_Q, site.prefix, call.key_BKSD.shape[2])
        keep_QS = ~lone_Q[:, None] | own_QS
        if self.keep_prefix:
            keep_QS[:, : site.prefix] = True
        return restricted(call, _only_heads(keep_QS, call, site), kept_QS=own_QS)[0]
