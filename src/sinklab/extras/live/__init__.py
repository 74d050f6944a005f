"""The live page: write a text, watch it being denoised, block a sink from some step on; on this
machine alone.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
PROVIDES = {"commands": "commands"}
