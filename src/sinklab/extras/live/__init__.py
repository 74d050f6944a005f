"""The live page: write a text, watch it being denoised, block a sink from some step on; on this
machine alone.
"""

from sinklab.core.registry import exports

__getattr__, __dir__, __all__ = exports(__name__, live_text="LiveText", server="serve")

PROVIDES = {"commands": "commands"}
