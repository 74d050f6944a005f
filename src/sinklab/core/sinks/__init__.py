"""Attention sinks: rules on received attention, its normalisation, the main sink."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
