"""Norms of values and keys, head by head."""

# B batch, H query heads (those recorded), K key/value heads, S keys, D head dim
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.core.probing.statistics import KEYS, CallView, Statistic
from sinklab.core.registry import statistics


@statistics.register("value_norm_by_head")
class ValueNormByHead(Statistic):
    """Norm ‖v_j‖ of every token's value in every query head (float32).

    Over the mean of the other keys it is ρ of arXiv 2606.08105, section 3: near 0 the sink is a
    no-operation, near 1 it may broadcast.
    """

    axes = KEYS
    vectors: ClassVar[str] = "value_BKSD"

    def measure(self, view: CallView) -> Tensor:
        heads = view.call.query_BHQD.shape[1]
        vectors = {"value_BKSD": view.call.value_BKSD, "key_BKSD": view.call.key_BKSD}
        norm_BKS = torch.linalg.vector_norm(vectors[self.vectors].detach().float(), dim=-1)
        return view.of_heads(norm_BKS.repeat_interleave(heads // norm_BKS.shape[1], 1))


@statistics.register("key_norm_by_head")
class KeyNormByHead(ValueNormByHead):
    """Norm ‖k_j‖ of every token's key in every query head, as it enters the scores (float32).

    Gu et al. (arXiv 2410.10781, section 3.1): a causal sink's key is short, and its direction makes
    the score; see `KeyCosine`.
    """

    vectors = "key_BKSD"
