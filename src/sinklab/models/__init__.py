"""Diffusion language models on Hugging Face backbones, their sink and gate, and how they are loaded."""

from sinklab.models.config import DiffusionLMConfig
from sinklab.models.conversion import from_causal
from sinklab.models.diffusion_lm import DiffusionLM
from sinklab.models.information import ModelInfo, describe
from sinklab.models.loading import Loaded, load
from sinklab.models.published import PUBLISHED, Published, SpecialIds
from sinklab.models.retrofit import freeze, merge_lora, trainable_parameters
from sinklab.models.sink import SinkPrefix
from sinklab.models.sinkfile import SinkFile, attach_sink, save_sink, sink_file_of

__all__ = [
    "PUBLISHED",
    "DiffusionLM",
    "DiffusionLMConfig",
    "Loaded",
    "ModelInfo",
    "Published",
    "SinkFile",
    "SinkPrefix",
    "SpecialIds",
    "attach_sink",
    "describe",
    "freeze",
    "from_causal",
    "load",
    "merge_lora",
    "save_sink",
    "sink_file_of",
    "trainable_parameters",
]
