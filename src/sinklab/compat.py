"""Private names of torch, transformers and accelerate that the package relies on, each with a test: the list to check
when one of them is upgraded.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import _C, nn
from torch.utils.hooks import RemovableHandle


def is_replayed() -> bool:
    """Whether this thread is inside a backward pass, where gradient checkpointing runs layers a second time."""
    return _C._current_graph_task_id() != -1


def forward_hooks(module: nn.Module) -> tuple[dict[int, Any], dict[int, Any]]:
    """The hooks of a module by number: those before its forward, and those after it."""
    return module._forward_pre_hooks, module._forward_hooks


def next_hook() -> int:
    """The number that the next hook gets, on whatever module: while it stays the same, no hook has come."""
    return RemovableHandle.next_id


def has_global_hooks() -> bool:
    """Whether hooks are registered that every module runs."""
    return bool(nn.modules.module._has_any_global_hook())


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return module._compiled_call_impl is not None


def onednn_linear() -> Callable[..., torch.Tensor] | None:
    """(x, weight, bias, "none", [], "") -> x · weightᵀ by oneDNN; None where this build of torch lacks it."""
    return getattr(torch.ops.mkldnn, "_linear_pointwise", None)
