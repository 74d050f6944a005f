__version__: str

from .core.models.config import DiffusionLMConfig as DiffusionLMConfig
from .core.models.diffusion_lm import DiffusionLM as DiffusionLM
from .core.probing.intervention import intervene as intervene
from .core.probing.interventions.block_keys import BlockKeys as BlockKeys
from .core.probing.interventions.selectors import From as From
from .core.probing.interventions.selectors import SinkKeys as SinkKeys
from .core.probing.interventions.selectors import TopKeys as TopKeys
from .core.probing.tracing import trace as trace
from .core.sampling.canvas import Canvas as Canvas
from .core.sampling.loop import denoise as denoise
from .core.sinks import Excess as Excess
from .core.sinks import find_sinks as find_sinks
from .lab.measures.controls import EqualMass as EqualMass
from .lab.measures.controls import Random as Random
from .lab.measures.positions import LoneRows as LoneRows
from .lab.measures.protocols import MaskSinks as MaskSinks
from .lab.short_road.models import load as load
from .lab.short_road.models import wrap as wrap
from .lab.short_road.runs import open_run as open_run
from .lab.short_road.runs import report as report
