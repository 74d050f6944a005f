"""Held-out loss over the number of masked columns."""

from sinklab.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    study="CurveSettings Curve masking_curve",
    run="curve_table",
    figures="MaskingCurve masking_curve_figure masking_curve_sentences masking_curve_table write_masking_curves",
)
