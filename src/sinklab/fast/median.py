"""Medians on CUDA, where torch gives a row to one processor of a hundred: found bit by bit."""

# B batch, N magnitudes of a row
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sinklab.registry import fast_medians


def bisected_median(size_BN: Tensor, is_short: bool = False) -> Tensor:
    """`size_BN.nanmedian(1, True).values` of magnitudes, bit by bit. `is_short`: all are bfloat16."""
    # of numbers that are not negative the bits have their order, and those of NaN come last
    bits_BN, infinity, lowest = size_BN.contiguous().view(torch.int32), 0x7F800000, 0
    if is_short:
        bits_BN, infinity, lowest = (bits_BN >> 16).short(), infinity >> 16, 16
    total_B1 = (bits_BN <= infinity).sum(1, keepdim=True)
    found_B1 = torch.zeros_like(total_B1)
    for bit in range(30 - lowest, -1, -1):
        trial_B1 = found_B1 | 1 << bit
        below_B1 = (bits_BN < trial_B1.to(bits_BN.dtype)).sum(1, keepdim=True)
        found_B1 = torch.where(below_B1 <= (total_B1 - 1) // 2, trial_B1, found_B1)
    median_B1 = (found_B1 << lowest).int().view(torch.float32)
    return median_B1.masked_fill(total_B1 == 0, torch.nan)


@fast_medians.register("bisected")
class Bisected:
    """In place of `torch.nanmedian`."""

    @staticmethod
    def serving(of: Tensor) -> Callable[[Tensor], Tensor] | None:
        """The median of magnitudes of this tensor in float32, (B, N) to (B, 1); None where torch's is as good."""
        return partial(bisected_median, is_short=of.dtype == torch.bfloat16) if of.is_cuda else None
