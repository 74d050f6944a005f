"""Decoding by unmasking: a canvas, rules, schedules and caches that combine, and the loop that yields every step."""

from sinklab.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    caches="CACHES Cache DualCache PrefixCache cache_by_name evaluator",
    canvas="Canvas",
    denoisers="CachingDenoiser Denoiser Session guided limited suppressed",
    loop="Step denoise",
    named="rule_by_name schedule_by_name",
    rules=(
        "Candidates Entropy LeftToRight LowConfidence MaskgitPlus Origin PositionalOrder RULES RandomOrder "
        "Rule TopkMargin"
    ),
    schedules="EntropyBound EvenQuota Factor SCHEDULES Schedule Threshold Timed commit_counts deal_steps",
    settings="DecodingSettings",
    tokens="TokenSampling sample_tokens",
)
