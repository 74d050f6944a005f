"""The short road: results of `sinklab.load` and `sinklab.open_run`, which answer common questions
by themselves.
"""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__,
    compare="Comparison Summary",
    models="LM Loss load wrap",
    runs="Page Run open_run report",
)
