"""Private names of torch that fast paths rely on, each with a test: the list to check, beside
`sinklab.core.compat`, when torch is upgraded.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sinklab.core.compat import stated


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """The hooks of a module by number: those before its forward, and those after it."""
    return module._forward_pre_hooks, module._forward_hooks


def has_global_hooks() -> bool:
    """Whether hooks are registered that every module runs."""
    return bool(nn.modules.module._has_any_global_hook())


def onednn_linear() -> Callable[..., torch.Tensor] | None:
    """The oneDNN product (x, weight, bias, "none", [], "") -> x · weightᵀ; None if this build of
    torch lacks it.
    """
    return stated(torch.ops.mkldnn, "_linear_pointwise")
