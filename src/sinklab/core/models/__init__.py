"""`DiffusionLM`: a Hugging Face decoder made bidirectional, with its sink and its gate."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
