"""Conformance suites: what a registered class must keep, for those of the package and for one's own."""

from sinklab.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    decoding="check_cache check_unmasking_rule",
    families="check_family",
    figures="check_figure",
    probing="check_intervention check_statistic",
    rules="check_rule",
    sinks="check_sink",
    studies="check_study",
    values="check_text_and_json",
)
