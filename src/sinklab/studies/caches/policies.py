"""The caches that are compared, by what they keep; at one budget the members of a family differ in protection alone."""

from dataclasses import dataclass
from typing import Any

from sinklab.caching.policies import SCORES, EvictingCache
from sinklab.sampling.caches import Cache, cache_of
from sinklab.studies.caches.study import CacheSettings

DELAY = 1
"""Evicting caches all choose at the second evaluation of a block, as Sparse-dLLM does: full evaluations are equal."""


@dataclass(frozen=True)
class Policy:
    """One way to evaluate a block."""

    family: str
    """none, prefix, dual, sink_refresh; nearest, aligned, received, random (evicting)."""
    keep: float = 1.0
    """Share of the columns outside the block that a query attends to."""
    sinks: int = 0
    """Columns protected, or recomputed with the block."""
    protect: str = ""
    """Whose sinks."""

    @property
    def label(self) -> str:
        """As it stands in tables."""
        if self.family == "sink_refresh":
            return f"dual, {self.sinks} sinks recomputed"
        kept = "" if self.keep == 1 else f" {self.keep:.3g}"
        whose = {"": "", "now": "", "first": "first ", "earlier": "earlier "}
        name = "all kept" if self.is_evicting and self.keep == 1 else self.family
        return f"{name}{kept}" + (f" + {self.sinks} {whose[self.protect]}sinks" if self.sinks else "")

    @property
    def is_evicting(self) -> bool:
        """Whether it chooses columns, and forgets the others."""
        return self.family in SCORES

    @property
    def cache(self) -> Cache | None:
        """The cache that does it; None where everything is computed."""
        if self.family in ("none", "prefix", "dual", "sink_refresh"):
            return cache_of(self.family + (f":sinks={self.sinks}" if self.sinks else ""))
        options: dict[str, Any] = {"protect": self.protect} if self.protect else {}
        return EvictingCache(keep=self.keep, sinks=self.sinks, score=self.family, delay=DELAY, **options)


def policies(settings: CacheSettings) -> list[Policy]:
    """All that are compared, the uncached one first. Raises ValueError for budgets and names that make no sense."""
    found = [Policy("none"), Policy("prefix"), Policy("dual")]
    found += [Policy("sink_refresh", sinks=count) for count in settings.refreshed]
    found += [Policy("nearest")]
    for keep in sorted(settings.cache_keep, reverse=True):
        for score in settings.scores:
            found.append(Policy(score, keep))
            # what keeps by attention received keeps the sinks of now by itself
            protect = [which for which in settings.protect if score != "received" or which != "now"]
            found += [Policy(score, keep, settings.cache_sinks, which) for which in protect]
    for policy in found:
        _ = policy.cache
    return found


def pairs(found: list[Policy]) -> list[tuple[Policy, Policy]]:
    """(protected, the same without protection), at equal budgets."""
    return [(policy, Policy(policy.family, policy.keep)) for policy in found if policy.protect]
