"""Held-out loss over the number of masked columns."""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(__name__, study="CurveSettings Curve masking_curve")
