"""q · kᵀ of one head in float32: the product that costs most of a statistic, by the fastest exact kernel there is."""

# C queries of a chunk, S keys, D head dim
from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

Product = Callable[[Tensor, Tensor], Tensor]
"""(q_CD, k_SD) -> scores_CS, float32, contiguous."""

# Below this many scores a head, one batched product over all heads costs less than a call for each.
WORTHWHILE = 1 << 18


def product_for(tensor: Tensor, scores_of_a_head: int) -> Product | None:
    """A product that beats `torch.bmm` for tensors like this one; None where there is none.

    On AVX-512 processors that are not Intel's, MKL multiplies at half the width of oneDNN, which torch uses for its
    compiled linear layers. float32 in and out, no lower precision inside.
    """
    if tensor.device.type != "cpu" or tensor.dtype != torch.float32 or scores_of_a_head < WORTHWHILE:
        return None
    # Anything but "highest" lets oneDNN round the factors to bfloat16.
    return _onednn() if torch.get_float32_matmul_precision() == "highest" else None


@cache
def _onednn() -> Product | None:
    """oneDNN's inner product, if this build of torch has it, this processor gains by it, and it is right."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not torch.backends.mkldnn.is_available():
        return None
    linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    if linear is None:
        return None

    def product(q_CD: Tensor, k_SD: Tensor) -> Tensor:
        return linear(q_CD, k_SD, None, "none", [], "")

    # An operator that torch does not document: it is held to the documented one before it is trusted.
    q_CD = torch.linspace(-2, 2, 32 * 8, device="cpu").view(32, 8)
    k_SD = torch.linspace(-1, 3, 40 * 8, device="cpu").view(40, 8).flip(0)
    with torch.no_grad():
        try:
            right = torch.allclose(product(q_CD, k_SD), q_CD @ k_SD.T, rtol=1e-5, atol=1e-5)
        except (RuntimeError, TypeError, ValueError):
            return None
    return product if right else None
