"""Models, runs and galleries for others: `sinklab export`, `push` and `gallery`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
PROVIDES = {"commands": "commands"}
