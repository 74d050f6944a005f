"""Mathematics of attention on queries, keys and values: received attention, log-sum-exp, value
norms.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
