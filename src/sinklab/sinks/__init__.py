"""What counts as an attention sink, how sinks move, and which tokens they are: pure functions on received attention."""

from .borders import BlockEffects, SplitSinks, block_effects, split_sinks
from .classes import AGES, CLASSES, STATES, token_ages, token_class, token_classes
from .curves import EPSILONS, EpsilonCurve, ScoreHistogram, epsilon_curve, score_histogram
from .explained import Explained, explained_mass
from .frequency import Enrichment, enrichment
from .motion import Motion, motion
from .overlap import (
    LayerSinks,
    jaccard,
    overlap_by_head,
    overlap_by_layer,
    overlap_by_step,
    sinks_per_layer,
)
from .paths import main_sink
from .rates import DEFAULT_RULES, RuleRow, absorb_rate, compare_rules, sink_rate
from .rules import Excess, Gu, Rule, Top, find_sinks
from .scale import even_share
from .summary import MotionSummary, motion_word
from .verdicts import Verdict, masking_cost, ninety_six, recovery, start_only

__all__ = [
    "AGES",
    "CLASSES",
    "DEFAULT_RULES",
    "EPSILONS",
    "STATES",
    "BlockEffects",
    "Enrichment",
    "EpsilonCurve",
    "Excess",
    "Explained",
    "Gu",
    "LayerSinks",
    "Motion",
    "MotionSummary",
    "Rule",
    "RuleRow",
    "ScoreHistogram",
    "SplitSinks",
    "Top",
    "Verdict",
    "absorb_rate",
    "block_effects",
    "compare_rules",
    "enrichment",
    "epsilon_curve",
    "even_share",
    "explained_mass",
    "find_sinks",
    "jaccard",
    "main_sink",
    "masking_cost",
    "motion",
    "motion_word",
    "ninety_six",
    "overlap_by_head",
    "overlap_by_layer",
    "overlap_by_step",
    "recovery",
    "score_histogram",
    "sink_rate",
    "sinks_per_layer",
    "split_sinks",
    "start_only",
    "token_ages",
    "token_class",
    "token_classes",
]
