"""Ways to take keys away from an attention call: for which queries, and what this costs."""

# B batch, H query heads, K key/value heads, Q queries, S keys or canvas positions, D head dim, M
# keys taken away; an axis may be 1
import math
import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sinklab.core.attention.context import reads_wait, running_canvas
from sinklab.core.attention.received import row_logsumexp
from sinklab.core.attention.visibility import allowed, compact
from sinklab.core.errors import Checked, unknown
from sinklab.core.probing.call import Call, narrowed, real_queries_B1
from sinklab.core.probing.keys import Doubt, at_once
from sinklab.core.probing.states import position_states_of
from sinklab.core.registry import removals
from sinklab.core.sinks import STATES


def restricted(
    call: Call, keep_BHQS: Tensor, doubt: Doubt = at_once, *, kept_QS: Tensor | None = None
) -> tuple[Call, Tensor]:
    """The call with keys blocked that are False in `keep_BHQS`, and the number of queries (B, H)
    left alone.

    A query that would lose every key it may see keeps the mask it had before this edit (the first
    rows of a causal map). With `kept_QS`, each query's own key or its neighbours, it never loses
    those, and a query is left alone if it has no other any more. The mask stays (B, H, 1, S) unless
    the call's own, or `keep_BHQS`, differs by query.

    Raises ValueError when in some row and head no query would see a key any more.
    """
    mask = short_mask(call)
    before_BHQS = allowed(mask)
    if kept_QS is not None:
        keep_BHQS = keep_BHQS | kept_QS
        others_BHQS = before_BHQS & ~kept_QS
        alone_BHQ = others_BHQS.any(-1) & ~(others_BHQS & keep_BHQS).any(-1)
        edited = replace(call, mask=narrowed(mask, keep_BHQS), is_causal=False)
        return edited, _real_queries(call, alone_BHQ)
    after_BHQS = before_BHQS & keep_BHQS
    lost_BHQ = before_BHQS.any(-1) & ~after_BHQS.any(-1)
    hidden = narrowed(mask, keep_BHQS)
    edited = replace(call, mask=hidden, is_causal=False)
    if not reads_wait(lost_BHQ.device) and not bool(lost_BHQ.any()):
        return edited, torch.zeros(call.q_BHQD.shape[:2], device=keep_BHQS.device)
    sees_BH = after_BHQS.any(-1).any(-1).expand(call.q_BHQD.shape[:2])

    def check() -> None:
        row, head = (~sees_BH).nonzero()[0].tolist()
        raise ValueError(
            f"every query must keep a key, but the edits together take all {keep_BHQS.shape[-1]} "
            f"keys of {call.layer}, row {row}, head {head}: take fewer, or set a limit"
        )

    doubt(~sees_BH.all(), check)
    edited = replace(edited, mask=torch.where(lost_BHQ.unsqueeze(-1), mask, hidden))
    return edited, _real_queries(call, lost_BHQ)


def _real_queries(call: Call, some_BHQ: Tensor) -> Tensor:
    """Number of these queries that are not padding, (B, H)."""
    some_BHQ = some_BHQ.expand(call.q_BHQD.shape[:3])
    return (some_BHQ & call.visibility.counted_BQ.unsqueeze(1)).sum(-1)


def own_mask(call: Call) -> Tensor:
    """The mask of the call with its causality written out; one row where that is known without a
    look at its numbers.
    """
    mask = call.mask
    device = call.q_BHQD.device
    keys = call.k_BKSD.shape[2]
    if call.is_causal:
        queries = call.q_BHQD.shape[2]
        seen_QS = torch.ones(queries, keys, dtype=torch.bool, device=device).tril()
        return narrowed(mask, seen_QS[None, None])
    if mask is None:
        return torch.ones(1, 1, 1, keys, dtype=torch.bool, device=device)
    return compact(mask)


def short_mask(call: Call) -> Tensor:
    """The same, one row if it is the same for every query, which is read from the device."""
    mask = own_mask(call)
    if not call.is_causal and mask.shape[2] > 1 and bool((mask == mask[:, :, :1]).all()):
        return mask[:, :, :1]
    return mask


@dataclass(frozen=True)
class Removal(Checked):
    """Way to take keys away from the queries of a head.

    There are two kinds. `Mask` blocks keys: it only says so (`blocks`), and `BlockHandler` changes
    the mask. All others change the call in `apply`, most of them the values: those of
    `sinklab.lab.measures.values`, and their base.
    """

    blocks = False
    """Whether queries no longer see the keys; `BlockHandler` then changes the mask, for some
    queries or all, and `apply` is not called.
    """
    draws = False
    """Whether random numbers enter."""

    def apply(self, call: Call, blocked_BHS: Tensor, random_BHS: Tensor) -> Call:
        """The call without these keys.

        Args:
            call: the attention call.
            blocked_BHS: keys to take away, bool, for every query head.
            random_BHS: with `draws`, numbers uniform in [0, 1) that follow from the seed; else an
                empty tensor.
        """
        raise NotImplementedError(f"{self} has no method apply of its own; write it")


@removals.register("mask")
@dataclass(frozen=True)
class Mask(Removal):
    """Block keys before the softmax: their mass goes to other keys."""

    blocks = True


def lost_share(before: Call, after: Call) -> Tensor:
    """The share of attention (B, H) that keys blocked by `after` held in `before`, for any pattern
    of blocking.

    The remaining share of a softmax row is exp(lse' - lse), the ratio of the denominators.
    """
    lse_BHQ, less_BHQ = (
        row_logsumexp(call.q_BHQD, call.k_BKSD, **call.masking) for call in (before, after)
    )
    lost_BHQ = torch.where(lse_BHQ > -math.inf, -torch.expm1(less_BHQ - lse_BHQ), 0.0)
    lost_BHQ = lost_BHQ * before.visibility.counted_BQ.unsqueeze(1)
    return lost_BHQ.sum(-1) / real_queries_B1(before)


def keys_seen(call: Call, blocked_BHS: Tensor | None = None) -> Tensor:
    """Number of keys a query sees in this call, less those removed: mean over the queries that are
    not padding, (B, H).
    """
    batch, heads = call.q_BHQD.shape[:2]
    may_BHQS = allowed(short_mask(call))
    if blocked_BHS is not None:
        may_BHQS = may_BHQS & ~blocked_BHS.unsqueeze(2)
    seen_BHQ = may_BHQS.sum(-1).expand(batch, heads, call.q_BHQD.shape[2]).float()
    seen_BHQ = seen_BHQ * call.visibility.counted_BQ.unsqueeze(1)
    return seen_BHQ.sum(-1) / real_queries_B1(call)


WORDS = ("all", "from32", *STATES)
"""Ways to say which; ``from32`` stands for any position."""


def From(position: int) -> str:
    """Queries at canvas positions from this one on, as `BlockKeys` takes them: ``"from32"``."""
    return f"from{position}"


def first_query(queries: str | None) -> int:
    """The position that words such as "from32" name; −1 for other words."""
    number = str(queries).removeprefix("from")
    return int(number) if number.isdecimal() else -1


def check_queries(queries: str | None) -> None:
    """Raises ValueError for words that name no queries."""
    if queries is not None and queries not in WORDS and not re.fullmatch(r"from\d+", queries):
        raise unknown("choice of queries", queries, WORDS)


def chosen_queries(queries: str, call: Call, positions_Q: Tensor) -> Tensor:
    """Flags of the chosen queries, bool (B or 1, Q).

    Args:
        queries: one of `WORDS`.
        call: the attention call.
        positions_Q: canvas position of each query.

    Raises:
        ValueError: if states are asked for and nothing tells them.
    """
    if queries == "all":
        return torch.ones_like(positions_Q, dtype=torch.bool)[None]
    if queries.startswith("from"):
        return (positions_Q >= first_query(queries))[None]
    state_BS = position_states_of(call, f"queries={queries!r}", needs_canvas=queries == "prompt")
    state_BS = state_BS.to(positions_Q.device)
    return state_BS.index_select(1, positions_Q) == STATES.index(queries)


def near_keys(call: Call, positions_Q: Tensor, radius: int = 0) -> Tensor:
    """Keys at most so many positions from each query, bool (Q, S), behind the model's own sink
    columns: with radius 0 its own.
    """
    place_S = torch.arange(call.k_BKSD.shape[2], device=positions_Q.device)
    distance_QS = ((positions_Q + call.prefix)[:, None] - place_S).abs()
    return (distance_QS <= radius) & (place_S >= call.prefix)


def query_positions(call: Call) -> Tensor:
    """The canvas position of every query of the call, int64 (Q,). Raises ValueError if they are
    unknown.
    """
    queries = call.q_BHQD.shape[2]
    keys = call.k_BKSD.shape[2] - call.prefix
    device = call.q_BHQD.device
    if call.visibility.running is not None:
        return call.visibility.running.columns_Q.to(device)
    if queries == keys:
        return torch.arange(keys, device=device)
    if running_canvas() is not None:
        raise ValueError(
            f"{call.layer} got {queries} queries and {keys} keys, which are not the columns of the "
            "canvas that the denoiser announces: announce those that become queries with "
            "sinklab.core.attention.running(ids, columns)"
        )
    # A model with room at the end of its memory writes where its mask ends.
    seen = int((call.visibility.visible_BHS > 0).any(1).any(0).nonzero().max()) + 1 - call.prefix
    return torch.arange(seen - queries, seen, device=device)
