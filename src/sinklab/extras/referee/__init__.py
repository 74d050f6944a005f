"""How far rounding moves a score, whether two runs differ by more, and whether another
implementation computes the same as this one.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
PROVIDES = {"studies": "study", "commands": "commands"}
