"""The subject: diffusion language models, their added sinks, and how they write a canvas."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
