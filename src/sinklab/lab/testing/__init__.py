"""Conformance suites: the contract of a registered class, for those of the package and for one's
own.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
