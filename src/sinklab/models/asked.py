"""What a training step asks of the LM head: at which positions, for which ids, with which weights."""

# B batch, S sequence, M asked positions (row-major), D hidden size
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sinklab.models.head import Head

NOT_ASKED = -100
"""The label of a position that is not in the loss."""


@dataclass(frozen=True, eq=False)
class Asked:
    """The asked positions of a batch, and how many of them get their logits at a time."""

    places_M: Tensor
    """Where they stand in the flattened batch."""
    labels_M: Tensor
    weights_M: Tensor
    chunk: int

    @classmethod
    def of(
        cls,
        input_ids: Tensor,
        labels: Tensor,
        label_weights: Tensor | None,
        logits_to_keep: Tensor | None = None,
        chunk: int = 4096,
    ) -> Asked:
        """Read them from labels (B, S) and weights (B, S) as :meth:`DiffusionLM.forward` takes them.

        Raises:
            ValueError: if shapes or types disagree, or ``chunk`` < 1.
        """
        shape = tuple(input_ids.shape)
        if logits_to_keep is not None:
            raise ValueError("labels say where the head is applied; pass them or logits_to_keep, not both")
        if chunk < 1:
            raise ValueError(f"head_chunk must be at least 1 position, but is {chunk}")
        if labels.shape != shape or labels.dtype != torch.int64:
            raise ValueError(
                f"labels must be an int64 tensor of the shape of input_ids {shape} ({NOT_ASKED} where nothing is "
                f"asked), but are {labels.dtype} of shape {tuple(labels.shape)}"
            )
        if label_weights is not None and (label_weights.shape != shape or not label_weights.is_floating_point()):
            raise ValueError(
                f"label_weights must be a float tensor of the shape of labels {shape}, but are "
                f"{label_weights.dtype} of shape {tuple(label_weights.shape)}"
            )
        places_M = (labels.flatten() != NOT_ASKED).nonzero()[:, 0]
        labels_M = labels.flatten()[places_M]
        if label_weights is None:
            return cls(places_M, labels_M, torch.ones_like(labels_M, dtype=torch.float32), chunk)
        return cls(places_M, labels_M, label_weights.flatten()[places_M], chunk)

    def loss(self, head: Any, states_BSD: Tensor, liger: bool | None = None) -> Tensor:
        """Σ weight · cross-entropy, from the states that predict each position (a scalar).

        Raises:
            ValueError: as :meth:`Head.forward` does, or if Liger is asked for with a head that is not ours.
        """
        states_MD = states_BSD.flatten(0, 1).index_select(0, self.places_M)
        if isinstance(head, Head):
            return head(states_MD, self.labels_M, self.weights_M, self.chunk, liger)
        if liger:
            raise ValueError(
                f"Liger's loss needs the model's own head, but it is a {type(head).__name__}; leave it out"
            )
        # adapters and quantised heads have no weight of their own to multiply with: recompute their logits instead
        parts = zip(*(part.split(self.chunk) for part in (states_MD, self.labels_M, self.weights_M)), strict=True)
        return torch.stack([checkpoint(_summed, head, *part, use_reentrant=False) for part in parts]).sum()


def _summed(head: Any, states_CD: Tensor, labels_C: Tensor, weights_C: Tensor) -> Tensor:
    logits_CV = head(states_CD)
    exact_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    return (F.cross_entropy(exact_CV, labels_C, reduction="none") * weights_C).sum()
