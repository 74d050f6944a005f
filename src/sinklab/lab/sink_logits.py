"""The logits of a sink without a key. A kernel takes no term of its softmax alone, but it takes a
mask: the sink is a key of zero, and its logits are added to the scores by the mask of each layer.
"""

# B batch, N sinks, J keys = N + those of the text, Q queries, H query heads
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sinklab.core.compat import stated
from sinklab.core.subject.prefix import SinkPrefix


@dataclass(frozen=True)
class LogitPrefix(SinkPrefix):
    """Keys and values of zero with logits, (H, N) a layer."""

    logits: tuple[Tensor, ...]


def logits_of(memory: Any, layer: int = 0) -> Tensor | None:
    """Logits that a layer adds to its scores of the sinks, (H, N), of a prefix or of a memory that
    holds one; None for nothing.
    """
    memory = stated(memory, "prefix", memory)
    if not isinstance(memory, LogitPrefix):
        return None
    return memory.logits[layer]


def with_logits(mask: Tensor, logits_HN: Tensor, like: Tensor) -> Tensor:
    """A mask (B or 1, 1 or H, 1 or Q, J), boolean or additive, with these logits added to the
    scores of the first N keys: additive, (B or 1, H, 1 or Q, J), of the type of ``like``.
    """
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=like.dtype).masked_fill(~mask, -torch.inf)
    logits_H1J = F.pad(logits_HN.to(like), (0, mask.shape[-1] - logits_HN.shape[1]))[:, None]
    return mask + logits_H1J


def add_logits(attention: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The hook before an attention layer, after the one that gives it the sinks."""
    logits_HN = logits_of(kwargs.get("past_key_values"), attention.layer_idx)
    if logits_HN is not None:
        kwargs["attention_mask"] = with_logits(
            kwargs["attention_mask"], logits_HN, kwargs["hidden_states"]
        )
    return args, kwargs
