"""The LM head, its logits and its loss.

All logits of a batch are the largest tensor of training, so the loss makes them in chunks, and
again in the backward pass.
"""

# B batch, S sequence, M positions (any leading axes; of the loss: row-major), C positions of a
# chunk, D hidden size, R rows of the head, V vocabulary
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sinklab.core.errors import check_count, check_tensor
from sinklab.core.registry import fast_losses, fast_path

IGNORE_INDEX = -100
"""The label of a position that is not in the loss."""


class Head(nn.Linear):
    """Logits for ``vocab_size`` ids from ``rows`` rows; ids without a row (SMDM's [MASK]) get the
    lowest finite logit, as guidance subtracts logits, which must not give NaN.
    """

    def __init__(self, hidden_size: int, rows: int, vocab_size: int) -> None:
        super().__init__(hidden_size, rows, bias=False)
        self.vocab_size = vocab_size

    def forward(
        self,
        states_MD: Tensor,
        labels_M: Tensor | None = None,
        weights_M: Tensor | None = None,
        chunk: int = 4096,
    ) -> Tensor:
        """Logits (…, V), or with labels their loss, ``chunk`` positions at a time.

        Raises ValueError if a label is no row of the head.
        """
        if labels_M is not None and weights_M is not None:
            self._check(labels_M)
            fast = fast_path(fast_losses)
            if fast is not None:
                return fast(states_MD, self.weight, labels_M, weights_M, chunk)
            return recomputed_loss(self.forward, states_MD, labels_M, weights_M, chunk)
        logits_MR = super().forward(states_MD)
        absent = self.vocab_size - self.out_features
        if not absent:
            return logits_MR
        return F.pad(logits_MR, (0, absent), value=torch.finfo(logits_MR.dtype).min)

    def _check(self, labels_M: Tensor) -> None:
        rows = self.out_features
        wrong_M = labels_M[(labels_M < 0) | (labels_M >= rows)]
        if len(wrong_M):
            raise ValueError(
                f"labels must be ids that the head has a row for (0…{rows - 1}), or "
                f"{IGNORE_INDEX} where nothing is asked, but one is {wrong_M[0].item()}"
            )


@dataclass(frozen=True, eq=False)
class LossTargets:
    """The positions of a batch that are in the loss."""

    positions_M: Tensor
    """Their indices in the flattened batch."""
    labels_M: Tensor
    weights_M: Tensor

    @classmethod
    def of(cls, input_ids: Tensor, labels: Tensor | None, weights: Tensor | None) -> LossTargets:
        """From labels and weights (B, S). Raises ValueError for wrong shapes or types."""
        if labels is None:
            raise ValueError(
                "label_weights are weights of labels, but labels are missing; pass both"
            )
        shape = tuple(input_ids.shape)
        remedy = f"as input_ids, {IGNORE_INDEX} where nothing is asked"
        check_tensor("labels", labels, shape, "int64", remedy)
        if weights is None:
            weights = torch.ones_like(labels, dtype=torch.float32)
        check_tensor("label_weights", weights, shape, "float", "as labels")
        positions_M = (labels.flatten() != IGNORE_INDEX).nonzero()[:, 0]
        return cls(positions_M, labels.flatten()[positions_M], weights.flatten()[positions_M])

    def loss(self, head: Any, states_BSD: Tensor, chunk: int) -> Tensor:
        """Σ weight · cross-entropy (a scalar), from the states that predict each position.

        Raises ValueError as :meth:`Head.forward` does.
        """
        check_count("head_chunk", chunk, "it counts positions")
        states_MD = states_BSD.flatten(0, 1).index_select(0, self.positions_M)
        if isinstance(head, Head):
            return head(states_MD, self.labels_M, self.weights_M, chunk)
        # heads of adapters and quantised ones
        return recomputed_loss(head, states_MD, self.labels_M, self.weights_M, chunk)


def recomputed_loss(
    logits: Callable[[Tensor], Tensor],
    states_MD: Tensor,
    labels_M: Tensor,
    weights_M: Tensor,
    chunk: int,
) -> Tensor:
    """Σ weight · cross-entropy; the backward pass makes each chunk of logits again."""
    parts = zip(*(part.split(chunk) for part in (states_MD, labels_M, weights_M)), strict=True)
    return torch.stack(
        [checkpoint(_sum, logits, *part, use_reentrant=False) for part in parts]
    ).sum()


def _sum(
    logits: Callable[[Tensor], Tensor], states_CD: Tensor, labels_C: Tensor, weights_C: Tensor
) -> Tensor:
    logits_CV = logits(states_CD)
    exact_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    return (F.cross_entropy(exact_CV, labels_C, reduction="none") * weights_C).sum()
