"""How far rounding moves a score, whether two runs differ by more, and whether another
implementation computes the same as this one.
"""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    estimators="conditionals in_order over_orders",
    margins="first_difference measure_margins near_ties rewritten",
    reference="Held Reference write_reference",
    study="Referee RefereeSettings",
)

PROVIDES = {"studies": "study", "commands": "commands"}
