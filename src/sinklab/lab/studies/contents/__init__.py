"""Information in the states of sinks."""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(__name__, study="ContentsSettings Probe sink_contents")
