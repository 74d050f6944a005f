"""A module from elsewhere as a model of ours: its kind, its sizes, its special tokens, and the
tokens around its texts.
"""

import copy
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from sinklab.core.compat import config_value, stated
from sinklab.core.errors import one_of
from sinklab.core.subject.diffusion_lm import DiffusionLM
from sinklab.lab.checkpoints.families import Family, SpecialIds
from sinklab.lab.checkpoints.tokens import special_ids
from sinklab.lab.checkpoints.wrapped import (
    WrappedConfig,
    WrappedLM,
    is_decoder,
    position_limits,
    sees_right,
)
from sinklab.lab.files import refused

KINDS = ("autoregressive", "diffusion", "masked")
SIZES = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")
MOST_ROUNDED = 8
"""Change of a logit, in units of its rounding, that a causal model may show."""
HOW = "sinklab.wrap(model, tokenizer)"
_MARKS = {"masked": ("ForMaskedLM",), "autoregressive": ("ForCausalLM", "LMHeadModel")}
"""Parts of the names of transformers' classes that say a model's kind."""


def check_module(model: object) -> None:
    """Raises ValueError for what is no module, an encoder-decoder, and a forward that wants more
    than ids.
    """
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"wrap takes an nn.Module that maps token ids to logits, got a {name}; make it one"
        )
    if config_value(model, "is_encoder_decoder"):
        raise ValueError(
            f"wrap takes a model that reads one text, but {name} has an encoder and a decoder; "
            "sinklab.trace records the attention of both"
        )
    taken = inspect.signature(model.forward)
    fault = f"wrap gives a module token ids alone, but {name}.forward takes {taken}; change it"
    with refused(fault, TypeError):
        taken.bind(None)


def kind_of(model: nn.Module) -> str:
    """One of :data:`KINDS`, if the class, or else the config, of a module says it.

    Raises:
        ValueError: if neither does.
    """
    if isinstance(model, DiffusionLM):
        return "diffusion"
    config = config_of(model)
    names = [type(model).__name__, *(stated(config, "architectures") or ())]
    for name in names:
        for kind, marks in _MARKS.items():
            if any(mark in name for mark in marks):
                return kind
    if stated(config, "is_decoder"):
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
    config: Any = stated(model, "config")
    if isinstance(config, PreTrainedConfig):
        return config.get_text_config()
    return config


def sizes_of(model: nn.Module) -> dict[str, int] | None:
    """Layers, heads, hidden size and vocabulary from the config; None if it lacks one of them."""
    config = config_of(model)
    config = stated(config, "backbone", config)
    found: dict[str, Any] = {name: stated(config, name) for name in SIZES}
    if all(isinstance(value, int) for value in found.values()):
        return found
    return None


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
        ValueError: for an unknown kind, one that a forward disproves, a mask id outside the
            vocabulary, and one of a model that has no masks.
    """
    one_of("kind", kind, KINDS)
    config = config_of(model)
    rows = sizes["vocab_size"]
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
        about = _about(model, config, sizes, found["special"])
        return found | _reading(model, config, about)
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
    notes = []
    special = _with_mask(special, mask_id, rows)
    if special.mask is None:
        notes.append(
            f"neither tokenizer nor config says which id is [MASK]: give {HOW} a mask_id to denoise"
        )
    around = None
    if kind == "masked":
        around = _around(config, tokenizer, rows)
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
        about.opening_ids = around[:1]
        about.closing_ids = around[1:]
    if about.global_layers is not None:
        layers = ", ".join(map(str, about.global_layers))
        notes.append(
            f"some layers see a window alone: studies record those that see everything ({layers})"
        )
    found |= {"family": "diffusion", "special": special, "notes": tuple(notes)}
    return found | {"model": _filling(model, about), "context": about.text_positions}


def _reading(model: nn.Module, config: Any, about: WrappedConfig) -> dict[str, Any]:
    """The module as one that reads from left to right, and its context. Raises ValueError if its
    tokens see those to their right.
    """
    found: dict[str, Any] = {"model": WrappedLM(model, about), "context": about.text_positions}
    if is_decoder(model) and stated(config, "max_position_embeddings") is not None:
        # it is one already, with its own cache
        found = {"model": model, "context": config.max_position_embeddings}
    if sees_right(found["model"]) > MOST_ROUNDED:
        raise ValueError(
            f"{type(model).__name__} is to read from left to right, but its tokens see those to "
            'their right; pass kind="diffusion" or kind="masked"'
        )
    return found


def _filling(model: nn.Module, about: WrappedConfig) -> WrappedLM:
    """The module as one that fills masks. Raises ValueError if it is causal, or a decoder of
    transformers that is causal beside padding, whose mask is built by the config whatever the
    layers say.
    """
    filling = WrappedLM(model, about)
    paddings: dict[str, list[int] | None] = {"": None}
    if is_decoder(model):
        paddings[" beside padding"] = [0, 1, 1, 1]
    for beside, attention_mask in paddings.items():
        if sees_right(filling, attention_mask) == 0:
            raise ValueError(
                f"{type(model).__name__} is to fill masks, but{beside} its tokens see none to "
                'their right: pass kind="autoregressive", or before it is wrapped set '
                "model.config.is_causal = False, if it is a decoder of transformers"
            )
    return filling


def _with_mask(special: SpecialIds, mask_id: int | None, rows: int) -> SpecialIds:
    """The special ids with the [MASK] that was asked for."""
    if mask_id is None:
        return special
    if not 0 <= mask_id < rows:
        raise ValueError(
            f"mask_id must be an id of the vocabulary, 0 to {rows - 1}, but is {mask_id}"
        )
    return replace(special, mask=mask_id)


def _about(
    model: nn.Module, config: Any, sizes: Mapping[str, Any], special: SpecialIds
) -> WrappedConfig:
    """The config of a wrapped module that puts nothing around its texts."""
    limit, first = position_limits(model, config)
    kinds, everything = stated(config, "layer_types") or (), None
    if "sliding_attention" in kinds:
        everything = tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")
    return WrappedConfig(
        **sizes,
        max_position_embeddings=limit,
        first_position=first,
        global_layers=everything,
        mask_token_id=special.mask,
        pad_token_id=special.pad,
        eos_ids=special.stop,
    )


def _of_vocabulary(special: SpecialIds, rows: int) -> SpecialIds:
    """The special ids without those that the model has no row for: of a config they may be its
    class's defaults.
    """
    ids = vars(special).items()
    known = {name: one for name, one in ids if isinstance(one, int) and 0 <= one < rows}
    return SpecialIds(**known, stop=tuple(one for one in special.stop if 0 <= one < rows))


def _around(
    config: Any, tokenizer: PreTrainedTokenizerBase | None, rows: int
) -> tuple[int, int] | None:
    """Ids that stand before and behind a text of a masked language model: [CLS] and [SEP], or <s>
    and </s>.
    """
    around = []
    for names in (("cls_token_id", "bos_token_id"), ("sep_token_id", "eos_token_id")):
        said = [stated(source, name) for source in (tokenizer, config) for name in names]
        around += [one for one in said if isinstance(one, int) and one < rows][:1]
    if len(around) != 2:
        return None
    return around[0], around[1]


def _with_rows(tokenizer: PreTrainedTokenizerBase | None) -> PreTrainedTokenizerBase | None:
    """A copy whose packed rows begin with [CLS] and in which [SEP] ends a document."""
    if tokenizer is None:
        return None
    tokenizer = copy.deepcopy(tokenizer)
    if tokenizer.bos_token is None:
        tokenizer.bos_token = tokenizer.cls_token
    if tokenizer.eos_token is None:
        tokenizer.eos_token = tokenizer.sep_token
    # as `sinklab.lab.data.rows.begin_rows` marks one
    tokenizer.init_kwargs["row_start"] = True
    return tokenizer
