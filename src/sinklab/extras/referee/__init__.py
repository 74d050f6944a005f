"""How far rounding moves a score, and whether two runs differ by more."""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(__name__, study="Referee RefereeSettings")

PROVIDES = {"studies": "study"}
