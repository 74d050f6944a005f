from .config import DiffusionLMConfig as DiffusionLMConfig
from .diffusion_lm import DiffusionLM as DiffusionLM
from .prefix import SinkPrefix as SinkPrefix
from .sinks import Sink as Sink
