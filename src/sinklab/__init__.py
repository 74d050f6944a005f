"""A laboratory for attention sinks in diffusion language models.

Names load where they are first used: importing this package costs at most torch
(tests/test_import_cost.py).
"""

from typing import TYPE_CHECKING

__version__ = "0.2.0.dev0"

from sinklab.core.registry import exports

if TYPE_CHECKING:
    from sinklab.core.models.config import DiffusionLMConfig as DiffusionLMConfig
    from sinklab.core.models.diffusion_lm import DiffusionLM as DiffusionLM
    from sinklab.core.probing.intervention import intervene as intervene
    from sinklab.core.probing.interventions.mask_sinks import MaskSinks as MaskSinks
    from sinklab.core.probing.tracing import trace as trace
    from sinklab.core.sampling.canvas import Canvas as Canvas
    from sinklab.core.sampling.loop import denoise as denoise
    from sinklab.core.sinks.rules import Excess as Excess
    from sinklab.core.sinks.rules import find_sinks as find_sinks
    from sinklab.lab.short_road.models import load as load
    from sinklab.lab.short_road.models import wrap as wrap
    from sinklab.lab.short_road.runs import open_run as open_run
    from sinklab.lab.short_road.runs import report as report

__getattr__, __dir__, __all__ = exports(
    __name__,
    **{
        "core.models": "DiffusionLM DiffusionLMConfig",
        "core.probing": "MaskSinks intervene trace",
        "core.sampling": "Canvas denoise",
        "core.sinks": "Excess find_sinks",
        "lab.short_road": "load open_run report wrap",
    },
)
