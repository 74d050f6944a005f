"""Which heads a model needs its most attended keys in: the cost of hiding them in one head, or layer, at a time."""

from sinklab.registry import exports

__getattr__, __dir__, __all__ = exports(__name__, study="Ablate AblateSettings")
