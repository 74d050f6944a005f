"""Keys of a call as masks, flags and columns: how some are blocked, and the highest chosen."""

# B batch, H query heads, Q queries, S keys, M keys chosen, D head dim; an axis may be 1
import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sinklab.core.attention.context import reads_wait
from sinklab.core.attention.visibility import allowed, compact


def and_mask(mask: Tensor | None, keep: Tensor) -> Tensor:
    """A boolean or additive mask, or none, that also blocks every key that is not in `keep`."""
    if mask is None:
        return keep
    if mask.dtype == torch.bool:
        return mask & keep
    return mask.masked_fill(~keep, -math.inf)


def dense_mask(call: Any) -> Tensor:
    """The mask of the call with its causality written out; one row if its shape tells."""
    mask = call.mask
    device = call.q_BHQD.device
    keys = call.k_BKSD.shape[2]
    if call.is_causal:
        queries = call.q_BHQD.shape[2]
        seen_QS = torch.ones(queries, keys, dtype=torch.bool, device=device).tril()
        return and_mask(mask, seen_QS[None, None])
    if mask is None:
        return torch.ones(1, 1, 1, keys, dtype=torch.bool, device=device)
    return compact(mask)


def one_row_mask(call: Any) -> Tensor:
    """`dense_mask` as one row if all are equal, which is read from the device."""
    mask = dense_mask(call)
    if not call.is_causal and mask.shape[2] > 1 and bool((mask == mask[:, :, :1]).all()):
        return mask[:, :, :1]
    return mask


def blocked(
    call: Any, keys: Tensor, queries_BQ: Tensor | None = None, kept_QS: Tensor | None = None
) -> Any:
    """`Call.block`."""
    if keys.dim() == 3:
        keys = keys.unsqueeze(2)
    # flags expanded over heads need one row of the mask
    if keys.stride(1) == 0:
        keys = keys[:, :1]
    if queries_BQ is not None:
        keys = keys & queries_BQ[:, None, :, None]
    if kept_QS is not None:
        keys = keys & ~kept_QS
    mask = one_row_mask(call)
    others_BHQS = allowed(mask)
    if kept_QS is not None:
        others_BHQS = others_BHQS & ~kept_QS
    left_BHQ = (others_BHQS & ~keys).any(-1)
    alone_BHQ = others_BHQS.any(-1) & ~left_BHQ
    masked = and_mask(mask, ~keys)
    if kept_QS is None and (reads_wait(keys.device) or bool(alone_BHQ.any())):
        empty_BH = ~left_BHQ.any(-1).expand(call.q_BHQD.shape[:2])
        call.check(empty_BH.any(), partial(_refuse_empty, call.layer, empty_BH, keys.shape[-1]))
        masked = torch.where(alone_BHQ.unsqueeze(-1), mask, masked)
    alone_BHQ = alone_BHQ.expand(call.q_BHQD.shape[:3])
    alone_BH = (alone_BHQ & call.visibility.counted_BQ.unsqueeze(1)).sum(-1)
    return replace(call, mask=masked, is_causal=False, alone_BH=alone_BH)


def _refuse_empty(layer: str, empty_BH: Tensor, keys: int) -> None:
    row, head = empty_BH.nonzero()[0].tolist()
    raise ValueError(
        f"every query must keep a key, but the edits together take all {keys} keys of {layer}, row "
        f"{row}, head {head}: take fewer, or set a limit"
    )


def last_query(call: Any) -> tuple[Tensor, Tensor | None]:
    """The last query of every batch row that is not padding, (B, H, 1, D), and its mask."""
    batch, heads, queries, dim = call.q_BHQD.shape
    real_BQ = call.visibility.real_BQ
    last_B = torch.full((batch,), queries - 1, device=call.q_BHQD.device)
    if real_BQ is not None:
        last_B = queries - 1 - real_BQ.flip(-1).long().argmax(-1).to(last_B.device)
    at_B111 = last_B.view(batch, 1, 1, 1)
    query_BH1D = call.q_BHQD.gather(2, at_B111.expand(-1, heads, 1, dim))
    mask = call.mask
    if mask is not None and mask.shape[2] > 1:
        mask = mask.expand(batch, -1, -1, -1)
        mask = mask.gather(2, at_B111.expand(-1, mask.shape[1], 1, mask.shape[3]))
    if call.is_causal:
        # Causal masks are top-left aligned, as in torch: query i sees the keys up to i.
        keys = call.k_BKSD.shape[2]
        mask = and_mask(mask, torch.arange(keys, device=last_B.device) <= at_B111)
    return query_BH1D, mask


def as_flags(columns_BHM: Tensor, keys: int) -> Tensor:
    """Columns (-1 for none) as flags (B, H, S)."""
    flags_BHS = torch.zeros(
        *columns_BHM.shape[:2], keys + 1, dtype=torch.bool, device=columns_BHM.device
    )
    return flags_BHS.scatter_(2, columns_BHM.masked_fill(columns_BHM < 0, keys), True)[..., :keys]


def highest(
    order_BHS: Tensor, among_BHS: Tensor, count_BH1: Tensor, max_count: int | None = None
) -> Tensor:
    """Columns (B, H, M) of the highest keys among some, the highest first: as many as each head
    counts, then -1. `max_count` is the most there may be, so that no GPU is asked.
    """
    if max_count is None or not reads_wait(count_BH1.device):
        max_count = int(count_BH1.max())
    width = min(max_count, among_BHS.shape[-1])
    columns_BHM = order_BHS.masked_fill(~among_BHS, -torch.inf).topk(width, dim=-1).indices
    number_M = torch.arange(width, device=columns_BHM.device)
    return columns_BHM.masked_fill(number_M >= count_BH1, -1)


def as_columns(
    blocked_BHS: Tensor, max_count: int | None = None, order_BHS: Tensor | None = None
) -> Tensor:
    """Turn flags into columns, as `highest` does; they rise without an order."""
    if order_BHS is None:
        place_S = torch.arange(blocked_BHS.shape[-1], device=blocked_BHS.device)
        order_BHS = -place_S.float().expand(blocked_BHS.shape)
    return highest(order_BHS, blocked_BHS, blocked_BHS.sum(-1, keepdim=True), max_count)


def pad_flags(blocked_BHS: Tensor, keys: int) -> Tensor:
    """Flags for this many keys: those that came since are not blocked."""
    return pad(blocked_BHS, (0, max(0, keys - blocked_BHS.shape[-1])))


def refuse_short(short_BH1: Tensor, wanted_BH1: Tensor, found_BH1: Tensor) -> None:
    """Raises ValueError for a head with too few keys to choose from."""
    row, head = short_BH1[..., 0].nonzero()[0].tolist()
    raise ValueError(
        f"{int(wanted_BH1[row, head])} keys of a head are to be chosen, but row {row} of this "
        f"batch has {int(found_BH1[row, head])} to choose from: lower k, choose a stricter rule, "
        "or set a limit"
    )
