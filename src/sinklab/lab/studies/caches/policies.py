"""The caches that are compared, defined by the columns that they keep; at one budget the members of
a family differ in protection alone.
"""

# B batch rows, S canvas columns, M wanted positions, Q = K = S
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sinklab.core.probing.tracing import trace
from sinklab.core.sampling import Cache, Denoiser, Places, cache_of
from sinklab.lab.caching.policies import SCORES, EvictingCache
from sinklab.lab.studies.caches.study import CacheSettings

DELAY = 1
"""Evicting caches all choose at the second evaluation of a block, as Sparse-dLLM does: full
evaluations are equal.
"""


@dataclass(frozen=True)
class Policy:
    """One way to evaluate a block."""

    family: str
    """none, prefix, dual, sink_refresh; nearest, aligned, received, random (evicting); window
    (sparse attention).
    """
    keep: float = 1.0
    """Share of the columns outside the block (window: of all columns) that a query attends to."""
    sinks: int = 0
    """Columns protected, or recomputed with the block."""
    protect: str = ""
    """Choice of protected sinks; "random" columns in their place are the control of the window."""

    @property
    def label(self) -> str:
        """Name in tables."""
        if self.family == "sink_refresh":
            return f"dual, {self.sinks} sinks recomputed"
        name = self.family
        if self.keep < 1:
            name += f" {self.keep:.3g}"
        elif self.is_evicting:
            name = "all kept"
        if not self.sinks:
            return name
        whose = {"first": "first ", "earlier": "earlier ", "random": "random columns for "}
        return f"{name} + {self.sinks} {whose.get(self.protect, '')}sinks"

    @property
    def is_evicting(self) -> bool:
        """Whether it chooses columns, and forgets the others."""
        return self.family in SCORES

    @property
    def cache(self) -> Cache | None:
        """The cache of this policy; None if everything is computed."""
        if self.family == "window":
            return None
        if self.family == "sink_refresh":
            return cache_of(f"sink_refresh:sinks={self.sinks}")
        if self.family in ("none", "prefix", "dual"):
            return cache_of(self.family)
        how: dict[str, Any] = {"sinks": self.sinks, "score": self.family, "delay": DELAY}
        if self.protect:
            how["protect"] = self.protect
        return EvictingCache(keep=self.keep, **how)

    def denoiser(self, model: Any) -> Any:
        """The model as this policy runs it."""
        if self.family == "window":
            return SparseDenoiser(model, self.keep, self.sinks, is_random=self.protect == "random")
        return model.denoiser()


def policies(settings: CacheSettings) -> list[Policy]:
    """Policies to compare, the uncached one first. Raises ValueError for budgets and names that
    make no sense.
    """
    found = [Policy("none"), Policy("prefix"), Policy("dual")]
    found += [Policy("sink_refresh", sinks=count) for count in settings.refreshed]
    found += [Policy("nearest")]
    for keep in sorted(settings.cache_keep, reverse=True):
        for score in settings.scores:
            found.append(Policy(score, keep))
            # a cache that keeps by attention received keeps the sinks of now by itself
            protect = [which for which in settings.protect if score != "received" or which != "now"]
            found += [Policy(score, keep, settings.cache_sinks, which) for which in protect]
        if settings.sparse:
            found.append(Policy("window", keep))
            found += [
                Policy("window", keep, settings.cache_sinks, which) for which in ("now", "random")
            ]
    for policy in found:
        _ = policy.cache
    return found


def pairs(found: list[Policy]) -> list[tuple[Policy, Policy]]:
    """(protected, the same without protection), at equal budgets."""
    return [(policy, Policy(policy.family, policy.keep)) for policy in found if policy.protect]


class SparseDenoiser(Denoiser):
    """Full recomputation in which every query attends to a share of the keys: the sinks first, then
    the nearest.

    Sinks are the columns that receive most over all layers and heads in a clean pass over the same
    canvas, each row its own; the mask is one for all layers and heads. For fidelity alone: the mask
    saves no time. Added sinks are always seen.
    """

    def __init__(self, model: Any, keep: float, sinks: int, *, is_random: bool = False) -> None:
        self.model, self.keep, self.sinks, self.is_random = model, keep, sinks, is_random

    @torch.inference_mode()
    def logits(self, ids_BS: Tensor, at: Places) -> Tensor:
        """Logits (M, V). The canvas has no padding."""
        visible_BQK = nearest_keys(
            self._sinks(ids_BS), math.floor(self.keep * ids_BS.shape[1] + 1e-9)
        )
        return self.model(
            ids_BS, logits_to_keep=at.wanted_BS, visible=visible_BQK.to(ids_BS.device)
        ).logits

    def _sinks(self, ids_BS: Tensor) -> Tensor:
        batch, length = ids_BS.shape
        sinks_BS = torch.zeros(batch, length, dtype=torch.bool)
        if not self.sinks:
            return sinks_BS
        if self.is_random:
            draws_BS = torch.rand(1, length, generator=torch.Generator().manual_seed(0)).expand(
                batch, -1
            )
        else:
            with trace(self.model, ("received",)) as recording:
                self.model(ids_BS, logits_to_keep=torch.zeros_like(ids_BS, dtype=torch.bool))
            draws_BS = recording.received[0].sum((1, 2))[:, -length:]
        return sinks_BS.scatter_(1, draws_BS.topk(min(self.sinks, length)).indices.cpu(), True)


def nearest_keys(sinks_BS: Tensor, count: int) -> Tensor:
    """Visibility of keys, bool (B, S, S): each query sees itself, the sinks, then the nearest,
    `count` in all (at least 1).
    """
    length = sinks_BS.shape[1]
    position_S = torch.arange(length)
    # twice the distance, so that of two equally near keys the left one is nearer
    far_QK = 2 * (position_S[:, None] - position_S).abs() + (position_S > position_S[:, None])
    first_BQK = sinks_BS[:, None] & (far_QK > 0)
    far_BQK = torch.where(first_BQK, far_QK - 2 * length, far_QK) - 8 * length * (far_QK == 0)
    seen_BQK = torch.zeros(len(sinks_BS), length, length, dtype=torch.bool)
    return seen_BQK.scatter_(2, far_BQK.topk(max(count, 1), largest=False).indices, True)
