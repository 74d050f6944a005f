__version__: str

from .core.instrument.edits.block_keys import BlockKeys as BlockKeys
from .core.instrument.edits.intervention import intervene as intervene
from .core.instrument.edits.selectors import SinkKeys as SinkKeys
from .core.instrument.edits.selectors import TopKeys as TopKeys
from .core.instrument.tracing import trace as trace
from .core.sinks import Excess as Excess
from .core.sinks import find_sinks as find_sinks
from .core.subject.canvas import Canvas as Canvas
from .core.subject.config import DiffusionLMConfig as DiffusionLMConfig
from .core.subject.diffusion_lm import DiffusionLM as DiffusionLM
from .core.subject.loop import denoise as denoise
from .lab.measures.controls import EqualMass as EqualMass
from .lab.measures.controls import Random as Random
from .lab.measures.positions import LoneRows as LoneRows
from .lab.measures.protocols import MaskSinks as MaskSinks
from .lab.reports.build import report as report
from .lab.short_road.models import load as load
from .lab.short_road.models import wrap as wrap
from .lab.short_road.runs import open_run as open_run
