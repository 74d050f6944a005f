"""Attention sinks: rules on received attention, its normalisation, the main sink."""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    normalize="even_share main_sink namespace",
    rules="DEFAULT Excess Gu Rule Top find_sinks",
    states="COMMITTED MASKED PROMPT STATES",
)
