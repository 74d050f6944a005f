"""Linear layers of float32 on a CPU by the fastest exact kernel there is."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from sinklab.extras.fast.compat import onednn_linear

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
