"""Selectors, which choose the keys of each head that `BlockKeys` takes away. Those that wrap
another one are in `sinklab.lab.measures`.
"""

# B batch, H query heads that are edited (1: alike in all), S keys, M keys chosen, D head dim
from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from sinklab.core.attention.scores import of_heads
from sinklab.core.errors import Checked, limited
from sinklab.core.probing.call import AttentionCall
from sinklab.core.probing.interventions.base import CallSite
from sinklab.core.probing.interventions.removals import (
    Doubt,
    as_flags,
    at_once,
    highest,
    real_queries_B1,
)
from sinklab.core.probing.scope import whole_numbers
from sinklab.core.probing.statistics import position_states_of
from sinklab.core.registry import registered, rules, selectors
from sinklab.core.sinks import DEFAULT, Rule, find_sinks

SCORES = ("received", "last_row")
Draw = Callable[[Sequence[int]], Tensor]


@dataclass(frozen=True, eq=False)
class KeyView:
    """One attention call as a selector reads it: what each key received, and where it stands."""

    scores_BHS: Tensor
    """Attention that each key receives, summed over the queries that are not padding (or of the
    last one alone); empty if attention does not choose (`Selector.by_attention`).
    """
    queries_B1: Tensor | int
    """Number of queries that the scores are summed over."""
    visible_BHS: Tensor
    """Number of these queries that may see each key."""
    site: CallSite
    call: AttentionCall
    """The call itself."""
    tap: Any = None
    """The tap of the model, which knows the ids of the running forward."""
    gone_BHS: Tensor | None = None
    """Keys that are taken away already; None for none."""
    limit: int | None = None
    """The most keys a head may have lost, those already gone included."""
    spared: tuple[int, ...] = ()
    """Columns that are never chosen."""
    draw: Draw = torch.rand
    """The generator: numbers of a shape, uniform in [0, 1), which follow from the seed."""
    doubt: Doubt = at_once
    """Handler of doubts about a choice, which need not ask the device at once."""
    notes: dict[str, Tensor] = field(default_factory=dict)
    """Numbers (B, H) that a selector leaves for the log, such as "matched"."""

    @classmethod
    def of(
        cls, call: AttentionCall, site: CallSite, reading: str, *, by_attention: bool, **more: Any
    ) -> KeyView:
        """The view of a call. `reading`: scores from all queries ("received") or "last_row"."""
        is_last = reading == "last_row"
        visible_BHS = call.visibility.visible_BHS.to(call.query_BHQD.device)
        if visible_BHS.shape[1] > 1:
            visible_BHS = of_heads(visible_BHS, site.heads)
        scores_BHS = torch.empty(0)
        if by_attention:
            with torch.no_grad():
                if is_last:
                    scores_BHS = call.last_row_BHS
                else:
                    scores_BHS = call.received_BHS
                scores_BHS = of_heads(scores_BHS, site.heads)
        if is_last:
            return cls(scores_BHS, 1, (visible_BHS > 0).long(), site, call, **more)
        return cls(scores_BHS, real_queries_B1(call), visible_BHS, site, call, **more)

    @property
    def shape(self) -> torch.Size:
        """(B, H or 1, S): rows, heads and keys of the call."""
        return self.visible_BHS.shape

    @property
    def step(self) -> int:
        """Step of the sequence, from 0."""
        return self.site.step

    @property
    def seen_B1S(self) -> Tensor:
        """Keys that some query sees in some head."""
        return (self.visible_BHS.amax(1) > 0).unsqueeze(1)

    @cached_property
    def free_BHS(self) -> Tensor:
        """Keys that may be chosen: seen, not gone yet, and not spared."""
        free_BHS = self.seen_B1S.repeat(1, len(self.site.heads), 1)
        for column in self.spared:
            free_BHS[..., column : column + 1].fill_(False)
        if self.gone_BHS is None:
            return free_BHS
        return free_BHS & ~self.gone_BHS

    @property
    def prefix(self) -> int:
        """Added sinks, which are the first columns."""
        return self.site.prefix

    @property
    def positions_S(self) -> Tensor:
        """Canvas position of each key, below 0 for added sinks."""
        keys = self.visible_BHS.shape[-1]
        return torch.arange(keys, device=self.visible_BHS.device) - self.prefix

    @property
    def values_BHSD(self) -> Tensor:
        """Values of the keys in these heads."""
        values_BHSD = self.call.for_query_heads(self.call.value_BKSD)
        return of_heads(values_BHSD, self.site.heads)

    @property
    def ids_BS(self) -> Tensor | None:
        """Token ids of the canvas or the running forward, added sinks not counted; None if they
        are not known.
        """
        return self.tap.ids_of(self.call.visibility.running)

    @property
    def state_BS(self) -> Tensor:
        """State of every canvas position, its number in `sinks.STATES`. Raises ValueError if
        nothing tells them.
        """
        return position_states_of(self.call, self.tap, "a selector of states")

    def sinks(self, rule: Rule) -> Tensor:
        """Sinks by a rule, bool (B, H, S), as if all queries had run."""
        visible_BHS = self.visible_BHS.to(self.scores_BHS.dtype)
        positions_B1 = (visible_BHS[..., self.prefix :].amax(1) > 0).sum(-1, keepdim=True)
        return find_sinks(self.scores_BHS, rule, visible_BHS, positions_B1)

    def random(self) -> Tensor:
        """Random numbers (B, H, S), uniform in [0, 1)."""
        return self.draw(self.free_BHS.shape).to(self.visible_BHS.device, non_blocking=True)

    def top(
        self,
        order_BHS: Tensor,
        count: int | Tensor,
        among_BHS: Tensor | None = None,
        most: int | None = None,
    ) -> Tensor:
        """The free keys that an order puts highest, bool (B, H, S); fewer where a limit says so.

        Args:
            order_BHS: the highest is chosen first.
            count: how many keys of a head, a number or (B, H, 1).
            among_BHS: keys to choose from, if not from all that are free.
            most: upper bound of `count`, if known, so that no device is asked.

        Raises:
            ValueError: if a head has fewer keys to choose from.
        """
        if among_BHS is None:
            among_BHS = self.free_BHS
        among_BHS = among_BHS & self.free_BHS
        if isinstance(count, int):
            most = count
        if self.limit is not None:
            gone_BH1 = torch.zeros_like(among_BHS[..., :1], dtype=torch.long)
            if self.gone_BHS is not None:
                gone_BH1 = self.gone_BHS[:, : among_BHS.shape[1]].sum(-1, keepdim=True)
            count = (self.limit - gone_BH1).clamp(min=0).clamp_max(count)
        found_BH1 = among_BHS.sum(-1, keepdim=True)
        wanted_BH1 = torch.zeros_like(found_BH1) + count
        short_BH1 = wanted_BH1 > found_BH1
        self.doubt(short_BH1.any(), partial(_refuse, short_BH1, wanted_BH1, found_BH1))
        return as_flags(highest(order_BHS, among_BHS, wanted_BH1, most), among_BHS.shape[-1])


def _refuse(short_BH1: Tensor, wanted_BH1: Tensor, found_BH1: Tensor) -> None:
    row, head = short_BH1[..., 0].nonzero()[0].tolist()
    raise ValueError(
        f"{int(wanted_BH1[row, head])} keys of a head are to be chosen, but row {row} of this "
        f"batch has {int(found_BH1[row, head])} to choose from: lower k, choose a stricter rule, "
        "or set a limit"
    )


@dataclass(frozen=True)
class Selector(Checked):
    """Choice of keys, head by head. A function of the call is registered under a name, or a
    subclass with `select`::

        @selectors.register("weak_values")
        def weak_values(view, k=1):
            return view.top(-view.values_BHSD.norm(dim=-1), k)
    """

    by_attention = True
    """Whether attention chooses; if not, `KeyView.scores_BHS` is empty and the log has no share."""

    @property
    def most(self) -> int | None:
        """The most keys of a head that it chooses; None if that is not known beforehand."""
        return None

    @property
    def draws(self) -> bool:
        """Whether keys are drawn, so that equal rows may lose different ones."""
        return False

    @property
    def sink_rule(self) -> Rule | None:
        """Rule by which it knows sinks; None if it has none."""
        return None

    @property
    def last_position(self) -> int:
        """The last canvas position that it names; −1 if it names none."""
        return -1

    def select(self, view: KeyView) -> Tensor:
        """Keys to take away, bool (B, H, S); H may be 1 for the same keys in all heads."""
        raise NotImplementedError(f"{self} has no method select of its own; write it")


@selectors.register("top")
@dataclass(frozen=True)
class TopKeys(Selector):
    """The k keys that receive most, sinks or not (arXiv 2510.15731, section 4.3)."""

    k: int = limited(MISSING, at_least=1)

    @property
    def most(self) -> int | None:
        return self.k

    def select(self, view: KeyView) -> Tensor:
        return view.top(view.scores_BHS, self.k)


@selectors.register("sinks")
@dataclass(frozen=True)
class SinkKeys(Selector):
    """All keys that a rule calls sinks, or the k of them that receive most.

    If a cache lets only some queries run, scores are scaled by positions / queries that ran, so
    that an even share is 1 in every forward.
    """

    rule: Rule = registered(rules, DEFAULT)
    k: int | None = limited(None, at_least=1)

    @property
    def most(self) -> int | None:
        return self.k

    @property
    def sink_rule(self) -> Rule | None:
        return self.rule

    def select(self, view: KeyView) -> Tensor:
        sinks_BHS = view.sinks(self.rule) & view.free_BHS
        count_BH1 = sinks_BHS.sum(-1, keepdim=True)
        if self.k is not None:
            count_BH1 = count_BH1.clamp(max=self.k)
        return view.top(view.scores_BHS, count_BH1, sinks_BHS, self.k)


@selectors.register("positions")
@dataclass(frozen=True)
class Positions(Selector):
    """The same canvas positions in every head, whatever they receive.

    Positions count the columns of the canvas (left padding included) without the added sinks in
    front. One that is not there yet (an autoregressive model) is taken when it comes; padding is
    never attended, and counts as nothing taken.

    Raises ValueError for no position, and in the run for an added sink the model does not have.
    """

    positions: tuple[int, ...] = ()
    added: tuple[int, ...] = ()
    """Added sinks, from 0."""

    by_attention = False

    def __post_init__(self) -> None:
        for name, given in (("positions", self.positions), ("added", self.added)):
            numbers = whole_numbers(name, given)
            object.__setattr__(self, name, tuple(sorted(set(numbers))))
        if not (self.positions or self.added):
            raise ValueError("positions name the keys to take away, got none: leave out the edit")

    @property
    def last_position(self) -> int:
        return max(self.positions, default=-1)

    def select(self, view: KeyView) -> Tensor:
        if max(self.added, default=-1) >= view.prefix:
            raise ValueError(
                f"there is no added sink {self.added[-1]}, the model has {view.prefix}: leave out "
                "added"
            )
        columns = [*self.added, *(view.prefix + position for position in self.positions)]
        keys = view.visible_BHS.shape[-1]
        named_S = torch.zeros(keys, dtype=torch.bool)
        named_S[[column for column in columns if column < keys]] = True
        return view.seen_B1S & named_S.to(view.seen_B1S.device)
