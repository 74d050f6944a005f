"""What a training run refuses before it reads anything."""

from __future__ import annotations

import difflib
from typing import Any, get_args

from transformers import LlamaConfig

from sinklab.diffusion.forward import TimeSampler
from sinklab.models import DiffusionLMConfig
from sinklab.training.settings import TrainSettings


def check(settings: TrainSettings) -> None:
    """What can be refused without reading the corpus.

    Raises:
        ValueError: for sizes below 1 or that do not fit, an unknown variant or time sampler, fractions outside 0…1.
    """
    for name in (
        "hidden_size",
        "layers",
        "heads",
        "mlp_size",
        "batch",
        "steps",
        "log_every",
        "eval_every",
        "save_every",
    ):
        if getattr(settings, name) < 1:
            raise ValueError(f"{name} must be at least 1, but is {getattr(settings, name)}")
    if settings.hidden_size % settings.heads:
        raise ValueError(f"hidden_size ({settings.hidden_size}) must be a multiple of heads ({settings.heads})")
    if (settings.hidden_size // settings.heads) % 2:
        raise ValueError(
            f"each head must have an even width, which rotary positions turn in pairs, but hidden_size "
            f"{settings.hidden_size} over {settings.heads} heads gives {settings.hidden_size // settings.heads}"
        )
    DiffusionLMConfig(LlamaConfig(), **variant(settings))
    for name in ("causal_start", "warmup"):
        if not 0 <= getattr(settings, name) <= 1:
            raise ValueError(f"{name} is a fraction of the steps, from 0 to 1, but is {getattr(settings, name)}")
    samplers = get_args(TimeSampler)
    if settings.time_sampler not in samplers:
        near = difflib.get_close_matches(settings.time_sampler, samplers, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"time_sampler must be one of {', '.join(samplers)}, but is {settings.time_sampler!r}{hint}")


def variant(settings: TrainSettings) -> dict[str, Any]:
    """The settings that make the model's variant, as its config names them."""
    return {key: getattr(settings, key) for key in ("sink_kind", "sink_count", "sink_side", "gate")}
