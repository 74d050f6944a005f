"""Which family a checkpoint belongs to, and how its ``config.json`` is read."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedConfig, Qwen2Config

from sinklab.checkpoints import llada, smdm
from sinklab.checkpoints.weights import Recipe, Shapes, field_of, require
from sinklab.models.config import BACKBONES, DiffusionLMConfig

Reader = Callable[[Mapping[str, Any], Shapes | None], Recipe]

# What would choose the code that runs: an attention may be a repository of compiled kernels, output_attentions asks for
# another attention, auto_map names classes.
_CODE = re.compile(r"_?(attn|experts)_implementation|_?output_attentions|auto_map")

DREAM_FIELDS = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
DREAM_FIELDS += ["num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps", "tie_word_embeddings"]
DREAM_FIELDS += ["attention_dropout", "initializer_range", "bos_token_id", "eos_token_id", "pad_token_id"]


def dream(config: Mapping[str, Any], shapes: Shapes | None) -> Recipe:
    """Read a ``DreamModel`` config (Dream, DiffuCoder, Dream-Coder): Qwen2 with shifted logits.

    Raises:
        ValueError: for a field that is missing or has no counterpart, by name.
    """
    require(
        config,
        "dream",
        {"use_sliding_window": (False, None), "use_mrope": (False, None), "hidden_act": ("silu",)},
    )
    rope = config.get("rope_scaling") or {"rope_type": "default"}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    fields = {name: config[name] for name in DREAM_FIELDS if name in config}
    backbone = Qwen2Config(
        **fields,
        rope_parameters={**rope, "rope_type": rope_type, "rope_theta": field_of(config, "dream", "rope_theta")},
        use_sliding_window=False,
    )
    return Recipe("dream", backbone, {"mask_token_id": config.get("mask_token_id"), "logit_shift": True})


def own(config: Mapping[str, Any], shapes: Shapes | None) -> Recipe:
    """Read a config that :class:`DiffusionLM` saved."""
    settings = dict(config)
    backbone = DiffusionLMConfig(**settings).backbone
    return Recipe("sinklab", backbone, {name: value for name, value in settings.items() if name != "backbone"})


def autoregressive(config: Mapping[str, Any], shapes: Shapes | None) -> Recipe:
    """Read the config of a Llama, Qwen2 or Qwen3 causal model."""
    fields = dict(config)
    model_type = fields.pop("model_type")
    return Recipe(model_type, AutoConfig.for_model(model_type, **fields))


READERS: dict[str, Reader] = {
    "LLaDAModelLM": llada.recipe,
    "MMadaModelLM": partial(llada.recipe, family="mmada"),
    "DreamModel": dream,
    "DiffusionLM": own,
}
BY_TYPE: dict[str, Reader] = {
    "llada": READERS["LLaDAModelLM"],
    "mmada": READERS["MMadaModelLM"],
    "Dream": dream,
    DiffusionLMConfig.model_type: own,
    **dict.fromkeys(BACKBONES, autoregressive),
}


def read_config(path: Path, name: str) -> dict[str, Any]:
    """The ``config.json`` at ``path``; nothing it refers to is looked at.

    Raises:
        ValueError: if there is none or it is no JSON object.
    """
    try:
        config = json.loads(path.read_text("utf-8"))
    except OSError as error:
        hint = smdm.missing_config(path.parent)
        raise ValueError(
            f"no model can be loaded from {name!r}: it has no readable config.json ({error}){hint}"
        ) from error
    except ValueError as error:
        raise ValueError(f"no model can be loaded from {name!r}: its config.json is damaged ({error})") from error
    if not isinstance(config, dict):
        raise ValueError(f"no model can be loaded from {name!r}: its config.json holds no object")
    return config


def without_code(value: Any) -> Any:
    """A config without the fields, at any depth, that choose which code runs: that is never a checkpoint's to say."""
    if isinstance(value, Mapping):
        return {key: without_code(one) for key, one in value.items() if not _CODE.match(str(key))}
    return [without_code(one) for one in value] if isinstance(value, list) else value


@contextmanager
def blamed_on(name: str) -> Iterator[None]:
    """Turn what transformers raises for a config it cannot use into a ValueError that names the checkpoint."""
    try:
        yield
    except ValueError as error:
        if name in str(error):
            raise
        raise ValueError(f"no model can be loaded from {name!r}: {error}") from error
    except Exception as error:  # KeyError, ZeroDivisionError, StrictDataclassError, …: whatever the damage leads to
        raise ValueError(
            f"the config.json of {name} is damaged, or has a field of a kind that sinklab does not know: {error!r}"
        ) from error


def read(config: Mapping[str, Any], name: str, shapes: Shapes | None = None) -> Recipe:
    """The recipe for a checkpoint.

    Args:
        config: its ``config.json``.
        name: for messages.
        shapes: of its tensors; None when only the config is at hand.

    Raises:
        ValueError: if the architecture is not known, or this config of it cannot be represented.
    """
    config = without_code(config)
    architectures = architectures_of(config)
    reader = next((READERS[one] for one in architectures if one in READERS), None)
    reader = reader or BY_TYPE.get(str(config.get("model_type")))
    if reader is None and {"n_embd", "padded_vocab_size"} <= config.keys():
        reader = smdm.recipe
    if reader is None:
        raise ValueError(
            f"{name} is a {config.get('model_type')!r} model ({', '.join(architectures) or 'no architecture named'}), "
            f"but sinklab loads {', '.join(READERS)}, SMDM's lit-gpt checkpoints, and {', '.join(BACKBONES)}"
        )
    with blamed_on(name):
        return reader(config, shapes)


def architectures_of(config: Mapping[str, Any]) -> list[str]:
    """The classes that a ``config.json`` names."""
    listed = config.get("architectures")
    return [str(one) for one in listed] if isinstance(listed, list) else []


def configured(recipe: Recipe, overrides: Mapping[str, Any], name: str) -> PreTrainedConfig:
    """The config of the model called ``name``: the recipe's, with the caller's settings over it.

    Raises:
        ValueError: for settings of an autoregressive model, of the backbone, or that are unknown.
    """
    if "backbone" in overrides:
        raise ValueError("the backbone comes from the checkpoint and cannot be set; leave out backbone=")
    if recipe.settings is None:
        return recipe.backbone
    with blamed_on(name):
        return DiffusionLMConfig(backbone=recipe.backbone, **{**recipe.settings, **overrides})
