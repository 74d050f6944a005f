"""A laboratory for attention sinks in diffusion language models.

Names load where they are first used: importing this package costs at most torch (tests/test_import_cost.py).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sinklab.models.config import DiffusionLMConfig
    from sinklab.models.diffusion_lm import DiffusionLM
    from sinklab.probing.intervention import intervene
    from sinklab.probing.interventions.mask_sinks import MaskSinks
    from sinklab.probing.tracing import trace
    from sinklab.sampling.canvas import Canvas
    from sinklab.sampling.loop import denoise
    from sinklab.short_road.models import load
    from sinklab.short_road.runs import open_run, report
    from sinklab.sinks.rules import Excess, find_sinks

__version__ = "0.2.0.dev0"

__all__ = [
    "Canvas",
    "DiffusionLM",
    "DiffusionLMConfig",
    "Excess",
    "MaskSinks",
    "__version__",
    "denoise",
    "find_sinks",
    "intervene",
    "load",
    "open_run",
    "report",
    "trace",
]

_HOME = {
    "Canvas": "sampling",
    "DiffusionLM": "models",
    "DiffusionLMConfig": "models",
    "Excess": "sinks",
    "MaskSinks": "probing",
    "denoise": "sampling",
    "find_sinks": "sinks",
    "intervene": "probing",
    "load": "short_road",
    "open_run": "short_road",
    "report": "short_road",
    "trace": "probing",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        # `name` and `obj` make Python add "Did you mean" with the nearest of dir().
        raise AttributeError(f"module 'sinklab' has no attribute {name!r}", name=name, obj=import_module(__name__))
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
