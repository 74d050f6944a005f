"""Conformance suites: what a registered class must keep, for those of the package and for one's own."""

from sinklab.registry import exports

__getattr__, __dir__, __all__ = exports(__name__, families="check_family", figures="check_figure", rules="check_rule")
