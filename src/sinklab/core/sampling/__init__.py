"""Decoding by unmasking: a canvas, rules, schedules and caches that combine, and the loop that
yields every step.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
