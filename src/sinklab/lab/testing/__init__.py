"""Conformance suites: the contract of a registered class, for those of the package and for one's
own.
"""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    decoding="check_cache check_unmasking_rule",
    models="check_family check_sink",
    probing="check_intervention check_rule check_statistic",
    runs="check_figure check_study",
    values="check_text",
)
