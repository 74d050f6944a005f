"""Softmax rows in chunks of queries: the one loop behind every statistic, O(S) in memory."""

# B batch, H query heads, K key/value heads, Q queries, S keys, D head dim, R = B·H of one block, C queries of a chunk

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

LOG2E = math.log2(math.e)
LN2 = math.log(2.0)
# One block of scores should stay near the second-level cache of a CPU; an accelerator wants few, large launches.
_BUDGET = {"cpu": 1 << 19}
_BUDGET_ACCELERATOR = 1 << 25
# Unshifted exponentials are exact as long as the row sums keep this distance to under- and overflow.
_SAFE = 2.0**90


@dataclass(frozen=True)
class Chunk:
    """Unnormalised softmax rows exp2(score - shift), in a buffer that the next chunk overwrites."""

    batches: slice
    heads: slice
    queries: slice
    keys: int
    weights_BHCS: Tensor
    total_BHC: Tensor
    shift_BHC: Tensor | float

    def inverse_total(self) -> Tensor:
        """1 / row sum, and 0 for a query that may see no key (as scaled_dot_product_attention does)."""
        return torch.where(self.total_BHC > 0, self.total_BHC.reciprocal(), 0.0)


@dataclass(frozen=True)
class Scores:
    """What is needed to compute attention scores: the arguments of one attention call, checked."""

    q_BHQD: Tensor
    k_BKSD: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float

    @classmethod
    def of(cls, q_BHQD: Tensor, k_BKSD: Tensor, mask: Tensor | None, is_causal: bool, scale: float | None) -> "Scores":
        if q_BHQD.dim() != 4 or k_BKSD.dim() != 4:
            raise ValueError(
                f"q and k must have four axes (batch, head, position, head dim), got {tuple(q_BHQD.shape)} and "
                f"{tuple(k_BKSD.shape)}: add the missing axes with unsqueeze"
            )
        heads, kv_heads = q_BHQD.shape[1], k_BKSD.shape[1]
        same = q_BHQD.shape[0] == k_BKSD.shape[0] and q_BHQD.shape[3] == k_BKSD.shape[3]
        if not same or heads % kv_heads:
            raise ValueError(
                f"q and k must share batch and head dim, and query heads be a multiple of key heads, got "
                f"{tuple(q_BHQD.shape)} and {tuple(k_BKSD.shape)}: check the order (batch, head, position, dim)"
            )
        if mask is not None:
            mask = mask.detach()[(None,) * (4 - mask.dim())]
            # Expanded over queries (stride 0): one row says it all, and costs no S x S pass.
            mask = mask[:, :, :1] if mask.stride(2) == 0 else mask
            try:
                torch.broadcast_shapes(mask.shape, (*q_BHQD.shape[:3], k_BKSD.shape[2]))
            except RuntimeError as error:
                raise ValueError(
                    f"mask must broadcast to (batch, head, query, key) = {(*q_BHQD.shape[:3], k_BKSD.shape[2])}, "
                    f"got {tuple(mask.shape)}"
                ) from error
        scale = q_BHQD.shape[-1] ** -0.5 if scale is None else scale
        return cls(q_BHQD.detach(), k_BKSD.detach(), mask, is_causal, scale)

    @property
    def dtype(self) -> torch.dtype:
        """float32, or float64 for float64 inputs: probabilities summed in half precision drift by percents."""
        return torch.promote_types(self.q_BHQD.dtype, torch.float32)

    def chunks(self, chunk: int | None = None) -> Iterator[Chunk]:
        """Softmax rows, block by block of heads and queries. Peak memory: one buffer of about chunk x S numbers."""
        device = self.q_BHQD.device
        batch, heads, queries, _ = self.q_BHQD.shape
        keys = self.k_BKSD.shape[2]
        budget = _BUDGET.get(device.type, _BUDGET_ACCELERATOR)
        width = min(queries, chunk or max(32, min(256 if device.type == "cpu" else 1024, budget // max(keys, 1))))
        rows = max(1, budget // max(1, width * keys))
        heads_step = min(heads, rows)
        batch_step = max(1, rows // heads) if heads_step == heads else 1
        buffer = torch.empty(min(batch, batch_step) * heads_step * width * keys, dtype=self.dtype, device=device)
        # On an accelerator the check below would wait for the device, so the maximum is always taken there.
        shifted = device.type != "cpu"
        for first_batch in range(0, batch, batch_step):
            batches = slice(first_batch, min(first_batch + batch_step, batch))
            for first_head in range(0, heads, heads_step):
                block = _Block(self, batches, slice(first_head, min(first_head + heads_step, heads)), buffer)
                for start in range(0, queries, width):
                    part = slice(start, min(start + width, queries))
                    result = None if shifted else block.unshifted(part)
                    shifted = result is None
                    yield block.shifted(part) if result is None else result


class _Block:
    """Some batch rows and heads of a call, scaled and laid out for matmul once for all their chunks."""

    def __init__(self, scores: Scores, batches: slice, heads: slice, buffer: Tensor) -> None:
        self.scores, self.batches, self.heads, self.buffer = scores, batches, heads, buffer
        q, k, groups = scores.q_BHQD, scores.k_BKSD, scores.q_BHQD.shape[1] // scores.k_BKSD.shape[1]
        self.shape = (batches.stop - batches.start, heads.stop - heads.start)
        # The factor log2(e) turns exp into exp2, which is four times cheaper on CPU.
        self.q_RQD = (q[batches, heads].to(scores.dtype) * (scores.scale * LOG2E)).flatten(0, 1)
        head_of = torch.arange(heads.start, heads.stop, device=k.device) // groups
        k_BHSD = k[batches, heads] if groups == 1 else k[batches].index_select(1, head_of)
        self.k_RDS = k_BHSD.to(scores.dtype).flatten(0, 1).transpose(1, 2)

    def _scores(self, part: slice) -> Tensor:
        keys = self.k_RDS.shape[2]
        if self.scores.is_causal:
            keys = min(keys, part.stop)
        size = part.stop - part.start
        x_RCS = self.buffer[: self.q_RQD.shape[0] * size * keys].view(-1, size, keys)
        torch.bmm(self.q_RQD[:, part], self.k_RDS[:, :, :keys], out=x_RCS)
        x_BHCS = x_RCS.view(*self.shape, size, keys)
        if self.scores.mask is not None:
            x_BHCS.add_(_bias(self._mask_part(part, keys), x_BHCS.dtype))
        if self.scores.is_causal and keys > part.start:
            # Keys before the chunk are visible to all of it: only the corner at the diagonal needs masking.
            corner = torch.ones(size, keys - part.start, dtype=torch.bool, device=x_RCS.device)
            x_BHCS[..., part.start :].masked_fill_(corner.triu_(1), -math.inf)
        return x_BHCS

    def _mask_part(self, part: slice, keys: int) -> Tensor:
        mask = self.scores.mask
        assert mask is not None
        for axis, where in enumerate((self.batches, self.heads, part, slice(0, keys))):
            if mask.shape[axis] > 1:
                mask = mask.narrow(axis, where.start, where.stop - where.start)
        return mask

    def unshifted(self, part: slice) -> Chunk | None:
        """Exponentials without subtracting the row maximum; None where a row sum comes near under- or overflow."""
        x_BHCS = self._scores(part).exp2_()
        total_BHC = x_BHCS.sum(-1)
        low, high = total_BHC.aminmax()
        if not (low.item() > 1 / _SAFE and high.item() < _SAFE):
            return None
        return Chunk(self.batches, self.heads, part, x_BHCS.shape[-1], x_BHCS, total_BHC, 0.0)

    def shifted(self, part: slice) -> Chunk:
        """Exponentials less the row maximum: any scores, also rows without a single visible key."""
        x_BHCS = self._scores(part)
        shift_BHC = x_BHCS.amax(-1)
        shift_BHC = shift_BHC.masked_fill(shift_BHC == -math.inf, 0.0)
        x_BHCS.sub_(shift_BHC.unsqueeze(-1)).exp2_()
        return Chunk(self.batches, self.heads, part, x_BHCS.shape[-1], x_BHCS, x_BHCS.sum(-1), shift_BHC)


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask as what is added to scores in units of log 2."""
    if mask.dtype == torch.bool:
        return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)
    # finfo.min times log2(e) would overflow to -inf, and a row masked by finfo.min alone is uniform, not empty.
    scaled = (mask.to(dtype) * LOG2E).clamp_min_(torch.finfo(dtype).min / 2)
    return scaled.masked_fill_(mask == -math.inf, -math.inf)
