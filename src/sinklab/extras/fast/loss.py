"""Cross-entropy of a linear head with logits that never exist all at once: the gradients of a chunk
are made while its logits exist, none twice.
"""

# M positions, C positions of a chunk, D hidden size, R rows of the head
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
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
    @once_differentiable
    def backward(ctx: Any, scale: Tensor) -> tuple[Tensor | None, ...]:
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
    def serving() -> Callable[..., Tensor]:
        """The chunked loss."""
        return chunked_cross_entropy
