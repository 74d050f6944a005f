"""What a step asks of the model: the masked-token loss, or the next token, as labels and weights."""

# B batch, S sequence
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sinklab.diffusion import corrupt, masked_token_loss, sample_times
from sinklab.models import DiffusionLM
from sinklab.models.asked import NOT_ASKED
from sinklab.training.noise import neighbours, visible_keys


@dataclass(frozen=True)
class Phases:
    """Which objective a step has: causal first, then diffusion, with keys to the right coming into sight on the way."""

    causal_steps: int
    anneal_steps: int
    seed: int
    autoregressive: bool = False
    """Every step is causal, and so is what is measured."""
    window: int | None = None
    """Neighbours in sight on either side, in every step; None for no such limit."""

    def is_causal(self, step: int) -> bool:
        """Whether this step trains a causal language model."""
        return self.autoregressive or step < self.causal_steps

    def share(self, step: int) -> float:
        """Probability that a key to the right is visible, rising from 0 to 1 over the annealing steps."""
        done = step - self.causal_steps
        return 1.0 if done >= self.anneal_steps else max(0, done) / self.anneal_steps

    def visible(self, step: int, length: int) -> Tensor | None:
        """Bool (S, S) of what a query may see, beside a causal step's own order; None once that is everything."""
        near_SS = neighbours(self.window, length)
        share = 1.0 if self.is_causal(step) else self.share(step)
        if share >= 1:
            return near_SS
        seen_SS = visible_keys(self.seed, step, share, length)
        return seen_SS if near_SS is None else seen_SS & near_SS


def diffusion_call(batch: Mapping[str, Tensor], mask_id: int, tokens: Tensor | float) -> dict[str, Any]:
    """Arguments of the model for the masked-token loss (Eq. 3–4 of «One Token Is Enough») of this micro-batch, as its
    share of a step with ``tokens`` maskable tokens: Σ 1 / (t · tokens) · cross-entropy over the masks.
    """
    ids_BS, masked_BS = batch["input_ids"], batch["masked"]
    weights_B = 1 / (batch["t"].float() * tokens)
    return {
        "input_ids": ids_BS.masked_fill(masked_BS, mask_id),
        "labels": ids_BS.masked_fill(~masked_BS, NOT_ASKED),
        "label_weights": weights_B[:, None].expand(ids_BS.shape).contiguous(),
    }


def causal_call(batch: Mapping[str, Tensor], tokens: Tensor | float, *, shifted: bool) -> dict[str, Any]:
    """Arguments of the model for the next-token loss of this micro-batch, as its share of a step with ``tokens``
    predicted tokens.

    Args:
        batch: of the run; ids that are not maskable (prompts, padding) are not asked for.
        tokens: predicted tokens of the whole step.
        shifted: the model moves its outputs by one itself (``logit_shift``).
    """
    ids_BS = batch["input_ids"]
    labels_BS = ids_BS.masked_fill(~asked_causally(batch), NOT_ASKED)
    if not shifted:
        labels_BS = torch.cat([labels_BS[:, 1:], torch.full_like(labels_BS[:, :1], NOT_ASKED)], dim=1)
    weights_BS = torch.ones(ids_BS.shape, device=ids_BS.device) / tokens
    return {"input_ids": ids_BS, "labels": labels_BS, "label_weights": weights_BS, "causal": True}


def asked_causally(batch: Mapping[str, Tensor]) -> Tensor:
    """Bool (B, S): tokens that have a predecessor to be predicted from, in their own document where those are apart."""
    ids_BS = batch["input_ids"]
    asked_BS = batch["maskable"].clone() if "maskable" in batch else torch.ones_like(ids_BS, dtype=torch.bool)
    asked_BS[:, 0] = False
    if "documents" in batch:
        asked_BS[:, 1:] &= batch["documents"][:, 1:] == batch["documents"][:, :-1]
    return asked_BS


def sight(batch: Mapping[str, Tensor], visible_SS: Tensor | None) -> dict[str, Tensor]:
    """Arguments of the model for what is hidden: padding, other documents, keys that annealing still withholds."""
    seen: Tensor | None = None if visible_SS is None else visible_SS.to(batch["input_ids"].device)
    if "documents" in batch:
        documents_BS = batch["documents"]
        own_BSS = documents_BS[:, :, None] == documents_BS[:, None, :]
        seen = own_BSS if seen is None else own_BSS & seen
    found = {} if seen is None else {"visible": seen}
    return found | ({"attention_mask": batch["attention_mask"]} if "attention_mask" in batch else {})


def diffusion_loss(
    model: DiffusionLM, ids_BS: Tensor, *, generator: torch.Generator, time_sampler: Any = "iid"
) -> Tensor:
    """Masked-token loss (nats per token, Eq. 3–4) of one batch under freshly drawn times and masks, for a loop of one's
    own; the head runs at masks alone.
    """
    t_B = sample_times(ids_BS.shape[0], sampler=time_sampler, generator=generator)
    noisy_BS, masked_BS = corrupt(ids_BS.cpu(), t_B, mask_id=model.config.mask_token_id, generator=generator)
    noisy_BS, masked_BS = noisy_BS.to(ids_BS.device), masked_BS.to(ids_BS.device)
    logits_MV = model(noisy_BS, logits_to_keep=masked_BS).logits
    return masked_token_loss(logits_MV, ids_BS, masked_BS, t_B)


def causal_loss(model: DiffusionLM, ids_BS: Tensor) -> Tensor:
    """Next-token loss (nats per token) with each position seeing its left only, for a loop of one's own."""
    logits_BSV = model(ids_BS, causal=True).logits
    return F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1).float(), ids_BS[:, 1:].flatten())
