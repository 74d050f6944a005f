"""Norms of values and keys, head by head."""

# B batch, H query heads (those recorded), K key/value heads, S keys
import torch
from torch import Tensor

from sinklab.core.attention.received import value_norms
from sinklab.core.probing.call import AttentionCall
from sinklab.core.probing.statistics import KEYS, CallView, ValueNorm
from sinklab.core.registry import statistics


@statistics.register("value_norm_by_head")
class ValueNormByHead(ValueNorm):
    """Norm ‖v_j‖ of every token's value in every query head; NaN if a cache has dropped it.

    Over the mean of the other keys it is ρ of arXiv 2606.08105, section 3: near 0 the sink is a
    no-operation, near 1 it may broadcast.
    """

    axes = KEYS

    def measure(self, view: CallView) -> Tensor:
        norms_BKS = value_norms(self.vectors(view.call), per_head=True)
        norms_BKS[..., : view.call.dropped] = torch.nan
        return view.of_heads(view.call.for_query_heads(norms_BKS))


@statistics.register("key_norm_by_head")
class KeyNormByHead(ValueNormByHead):
    """Norm ‖k_j‖ of every token's key in every query head, as it enters the scores.

    Gu et al. (arXiv 2410.10781, section 3.1): a causal sink's key is short, and its direction makes
    the score; see `KeyCosine`.
    """

    def vectors(self, call: AttentionCall) -> Tensor:
        return call.key_BKSD
