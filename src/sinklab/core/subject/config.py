"""Configuration of a diffusion language model: a backbone's config and what makes it a DLM. A
variant of the model is a value of this config, never another class.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from types import NoneType
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

from sinklab.core.compat import config_keys, stated
from sinklab.core.errors import limited, near, one_of, within_limits
from sinklab.core.registry import sinks
from sinklab.core.subject.sinks import SIDES, sink_of

BACKBONES = ("llama", "qwen2", "qwen3", "qwen3_moe", "glm4_moe")
ATTENTION = ("full", "causal", "first_alone")
SPECIAL = ("pad_token_id", "eos_token_id", "bos_token_id")


def refuse_unknown(settings: Iterable[str], known: Iterable[str] = ()) -> None:
    """Raises ValueError for a key that is neither a field of the config nor ``known``."""
    for name in settings:
        if name not in OWN and name not in known:
            hint = near(name, OWN) or f"known are {', '.join(OWN)}"
            raise ValueError(f"{name!r} is no setting of a diffusion language model; {hint}")


def _check(config: DiffusionLMConfig) -> None:
    """Raises ValueError if the settings do not fit together."""
    kind = config.sink_kind
    remedy = "if a plug-in defines it, install that or name its file: --plugin"
    one_of("sink_kind", kind.partition(":")[0], ("none", *sinks), remedy)
    if (kind == "none") != (config.sink_count == 0):
        raise ValueError(
            f"sink_kind and sink_count must agree, got {kind!r} with {config.sink_count}: none "
            "has 0"
        )
    if config.sink is not None and config.sink_side not in config.sink.sides:
        raise ValueError(
            f"sink_side must be {' or '.join(map(repr, config.sink.sides))} for sink_kind "
            f"{kind!r}, whose keys have no position, but is {config.sink_side!r}; leave it out"
        )
    size = config.backbone.vocab_size
    rows = config.output_vocab_size
    for name, value, limit in (
        ("mask_token_id", config.mask_token_id, size - 1),
        ("text_vocab_size", config.text_vocab_size, size),
        ("output_vocab_size", rows, size),
    ):
        if value is not None and value > limit:
            raise ValueError(
                f"{name} must be at most {limit}, as the backbone's vocabulary has {size} ids, but "
                f"is {value}; add rows to the vocabulary, or leave it out"
            )
    if rows not in (None, size) and config.backbone.tie_word_embeddings:
        raise ValueError(
            f"a head of {rows} rows cannot be tied to an embedding of {size}; set "
            "tie_word_embeddings=False in the backbone"
        )
    if config.block_length is not None and config.attention != "full":
        raise ValueError(
            f"attention={config.attention!r} and attention in blocks exclude one another, got "
            f"block_length={config.block_length}; leave out one of them"
        )


def _check_kinds(settings: Mapping[str, Any]) -> None:
    """Raises ValueError for special ids that are no ids, and for a gate bias that is no number."""
    for name in SPECIAL:
        value = settings.get(name)
        ids = [value]
        if name == "eos_token_id" and isinstance(value, list | tuple):
            ids = [*value]
        if any(type(one) not in (int, NoneType) for one in ids):
            raise ValueError(
                f"{name} must be a whole number or None, but is {value!r}; give it without quotes"
            )
    bias = settings.get("gate_bias")
    if type(bias) not in (int, float, NoneType):
        raise ValueError(
            f"gate_bias must be a number or None, but is {bias!r}; give it without quotes"
        )


def _bidirectional(backbone: PreTrainedConfig | Mapping[str, Any] | None) -> PreTrainedConfig:
    """A copy of a backbone's config (or ``to_dict()``) without a causal mask."""
    if backbone is None:
        raise ValueError(
            "DiffusionLMConfig needs a backbone: pass a LlamaConfig, Qwen2Config or Qwen3Config"
        )
    # the caller's config may belong to a causal model that is still in use
    config: Any = copy.deepcopy(backbone)
    if isinstance(config, Mapping):
        one_of("the backbone's model_type", config.get("model_type"), BACKBONES)
        config = AutoConfig.for_model(**config)
    one_of("the backbone's model_type", config.model_type, BACKBONES)
    if "sliding_attention" in (stated(config, "layer_types") or ()):
        raise ValueError(
            "a bidirectional model needs full attention in every layer, but the backbone has "
            "sliding windows; set use_sliding_window=False"
        )
    config.is_causal = False
    return config


class DiffusionLMConfig(PreTrainedConfig):
    """Config of `DiffusionLM`.

    Args:
        backbone: config of the decoder or its ``to_dict()``, of a type in :data:`BACKBONES`.
        sink_kind: ``none``, or a kind of :data:`sinklab.core.registry.sinks`.
        sink_count: number of sink tokens (0, 1, 2 or 4).
        sink_side: ``front`` (sinks take positions 0…n−1, Eq. 5) or ``end`` (Eq. 7); a kind without
            positions is ``front``.
        gate: ``elementwise`` multiplies the attention output by sigmoid(X·W_g) (Eq. 8–10).
        gate_bias: initial bias of the gate (4 opens it); None for no bias, as in Eq. 9.
        mask_token_id: id of [MASK].
        logit_shift: True when the output at position i − 1 predicts position i (Dream).
        text_vocab_size: ids from here on are no text (MMaDA's image codes).
        output_vocab_size: rows of the LM head if it has fewer than the embedding (SMDM).
        rope_dtype: type to which rotary tables are rounded (``bfloat16``: SMDM and One-Token).
        eot_token_id: id of the end-of-turn token.
        context: recommended maximum of tokens, not enforced.
        attention: keys that a query of the text sees besides the sinks: ``full``, all; ``causal``,
            itself and those to its left; ``first_alone``, all, but the first token only itself.
        block_length: tokens of a block if attention is block-causal: a token sees its own block and
            those before it (BD3-LM, 2503.09573). None for full attention.
        clean_attention: how finished blocks attend: ``block``, as before, or ``causal``, from left
            to right inside the block too.
        blocks_from: what blocks are counted from: the first token of the ``text``, or the first
            ``column`` of the batch.
        first_alone: whether the first token of a block is written before the others.

    Raises:
        ValueError: for unknown keys or values, and settings that do not fit.
    """

    model_type = "sinklab_diffusion"
    sub_configs = {"backbone": AutoConfig}  # noqa: RUF012 (transformers reads a plain class attribute)
    has_no_defaults_at_init = True

    backbone: Any = None
    sink_kind: str = "none"
    sink_count: int = limited(0, one_of=(0, 1, 2, 4))
    sink_side: str = limited("front", one_of=SIDES)
    gate: str = limited("none", one_of=("none", "elementwise"))
    gate_bias: float | None = None
    mask_token_id: int | None = limited(None, at_least=0)
    logit_shift: bool = False
    text_vocab_size: int | None = limited(None, at_least=1)
    output_vocab_size: int | None = limited(None, at_least=1)
    rope_dtype: str = limited("float32", one_of=("float32", "bfloat16"))
    eot_token_id: int | None = None
    context: int | None = limited(None, at_least=1)
    attention: str = limited("full", one_of=ATTENTION)
    block_length: int | None = limited(None, at_least=1)
    clean_attention: str = limited("block", one_of=("block", "causal"))
    blocks_from: str = limited("text", one_of=("text", "column"))
    first_alone: bool = False

    def __init__(
        self, backbone: PreTrainedConfig | dict[str, Any] | None = None, **settings: Any
    ) -> None:
        refuse_unknown(settings, config_keys())
        self.backbone = _bidirectional(backbone)
        _check_kinds(settings)
        for field in dataclasses.fields(self):
            if field.name in OWN and field.name != "backbone":
                value = settings.pop(field.name, field.default)
                setattr(self, field.name, within_limits(field, value))
        _check(self)
        if self.gate_bias is not None:
            # an int would make an integer bias
            self.gate_bias = float(self.gate_bias)
        settings.setdefault("tie_word_embeddings", self.backbone.tie_word_embeddings)
        for name in SPECIAL:
            settings.setdefault(name, stated(self.backbone, name))
        super().__init__(**settings)

    sink = property(sink_of, doc="The added sink; None without one.")

    @property
    def vocab_size(self) -> int:
        """Ids of the backbone."""
        return self.backbone.vocab_size

    @vocab_size.setter
    def vocab_size(self, value: int) -> None:
        self.backbone.vocab_size = value

    @property
    def sink_positions(self) -> int:
        """Positions that the sinks take."""
        if self.sink is None:
            return 0
        return self.sink.positions * self.sink_count

    @property
    def text_positions(self) -> int:
        """Tokens of text that the positions reach."""
        return self.backbone.max_position_embeddings - self.sink_positions

    def check_length(self, length: int) -> None:
        """Raises ValueError for a text that is too long."""
        if length > self.text_positions:
            raise ValueError(
                f"the text has {length} tokens, but the model's context is {self.text_positions}; "
                "shorten the prompt or ask for fewer new tokens"
            )

    @property
    def text_start(self) -> int:
        """Position of the first token of text."""
        if self.sink_side == "front":
            return self.sink_positions
        return 0

    def closing_of(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Ids that end such a text, as BERT's [SEP] does: none."""
        return ()

    @property
    def block_columns(self) -> int:
        """Divisor of the prompt's length if the completion is to begin a block."""
        if self.block_length is None or self.blocks_from == "text":
            return 1
        return self.block_length

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        own = stated(self.backbone, "head_dim")
        return own or self.backbone.hidden_size // self.backbone.num_attention_heads

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every end-of-text id; Llama-3.1 has several."""
        eos = self.eos_token_id
        if isinstance(eos, int):
            return (eos,)
        return tuple(eos or ())

    @property
    def decoding(self) -> dict[str, Any]:
        """Arguments of `DecodingSettings.decode` that belong to the model."""
        ends = [*self.eos_ids]
        if self.eot_token_id is not None:
            ends.append(self.eot_token_id)
        return {"eos_ids": ends, "text_vocabulary": self.text_vocab_size}

    def get_text_config(self, *args: Any, **kwargs: Any) -> PreTrainedConfig:
        """This config, for transformers."""
        return self


OWN = (*DiffusionLMConfig.__annotations__,)
"""The fields that transformers' configs do not have."""
