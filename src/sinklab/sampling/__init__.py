"""Decoding by unmasking: a canvas, rules, schedules and caches that combine, and the loop that yields every step.

Names load where first used: settings alone must not cost torch, or `--help` would be slow.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sinklab.sampling.caches import CACHES, Cache, DualCache, PrefixCache, cache_by_name, evaluator
    from sinklab.sampling.candidates import Candidates
    from sinklab.sampling.canvas import Canvas
    from sinklab.sampling.denoisers import CachingDenoiser, Denoiser, Session, guided, limited, suppressed
    from sinklab.sampling.loop import Step, denoise
    from sinklab.sampling.named import rule_by_name, schedule_by_name
    from sinklab.sampling.quotas import commit_counts, deal_steps
    from sinklab.sampling.rules import (
        RULES,
        Entropy,
        LeftToRight,
        LowConfidence,
        MaskgitPlus,
        Origin,
        PositionalOrder,
        RandomOrder,
        Rule,
        TopkMargin,
    )
    from sinklab.sampling.schedules import SCHEDULES, EntropyBound, EvenQuota, Factor, Schedule, Threshold, Timed
    from sinklab.sampling.settings import DecodingSettings
    from sinklab.sampling.sink_cache import (
        BlockWork,
        EvictCache,
        EvictingCache,
        RandomCache,
        ReceivedCache,
        SinkCache,
        SinkRefreshCache,
    )
    from sinklab.sampling.tokens import TokenSampling, sample_tokens

__all__ = [
    "CACHES",
    "RULES",
    "SCHEDULES",
    "BlockWork",
    "Cache",
    "CachingDenoiser",
    "Candidates",
    "Canvas",
    "DecodingSettings",
    "Denoiser",
    "DualCache",
    "Entropy",
    "EntropyBound",
    "EvenQuota",
    "EvictCache",
    "EvictingCache",
    "Factor",
    "LeftToRight",
    "LowConfidence",
    "MaskgitPlus",
    "Origin",
    "PositionalOrder",
    "PrefixCache",
    "RandomCache",
    "RandomOrder",
    "ReceivedCache",
    "Rule",
    "Schedule",
    "Session",
    "SinkCache",
    "SinkRefreshCache",
    "Step",
    "Threshold",
    "Timed",
    "TokenSampling",
    "TopkMargin",
    "cache_by_name",
    "commit_counts",
    "deal_steps",
    "denoise",
    "evaluator",
    "guided",
    "limited",
    "rule_by_name",
    "sample_tokens",
    "schedule_by_name",
    "suppressed",
]

_HOMES = {
    "CACHES": "caches",
    "Cache": "caches",
    "DualCache": "caches",
    "PrefixCache": "caches",
    "cache_by_name": "caches",
    "evaluator": "caches",
    "Candidates": "candidates",
    "Canvas": "canvas",
    "CachingDenoiser": "denoisers",
    "Denoiser": "denoisers",
    "Session": "denoisers",
    "guided": "denoisers",
    "limited": "denoisers",
    "suppressed": "denoisers",
    "Step": "loop",
    "denoise": "loop",
    "rule_by_name": "named",
    "schedule_by_name": "named",
    "commit_counts": "quotas",
    "deal_steps": "quotas",
    "Entropy": "rules",
    "LeftToRight": "rules",
    "LowConfidence": "rules",
    "MaskgitPlus": "rules",
    "Origin": "rules",
    "PositionalOrder": "rules",
    "RULES": "rules",
    "RandomOrder": "rules",
    "Rule": "rules",
    "TopkMargin": "rules",
    "EntropyBound": "schedules",
    "EvenQuota": "schedules",
    "Factor": "schedules",
    "SCHEDULES": "schedules",
    "Schedule": "schedules",
    "Threshold": "schedules",
    "Timed": "schedules",
    "DecodingSettings": "settings",
    "BlockWork": "sink_cache",
    "EvictCache": "sink_cache",
    "EvictingCache": "sink_cache",
    "RandomCache": "sink_cache",
    "ReceivedCache": "sink_cache",
    "SinkCache": "sink_cache",
    "SinkRefreshCache": "sink_cache",
    "TokenSampling": "tokens",
    "sample_tokens": "tokens",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
