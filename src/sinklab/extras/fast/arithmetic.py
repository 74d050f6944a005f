"""Arithmetic by the fastest exact kernel there is: linear layers of float32 on a CPU, and medians
of long rows.
"""

# B batch, N magnitudes of a row
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from sinklab.extras.fast.compat import onednn_linear
from sinklab.lab.registry import fast_medians

WORTHWHILE_WEIGHT = 1 << 17  # numbers in a weight


def linear_for(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x -> x · weightᵀ + bias, as `F.linear`; by oneDNN if it is the faster one, nothing is to be
    differentiated, and the weight is worth the half millisecond that oneDNN takes for every new
    number of rows.

    On AVX-512 processors that are not Intel's, MKL multiplies at half the width of oneDNN, which
    torch uses for its compiled linear layers. float32 in and out, no lower precision inside.
    """
    product = (
        _onednn() if weight.numel() >= WORTHWHILE_WEIGHT and weight.dtype == torch.float32 else None
    )
    if product is None or not weight.is_cpu:
        return lambda x: F.linear(x, weight, bias)

    def linear(x: Tensor) -> Tensor:
        stands = (
            x.is_cpu and torch.is_inference_mode_enabled() and not torch.is_autocast_enabled("cpu")
        )
        if stands and _is_exact():
            return product(x, weight, bias, "none", [], "")
        return F.linear(x, weight, bias)

    return linear


def _is_exact() -> bool:
    """Whether products are required in full precision: else oneDNN may round the factors to
    bfloat16.
    """
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:
        # torch refuses to say once torch.backends.….fp32_precision is set.
        return False


@cache
def _onednn() -> Callable[..., Tensor] | None:
    """oneDNN's inner product, if this build of torch has it and this processor gains by it: one
    with AVX-512 on which MKL does not multiply at full width.
    """
    told = Path("/proc/cpuinfo")
    if (
        torch.backends.cpu.get_cpu_capability() != "AVX512"
        or not torch.backends.mkldnn.is_available()
        or not told.is_file()
        or "GenuineIntel" in told.read_text()
    ):
        return None
    return onednn_linear()


def bisected_median(size_BN: Tensor, is_short: bool = False) -> Tensor:
    """`size_BN.nanmedian(1, True).values` of magnitudes, bit by bit. `is_short`: all are
    bfloat16.
    """
    # of numbers that are not negative the bits have their order, and those of NaN come last
    bits_BN, infinity, lowest = size_BN.contiguous().view(torch.int32), 0x7F800000, 0
    if is_short:
        bits_BN, infinity, lowest = (bits_BN >> 16).short(), infinity >> 16, 16
    total_B1 = (bits_BN <= infinity).sum(1, keepdim=True)
    half_B1 = (total_B1 - 1) // 2
    found_B1 = torch.zeros_like(total_B1, dtype=bits_BN.dtype)
    for bit in range(30 - lowest, -1, -1):
        trial_B1 = found_B1 | 1 << bit
        below_B1 = (bits_BN < trial_B1).sum(1, keepdim=True)
        found_B1 = torch.where(below_B1 <= half_B1, trial_B1, found_B1)
    median_B1 = (found_B1.int() << lowest).view(torch.float32)
    return median_B1.masked_fill(total_B1 == 0, torch.nan)


def partitioned_median(size_BN: Tensor) -> Tensor:
    """Median of each row on a CPU, by numpy's partition; NaN is left out."""
    rows = size_BN.numpy()
    middle_B = [max(int(count) - 1, 0) // 2 for count in rows.shape[1] - np.isnan(rows).sum(1)]
    # NaN comes last
    found_B = [
        np.partition(row, middle)[middle] for row, middle in zip(rows, middle_B, strict=True)
    ]
    return torch.from_numpy(np.array(found_B))[:, None]


@fast_medians.register("selected")
class Selected:
    """Medians in place of `torch.nanmedian`: on CUDA bit by bit, since torch gives a row to one
    processor of a hundred; on a CPU by numpy's partition, five times as fast as torch's.
    """

    @staticmethod
    def serving(of: Tensor) -> Callable[[Tensor], Tensor] | None:
        """The median of magnitudes of this tensor in float32, (B, N) to (B, 1); None if only
        torch's exists for its device.
        """
        if of.is_cuda:
            return partial(bisected_median, is_short=of.dtype == torch.bfloat16)
        return partitioned_median if of.device.type == "cpu" else None
