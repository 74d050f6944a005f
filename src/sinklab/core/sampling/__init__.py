"""Decoding by unmasking: a canvas, rules, schedules and caches that combine, and the loop that
yields every step.
"""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    caches="BlockWork Cache cache_of",
    canvas="Canvas Places",
    denoisers="Denoiser DenoisingModel Evaluation Session guided suppressed text_only",
    loop="Step WritingSchedule denoise",
    rules=(
        "Candidates ConfidenceRule Entropy LeftToRight LowConfidence MaskgitPlus Origin "
        "PositionalOrder RandomOrder TopkMargin UnmaskingRule"
    ),
    schedules=(
        "EntropyBound EvenQuota Factor Schedule Threshold Timed Turn commit_counts split_steps"
    ),
    settings="DecodingSettings",
    tokens="TokenSampling sample_tokens",
)
