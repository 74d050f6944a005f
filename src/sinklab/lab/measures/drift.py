"""Drift of keys and values from one step to the next."""

# B batch, H query heads (those recorded), K key/value heads, S keys, D head dim
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cosine_similarity

from sinklab.core.errors import Checked, limited
from sinklab.core.probing.statistics import KEYS, CallView, Statistic
from sinklab.core.registry import statistics


@statistics.register("drift")
@dataclass(frozen=True)
class Drift(Statistic, Checked):
    """Change 1 − cos of every token's key, or value, since the last recorded step, 0 to 2
    (Elastic-Cache, arXiv 2510.14973, whose caches rest on «the most attended token drifts least»).

    NaN in the first step, and for a key that was not there before or that a cache has dropped.
    """

    of: str = limited("key", one_of=("key", "value"))
    """Vectors that are compared."""

    axes = KEYS
    remembers = True

    def measure(self, view: CallView) -> Tensor:
        call = view.call
        vectors = {"key": call.key_BKSD, "value": call.value_BKSD}
        now_BKSD = vectors[self.of].detach().float()
        before_BKSD = view.memory.get(self.of)
        view.memory[self.of] = now_BKSD.clone()
        drift_BKS = torch.full(now_BKSD.shape[:3], torch.nan, device=now_BKSD.device)
        if before_BKSD is not None and before_BKSD.shape[:2] == now_BKSD.shape[:2]:
            both = min(before_BKSD.shape[2], now_BKSD.shape[2])
            parts = (now_BKSD[:, :, :both], before_BKSD[:, :, :both])
            drift_BKS[..., :both] = 1 - cosine_similarity(*parts, dim=-1)
        drift_BKS[..., : call.dropped] = torch.nan
        return view.of_heads(call.for_query_heads(drift_BKS))
