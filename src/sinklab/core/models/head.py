"""The LM head, its logits and its loss; it may have fewer rows than there are ids."""

# B batch, S sequence, M positions (any leading axes; of the loss: row-major), C positions of a
# chunk, D hidden size, R rows of the head, V vocabulary
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from sinklab.core.errors import check_count, check_tensor
from sinklab.core.registry import fast_losses, fast_path


class Head(nn.Linear):
    """Logits for ``vocab_size`` ids from ``rows`` rows; ids without a row get the lowest finite
    logit.

    SMDM's head has no row for [MASK]: its probability is zero, and a row of zeros would take some.
    The value is finite, because differences of two such logits (classifier-free guidance) must not
    be NaN.
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
        liger: bool | None = None,
    ) -> Tensor:
        """Logits (…, V); with labels the sum of weighted cross-entropies instead, ``chunk``
        positions at a time.

        The loss is computed in here and not outside from the weight, so that wrappers that gather
        the weight for a call of this module (FSDP) do so.

        Raises:
            ValueError: if a label is no row of the head, or Liger is required but cannot run.
        """
        if labels_M is not None and weights_M is not None:
            check_labels(labels_M, self.out_features)
            fast = fast_path(fast_losses, liger, states_MD.device)
            if fast is not None:
                return fast(states_MD, self.weight, labels_M, weights_M, chunk)
            if liger:
                raise ValueError(
                    "Liger's loss is asked for, but no fast loss is installed; leave liger out"
                )
            return recomputed_loss(self.forward, states_MD, labels_M, weights_M, chunk)
        logits_MR = super().forward(states_MD)
        if self.vocab_size == self.out_features:
            return logits_MR
        absent = self.vocab_size - self.out_features
        return nn.functional.pad(logits_MR, (0, absent), value=torch.finfo(logits_MR.dtype).min)


def check_labels(labels_M: Tensor, rows: int) -> None:
    """Raise for a label that the head has no row for."""
    if len(labels_M) and not 0 <= int(labels_M.min()) <= int(labels_M.max()) < rows:
        wrong = labels_M[(labels_M < 0) | (labels_M >= rows)][0].item()
        raise ValueError(
            f"labels must be ids that the head has a row for (0…{rows - 1}), or -100 where nothing "
            f"is asked, but one is {wrong}"
        )


IGNORE_INDEX = -100
"""The label of a position that is not in the loss."""


class LossOptions(TypedDict, total=False):
    """Loss options of :meth:`DiffusionLM.forward <sinklab.core.models.DiffusionLM.forward>`."""

    label_weights: Tensor | None
    """Float (B, S), weight of each position of the loss; 1 when left out. For the objective of
    `sinklab.core.diffusion` it is 1/(t·N), N the number of tokens that could be masked.
    """
    head_chunk: int
    """Positions per chunk of logits; 4096 when left out."""
    liger: bool | None
    """Liger's fused kernel: True, False, or None to use it if it is installed and fits."""


@dataclass(frozen=True, eq=False)
class LossTargets:
    """The positions of a batch that are in the loss, and how it is made of them."""

    positions_M: Tensor
    """Positions of the labels in the flattened batch."""
    labels_M: Tensor
    weights_M: Tensor
    chunk: int
    liger: bool | None

    @classmethod
    def of(
        cls,
        input_ids: Tensor,
        labels: Tensor | None,
        logits_to_keep: Tensor | None = None,
        *,
        label_weights: Tensor | None = None,
        head_chunk: int = 4096,
        liger: bool | None = None,
    ) -> LossTargets | None:
        """Read them from labels (B, S) and the other arguments of :meth:`DiffusionLM.forward`; None
        without labels.

        Raises:
            ValueError: if shapes or types disagree, or ``head_chunk`` < 1.
        """
        if labels is None:
            if label_weights is not None:
                raise ValueError(
                    "label_weights are weights of labels, but labels are missing; pass both"
                )
            return None
        shape = tuple(input_ids.shape)
        if logits_to_keep is not None:
            raise ValueError(
                "labels say where the head is applied; pass them or logits_to_keep, not both"
            )
        check_count("head_chunk", head_chunk, "it counts positions")
        check_tensor(
            "labels", labels, shape, "int64", f"as input_ids, {IGNORE_INDEX} where nothing is asked"
        )
        if label_weights is not None:
            check_tensor("label_weights", label_weights, shape, "float", "as labels")
        positions_M = (labels.flatten() != IGNORE_INDEX).nonzero()[:, 0]
        labels_M = labels.flatten()[positions_M]
        if label_weights is None:
            label_weights = torch.ones_like(labels, dtype=torch.float32)
        weights_M = label_weights.flatten()[positions_M]
        return cls(positions_M, labels_M, weights_M, head_chunk, liger)

    def loss(self, head: Any, states_BSD: Tensor) -> Tensor:
        """Σ weight · cross-entropy, from the states that predict each position (a scalar).

        Raises:
            ValueError: as :meth:`Head.forward` does, or if Liger is required with a head that is
                not ours.
        """
        states_MD = states_BSD.flatten(0, 1).index_select(0, self.positions_M)
        if isinstance(head, Head):
            return head(states_MD, self.labels_M, self.weights_M, self.chunk, self.liger)
        if self.liger:
            raise ValueError(
                f"Liger's loss needs the model's own head, not a {type(head).__name__}; leave it "
                "out"
            )
        # adapters and quantised heads have no weight of their own that a fast loss could multiply
        # with
        return recomputed_loss(head, states_MD, self.labels_M, self.weights_M, self.chunk)


def recomputed_loss(
    logits: Callable[[Tensor], Tensor],
    states_MD: Tensor,
    labels_M: Tensor,
    weights_M: Tensor,
    chunk: int,
) -> Tensor:
    """Σ weight · cross-entropy of these logits, ``chunk`` positions at a time: the backward pass
    makes them again.
    """
    parts = zip(*(part.split(chunk) for part in (states_MD, labels_M, weights_M)), strict=True)
    return torch.stack(
        [checkpoint(_summed, logits, *part, use_reentrant=False) for part in parts]
    ).sum()


def _summed(
    logits: Callable[[Tensor], Tensor], states_CD: Tensor, labels_C: Tensor, weights_C: Tensor
) -> Tensor:
    logits_CV = logits(states_CD)
    exact_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    return (F.cross_entropy(exact_CV, labels_C, reduction="none") * weights_C).sum()
