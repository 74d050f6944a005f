"""Movement of sinks, tokens of sinks, explanations of sinks, and verdicts: pure functions on
received attention.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
