"""Fidelity of block caches, with and without protected sinks."""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(__name__, study="CacheSettings Caches cache_fidelity")
