"""Private names of torch that fast paths rely on, each with a test: the list to check, beside
`sinklab.core.compat`, when torch is upgraded.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

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


_ATEN = torch.ops.aten
# attention kernels that scaled_dot_product_attention chooses from -> where they are asked for the
# log-sum-exp, which they say second; None: they always say it
_KERNELS: dict[Any, Any] = {
    _ATEN._scaled_dot_product_flash_attention.default: None,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default: None,
    _ATEN._scaled_dot_product_efficient_attention.default: 4,
    _ATEN._scaled_dot_product_cudnn_attention.default: 4,
}


class _Overheard(TorchDispatchMode):
    """Asks whichever kernel an attention call runs for the log-sum-exp of its rows, (B, H, Q or
    more), in nats.
    """

    logsumexp: torch.Tensor | None = None
    ran: tuple[Any, tuple, dict[str, Any]] = (None, (), {})

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is _ATEN.scaled_dot_product_attention.default:
            # inference mode does not take it apart before it comes here
            with self:
                return func.decompose(*args, **kwargs)
        if func not in _KERNELS:
            return func(*args, **kwargs)
        at = _KERNELS[func]
        if at is not None:
            args = (*args[:at], True, *args[at + 1 :])
        out = func(*args, **kwargs)
        self.logsumexp = out[1]
        self.ran = (func, args, kwargs)
        return out


# by kind of call: whether its kernel may be asked, and if it may be called at once, its arguments
# beside q, k and v
_known: dict[tuple, tuple[bool, Any, tuple, dict[str, Any]]] = {}


def attend_with_logsumexp(
    attention: Callable[..., torch.Tensor], args: tuple, kwargs: dict[str, Any]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output of `scaled_dot_product_attention` for these arguments, to the bit, and the
    log-sum-exp of rows.

    The log-sum-exp is None if no kernel returns it, or the output would change. The first call of a
    kind is made both ways. A dispatch mode takes as long as several launches: a kernel that was
    given q, k and v themselves is called at once.
    """
    given = (
        dict(zip(("query", "key", "value", "attn_mask", "dropout_p"), args, strict=False)) | kwargs
    )
    if given.get("dropout_p"):
        return attention(*args, **kwargs), None
    tensors = [
        given.pop(name)
        for name in ("query", "key", "value", "attn_mask")
        if given.get(name) is not None
    ]
    same = ((x.dtype, x.device, x.shape, x.stride(), x.requires_grad) for x in tensors)
    kind = (
        torch._fused_sdp_choice(*args, **kwargs),
        torch.is_grad_enabled(),
        *given.items(),
        *same,
    )
    if kind not in _known:
        out = attention(*args, **kwargs)
        with _Overheard() as heard:
            again = attention(*args, **kwargs)
        kernel, found, options = heard.ran
        if not torch.equal(out, again):
            _known[kind] = False, None, (), {}
            return out, None
        # nothing filled up or repeated on the way to the kernel, and no mask, which is
        if [x.shape for x in tensors] == [x.shape for x in found[:3]]:
            direct = kernel(*tensors, *found[3:], **options)[0]
            if direct.stride() != out.stride() or not torch.equal(direct, out):
                kernel = None
        else:
            kernel = None
        _known[kind] = True, kernel, found[3:], options
        return out, heard.logsumexp
    may_ask, kernel, rest, options = _known[kind]
    if not may_ask:
        return attention(*args, **kwargs), None
    if kernel is not None:
        out, logsumexp, *_ = kernel(*tensors, *rest, **options)
        return out, logsumexp
    with _Overheard() as heard:
        return attention(*args, **kwargs), heard.logsumexp
