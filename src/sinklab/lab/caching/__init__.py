"""Block caches that evict or refresh keys and values: their policies, and the store."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
