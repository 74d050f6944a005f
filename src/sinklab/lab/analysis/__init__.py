"""Movement of sinks, tokens of sinks, explanations of sinks, and verdicts: pure functions on
received attention.
"""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    answers="Answer Answers",
    estimates="Estimate jackknife mean_over median_over",
    explained="Explained explained_mass",
    movement="Motion MotionSummary motion motion_word",
    overlap=(
        "BlockEffects LayerSinks SplitSinks block_effects jaccard overlap_by_head overlap_by_layer "
        "overlap_by_step sinks_per_layer split_sinks"
    ),
    thresholds="DEFAULT_RULES EPSILONS EpsilonCurve RuleRow ScoreHistogram compare_rules "
    "epsilon_curve score_histogram",
    tokens="AGES CLASSES Enrichment STATES characters enrichment token_ages token_class "
    "token_classes",
    verdicts="Verdict holm masking_cost new_sinks ninety_six recovery start_only",
)
