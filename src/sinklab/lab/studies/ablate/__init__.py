"""Cost of blocking the most attended keys: in one head or layer, or everywhere while texts are
written.
"""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__, study="Ablate AblateSettings DistanceSettings DistanceStudy"
)
