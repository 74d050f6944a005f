"""Kinds of added sink, one file each: subclasses of `Sink`, registered in
`sinklab.core.registry.sinks`.
"""
