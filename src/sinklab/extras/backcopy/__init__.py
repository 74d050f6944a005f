"""Bigram-Backcopy: causal and diffusion twins of a task on which a causal model grows a sink in
seconds.
"""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(
    __name__, study="Backcopy BackcopySettings", source="Source"
)

PROVIDES = {"studies": "study"}
