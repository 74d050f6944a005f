"""The format that :class:`~sinklab.models.DiffusionLM` saves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sinklab.checkpoints.families import CheckpointPlan, Family, Shapes
from sinklab.models.config import DiffusionLMConfig
from sinklab.registry import families


@families.register("sinklab")
class Sinklab(Family):
    """Diffusion language models trained or converted here: every setting stands in ``config.json``."""

    architectures = ("DiffusionLM",)
    model_types = (DiffusionLMConfig.model_type,)

    def read(self, config: Mapping[str, Any], shapes: Shapes | None) -> CheckpointPlan:
        """The config is read by its own class, which refuses unknown fields."""
        backbone = DiffusionLMConfig(**config).backbone
        return CheckpointPlan(self, backbone, {name: value for name, value in config.items() if name != "backbone"})
