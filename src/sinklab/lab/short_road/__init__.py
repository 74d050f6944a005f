"""The short road: results of `sinklab.load` and `sinklab.open_run`, which answer common questions
by themselves.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
