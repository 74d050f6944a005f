"""One line to load a model: the packaged pair, our own checkpoints, and autoregressive baselines. No code of a
checkpoint is run.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from sinklab.models.config import BACKBONES, DiffusionLMConfig
from sinklab.models.diffusion_lm import DiffusionLM

PACKAGED = ("tiny", "tiny-sink")


@dataclass(frozen=True)
class Loaded:
    """A model ready to use, with what belongs to it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    revision: str | None
    family: str
    """``diffusion`` or ``autoregressive``."""


def load(
    name_or_folder: str | Path,
    *,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str = "cpu",
    revision: str | None = None,
) -> Loaded:
    """Load a model and its tokenizer.

    Args:
        name_or_folder: ``"tiny"`` or ``"tiny-sink"`` (the pair inside this package), a folder, or a name on the Hub: a
            checkpoint of :class:`DiffusionLM`, or a Llama, Qwen2 or Qwen3 causal model as an autoregressive baseline.
        dtype: of the weights, e.g. ``torch.bfloat16``.
        device: where to put the model.
        revision: commit, branch or tag on the Hub.

    Raises:
        ValueError: if there is no such model, its architecture is not supported, tensors are missing, surplus or
            damaged.
    """
    name = str(name_or_folder)
    place = _place(name)
    try:
        config = AutoConfig.from_pretrained(place, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        near = [] if name in PACKAGED else difflib.get_close_matches(name, PACKAGED, n=1)
        hint = (
            f"did you mean {near[0]!r}?" if near else f"use {' or '.join(map(repr, PACKAGED))}, a folder, or a Hub name"
        )
        raise ValueError(f"no model can be loaded from {name!r}: {hint} ({error})") from error
    classes: dict[str, Any] = {
        DiffusionLMConfig.model_type: DiffusionLM,
        **dict.fromkeys(BACKBONES, AutoModelForCausalLM),
    }
    if config.model_type not in classes:
        raise ValueError(f"{name} is a {config.model_type!r} model, but sinklab loads {', '.join(classes)}")
    model = _weights(classes[config.model_type], place, name, dtype, revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, revision=revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} has a model but no tokenizer that can be read: {error}") from error
    family = "diffusion" if isinstance(model, DiffusionLM) else "autoregressive"
    return Loaded(model.to(device).eval(), tokenizer, name, revision, family)


def _place(name: str) -> str:
    """Folder of a packaged model, or the name itself."""
    if name in PACKAGED and not Path(name).exists():
        return str(resources.files("sinklab.models").joinpath("packaged", name))
    return name


def _weights(cls: Any, place: str, name: str, dtype: Any, revision: str | None) -> Any:
    try:
        model, info = cls.from_pretrained(
            place,
            dtype=dtype,
            revision=revision,
            use_safetensors=True,
            output_loading_info=True,
            # refused below, by name
            ignore_mismatched_sizes=True,
            trust_remote_code=False,
        )
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ValueError(
            f"the weights of {name} cannot be read, the file may be cut short or damaged: {error}"
        ) from error
    wrong = {
        key: sorted(map(str, info[f"{key}_keys"]))
        for key in ("missing", "unexpected", "mismatched")
        if info[f"{key}_keys"]
    }
    if wrong:
        listed = "; ".join(
            f"{key}: {', '.join(names[:5])}{' …' if len(names) > 5 else ''}" for key, names in wrong.items()
        )
        raise ValueError(
            f"the tensors of {name} do not fit its config ({listed}); check that weights and config belong together"
        )
    return model
