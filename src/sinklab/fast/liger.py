"""Liger's fused linear cross-entropy for the training loss, where it is installed and gives each row its weight.

Releases of Liger before 0.8 scale the head's gradient by the first row's weight alone and say nothing, so the gradient
is looked at once on a small problem and not taken from a version number.
"""

# M positions, D hidden size, R rows of the head
from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from sinklab.fast.loss import chunked_cross_entropy, compute_dtype
from sinklab.registry import fast_losses

_EXTRA = "install it with pip install liger-kernel on a machine with a CUDA GPU, or leave liger out"


def chosen(liger: bool | None, device: torch.device) -> bool:
    """Whether the loss goes through Liger: as given, or for None where it can.

    Raises:
        ValueError: if it is required and cannot.
    """
    if liger is False or (liger is None and device.type != "cuda"):
        return False
    if device.type != "cuda":
        raise ValueError(f"Liger's loss runs on CUDA, but the model is on {device.type}; {_EXTRA}")
    if importlib.util.find_spec("liger_kernel") is None:
        if liger:
            raise ValueError(f"Liger's loss needs the package liger-kernel, which is not installed; {_EXTRA}")
        return False
    if not weighs_rows(device):
        if liger:
            raise ValueError(
                "the loss needs a weight for each position, but the installed liger-kernel gives wrong gradients for "
                "it; install a newer one, or leave liger out"
            )
        return False
    return True


def cross_entropy(states_MD: Tensor, weight_RD: Tensor, labels_M: Tensor, weights_M: Tensor, chunk: int) -> Tensor:
    """What :func:`~sinklab.fast.loss.chunked_cross_entropy` returns, by Liger's kernel, which chooses its chunks."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    dtype = compute_dtype(states_MD)
    with torch.autocast(states_MD.device.type, enabled=False):
        losses_M = liger_fused_linear_cross_entropy(
            states_MD.to(dtype), weight_RD.to(dtype), labels_M, reduction="none", accum_dtype=torch.float32
        )
        return losses_M.float() @ weights_M.float()


@cache
def weighs_rows(device: torch.device) -> bool:
    """Whether Liger's gradients follow the weights of the rows, seen on eight rows of uneven weight."""
    generator = torch.Generator().manual_seed(0)
    states_MD, weight_RD = (torch.randn(rows, 16, generator=generator).to(device) for rows in (8, 32))
    labels_M = torch.arange(8, device=device)
    weights_M = torch.linspace(0.5, 4.0, 8, device=device)
    gradients = []
    # the first forward pass may already be under no_grad
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        for of in (chunked_cross_entropy, cross_entropy):
            states, weight = (value.clone().requires_grad_() for value in (states_MD, weight_RD))
            gradients.append(torch.autograd.grad(of(states, weight, labels_M, weights_M, 8), (states, weight)))
    # a GPU may multiply float32 in TF32; wrong row weights are off by their ratio, up to eight
    return all(torch.allclose(ours, theirs, rtol=0.05, atol=0.05) for ours, theirs in zip(*gradients, strict=True))


@fast_losses.register("liger")
class Liger:
    """Liger's fused linear cross-entropy."""

    @staticmethod
    def serving(liger: bool | None, device: torch.device) -> Callable[..., Tensor] | None:
        """`cross_entropy` where `chosen` says so."""
        return cross_entropy if chosen(liger, device) else None
