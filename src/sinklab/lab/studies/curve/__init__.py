"""Cost of blocking keys: held-out loss over their number, in one head or layer at a time."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
