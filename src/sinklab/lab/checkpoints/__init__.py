"""Published and own checkpoints: reading, converting and saving them. No code of a checkpoint is
run.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
