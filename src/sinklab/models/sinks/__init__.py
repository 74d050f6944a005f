"""Kinds of added sink, one file each; a kind is a subclass of `Sink`, registered in `sinklab.registry.sinks`."""

from sinklab.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    base="Sink",
    prefix="SinkPrefix per_layer run_alone",
)
