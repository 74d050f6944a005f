"""The tap on a model's attention: `trace` watches, `intervene` changes, and neither leaves anything
behind.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
