"""A module from elsewhere as a model of ours: its kind, its sizes, its special tokens, what stands around its texts."""

import copy
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sinklab.checkpoints.families import Family, SpecialIds
from sinklab.checkpoints.tokens import special_ids
from sinklab.errors import one_of
from sinklab.models.wrapped import WrappedConfig, WrappedLM, position_limits

KINDS = ("autoregressive", "diffusion", "masked")
SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
HOW = "sinklab.wrap(model, tokenizer)"
_MARKS = {"masked": ("ForMaskedLM",), "autoregressive": ("ForCausalLM", "LMHeadModel")}
"""What the names of transformers' classes say of a model's kind."""


def kind_of(model: nn.Module) -> str:
    """One of :data:`KINDS`, where the class, or else the config, of a module says it.

    Raises:
        ValueError: where neither does.
    """
    config = config_of(model)
    names = [type(model).__name__, *(getattr(config, "architectures", None) or ())]
    for name in names:
        for kind, marks in _MARKS.items():
            if any(mark in name for mark in marks):
                return kind
    if getattr(config, "is_decoder", False):
        return "autoregressive"
    raise ValueError(
        f"a wrapped model reads from left to right or fills masks, but neither the class {names[0]} nor its config "
        'says which; pass kind="autoregressive", kind="diffusion" (masks at any rate, nothing around a text) or '
        'kind="masked" (like BERT: [CLS] before a text, [SEP] behind it)'
    )


def config_of(model: nn.Module) -> Any:
    """The config of a model's text decoder as transformers has it; None for a module without."""
    config = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def sizes_of(model: nn.Module) -> dict[str, int] | None:
    """Layers, heads, hidden size and vocabulary as the config says; None where it lacks one of them."""
    config = config_of(model)
    found = {name: getattr(config, name, None) for name in SIZES}
    return found if all(isinstance(value, int) for value in found.values()) else None


def wrapped(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    mask_id: int | None,
    kind: str,
    sizes: Mapping[str, int],
) -> dict[str, Any]:
    """Fields of what `sinklab.load` returns, but for names, about this module.

    Args:
        model: maps ids (B, S) to logits (B, S, V).
        tokenizer: of its texts; None where prompts are ids.
        mask_id: id of [MASK]; None for what tokenizer or config say.
        kind: one of :data:`KINDS`.
        sizes: those of :data:`SIZES`.

    Raises:
        ValueError: for an unknown kind, a mask id outside the vocabulary, and one of a model that has no masks.
    """
    one_of("kind", kind, KINDS)
    config = config_of(model)
    special = _of_vocabulary(special_ids(config, tokenizer, None, Family()), sizes["vocab_size"])
    notes: tuple[str, ...] = ()
    is_framed = False
    if kind == "autoregressive":
        if mask_id is not None:
            raise ValueError(f"an autoregressive model has no [MASK], got mask_id={mask_id}; leave it out, or say kind")
        if isinstance(model, PreTrainedModel) and model.can_generate() and hasattr(config, "max_position_embeddings"):
            # it is one already, with its own cache
            limit: int | None = config.max_position_embeddings
            return _fields(model, tokenizer, "autoregressive", replace(special, mask=None), limit, notes)
        special = replace(special, mask=None)
    else:
        rows = sizes["vocab_size"]
        if mask_id is not None and not 0 <= mask_id < rows:
            raise ValueError(f"mask_id must be an id of the vocabulary, 0 to {rows - 1}, but is {mask_id}")
        special = replace(special, mask=special.mask if mask_id is None else mask_id)
        if special.mask is None:
            notes = (f"neither tokenizer nor config says which id is [MASK]: give {HOW} a mask_id to denoise",)
    if kind == "masked":
        opening, closing = _around(config, tokenizer, sizes["vocab_size"])
        if opening is None or closing is None:
            notes += ("no tokenizer or config names [CLS] and [SEP]: nothing is put around its texts; write them",)
        else:
            is_framed = True
            special = replace(special, bos=opening, eos=closing, stop=(closing,))
            tokenizer = _with_rows(tokenizer)
    limit, first = position_limits(model, config)
    everywhere = _global_layers(config)
    if everywhere is not None:
        notes += (f"studies record the layers {', '.join(map(str, everywhere))}: the others see a window alone",)
    about = WrappedConfig(
        **sizes,
        max_position_embeddings=limit,
        first_position=first,
        global_layers=everywhere,
        mask_token_id=special.mask,
        pad_token_id=special.pad,
        eos_ids=special.stop,
        opening_ids=(special.bos,) if is_framed else (),
        closing_ids=(special.eos,) if is_framed else (),
    )
    family = "autoregressive" if kind == "autoregressive" else "diffusion"
    return _fields(WrappedLM(model, about).eval(), tokenizer, family, special, limit, notes)


def _fields(
    model: nn.Module,
    tokenizer: PreTrainedTokenizerBase | None,
    family: str,
    special: SpecialIds,
    context: int | None,
    notes: tuple[str, ...],
) -> dict[str, Any]:
    found = {"model": model, "tokenizer": tokenizer, "family": family, "special": special, "notes": notes}
    return found | {"context": context, "published_family": "wrapped"}


def _global_layers(config: Any) -> tuple[int, ...] | None:
    """Numbers of the layers with full attention, where a config says that others have windows."""
    kinds = getattr(config, "layer_types", None) or ()
    if "sliding_attention" not in kinds:
        return None
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")


def _of_vocabulary(special: SpecialIds, rows: int) -> SpecialIds:
    """The special ids without those that the model has no row for: of a config they may be its class's defaults."""
    roles = {name: getattr(special, name) for name in ("mask", "eos", "eot", "pad", "bos")}
    known = {name: one if one is not None and 0 <= one < rows else None for name, one in roles.items()}
    return SpecialIds(**known, stop=tuple(one for one in special.stop if 0 <= one < rows))


def _around(config: Any, tokenizer: PreTrainedTokenizerBase | None, rows: int) -> tuple[int | None, int | None]:
    """Ids that stand before and behind a text of a masked language model: [CLS] and [SEP], or <s> and </s>."""
    around = []
    for names in (("cls_token_id", "bos_token_id"), ("sep_token_id", "eos_token_id")):
        said = [getattr(source, name, None) for source in (tokenizer, config) for name in names]
        around.append(next((one for one in said if isinstance(one, int) and one < rows), None))
    return around[0], around[1]


def _with_rows(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase | None:
    """A copy whose packed rows begin with [CLS] and in which [SEP] ends a document."""
    if tokenizer is None:
        return None
    tokenizer = copy.deepcopy(tokenizer)
    for name, meant in (("bos_token", "cls_token"), ("eos_token", "sep_token")):
        if getattr(tokenizer, name) is None:
            setattr(tokenizer, name, getattr(tokenizer, meant))
    # as `sinklab.data.rows.begin_rows` marks one
    tokenizer.init_kwargs["row_start"] = True
    return tokenizer
