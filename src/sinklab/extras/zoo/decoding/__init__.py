"""How models that attend in blocks write a block: by a quota or a confidence, with edits of written
tokens; and how a canvas is written if tokens change its length.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
