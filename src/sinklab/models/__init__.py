"""Diffusion language models on Hugging Face backbones, their sink and gate, and how they are loaded."""

from sinklab.models.config import DiffusionLMConfig
from sinklab.models.diffusion_lm import DiffusionLM
from sinklab.models.loading import Loaded, load
from sinklab.models.sink import SinkPrefix

__all__ = ["DiffusionLM", "DiffusionLMConfig", "Loaded", "SinkPrefix", "load"]
