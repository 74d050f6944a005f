"""Products of float32 on a CPU by the fastest exact kernel there is: q · kᵀ of one head, and linear
layers.
"""

# C queries of a chunk, S keys, D head dim
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sinklab.core.attention.chunks import Product
from sinklab.core.registry import fast_products
from sinklab.extras.fast.compat import onednn_linear

# Below this many scores a head, one batched product over all heads costs less than a call for each.
WORTHWHILE = 1 << 18
WORTHWHILE_WEIGHT = 1 << 17  # numbers in a weight


def product_for(device: torch.device, dtype: torch.dtype, scores_of_a_head: int) -> Product | None:
    """A product that beats `torch.bmm` for factors of this dtype; None if there is none.

    On AVX-512 processors that are not Intel's, MKL multiplies at half the width of oneDNN, which
    torch uses for its compiled linear layers. float32 in and out, no lower precision inside.
    """
    if device.type != "cpu" or dtype != torch.float32 or scores_of_a_head < WORTHWHILE:
        return None
    return _onednn() if _is_exact() else None


def linear_for(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """x -> x · weightᵀ + bias, as `F.linear`; by oneDNN if it is the faster one (see
    `product_for`), nothing is to be differentiated, and the weight is worth the half millisecond
    that oneDNN takes for every new number of rows.
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
        return product(x, weight, bias) if stands and _is_exact() else F.linear(x, weight, bias)

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


def _is_intel() -> bool:
    """Whether the processor is one on which MKL multiplies at full width."""
    told = Path("/proc/cpuinfo")
    return "GenuineIntel" in (told.read_text() if told.is_file() else platform.processor())


@cache
def _onednn() -> Callable[..., Tensor] | None:
    """oneDNN's inner product, if this build of torch has it, this processor gains by it, and it is
    right.
    """
    if (
        torch.backends.cpu.get_cpu_capability() != "AVX512"
        or not torch.backends.mkldnn.is_available()
        or _is_intel()
    ):
        return None
    linear = onednn_linear()
    if linear is None:
        return None

    def product(q_CD: Tensor, k_SD: Tensor, bias_S: Tensor | None = None) -> Tensor:
        """Linear layers too: x in place of q, its weight in place of k."""
        return linear(q_CD, k_SD, bias_S, "none", [], "")

    # An operator that torch does not document: it is held to the documented one before it is
    # trusted.
    as_used: dict[str, Any] = {"device": "cpu", "dtype": torch.float32}
    q_CD = torch.linspace(-2, 2, 32 * 8, **as_used).view(32, 8)
    k_SD = torch.linspace(-1, 3, 40 * 8, **as_used).view(40, 8).flip(0)
    with torch.no_grad():
        try:
            right = torch.allclose(product(q_CD, k_SD), q_CD @ k_SD.T, rtol=1e-5, atol=1e-5)
        except (RuntimeError, TypeError, ValueError):
            return None
    return product if right else None


@fast_products.register("onednn")
class OneDNN:
    """oneDNN's inner product in place of MKL's."""

    serving = staticmethod(product_for)
