"""A laboratory for attention sinks in diffusion language models.

Names load where they are first used: importing this package costs at most torch
(tests/test_import_cost.py).
"""

import lazy_loader

__version__ = "0.2.0.dev0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
