"""What counts as an attention sink, how sinks move, and which tokens they are: pure functions on received attention."""

from .kinds import KINDS, Enrichment, enrichment, token_kind
from .paths import Trajectories, main_sink, trajectories
from .rules import Excess, Gu, Rule, Top, find_sinks

__all__ = [
    "KINDS",
    "Enrichment",
    "Excess",
    "Gu",
    "Rule",
    "Top",
    "Trajectories",
    "enrichment",
    "find_sinks",
    "main_sink",
    "token_kind",
    "trajectories",
]
