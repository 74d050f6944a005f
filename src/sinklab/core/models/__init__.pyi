from .config import DiffusionLMConfig as DiffusionLMConfig
from .diffusion_lm import DiffusionLM as DiffusionLM
from .sinks.base import Sink as Sink
from .sinks.prefix import SinkPrefix as SinkPrefix
