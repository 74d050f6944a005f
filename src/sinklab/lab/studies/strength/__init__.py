"""Strength of a model's sinks, by the protocol of Gu et al.: the weight of the first token, on
three kinds of text.
"""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(__name__, study="Strength StrengthSettings")
