"""The effect of an edit on one call: the keys that it removes, and the attention they had."""

# B batch, H query heads, Q queries, S keys, M keys removed
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sinklab.core.attention.received import row_logsumexp
from sinklab.core.attention.visibility import allowed
from sinklab.core.instrument.call import Call, real_queries_B1
from sinklab.core.instrument.keys import one_row_mask, pad_flags


@dataclass(frozen=True, eq=False)
class ChosenKeys:
    """Keys that an edit takes away in a call, chosen in it or before, and what the log says."""

    blocked_BHS: Tensor
    """Flags, for all heads."""
    columns_BHM: Tensor
    """Those keys in the heads that are edited, −1 where a head has fewer than M: the newly
    chosen ones by falling score, then the others.
    """
    numbers: dict[str, Tensor]
    """Numbers (B, H) for the log: "held", "chosen", "sinks", "matched"."""
    random_BHS: Tensor
    """Numbers for a removal that draws, else none."""
    by_query: bool = False
    """Whether only some queries lose them."""


@dataclass(frozen=True)
class Effect:
    """Keys removed in one layer, over the heads that are edited."""

    heads: list[int]
    columns_BHM: Tensor
    numbers: dict[str, Tensor]
    """Measures by name, as in `MEASURED`, each (B, H); those absent are not known."""


def with_dose(before: Call, after: Call, numbers: dict[str, Tensor]) -> dict[str, Tensor]:
    """The numbers of an edit with its dose: "removed", the share of attention (0 to 1) that it
    takes from a query, and "left", the keys that a query sees after it; means over the queries that
    are not padding, (B, H) of the edited heads. For an edit of another kind also "keys".
    """
    found: ChosenKeys | None = after.chosen
    is_masked = after.mask is not before.mask or after.is_causal != before.is_causal
    if found is None or is_masked:
        left_BH = before.of_heads(count_keys_seen(after))
    else:
        left_BH = before.of_heads(count_keys_seen(before, found.blocked_BHS))
    if found is None:
        numbers["keys"] = before.of_heads(count_keys_seen(before)) - left_BH
    numbers["left"] = left_BH
    if found is not None and not found.by_query:
        # A query left as it was saw nothing but these keys: it gives them a mass of 1.
        blocked_BHS = before.of_heads(found.blocked_BHS)
        held_BH = before.received_BHS.masked_fill(~blocked_BHS, 0.0).sum(-1) - numbers["alone"]
        if is_masked and after.alone_BH is None:
            # not blocked: they keep a part of their weight
            held_BH -= after.received_BHS.masked_fill(~blocked_BHS, 0.0).sum(-1)
        numbers["removed"] = held_BH / real_queries_B1(before)
    elif (
        # if the scores themselves are others, no share of them was removed
        after.q_BHQD is before.q_BHQD
        and after.k_BKSD is before.k_BKSD
        and after.scale is before.scale
    ):
        numbers["removed"] = before.of_heads(removed_share(before, after))
    return numbers


def removed_share(before: Call, after: Call) -> Tensor:
    """The share of attention (B, H) that keys blocked by `after` held in `before`, for any pattern
    of blocking.

    The remaining share of a softmax row is exp(lse' - lse), the ratio of the denominators.
    """
    lse_BHQ, less_BHQ = (
        row_logsumexp(call.q_BHQD, call.k_BKSD, **call.masking) for call in (before, after)
    )
    removed_BHQ = torch.where(lse_BHQ > -math.inf, -torch.expm1(less_BHQ - lse_BHQ), 0.0)
    removed_BHQ = removed_BHQ * before.visibility.counted_BQ.unsqueeze(1)
    return removed_BHQ.sum(-1) / real_queries_B1(before)


def count_keys_seen(call: Call, blocked_BHS: Tensor | None = None) -> Tensor:
    """Number of keys a query sees in this call, less those removed: mean over the queries that are
    not padding, (B, H).
    """
    batch, heads = call.q_BHQD.shape[:2]
    may_BHQS = allowed(one_row_mask(call))
    if blocked_BHS is not None:
        may_BHQS = may_BHQS & ~blocked_BHS.unsqueeze(2)
    seen_BHQ = may_BHQS.sum(-1).expand(batch, heads, call.q_BHQD.shape[2]).float()
    seen_BHQ = seen_BHQ * call.visibility.counted_BQ.unsqueeze(1)
    return seen_BHQ.sum(-1) / real_queries_B1(call)


def jaccard(a_BHS: Tensor, b_BHS: Tensor) -> Tensor:
    """Share of the keys of both among the keys of either, (B, H); NaN if there are none."""
    b_BHS = pad_flags(b_BHS, a_BHS.shape[-1])
    a_BHS = pad_flags(a_BHS, b_BHS.shape[-1])
    return (a_BHS & b_BHS).sum(-1) / (a_BHS | b_BHS).sum(-1)
