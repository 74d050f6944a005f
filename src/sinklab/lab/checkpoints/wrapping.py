"""A module from elsewhere as a model of ours: its kind, its sizes, its special tokens, and the
tokens around its texts.
"""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sinklab.core.errors import one_of
from sinklab.core.models.diffusion_lm import DiffusionLM
from sinklab.lab.checkpoints.families import Family, SpecialIds
from sinklab.lab.checkpoints.tokens import special_ids
from sinklab.lab.checkpoints.wrapped import WrappedConfig, WrappedLM, position_limits

KINDS = ("autoregressive", "diffusion", "masked")
SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
HOW = "sinklab.wrap(model, tokenizer)"
_MARKS = {"masked": ("ForMaskedLM",), "autoregressive": ("ForCausalLM", "LMHeadModel")}
"""Parts of the names of transformers' classes that say a model's kind."""


def kind_of(model: nn.Module) -> str:
    """One of :data:`KINDS`, if the class, or else the config, of a module says it.

    Raises:
        ValueError: if neither does.
    """
    if isinstance(model, DiffusionLM):
        return "diffusion"
    config = config_of(model)
    names = [type(model).__name__, *(getattr(config, "architectures", None) or ())]
    for name in names:
        for kind, marks in _MARKS.items():
            if any(mark in name for mark in marks):
                return kind
    if getattr(config, "is_decoder", False):
        return "autoregressive"
    raise ValueError(
        "a wrapped model reads from left to right or fills masks, but neither the class "
        f"{names[0]} nor its config "
        'says which; pass kind="autoregressive", kind="diffusion" (masks at any rate, nothing '
        "around a text) or "
        'kind="masked" (like BERT: [CLS] before a text, [SEP] behind it)'
    )


def config_of(model: nn.Module) -> Any:
    """The config of a model's text decoder as transformers has it; None for a module without."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def sizes_of(model: nn.Module) -> dict[str, int] | None:
    """Layers, heads, hidden size and vocabulary from the config; None if it lacks one of them."""
    config = config_of(model)
    config = getattr(config, "backbone", config)
    found: dict[str, Any] = {name: getattr(config, name, None) for name in SIZES}
    return found if all(isinstance(value, int) for value in found.values()) else None


def wrapped(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    mask_id: int | None,
    kind: str,
    sizes: Mapping[str, Any],
) -> dict[str, Any]:
    """Fields of the result of `sinklab.load`, but for names, about this module.

    Args:
        model: maps ids (B, S) to logits (B, S, V).
        tokenizer: of its texts; None if prompts are ids.
        mask_id: id of [MASK]; None for the one of tokenizer or config.
        kind: one of :data:`KINDS`.
        sizes: those of :data:`SIZES`.

    Raises:
        ValueError: for an unknown kind, a mask id outside the vocabulary, and one of a model that
            has no masks.
    """
    one_of("kind", kind, KINDS)
    config, rows = config_of(model), sizes["vocab_size"]
    special = _of_vocabulary(special_ids(config, tokenizer, None, Family()), rows)
    model = model.eval()
    found: dict[str, Any] = {"tokenizer": tokenizer, "published_family": "wrapped"}
    if kind == "autoregressive":
        if mask_id is not None:
            raise ValueError(
                f"an autoregressive model has no [MASK], got mask_id={mask_id}; leave it out, or "
                "say kind"
            )
        found |= {"family": "autoregressive", "special": replace(special, mask=None)}
        if (
            isinstance(model, PreTrainedModel)
            and model.can_generate()
            and hasattr(config, "max_position_embeddings")
        ):
            # it is one already, with its own cache
            return found | {"model": model, "context": config.max_position_embeddings}
        about = _about(model, config, sizes, found["special"])
        return found | {"model": WrappedLM(model, about), "context": about.text_positions}
    if isinstance(model, DiffusionLM):
        if mask_id not in (None, config.mask_token_id):
            raise ValueError(
                f"a DiffusionLM has its [MASK] in its config, got mask_id={mask_id}; leave it out"
            )
        known = {
            "family": "diffusion",
            "model": model,
            "context": config.context or config.text_positions,
        }
        return found | known | {"special": special}
    if mask_id is not None and not 0 <= mask_id < rows:
        raise ValueError(
            f"mask_id must be an id of the vocabulary, 0 to {rows - 1}, but is {mask_id}"
        )
    notes = []
    special = replace(special, mask=special.mask if mask_id is None else mask_id)
    if special.mask is None:
        notes.append(
            f"neither tokenizer nor config says which id is [MASK]: give {HOW} a mask_id to denoise"
        )
    around = _around(config, tokenizer, rows) if kind == "masked" else None
    if around is not None:
        special = replace(special, bos=around[0], eos=around[1], stop=(around[1],))
        found["tokenizer"] = _with_rows(tokenizer)
    elif kind == "masked":
        notes.append(
            "no tokenizer or config names [CLS] and [SEP]: nothing is put around its texts; write "
            "them"
        )
    about = _about(model, config, sizes, special)
    if around is not None:
        about.opening_ids, about.closing_ids = around[:1], around[1:]
    if about.global_layers is not None:
        layers = ", ".join(map(str, about.global_layers))
        notes.append(
            f"some layers see a window alone: studies record those that see everything ({layers})"
        )
    found |= {"family": "diffusion", "special": special, "notes": tuple(notes)}
    return found | {"model": WrappedLM(model, about), "context": about.text_positions}


def _about(
    model: nn.Module, config: Any, sizes: Mapping[str, Any], special: SpecialIds
) -> WrappedConfig:
    """The config of a wrapped module that puts nothing around its texts."""
    limit, first = position_limits(model, config)
    return WrappedConfig(
        **sizes,
        max_position_embeddings=limit,
        first_position=first,
        global_layers=_global_layers(config),
        mask_token_id=special.mask,
        pad_token_id=special.pad,
        eos_ids=special.stop,
    )


def _global_layers(config: Any) -> tuple[int, ...] | None:
    """Numbers of the layers with full attention, if a config says that others have windows."""
    kinds = getattr(config, "layer_types", None) or ()
    if "sliding_attention" not in kinds:
        return None
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")


def _of_vocabulary(special: SpecialIds, rows: int) -> SpecialIds:
    """The special ids without those that the model has no row for: of a config they may be its
    class's defaults.
    """
    roles = {name: getattr(special, name) for name in ("mask", "eos", "eot", "pad", "bos")}
    known = {
        name: one if one is not None and 0 <= one < rows else None for name, one in roles.items()
    }
    return SpecialIds(**known, stop=tuple(one for one in special.stop if 0 <= one < rows))


def _around(
    config: Any, tokenizer: PreTrainedTokenizerBase | None, rows: int
) -> tuple[int, int] | None:
    """Ids that stand before and behind a text of a masked language model: [CLS] and [SEP], or <s>
    and </s>.
    """
    around = []
    for names in (("cls_token_id", "bos_token_id"), ("sep_token_id", "eos_token_id")):
        said = [getattr(source, name, None) for source in (tokenizer, config) for name in names]
        around += [one for one in said if isinstance(one, int) and one < rows][:1]
    return (around[0], around[1]) if len(around) == 2 else None


def _with_rows(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase | None:
    """A copy whose packed rows begin with [CLS] and in which [SEP] ends a document."""
    if tokenizer is None:
        return None
    tokenizer = copy.deepcopy(tokenizer)
    for name, meant in (("bos_token", "cls_token"), ("eos_token", "sep_token")):
        if getattr(tokenizer, name) is None:
            setattr(tokenizer, name, getattr(tokenizer, meant))
    # as `sinklab.lab.data.rows.begin_rows` marks one
    tokenizer.init_kwargs["row_start"] = True
    return tokenizer
