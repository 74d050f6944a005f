"""Diffusion language models on Hugging Face backbones, their sink and gate, and how they are loaded."""

from sinklab.models.config import DiffusionLMConfig
from sinklab.models.diffusion_lm import DiffusionLM
from sinklab.models.information import ModelInfo, describe
from sinklab.models.loading import Loaded, load
from sinklab.models.published import PUBLISHED, Published, SpecialIds
from sinklab.models.sink import SinkPrefix

__all__ = [
    "PUBLISHED",
    "DiffusionLM",
    "DiffusionLMConfig",
    "Loaded",
    "ModelInfo",
    "Published",
    "SinkPrefix",
    "SpecialIds",
    "describe",
    "load",
]
