"""Methods that remove keys from an attention call, the attention they took away, and keys as flags
and as columns.
"""

# B batch, H query heads, K key/value heads, Q queries, S keys, D head dim, M keys taken away; an
# axis may be 1
import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import pad

from sinklab.core.attention.context import reads_wait
from sinklab.core.attention.received import row_logsumexp
from sinklab.core.attention.scores import allowed
from sinklab.core.errors import ordinary, refused
from sinklab.core.probing.call import AttentionCall, narrowed

REMOVALS = ("mask", "zero_value", "evict", "mean_value", "pool_value")


Doubt = Callable[[Tensor, Callable[[], None]], None]
"""Signature (wrong, check): `check` raises if the flag is set, now or at the end of the forward."""


def at_once(wrong: Tensor, check: Callable[[], None]) -> None:
    """A doubt that is not put off."""
    if bool(wrong):
        check()


def restricted(
    call: AttentionCall, keep_BHQS: Tensor, doubt: Doubt = at_once, *, own_QS: Tensor | None = None
) -> tuple[AttentionCall, Tensor]:
    """The call with keys blocked that are False in `keep_BHQS`, and the number of queries (B, H)
    left alone.

    A query that would lose every key it may see keeps what it had before this edit (the first rows
    of a causal map). With `own_QS`, each query's own key, it never loses that one, and a query is
    left alone if it has no other any more. The mask stays (B, H, 1, S) unless the call's own, or
    `keep_BHQS`, differs by query.

    Raises ValueError when in some row and head no query would see a key any more.
    """
    mask = _own_mask(call)
    before_BHQS = allowed(mask)
    if own_QS is not None:
        keep_BHQS = keep_BHQS | own_QS
        others_BHQS = before_BHQS & ~own_QS
        alone_BHQ = others_BHQS.any(-1) & ~(others_BHQS & keep_BHQS).any(-1)
        return replace(call, mask=narrowed(mask, keep_BHQS), is_causal=False), _real_queries(
            call, alone_BHQ
        )
    after_BHQS = before_BHQS & keep_BHQS
    lost_BHQ = before_BHQS.any(-1) & ~after_BHQS.any(-1)
    hidden = narrowed(mask, keep_BHQS)
    edited = replace(call, mask=hidden, is_causal=False)
    if not reads_wait(lost_BHQ.device) and not bool(lost_BHQ.any()):
        return edited, torch.zeros(call.query_BHQD.shape[:2], device=keep_BHQS.device)
    sees_BH = after_BHQS.any(-1).any(-1).expand(call.query_BHQD.shape[:2])

    def check() -> None:
        row, head = (~sees_BH).nonzero()[0].tolist()
        raise ValueError(
            f"every query must keep a key, but the edits together take all {keep_BHQS.shape[-1]} "
            f"keys of {call.layer}, row {row}, head {head}: take fewer, or set a limit"
        )

    doubt(~sees_BH.all(), check)
    edited = replace(edited, mask=torch.where(lost_BHQ.unsqueeze(-1), mask, hidden))
    return edited, _real_queries(call, lost_BHQ)


def _real_queries(call: AttentionCall, some_BHQ: Tensor) -> Tensor:
    """Number of these queries that are not padding, (B, H)."""
    batch, heads, queries, _ = call.query_BHQD.shape
    some_BHQ = some_BHQ.expand(batch, heads, queries)
    real_BQ = call.visibility.real_BQ
    return (some_BHQ if real_BQ is None else some_BHQ & real_BQ.unsqueeze(1)).sum(-1)


def _own_mask(call: AttentionCall) -> Tensor:
    """The mask of the call with its causality written out; one row if it is the same for every
    query.
    """
    mask, queries = call.mask, call.query_BHQD.shape[2] if call.is_causal else 1
    seen_11QS = torch.ones(
        1, 1, queries, call.key_BKSD.shape[2], dtype=torch.bool, device=call.query_BHQD.device
    )
    if mask is None:
        return seen_11QS.tril() if call.is_causal else seen_11QS
    if call.is_causal:
        return narrowed(mask, seen_11QS.tril())
    is_same = mask.shape[2] == 1 or mask.stride(2) == 0 or bool((mask == mask[:, :, :1]).all())
    return mask[:, :, :1] if is_same else mask


def replaced_values(
    call: AttentionCall, gone_BHS: Tensor, removal: str, means_HD: Tensor | None
) -> AttentionCall:
    """The call with other values for these keys: attention stays as it is.

    Args:
        call: the attention call.
        gone_BHS: the keys, of every query head.
        removal: "zero_value", nothing; "pool_value", the mean of the other keys seen; "mean_value",
            `means_HD`.
        means_HD: of each query head, as :func:`reference_values` reads it.

    Raises:
        ValueError: for pooled values if queries see different keys, and for a head without a
            reference.
    """
    value, key = call.value_BKSD, call.key_BKSD
    groups = call.query_BHQD.shape[1] // key.shape[1]
    if groups > 1:
        # Query heads of one value head lose different keys: each needs its own values from here on.
        value, key = value.repeat_interleave(groups, 1), key.repeat_interleave(groups, 1)
    if removal == "zero_value":
        new = torch.zeros_like(value[:, :, :1])
    elif removal == "pool_value":
        new = _pooled(call, value, gone_BHS)
    else:
        assert means_HD is not None, "mean_value has its means"
        lacking_H = means_HD.isnan().any(-1) & gone_BHS.any(-1).any(0).to(means_HD.device)
        if bool(lacking_H.any()):
            head = int(lacking_H.nonzero()[0])
            raise ValueError(
                f"{call.layer}, head {head} has no sink in the reference texts; leave out that head"
            )
        new = means_HD.nan_to_num().to(value)[None, :, None]
    return replace(call, key_BKSD=key, value_BKSD=torch.where(gone_BHS.unsqueeze(-1), new, value))


def _pooled(call: AttentionCall, value_BHSD: Tensor, gone_BHS: Tensor) -> Tensor:
    """Mean value (B, H, 1, D) of the keys that are seen and stay."""
    mask = _own_mask(call)
    if mask.shape[2] > 1:
        raise ValueError(
            f"pool_value is the mean of the values that a query sees, but in {call.layer} queries "
            "see different keys (a causal model, blocks): take removal='mean_value' or 'zero_value'"
        )
    others_BHS = allowed(mask)[:, :, 0] & ~gone_BHS
    weights_BHS = others_BHS.to(value_BHSD) / others_BHS.sum(-1, keepdim=True).clamp(min=1)
    return (weights_BHS.unsqueeze(-1) * value_BHSD).sum(2, keepdim=True)


@lru_cache(maxsize=4)
def reference_values(file: str) -> dict[str, Tensor]:
    """Mean values (H, D) by layer, of a file of `save_reference_values`. Raises ValueError for
    another file.
    """
    with refused(
        f"no reference values can be read from {file}, which is absent or damaged",
        SafetensorError,
        OSError,
    ):
        return load_file(ordinary(file))


def real_queries_B1(call: AttentionCall) -> Tensor | int:
    """Number of queries that are not padding: an int, or (B, 1) if rows differ."""
    real_BQ = call.visibility.real_BQ
    return call.query_BHQD.shape[2] if real_BQ is None else real_BQ.sum(-1, keepdim=True)


def lost_share(before: AttentionCall, after: AttentionCall) -> Tensor:
    """The share of attention (B, H) that keys blocked by `after` held in `before`, for any pattern
    of blocking.

    The remaining share of a softmax row is exp(lse' - lse), the ratio of the denominators.
    """
    lse_BHQ, less_BHQ = (
        row_logsumexp(call.query_BHQD, call.key_BKSD, **call.masking) for call in (before, after)
    )
    lost_BHQ = torch.where(lse_BHQ > -math.inf, -torch.expm1(less_BHQ - lse_BHQ), 0.0)
    real_BQ = before.visibility.real_BQ
    lost_BHQ = lost_BHQ if real_BQ is None else lost_BHQ * real_BQ.unsqueeze(1)
    return lost_BHQ.sum(-1) / real_queries_B1(before)


def keys_seen(call: AttentionCall, gone_BHS: Tensor | None = None) -> Tensor:
    """Number of keys a query sees in this call, less those removed: mean over the queries that are
    not padding, (B, H).
    """
    batch, heads = call.query_BHQD.shape[:2]
    may_BHQS = allowed(_own_mask(call))
    may_BHQS = may_BHQS if gone_BHS is None else may_BHQS & ~gone_BHS.unsqueeze(2)
    seen_BHQ = may_BHQS.sum(-1).expand(batch, heads, -1).float()
    real_BQ = call.visibility.real_BQ
    if real_BQ is None:
        return seen_BHQ.mean(-1)
    return (seen_BHQ * real_BQ.unsqueeze(1)).sum(-1) / real_queries_B1(call)


def as_flags(columns_BHM: Tensor, keys: int) -> Tensor:
    """Columns (-1 for none) as flags (B, H, S)."""
    flags_BHS = torch.zeros(
        *columns_BHM.shape[:2], keys + 1, dtype=torch.bool, device=columns_BHM.device
    )
    return flags_BHS.scatter_(2, columns_BHM.masked_fill(columns_BHM < 0, keys), True)[..., :keys]


def as_columns(gone_BHS: Tensor, limit: int | None = None) -> Tensor:
    """Flags as columns in rising order (B, H, M), -1 if a head has fewer than the most.

    `limit`: the most there may be, for a device that is not to be asked.
    """
    keys, is_far = gone_BHS.shape[-1], reads_wait(gone_BHS.device)
    most = min(limit, keys) if limit is not None and is_far else int(gone_BHS.sum(-1).max())
    columns_BHS = (
        torch.arange(keys, device=gone_BHS.device)
        .expand(gone_BHS.shape)
        .masked_fill(~gone_BHS, keys)
    )
    columns_BHM = columns_BHS.sort(-1).values[..., :most]
    return columns_BHM.masked_fill(columns_BHM == keys, -1)


def extended(gone_BHS: Tensor, keys: int) -> Tensor:
    """Flags for this many keys: those that came since are not removed."""
    return pad(gone_BHS, (0, max(0, keys - gone_BHS.shape[-1])))
