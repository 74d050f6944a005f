"""One attention call, and the base class of those that are shown calls.

A model makes one call of scaled_dot_product_attention in each layer and forward. The tap puts it
into this form, and whatever measures, chooses or edits attention is given it: there is no other
view of a call to learn (of hidden states there is one, `StatesView`). What follows from the
arguments is computed when somebody asks, in O(S) memory.
"""

# B batch, H query heads, K key/value heads, Q queries, S keys, D head dim (width of hidden states)
from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from sinklab.core.attention.context import running_canvas
from sinklab.core.attention.received import (
    Scores,
    attention_map,
    attention_statistics,
    of_heads,
)
from sinklab.core.attention.visibility import Visibility
from sinklab.core.compat import config_value, stated
from sinklab.core.errors import known_fields
from sinklab.core.probing.keys import Doubt, as_flags, at_once, highest
from sinklab.core.probing.states import position_states_of
from sinklab.core.sinks import STATES, Rule, find_sinks

NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
CONTEXT = ("heads", "step", "prefix", "query_state_BQ", "made_BHQD", "memory", "choice")
"""Fields of a call that say to whom it is shown, and when."""
Draw = Callable[[Sequence[int]], Tensor]


@dataclass(frozen=True, eq=False)
class Choice:
    """What a choice of keys heeds beside the attention of the call."""

    scores: str = "received"
    """Attention to choose by: of all queries ("received") or of the last one alone ("last_row")."""
    blocked_BHS: Tensor | None = None
    """Keys that are blocked already; None for none."""
    limit: int | None = None
    """The most keys of a head that may be blocked, those already blocked included."""
    excluded: tuple[int, ...] = ()
    """Columns that are never chosen."""
    draw: Draw = torch.rand
    """The generator: numbers of a shape, uniform in [0, 1), which follow from the seed."""
    doubt: Doubt = at_once
    """Handler of doubts about the choice, which need not ask the device at once."""
    notes: dict[str, Tensor] = field(default_factory=dict)
    """Numbers (B, H) that a selector leaves for the log, such as "matched"."""


@dataclass(frozen=True, eq=False)
class Call:
    """One attention call: all that a statistic, a selector, an edit or a removal is given.

    Its arguments have all axes: query (B, H, Q, D), key and value (B, K, S, D), mask 4-D or None,
    bool (True: seen) or additive, `scale` None for 1/√D. They belong to the model, so an edit
    leaves the tensors as they are and answers with ``replace(call, q_BHQD=…)``. Results
    (`received_BHS`, …) are computed when asked for, of the query heads in `heads`.
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
    output_shape: torch.Size
    """Shape of the output as the model made the call, but for its last axis: axes may be folded or
    missing there.
    """
    tap: Any = None
    """The tap of the model, which knows the ids of the running forward."""
    heads: list[int] | None = None
    """Query heads that are edited, rising, or recorded, in their order; None for all."""
    step: int = 0
    """Step of the sequence, from 0."""
    prefix: int = 0
    """The model's own sink columns, which stand in front of the keys."""
    query_state_BQ: Tensor | None = None
    """Number of each query's state in `STATES`, int8, −1 for padding; None without a canvas."""
    made_BHQD: Tensor | None = None
    """Output of every head, once the call was made."""
    memory: dict[Any, Any] = field(default_factory=dict)
    """What statistics keep of this layer, from one recorded step to the next."""
    choice: Choice = field(default_factory=Choice)
    known: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)
    """Results for all heads that are computed once: "received_BHS", "last_row_BHS", and "lse_BHQ"
    where a fast path got it from the attention kernel.
    """
    filled: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)
    """Results for `heads`, from one pass over the scores (`fill`)."""

    @classmethod
    def of(
        cls,
        layer: str,
        module: nn.Module,
        given: dict[str, Any],
        known: dict[tuple, Any],
        tap: Any = None,
    ) -> Call:
        """Read the arguments by name.

        `known` keeps, for a forward, the findings about a mask that its layers share.

        Raises ValueError for axes that are not (batch, [head,] position, dim).
        """
        query = given["query"]
        key = given["key"]
        value = given["value"]
        mask = given.get("attn_mask")
        output_shape = query.shape[:-1]
        if query.dim() == 3 and key.dim() == 3:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
            if mask is not None and mask.dim() == 3:
                mask = mask.unsqueeze(1)
        elif query.dim() != 4 or key.dim() != 4:
            raise ValueError(
                f"{layer or 'the model'} calls scaled_dot_product_attention with query "
                f"{tuple(query.shape)}: traces read (batch, head, position, dim) or (batch, "
                "position, dim); reshape before the call"
            )
        elif _is_folded(query, key, module):
            query = query.flatten(1, 2).unsqueeze(2)
            if mask is not None and mask.dim() == 4 and mask.shape[1] > 1:
                mask = mask.flatten(1, 2).unsqueeze(2)
        is_causal = bool(given.get("is_causal", False))
        # by the mask object that all layers share, not by a view of it
        shape = (query.shape[0], query.shape[2], key.shape[2])
        visibility = _visibility(known, Visibility(mask, shape, is_causal, None, query.device))
        if mask is not None:
            mask = mask[(None,) * (4 - mask.dim())]
        return cls(
            layer,
            query,
            key,
            value,
            mask,
            is_causal,
            given.get("scale"),
            given.get("dropout_p", 0.0),
            visibility,
            output_shape,
            tap,
        )

    def within(self, **context: Any) -> Call:
        """The same call with other `CONTEXT`: what is known of it stays known. Raises ValueError
        for an argument of the call itself, which `replace` changes.
        """
        known_fields("the context of a call", context, CONTEXT)
        other = replace(self, **context)
        object.__setattr__(other, "known", self.known)
        if "heads" not in context:
            object.__setattr__(other, "filled", self.filled)
        return other

    def run(self, function: Callable[..., Tensor]) -> Tensor:
        """Make the call with these arguments and give the output the layout of the original
        call.
        """
        out_BHQD = function(
            self.q_BHQD,
            self.k_BKSD,
            self.v_BKSD,
            attn_mask=self.mask,
            dropout_p=self.dropout_p,
            is_causal=self.is_causal,
            scale=self.scale,
            enable_gqa=self.q_BHQD.shape[1] != self.k_BKSD.shape[1],
        )
        return out_BHQD.reshape(*self.output_shape, out_BHQD.shape[-1])

    def unrolled(self, out: Tensor) -> Tensor:
        """An output in the layout of the original call as (B, H, Q, D)."""
        batch, _, queries, _ = self.q_BHQD.shape
        return out.reshape(batch, -1, queries, out.shape[-1])

    def for_query_heads(self, x_BK: Tensor) -> Tensor:
        """A tensor (B, K, …) of key/value heads as (B, H, …): repeated for the query heads that
        share each.
        """
        groups = self.q_BHQD.shape[1] // x_BK.shape[1]
        if groups == 1:
            return x_BK
        return x_BK.repeat_interleave(groups, 1)

    @property
    def masking(self) -> dict[str, Any]:
        """Arguments of the functions of `sinklab.core.attention` beside queries and keys."""
        return {"mask": self.mask, "is_causal": self.is_causal, "scale": self.scale}

    def scores(self, heads: Sequence[int] | None = None) -> Scores:
        """The scores from which statistics of this call, edits included, are computed; some query
        heads or all.
        """
        return Scores.of(
            self.q_BHQD,
            self.k_BKSD,
            self.mask,
            self.is_causal,
            self.scale,
            heads,
            self.known.get("lse_BHQ"),
        )

    def measured(self, names: Collection[str], **options: Any) -> dict[str, Tensor]:
        """`attention_statistics` of this call, in its `heads`."""
        return attention_statistics(self.scores(self.heads), names, **options)

    def of_heads(self, x_BH: Tensor) -> Tensor:
        """The `heads` of a tensor (B, H, …) over all query heads, or of (B, 1, …) itself."""
        if self.heads is None or x_BH.shape[1] == 1:
            return x_BH
        return of_heads(x_BH, self.heads)

    def fill(self, wanted: Collection[str]) -> None:
        """Compute results in one pass over the scores: "received" (B, H, S), "received_by_state"
        (B, 3, H, S), "row_entropy", "row_logsumexp" and "noop_bound" (B, H, Q), of `heads` alone
        and without the queries that are padding.
        """
        names = {*wanted} - {"received", "received_by_state"}
        groups_BGQ = self.visibility.groups_BGQ
        if "received_by_state" in wanted:
            names.add("received")
            state_BQ = self.query_state_BQ
            if state_BQ is None:
                raise ValueError(
                    f"{self.layer}: only statistics of trace(model, …, canvas=canvas) know the "
                    "states of queries: mark one that reads them with needs_canvas=True"
                )
            states = [state_BQ == state for state in range(len(STATES))]
            counted_BQ = self.visibility.counted_BQ.to(states[0].device)
            groups_BGQ = torch.stack([counted_BQ, *states], 1)
        elif "received" in wanted and (self.heads is not None or "received_BHS" not in self.known):
            names.add("received")
        if names:
            self.filled.update(self.measured(names, v_BKSD=self.v_BKSD, groups_BGQ=groups_BGQ))
        if "received" in names:
            if "received_by_state" in wanted:
                self.filled["received_by_state"] = self.filled["received"][:, 1:]
            if groups_BGQ is not None:
                self.filled["received"] = self.filled["received"][:, 0]
            if self.heads is None:
                # another listener need not compute it again
                self.known.setdefault("received_BHS", self.filled["received"])

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
    def received_by_state_BGHS(self) -> Tensor:
        """The same from masked, committed and prompt queries apart, (B, 3, H, S)."""
        return self.result("received_by_state")

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
        """The attention row of the last real query of every batch row (how an autoregressive model
        is read).
        """
        if "last_row_BHS" not in self.known:
            self.known["last_row_BHS"] = self._last_row()
        return self.of_heads(self.known["last_row_BHS"])

    def _last_row(self) -> Tensor:
        batch, _, queries, dim = self.q_BHQD.shape
        real_BQ = self.visibility.real_BQ
        last_B = torch.full((batch,), queries - 1, device=self.q_BHQD.device)
        if real_BQ is not None:
            last_B = queries - 1 - real_BQ.flip(-1).long().argmax(-1).to(last_B.device)
        at_B111 = last_B.view(batch, 1, 1, 1)
        query_BH1D = self.q_BHQD.gather(2, at_B111.expand(-1, self.q_BHQD.shape[1], 1, dim))
        mask = self.mask
        keys = self.k_BKSD.shape[2]
        if mask is not None and mask.shape[2] > 1:
            mask = mask.expand(batch, -1, -1, -1)
            mask = mask.gather(2, at_B111.expand(-1, mask.shape[1], 1, mask.shape[3]))
        if self.is_causal:
            # Causal masks are top-left aligned, as in torch: query i sees the keys up to i.
            seen_B11S = torch.arange(keys, device=last_B.device) <= at_B111
            mask = narrowed(mask, seen_B11S)
        return attention_map(query_BH1D, self.k_BKSD, mask=mask, scale=self.scale)[:, :, 0]

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
        return self.of_heads(self.for_query_heads(self.v_BKSD))

    @property
    def positions_S(self) -> Tensor:
        """Canvas position of each key, below 0 for added sinks."""
        keys = self.k_BKSD.shape[2]
        return torch.arange(keys, device=self.k_BKSD.device) - self.prefix

    @property
    def ids_BS(self) -> Tensor | None:
        """Token ids of the canvas or the running forward, added sinks not counted; None if they
        are not known.
        """
        return self.tap.ids_of(self.visibility.running)

    @property
    def state_BS(self) -> Tensor:
        """State of every canvas position, its number in `sinks.STATES`. Raises ValueError if
        nothing tells them.
        """
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
        """Keys that may be chosen: seen, not blocked yet, and not excluded."""
        heads = self.q_BHQD.shape[1] if self.heads is None else len(self.heads)
        eligible_BHS = self.seen_B1S.repeat(1, heads, 1)
        for column in self.choice.excluded:
            eligible_BHS[..., column : column + 1].fill_(False)
        if self.choice.blocked_BHS is None:
            return eligible_BHS
        return eligible_BHS & ~self.choice.blocked_BHS

    def sinks(self, rule: Rule) -> Tensor:
        """Sinks by a rule, bool (B, H, S), as if all queries had run."""
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
        most: int | None = None,
    ) -> Tensor:
        """The eligible keys that an order puts highest, bool (B, H, S); fewer where a limit says
        so.

        Args:
            order_BHS: the highest is chosen first.
            count: how many keys of a head, a number or (B, H, 1).
            among_BHS: keys to choose from, if not from all that are eligible.
            most: upper bound of `count`, if known, so that no device is asked.

        Raises:
            ValueError: if a head has fewer keys to choose from.
        """
        choice = self.choice
        if among_BHS is None:
            among_BHS = self.eligible_BHS
        among_BHS = among_BHS & self.eligible_BHS
        if isinstance(count, int):
            most = count
        if choice.limit is not None:
            blocked_BH1 = torch.zeros_like(among_BHS[..., :1], dtype=torch.long)
            if choice.blocked_BHS is not None:
                blocked_BH1 = choice.blocked_BHS.sum(-1, keepdim=True)
            count = (choice.limit - blocked_BH1).clamp(min=0).clamp_max(count)
        found_BH1 = among_BHS.sum(-1, keepdim=True)
        wanted_BH1 = torch.zeros_like(found_BH1) + count
        short_BH1 = wanted_BH1 > found_BH1
        choice.doubt(short_BH1.any(), partial(_refuse, short_BH1, wanted_BH1, found_BH1))
        return as_flags(highest(order_BHS, among_BHS, wanted_BH1, most), among_BHS.shape[-1])


def _refuse(short_BH1: Tensor, wanted_BH1: Tensor, found_BH1: Tensor) -> None:
    row, head = short_BH1[..., 0].nonzero()[0].tolist()
    raise ValueError(
        f"{int(wanted_BH1[row, head])} keys of a head are to be chosen, but row {row} of this "
        f"batch has {int(found_BH1[row, head])} to choose from: lower k, choose a stricter rule, "
        "or set a limit"
    )


def real_queries_B1(call: Call) -> Tensor:
    """Number of queries that are not padding, (B, 1)."""
    return call.visibility.counted_BQ.sum(-1, keepdim=True)


def narrowed(mask: Tensor | None, keep: Tensor) -> Tensor:
    """A boolean or additive mask, or none, that also blocks every key that is not in `keep`."""
    if mask is None:
        return keep
    if mask.dtype == torch.bool:
        return mask & keep
    return mask.masked_fill(~keep, -math.inf)


def _visibility(known: dict[tuple, Any], found: Visibility) -> Visibility:
    """The visibility of this mask, shape and causality, kept for a forward: all layers are given
    the same one.
    """
    running = running_canvas()
    batch, queries, keys = found.shape
    key = (id(found.mask), id(running), *found.shape, found.is_causal, found.device)
    if key not in known:
        # Another model may run inside the block that announces a canvas.
        if (
            running is not None
            and len(running.ids_BS) == batch
            and running.ids_BS.shape[1] <= keys
            and len(running.columns_Q) == queries
        ):
            found = replace(found, running=running)
        # The canvas is kept beside it, so that its id cannot be taken by another while it is known.
        known[key] = running, found
    return known[key][1]


def _is_folded(query: Tensor, key: Tensor, module: nn.Module) -> bool:
    """Whether the query axis holds the query heads of one key head: so transformers decodes one
    token under a mask.
    """
    groups = stated(module, "num_key_value_groups", 1)
    folded = groups > 1 and query.shape[1] == key.shape[1] and query.shape[2] == groups
    return folded and config_value(module, "num_attention_heads") == query.shape[1] * groups


class Listener:
    """Hears of every forward of a model: it begins with the first attention call and ends by
    `finish` or `discard`.
    """

    tap: Any
    """The `Tap` that it listens to; there once it is `tapped`."""
    reads_scores = False
    """Whether it takes statistics from the scores of calls."""
    exact = True
    """Whether it hears of the model's own forward alone; False: of a fast decoder's as well, whose
    numbers are equal within rounding.
    """
    of_states = ""
    """Feature that needs hidden states here, as errors name it; empty if nothing does."""

    def __getstate__(self) -> dict[str, Any]:
        # a copy listens to no model
        return {**vars(self), "tap": None}

    def begin(self) -> None:
        """A forward begins."""

    def edit(self, call: Call) -> Call:
        """Return the call to make; the same object when nothing is to change."""
        return call

    def observe(self, call: Call, out: Tensor) -> None:
        """Observe the call as it was made, after every edit, and its output (`call.unrolled`);
        neither is to be changed.
        """

    def edit_states(self, calls: list[str], states_BQD: Tensor) -> Tensor:
        """The hidden states to leave a decoder layer, in which these attention calls were made; the
        same object when nothing is to change."""
        return states_BQD

    def observe_states(self, calls: list[str], states_BQD: Tensor) -> None:
        """The hidden states as they leave the layer, after every edit; not to be changed."""

    def finish(self) -> None:
        """The forward came to its end."""

    def discard(self) -> None:
        """Forget the observations of a forward that failed."""
