"""Cost of blocking keys: held-out loss over their number, in one head or layer at a time, and the
distance of texts that are written meanwhile.
"""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    study=(
        "Ablate AblateSettings Curve CurveSettings DistanceSettings DistanceStudy masking_curve"
    ),
)
