"""Softmax rows in chunks of queries: the one loop behind every statistic, O(S) in memory."""

# B batch, H query heads, Q queries, S keys, D head dim, R = B·H of one block, C queries of a chunk
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from sinklab.core.attention.scores import LOG2E, Scores
from sinklab.core.compat import without_tf32
from sinklab.core.registry import fast_path, fast_products

Product = Callable[[Tensor, Tensor], Tensor]
"""(q_CD, k_SD) -> q · kᵀ, (C, S), contiguous: one that beats `torch.bmm`."""

LN2 = math.log(2.0)
# Numbers of a chunk at most, and of several heads together: a product of many queries pays more
# than staying in a CPU's nearest cache, where small heads stay; an accelerator wants few launches.
_BUDGET = {"cpu": (1 << 20, 1 << 18)}
_BUDGET_ACCELERATOR = (1 << 23, 1 << 23)
# Queries of a chunk at most, elsewhere 1024.
_TALLEST = {"cpu": 256}
# Unshifted exponentials are exact as long as the row sums keep this distance to under- and
# overflow.
_SAFE = 2.0**90
# An exponent whose power of two is zero in every precision.
_NEVER = -1e6


@contextmanager
def exactly(device: torch.device) -> Iterator[None]:
    """Run without gradients, autocast or TF32: the numerical setting of all statistics."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False), without_tf32(device):
        yield


@dataclass(frozen=True)
class Chunk:
    """Unnormalised softmax rows exp2(score - shift), in a buffer that the next chunk overwrites."""

    batches: slice
    heads: slice
    queries: slice
    keys: int
    weights_BHCS: Tensor
    total_BHC: Tensor
    inverse_BHC: Tensor
    """1 / row sum, and 0 for a query that may see no key (as scaled_dot_product_attention does)."""
    shift_BHC: Tensor | float
    exponents_BHCS: Tensor | None
    """score - shift in units of log 2, finite; None unless requested. Its last reader may overwrite
    it.
    """


def chunks(scores: Scores, chunk: int | None = None, *, exponents: bool = False) -> Iterator[Chunk]:
    """Softmax rows, block by block of heads and queries. Peak memory: a few buffers of about chunk
    x S numbers.
    """
    batch, heads, queries = scores.shape
    keys = scores.k_BKSD.shape[2]
    device = scores.q_BHQD.device
    product: Product | None = fast_path(fast_products, device, scores.dtype, queries * keys)
    most, joined = _BUDGET.get(device.type, _BUDGET_ACCELERATOR)
    tallest = _TALLEST.get(device.type, 1024)
    if product is not None:
        # A head by itself gets its scores from the product in memory of their own.
        tallest = queries
        joined = 0
    width = min(queries, chunk or max(32, min(tallest, most // keys)))
    rows = max(1, joined // (width * keys))
    heads_step = min(heads, rows)
    batch_step = max(1, rows // heads)
    size = 0
    if product is None:
        size = min(batch, batch_step) * heads_step * width * keys
    buffer = torch.empty(size, dtype=scores.dtype, device=device)
    # On an accelerator the check below would wait for the device, so the maximum is always taken
    # there.
    shifted = device.type != "cpu"
    for first_batch in range(0, batch, batch_step):
        batches = slice(first_batch, min(first_batch + batch_step, batch))
        for first_head in range(0, heads, heads_step):
            some = slice(first_head, min(first_head + heads_step, heads))
            block = _Block(scores, batches, some, product, buffer, exponents)
            for start in range(0, queries, width):
                part = slice(start, min(start + width, queries))
                result = block.chunk(part, shifted)
                shifted = isinstance(result.shift_BHC, Tensor)
                yield result
                # The reader drops it as well: the room is wanted for the next.
                del result


class _Block:
    """Some batch rows and heads of a call, scaled and laid out for the product once for all their
    chunks.
    """

    def __init__(
        self,
        scores: Scores,
        batches: slice,
        heads: slice,
        product: Product | None,
        buffer: Tensor,
        exponents: bool,
    ) -> None:
        self.scores = scores
        self.batches = batches
        self.heads = heads
        self.product = product
        self.buffer = buffer
        self.exponents = exponents
        self.shape = (batches.stop - batches.start, heads.stop - heads.start)
        # the tensor cores of CUDA multiply halves exactly, and sum in float32
        self.is_half = scores.q_BHQD.is_cuda and scores.q_BHQD.dtype in (
            torch.bfloat16,
            torch.float16,
        )
        factors = [factor.flatten(0, 1) for factor in scores.factors(batches, heads)]
        if not self.is_half:
            factors = [factor.to(scores.dtype) for factor in factors]
        self.q_RQD, self.k_RSD = factors
        # log2(e) turns exp into exp2, which is four times cheaper on a CPU
        self.unit = scores.scale * LOG2E
        if product is not None:
            self.q_RQD = (self.q_RQD * self.unit).contiguous()
            self.k_RSD = self.k_RSD.contiguous()

    def _scores(self, part: slice) -> Tensor:
        keys = self.k_RSD.shape[1]
        if self.scores.is_causal:
            keys = min(keys, part.stop)
        size = part.stop - part.start
        q_RCD = self.q_RQD[:, part]
        k_RSD = self.k_RSD[:, :keys]
        if self.product is not None:
            x_RCS = self.product(q_RCD[0], k_RSD[0])
        elif self.is_half:
            x_RCS = torch.bmm(q_RCD, k_RSD.mT, out_dtype=torch.float32).mul_(self.unit)
        else:
            x_RCS = self.buffer[: q_RCD.shape[0] * size * keys].view(-1, size, keys)
            x_RCS.baddbmm_(q_RCD, k_RSD.mT, beta=0, alpha=self.unit)
        x_BHCS = x_RCS.view(*self.shape, size, keys)
        bias = self.scores.bias(self.batches, self.heads, part, keys)
        if bias is not None:
            x_BHCS.add_(bias)
        if self.scores.is_causal and keys > part.start:
            # Keys before the chunk are visible to all of it: only the corner at the diagonal needs
            # masking.
            corner = torch.ones(size, keys - part.start, dtype=torch.bool, device=x_RCS.device)
            x_BHCS[..., part.start :].masked_fill_(corner.triu_(1), -math.inf)
        return x_BHCS

    def chunk(self, part: slice, shifted: bool) -> Chunk:
        """Exponentials of the scores of this part. `shifted` subtracts the row maximum, safe for
        any scores, also rows without a single visible key.

        Otherwise they are shifted only if a row sum comes near under- or overflow.
        """
        x_BHCS = self._scores(part)
        shift_BHC: Tensor | float = 0.0
        if shifted:
            shift_BHC = x_BHCS.amax(-1)
            shift_BHC = shift_BHC.masked_fill(shift_BHC == -math.inf, 0.0)
            x_BHCS.sub_(shift_BHC.unsqueeze(-1))
        kept = None
        if self.exponents:
            weights_BHCS = x_BHCS.exp2()
            # A weight of zero times an exponent of -inf would not be zero.
            kept = x_BHCS.clamp_min_(_NEVER)
        else:
            weights_BHCS = x_BHCS.exp2_()
        total_BHC = weights_BHCS.sum(-1)
        if not shifted:
            low, high = total_BHC.aminmax()
            if not (low.item() > 1 / _SAFE and high.item() < _SAFE):
                # their room is wanted
                del x_BHCS, weights_BHCS, kept
                return self.chunk(part, shifted=True)
        inverse_BHC = total_BHC.reciprocal()
        if shifted:
            inverse_BHC = torch.where(total_BHC > 0, inverse_BHC, 0.0)
        return Chunk(
            self.batches,
            self.heads,
            part,
            x_BHCS.shape[-1],
            weights_BHCS,
            total_BHC,
            inverse_BHC,
            shift_BHC,
            kept,
        )
