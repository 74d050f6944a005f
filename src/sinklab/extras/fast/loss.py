"""Cross-entropy of a linear head with logits that never exist all at once: by chunks, or by Liger's
fused kernel.

The first makes the gradients of a chunk while its logits exist, none twice. The second runs if it
is installed and gives each row its weight: releases of Liger before 0.8 scale the head's gradient
by the first row's weight alone and say nothing, so the gradient is looked at once on a small
problem and not taken from a version number.
"""

# M positions, C positions of a chunk, D hidden size, R rows of the head
import importlib.util
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sinklab.core.registry import fast_losses


def compute_dtype(states_MD: Tensor) -> torch.dtype:
    """The dtype in which a linear layer would multiply here: autocast's, except for float64, which
    it leaves alone.
    """
    device = states_MD.device.type
    if states_MD.dtype != torch.float64 and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return states_MD.dtype


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Makes the gradients of a chunk while its logits exist: three matrix products a chunk, as the
    plain path has.
    """

    @staticmethod
    def forward(
        ctx: Any,
        states_MD: Tensor,
        weight_RD: Tensor,
        labels_M: Tensor,
        weights_M: Tensor,
        chunk: int,
        wanted: bool,
    ) -> Tensor:
        # under no_grad the inputs still say that they require a gradient, hence `wanted`
        for_states, for_weight = (wanted and needed for needed in ctx.needs_input_grad[:2])
        dtype = compute_dtype(states_MD)
        exact = torch.promote_types(dtype, torch.float32)
        loss = states_MD.new_zeros((), dtype=exact)
        grad_MD = torch.empty_like(states_MD) if for_states else None
        grad_RD = torch.zeros_like(weight_RD, dtype=exact) if for_weight else None
        with torch.autocast(states_MD.device.type, enabled=False):
            head_RD = weight_RD.to(dtype)
            for start in range(0, len(labels_M), chunk):
                part = slice(start, start + chunk)
                states_CD, labels_C1, weights_C = (
                    states_MD[part].to(dtype),
                    labels_M[part, None],
                    weights_M[part],
                )
                scores_CR = F.log_softmax(F.linear(states_CD, head_RD), dim=-1, dtype=exact)
                loss -= scores_CR.gather(1, labels_C1)[:, 0] @ weights_C
                if not (for_states or for_weight):
                    continue
                # d loss / d logits = weight · (softmax − one-hot), in place of the scores
                slope_CR = scores_CR.exp_().mul_(weights_C[:, None])
                slope_CR.scatter_add_(1, labels_C1, -weights_C[:, None])
                slope_CR = slope_CR.to(dtype)
                if grad_MD is not None:
                    grad_MD[part] = slope_CR @ head_RD
                if grad_RD is not None:
                    grad_RD += slope_CR.T @ states_CD
        ctx.gradients = (grad_MD, None if grad_RD is None else grad_RD.to(weight_RD.dtype))
        return loss

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "the loss over chunks has no second derivative: its gradients are made without a "
                "graph; leave create_graph out, or take the cross-entropy of model(...).logits"
            )
        if ctx.gradients is None:
            raise RuntimeError(
                "the loss over chunks goes backward once: its gradients are made in the forward "
                "pass and given away; call the model again instead of using retain_graph=True"
            )
        gradients, ctx.gradients = ctx.gradients, None
        # in place: a second copy of the head's gradient would be as large as the head
        scaled = [None if grad is None else grad.mul_(scale) for grad in gradients]
        return (*scaled, None, None, None, None)


@torch.compiler.disable
def chunked_cross_entropy(
    states_MD: Tensor, weight_RD: Tensor, labels_M: Tensor, weights_M: Tensor, chunk: int
) -> Tensor:
    """Σ_m weights_m · CE(states_m · Wᵀ, labels_m) without ever more than ``chunk`` rows of logits.

    It multiplies in the dtype of autocast if that is on; softmax, sums and the head's gradient are
    float32, or float64 if the states are.

    Args:
        states_MD: inputs of the head.
        weight_RD: its weight W, one row an id.
        labels_M: ids in 0…R−1.
        weights_M: weight of each position; no gradient flows to them.
        chunk: rows of logits at a time, at least 1.

    Returns:
        the sum, differentiable once in ``states_MD`` and ``weight_RD``.
    """
    exact = torch.promote_types(compute_dtype(states_MD), torch.float32)
    return _ChunkedCrossEntropy.apply(
        states_MD, weight_RD, labels_M, weights_M.to(exact), chunk, torch.is_grad_enabled()
    )


@fast_losses.register("one_pass")
class OnePass:
    """`chunked_cross_entropy`, on every device."""

    @staticmethod
    def serving(liger: bool | None, device: torch.device) -> Callable[..., Tensor] | None:
        """The chunked loss, unless Liger's is asked for."""
        return None if liger else chunked_cross_entropy


def unusable_liger(device: torch.device) -> str:
    """Why Liger's loss cannot run here, and the remedy; empty if it can."""
    remedy = (
        "install it with pip install liger-kernel on a machine with a CUDA GPU, or leave liger out"
    )
    if device.type != "cuda":
        return f"Liger's loss runs on CUDA, but the model is on {device.type}; {remedy}"
    if importlib.util.find_spec("liger_kernel") is None:
        return f"Liger's loss needs the package liger-kernel, which is not installed; {remedy}"
    if not liger_weighs_rows(device):
        return (
            "the loss needs a weight for each position, but the installed liger-kernel gives wrong "
            "gradients for it; install a newer one, or leave liger out"
        )
    return ""


def fused_cross_entropy(
    states_MD: Tensor, weight_RD: Tensor, labels_M: Tensor, weights_M: Tensor, chunk: int
) -> Tensor:
    """Result of :func:`chunked_cross_entropy`, by Liger's kernel, which chooses its chunks."""
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    dtype = compute_dtype(states_MD)
    with torch.autocast(states_MD.device.type, enabled=False):
        losses_M = liger_fused_linear_cross_entropy(
            states_MD.to(dtype),
            weight_RD.to(dtype),
            labels_M,
            reduction="none",
            accum_dtype=torch.float32,
        )
        return losses_M.float() @ weights_M.float()


@cache
def liger_weighs_rows(device: torch.device) -> bool:
    """Whether Liger's gradients follow the weights of the rows, seen on eight rows of uneven
    weight.
    """
    generator = torch.Generator().manual_seed(0)
    states_MD, weight_RD = (
        torch.randn(rows, 16, generator=generator).to(device) for rows in (8, 32)
    )
    labels_M = torch.arange(8, device=device)
    weights_M = torch.linspace(0.5, 4.0, 8, device=device)
    gradients = []
    # the first forward pass may already be under no_grad
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        for of in (chunked_cross_entropy, fused_cross_entropy):
            states, weight = (value.clone().requires_grad_() for value in (states_MD, weight_RD))
            gradients.append(
                torch.autograd.grad(of(states, weight, labels_M, weights_M, 8), (states, weight))
            )
    # a GPU may multiply float32 in TF32; wrong row weights are off by their ratio, up to eight
    return all(
        torch.allclose(ours, theirs, rtol=0.05, atol=0.05)
        for ours, theirs in zip(*gradients, strict=True)
    )


@fast_losses.register("liger")
class Liger:
    """Liger's fused linear cross-entropy."""

    @staticmethod
    def serving(liger: bool | None, device: torch.device) -> Callable[..., Tensor] | None:
        """Liger's loss, unless ``liger`` is False or it cannot run here. Raises ValueError if it is
        required and cannot.
        """
        why = unusable_liger(device)
        if liger is False or (why and not liger):
            return None
        if why:
            raise ValueError(why)
        return fused_cross_entropy
