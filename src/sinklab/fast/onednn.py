"""q · kᵀ of one head in float32: the product that costs most of a statistic, by the fastest exact kernel there is."""

# C queries of a chunk, S keys, D head dim
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sinklab import compat
from sinklab.attention.chunks import Product
from sinklab.registry import fast_products

# Below this many scores a head, one batched product over all heads costs less than a call for each.
WORTHWHILE = 1 << 18


def product_for(device: torch.device, dtype: torch.dtype, scores_of_a_head: int) -> Product | None:
    """A product that beats `torch.bmm` for factors of this dtype; None where there is none.

    On AVX-512 processors that are not Intel's, MKL multiplies at half the width of oneDNN, which torch uses for its
    compiled linear layers. float32 in and out, no lower precision inside.
    """
    if device.type != "cpu" or dtype != torch.float32 or scores_of_a_head < WORTHWHILE:
        return None
    return _onednn() if _is_exact() else None


def _is_exact() -> bool:
    """Whether products are required in full precision: else oneDNN may round the factors to bfloat16."""
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:
        # torch refuses to say once torch.backends.….fp32_precision is set.
        return False


@cache
def _onednn() -> Product | None:
    """oneDNN's inner product, if this build of torch has it, this processor gains by it, and it is right."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return None
    linear = compat.onednn_linear()
    if linear is None:
        return None

    def product(q_CD: Tensor, k_SD: Tensor) -> Tensor:
        return linear(q_CD, k_SD, None, "none", [], "")

    # An operator that torch does not document: it is held to the documented one before it is trusted.
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
