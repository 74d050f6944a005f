"""One attention call: what everything that measures, chooses or edits attention is given.

A model makes one call of scaled_dot_product_attention in each layer and forward. The tap puts it
into this form, so that a statistic, a rule, a selector, an edit and a removal have one object to
know (of hidden states there is one more, `StatesView`). What follows from the arguments is computed
when somebody asks, in O(S) memory and without a map of Q × S weights. Arguments never change:
`block` and ``dataclasses.replace`` make another one, in which nothing is known yet.
"""

# B batch, H query heads, K key/value heads, Q queries, S keys, D head dim (width of hidden states)
from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from sinklab.core.attention.context import running_canvas
from sinklab.core.attention.received import (
    Scores,
    attention_map,
    attention_statistics,
    of_heads,
)
from sinklab.core.attention.visibility import Visibility
from sinklab.core.compat import in_backward
from sinklab.core.instrument.keys import as_flags, blocked, highest, last_query, refuse_short
from sinklab.core.instrument.states import position_states_of
from sinklab.core.sinks import STATES, Rule, find_sinks


@dataclass(frozen=True, eq=False)
class Choice:
    """What a choice of keys heeds beside the attention of the call."""

    scores: str = "received"
    """Attention to choose by: of all queries ("received") or of the last one alone ("last_row")."""
    blocked_BHS: Tensor | None = None
    """Keys that are blocked already, of the edited heads; None for none."""
    limit: int | None = None
    """The most keys of a head that may be blocked, those already blocked included."""
    draw: Callable[[Sequence[int]], Tensor] = torch.rand
    """Random numbers of a shape, uniform in [0, 1); in an edit by its seed."""
    notes: dict[str, Tensor] = field(default_factory=dict)
    """Numbers (B, H) that a selector leaves for the log, such as "matched"."""


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call: all that a statistic, a selector, an edit or a removal is given.

    The mask is 4-D or None, bool (True: seen) or additive, and `scale` None for 1/√D. Tensors are
    the model's: an edit leaves them as they are and answers with ``replace(call, q_BHQD=…)``.
    Results (`received_BHS`, …) are of the query heads in `heads`.
    """

    layer: str
    """Path of the attention module."""
    q_BHQD: Tensor
    k_BKSD: Tensor
    v_BKSD: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float | None
    dropout_p: float
    visibility: Visibility
    """Who sees whom: `counted_BQ` (not padding; `real_BQ` None for all), `visible_BHS` (number of
    queries that see a key), `running` (the canvas that a denoiser announces).
    """
    output_shape: torch.Size
    """Shape of the output that the model wants, but for its last axis."""
    tap: Any = None
    """The tap of the model, which knows the ids of the running forward."""
    heads: list[int] | None = None
    """Query heads that are edited (always a list) or recorded; None for all."""
    step: int = 0
    """Step of the sequence, from 0."""
    prefix: int = 0
    """The model's own sink columns, which stand in front of the keys."""
    query_state_BQ: Tensor | None = None
    """Number of each query's state in `STATES`, int8, −1 for padding: for statistics of
    ``trace(…, canvas=…)``. An edit asks `edits.selectors.chosen_queries`.
    """
    made_BHQD: Tensor | None = None
    """Output of every head, once the call was made."""
    is_clean: bool = False
    """Whether it is made under `InterventionLog.probing`, where edits only look on."""
    memory: dict[Any, Any] = field(default_factory=dict)
    """What this statistic or edit keeps of the layer, from one step (that ended) to the next."""
    choice: Choice = field(default_factory=Choice)
    chosen: Any = None
    """`ChosenKeys` that `BlockKeys` has removed, for the log; other edits leave it as it is."""
    alone_BH: Tensor | None = None
    """Number of real queries that `block` left as they were, or with the keys they keep alone."""
    known: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)
    """Results for all heads, shared by all who are shown the call: "received_BHS", "last_row_BHS".
    """
    filled: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)
    """Results for `heads`: what a recorder wants of some heads alone, in one pass (`fill`)."""

    def within(self, **context: Any) -> Call:
        """This call, shown to somebody else or at another time: results that are known stay known.
        `context` are fields from `tap` on.
        """
        other = replace(self, **context)
        object.__setattr__(other, "known", self.known)
        if "heads" not in context:
            object.__setattr__(other, "filled", self.filled)
        return other

    def by_head(self, out: Tensor) -> Tensor:
        """An output in the layout of the original call as (B, H, Q, D)."""
        batch, _, queries, _ = self.q_BHQD.shape
        return out.reshape(batch, -1, queries, out.shape[-1])

    @property
    def is_replay(self) -> bool:
        """Whether a backward pass repeats the layer (gradient checkpointing), with its edits."""
        return in_backward()

    def check(self, wrong: Tensor, refuse: Callable[[], None]) -> None:
        """Have `refuse` raise if the flag is set: now, or at the end of a forward on a GPU."""
        if self.tap is not None:
            self.tap.check(wrong, refuse)
        elif bool(wrong):
            refuse()

    def expand_kv(self, x_BK: Tensor) -> Tensor:
        """A tensor (B, K, …) of key/value heads as (B, H, …)."""
        groups = self.q_BHQD.shape[1] // x_BK.shape[1]
        if groups == 1:
            return x_BK
        return x_BK.repeat_interleave(groups, 1)

    @property
    def head_count(self) -> int:
        """Number of `heads`."""
        return len(self.heads or range(self.q_BHQD.shape[1]))

    @property
    def masking(self) -> dict[str, Any]:
        """Arguments of the functions of `sinklab.core.attention` beside queries and keys."""
        return {"mask": self.mask, "is_causal": self.is_causal, "scale": self.scale}

    def scores(self, heads: Sequence[int] | None = None) -> Scores:
        """The scores of some query heads or all, edits included."""
        return Scores.of(self.q_BHQD, self.k_BKSD, **self.masking, heads=heads)

    def of_heads(self, x_BH: Tensor) -> Tensor:
        """The `heads` of a tensor (B, H, …) over all query heads, or of (B, 1, …) itself."""
        if self.heads is None or x_BH.shape[1] == 1:
            return x_BH
        return of_heads(x_BH, self.heads)

    def fill(self, wanted: Collection[str]) -> None:
        """Compute results of `heads` alone, over queries that are not padding, in one pass:
        "received" (B, H, S), "received_by_state" (B, 3, H, S), "row_entropy", "row_logsumexp" and
        "noop_bound" (B, H, Q).
        """
        names = {*wanted} - {"received_by_state"}
        # group 0 is all real queries; of states there are groups after it
        groups_BGQ = self.visibility.groups_BGQ
        by_state = "received_by_state" in wanted
        if by_state:
            names.add("received")
            groups_BGQ = self._groups_by_state()
        elif self.heads is None and "received_BHS" in self.known:
            names.discard("received")
        if not names:
            return
        scores = self.scores(self.heads)
        found = attention_statistics(scores, names, v_BKSD=self.v_BKSD, groups_BGQ=groups_BGQ)
        if "received" in names:
            if by_state:
                found["received_by_state"] = found["received"][:, 1:]
            if groups_BGQ is not None:
                found["received"] = found["received"][:, 0]
            if self.heads is None:
                # another listener need not compute it again
                self.known.setdefault("received_BHS", found["received"])
        self.filled.update(found)

    def _groups_by_state(self) -> Tensor:
        """All real queries, and those in each state, bool (B, 4, Q)."""
        state_BQ = self.query_state_BQ
        if state_BQ is None:
            raise ValueError(
                f"{self.layer}: statistics of trace(model, …, canvas=canvas) know states of "
                "queries: mark one that reads them with needs_canvas=True"
            )
        states = [state_BQ == state for state in range(len(STATES))]
        return torch.stack([self.visibility.counted_BQ.to(state_BQ.device), *states], 1)

    def result(self, name: str) -> Tensor:
        """One of the results of `fill`."""
        if name == "received":
            return self.received_BHS
        if name not in self.filled:
            self.fill({name})
        return self.filled[name]

    @property
    def received_BHS(self) -> Tensor:
        """Column sums over the real queries of this call, edits included."""
        if "received" not in self.filled:
            if "received_BHS" not in self.known:
                self.within(heads=None).fill({"received"})
            self.filled["received"] = self.of_heads(self.known["received_BHS"])
        return self.filled["received"]

    @property
    def entropy_BHQ(self) -> Tensor:
        """Entropy of every query's attention row, in nats."""
        return self.result("row_entropy")

    @property
    def lse_BHQ(self) -> Tensor:
        """Natural logarithm of every query's softmax denominator."""
        return self.result("row_logsumexp")

    @property
    def last_row_BHS(self) -> Tensor:
        """The attention row of the last real query, as an autoregressive model is read."""
        if "last_row_BHS" not in self.known:
            query_BH1D, mask = last_query(self)
            map_BH1S = attention_map(query_BH1D, self.k_BKSD, mask=mask, scale=self.scale)
            self.known["last_row_BHS"] = map_BH1S[:, :, 0]
        return self.of_heads(self.known["last_row_BHS"])

    @property
    def out_BHQD(self) -> Tensor:
        """Output of these heads for every query. Raises ValueError before the call was made."""
        if self.made_BHQD is None:
            raise ValueError(f"{self.layer}: there is no output before the call was made")
        return self.of_heads(self.made_BHQD)

    @property
    def seen_by_BHS(self) -> Tensor:
        """Number of real queries that may see each key, (B, H or 1, S)."""
        return self.of_heads(self.visibility.visible_BHS.to(self.q_BHQD.device))

    @property
    def values_BHSD(self) -> Tensor:
        """Values of the keys in these heads."""
        return self.of_heads(self.expand_kv(self.v_BKSD))

    @cached_property
    def positions_S(self) -> Tensor:
        """Canvas position of each key, below 0 for added sinks."""
        return torch.arange(self.k_BKSD.shape[2], device=self.q_BHQD.device) - self.prefix

    @cached_property
    def positions_Q(self) -> Tensor:
        """The canvas position of every query, int64. Raises ValueError if they are unknown."""
        queries = self.q_BHQD.shape[2]
        keys = self.k_BKSD.shape[2] - self.prefix
        device = self.q_BHQD.device
        if self.visibility.running is not None:
            return self.visibility.running.columns_Q.to(device)
        if queries == keys:
            return torch.arange(keys, device=device)
        if running_canvas() is not None:
            raise ValueError(
                f"{self.layer} got {queries} queries and {keys} keys, which are not the columns of "
                "the canvas that the denoiser announces: announce those that become queries with "
                "sinklab.core.attention.running(ids, columns)"
            )
        # A static cache has room at its end: queries stand where the mask ends.
        last = (self.visibility.visible_BHS > 0).any(1).any(0).nonzero().max()
        end = int(last) + 1 - self.prefix
        return torch.arange(end - queries, end, device=device)

    def near_QS(self, radius: int = 0) -> Tensor:
        """Keys at most so many positions from each query, added sinks apart; its own with 0."""
        distance_QS = (self.positions_Q[:, None] - self.positions_S).abs()
        return (distance_QS <= radius) & (self.positions_S >= 0)

    @property
    def ids_BS(self) -> Tensor | None:
        """Token ids of the canvas or the running forward; None if they are not known."""
        if self.visibility.running is not None:
            return self.visibility.running.ids_BS
        return self.tap.ids_BS

    @property
    def state_BS(self) -> Tensor:
        """State of every canvas position, by `STATES`. Raises ValueError if nothing tells them."""
        if "state_BS" in self.known:
            return self.known["state_BS"]
        return position_states_of(self, "a selector of states")

    @property
    def scores_BHS(self) -> Tensor:
        """Attention that each key receives, by the reading of the choice."""
        if self.choice.scores == "last_row":
            return self.last_row_BHS
        return self.received_BHS

    @property
    def queries_B1(self) -> Tensor | int:
        """Number of queries that the scores are summed over."""
        if self.choice.scores == "last_row":
            return 1
        return real_queries_B1(self)

    @property
    def seen_B1S(self) -> Tensor:
        """Keys that some query sees in some head."""
        return (self.seen_by_BHS.amax(1) > 0).unsqueeze(1)

    @cached_property
    def eligible_BHS(self) -> Tensor:
        """Keys that may be chosen: seen, and not blocked yet."""
        eligible_BHS = self.seen_B1S.repeat(1, self.head_count, 1)
        if self.choice.blocked_BHS is None:
            return eligible_BHS
        return eligible_BHS & ~self.choice.blocked_BHS

    def sinks(self, rule: Rule) -> Tensor:
        """Sinks by a rule, bool (B, H, S), as if every query ran; a rule is given arrays."""
        seen_by_BHS = self.seen_by_BHS
        if self.choice.scores == "last_row":
            seen_by_BHS = seen_by_BHS > 0
        seen_by_BHS = seen_by_BHS.to(self.scores_BHS.dtype)
        positions_B1 = (seen_by_BHS[..., self.prefix :].amax(1) > 0).sum(-1, keepdim=True)
        return find_sinks(self.scores_BHS, rule, seen_by_BHS, positions_B1)

    def random(self) -> Tensor:
        """Random numbers (B, H, S), uniform in [0, 1)."""
        drawn_BHS = self.choice.draw(self.eligible_BHS.shape)
        return drawn_BHS.to(self.q_BHQD.device, non_blocking=True)

    def top(
        self,
        order_BHS: Tensor,
        count: int | Tensor,
        among_BHS: Tensor | None = None,
        max_count: int | None = None,
    ) -> Tensor:
        """The eligible keys that an order puts highest, bool (B, H, S), fewer where a limit is met.

        Args:
            order_BHS: the highest is chosen first.
            count: how many keys of a head, a number or (B, H, 1).
            among_BHS: keys to choose from, if not from all that are eligible.
            max_count: upper bound of `count`, if known, so that no device is asked.

        Raises:
            ValueError: if a head has fewer keys to choose from.
        """
        choice = self.choice
        if among_BHS is None:
            among_BHS = self.eligible_BHS
        among_BHS = among_BHS & self.eligible_BHS
        if isinstance(count, int):
            max_count = count
        if choice.limit is not None:
            blocked_BH1 = torch.zeros_like(among_BHS[..., :1], dtype=torch.long)
            if choice.blocked_BHS is not None:
                blocked_BH1 = choice.blocked_BHS.sum(-1, keepdim=True)
            count = (choice.limit - blocked_BH1).clamp(min=0).clamp_max(count)
        found_BH1 = among_BHS.sum(-1, keepdim=True)
        wanted_BH1 = torch.zeros_like(found_BH1) + count
        short_BH1 = wanted_BH1 > found_BH1
        self.check(short_BH1.any(), partial(refuse_short, short_BH1, wanted_BH1, found_BH1))
        return as_flags(highest(order_BHS, among_BHS, wanted_BH1, max_count), among_BHS.shape[-1])

    def block(
        self, keys: Tensor, queries_BQ: Tensor | None = None, kept_QS: Tensor | None = None
    ) -> Call:
        """The call with keys blocked, whose mass goes to others. A query that would lose every key
        that it may see keeps the mask it had (the first rows of a causal map), and is counted in
        `alone_BH`.

        Args:
            keys: flags (B, H or 1, S), or (B or 1, H or 1, Q, S) for other keys of each query.
            queries_BQ: queries that lose them; None for all.
            kept_QS: keys that a query never loses, such as its own.

        Raises:
            ValueError: if in some row and head every query would lose all its keys.
        """
        return blocked(self, keys, queries_BQ, kept_QS)


def real_queries_B1(call: Call) -> Tensor:
    """Number of queries that are not padding, (B, 1)."""
    return call.visibility.counted_BQ.sum(-1, keepdim=True)
