"""Strength of a model's sinks, by the protocol of Gu et al.: the weight of the first token, on
three kinds of text.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
