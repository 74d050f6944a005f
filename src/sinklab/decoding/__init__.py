"""How models that attend in blocks write a block: by a quota or a confidence, and with edits of what is written."""

from sinklab.registry import exports

__getattr__, __dir__, __all__ = exports(__name__, blocks="Alpha Dynamic Editing")
