"""Which queries may see which keys, as the mask of the call says; padding is read off the mask."""

# B batch, H query heads, Q queries, S keys; an axis of a mask may be 1 (broadcast)

import torch
from torch import Tensor

# What models write for "no" beside -inf and finfo.min (-1e9); no bias by distance comes near.
_NO = -1e8


def allowed(mask: Tensor) -> Tensor:
    """A boolean (True = may attend) or additive mask as a boolean one: -inf, finfo.min and below -1e8 mean no."""
    return mask if mask.dtype == torch.bool else mask > max(torch.finfo(mask.dtype).min / 2, _NO)


def visible_queries(
    mask: Tensor | None,
    batch: int,
    queries: int,
    keys: int,
    *,
    is_causal: bool = False,
    own_Q: Tensor | None = None,
) -> Tensor:
    """Number of queries that may see each key, int64 (B, 1 or H, S): the S of the excess rule when masks are in play.

    Padding never counts: a query whose own key no query may see is padding, and does not count as a viewer. `own_Q`
    says which key belongs to which query, int64; left out, the last Q keys belong to the Q queries, and a row in which
    that would leave no query at all has its keys elsewhere (a static cache with room at the end): there every query
    counts. A causal call sees as torch does, from the upper left corner.
    """
    if mask is None:
        count_S = (queries - torch.arange(keys)).clamp_min(0) if is_causal else torch.full((keys,), queries)
        return count_S.expand(batch, 1, keys)
    may_BHQS = _may(mask, batch, queries, keys, is_causal)
    real_BQ = _real(may_BHQS, queries, own_Q)
    if may_BHQS.shape[2] == 1:
        count_B = real_BQ.sum(-1) if real_BQ is not None else torch.full((batch,), queries, device=mask.device)
        return may_BHQS[:, :, 0] * count_B[:, None, None]
    if real_BQ is not None:
        may_BHQS = may_BHQS & real_BQ[:, None, :, None]
    return may_BHQS.sum(-2)


def real_queries(
    mask: Tensor | None,
    batch: int,
    queries: int,
    keys: int,
    *,
    is_causal: bool = False,
    own_Q: Tensor | None = None,
) -> Tensor | None:
    """Boolean (B, Q), False for padding queries as `visible_queries` knows them; None when every query is real."""
    if mask is None:
        return None
    return _real(_may(mask, batch, queries, keys, is_causal), queries, own_Q)


def _may(mask: Tensor, batch: int, queries: int, keys: int, is_causal: bool) -> Tensor:
    mask = mask.detach()[(None,) * (4 - mask.dim())]
    # A mask expanded over queries (stride 0) says the same to every query: one row is enough.
    may_BHQS = allowed(mask[:, :, :1] if mask.stride(2) == 0 else mask)
    if is_causal:
        may_BHQS = may_BHQS & torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()
    return may_BHQS.expand(batch, -1, -1, keys)


def _real(may_BHQS: Tensor, queries: int, own_Q: Tensor | None) -> Tensor | None:
    keys = may_BHQS.shape[-1]
    if own_Q is None and queries > keys:
        return None
    seen_BS = may_BHQS.any(2).any(1)
    if own_Q is None:
        real_BQ = seen_BS[:, keys - queries :]
        real_BQ = real_BQ | ~real_BQ.any(1, keepdim=True)
    else:
        real_BQ = seen_BS.index_select(1, own_Q.to(seen_BS.device))
    return None if bool(real_BQ.all()) else real_BQ
