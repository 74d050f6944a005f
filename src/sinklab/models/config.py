"""Configuration of a diffusion language model: a backbone's config plus what makes it a DLM."""

from __future__ import annotations

import copy
import dataclasses
import difflib
from collections.abc import Iterable
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

SINK_TENSORS = {
    "none": (),
    "token": ("sink_embeddings",),
    "zero": ("sink_embeddings",),
    "kv": ("sink_keys", "sink_values"),
}
"""Sink kind -> the model's parameters that are the sink."""
SINK_NAMES = tuple(dict.fromkeys(name for names in SINK_TENSORS.values() for name in names))
SINK_KINDS = tuple(SINK_TENSORS)
SINK_SIDES = ("front", "end")
GATES = ("none", "elementwise")
SINK_COUNTS = (0, 1, 2, 4)
BACKBONES = ("llama", "qwen2", "qwen3")
ROPE_DTYPES = ("float32", "bfloat16")
SPECIAL = ("pad_token_id", "eos_token_id", "bos_token_id")
# What PreTrainedConfig takes as keywords, or transformers writes into config.json, without a field of that name.
_OF_TRANSFORMERS = {"model_type", "tie_word_embeddings", "pad_token_id", "eos_token_id", "bos_token_id", "torch_dtype"}
_OF_TRANSFORMERS |= {"name_or_path", "_name_or_path", "_commit_hash", "output_attentions", "use_cache", "auto_map"}
_OF_TRANSFORMERS |= {"attn_implementation", "_attn_implementation", "_attn_implementation_internal", "num_labels"}
_OF_TRANSFORMERS |= {"experts_implementation", "_experts_implementation_internal", "quantization_config"}


def _one_of(name: str, value: object, allowed: tuple) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(str(value), [str(a) for a in allowed], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, but is {value!r}{hint}")


def _check_numbers(settings: dict[str, Any]) -> None:
    for name, value in settings.items():
        several = name == "eos_token_id" and isinstance(value, list | tuple)
        if any(type(one) is not int for one in (value if several else [value]) if one is not None):
            raise ValueError(f"{name} must be a whole number or None, but is {value!r}; give it without quotes")


def _check_vocabulary(
    backbone: PreTrainedConfig, mask_token_id: int | None, text_vocab_size: int | None, output_vocab_size: int | None
) -> None:
    size = backbone.vocab_size
    if mask_token_id is not None and not 0 <= mask_token_id < size:
        raise ValueError(
            f"mask_token_id must be an id of the backbone's vocabulary (0…{size - 1}), "
            f"but is {mask_token_id}; add a row for [MASK] to the vocabulary"
        )
    for name, value in (("text_vocab_size", text_vocab_size), ("output_vocab_size", output_vocab_size)):
        if value is not None and not 1 <= value <= size:
            raise ValueError(
                f"{name} must be from 1 to the size of the vocabulary {size}, but is {value}; leave it out"
            )
    if output_vocab_size not in (None, size) and backbone.tie_word_embeddings:
        raise ValueError(
            f"a head of {output_vocab_size} rows cannot be tied to an embedding of {size}; "
            "set tie_word_embeddings=False in the backbone"
        )


def refuse_unknown(settings: dict[str, Any], known: Iterable[str] = ()) -> None:
    """Raise for a key that is no field of :class:`DiffusionLMConfig` and not among ``known``, naming the near ones.

    Raises:
        ValueError: if there is such a key.
    """
    ours = [name for name in DiffusionLMConfig.__init__.__annotations__ if name not in ("kwargs", "return")]
    for name in settings:
        if name not in ours and name not in known:
            near = difflib.get_close_matches(name, ours, n=2)
            hint = f"did you mean {' or '.join(map(repr, near))}?" if near else f"known are {', '.join(ours)}"
            raise ValueError(f"{name!r} is no setting of a diffusion language model; {hint}")


class DiffusionLMConfig(PreTrainedConfig):
    """Config of :class:`~sinklab.models.DiffusionLM`. A variant of the model is a value in here, never another class.

    Args:
        backbone: config of the Hugging Face decoder (a config object, or its ``to_dict()``), of type llama, qwen2 or
            qwen3.
        sink_kind: ``none``; ``token`` (a learned embedding run through the layers, Eq. 5–6); ``zero`` (the same with
            its value states forced to zero in every layer, Table 5); ``kv`` (learned keys and values of each layer,
            without rotary positions: it takes none, and the text starts at 0).
        sink_count: number of sink tokens, each isolated from the others (0, 1, 2 or 4).
        sink_side: ``front`` (sinks take positions 0…n−1, text starts at n, Eq. 5) or ``end`` (Eq. 7); ``kv`` has no
            positions and is ``front``.
        gate: ``elementwise`` multiplies the attention output by sigmoid(X·W_g) before the output projection (Eq. 8–10).
        gate_bias: None for a gate without bias, as in Eq. 9 (starts near 0.5); a number adds a bias that starts there
            (4 opens it).
        mask_token_id: id of [MASK] in the backbone's vocabulary.
        logit_shift: True when the output at position i − 1 predicts position i (Dream).
        text_vocab_size: ids from here on are no text (MMaDA's image codes); None when all are.
        output_vocab_size: rows of the LM head where it has fewer than the embedding (SMDM: none for [MASK]); the ids
            without a row get the lowest logit there is. None when every id has one.
        rope_dtype: precision to which the rotary cosines and sines are rounded, ``float32`` (not at all) or
            ``bfloat16`` (as the released SMDM and One-Token code does).
        eot_token_id: id of the end-of-turn token of a chat model.
        context: tokens that prompt and completion should have together at most, as the authors state it; advice that
            the model does not enforce. None where only the positions limit it.

    Raises:
        ValueError: for an unknown key or value, naming the near ones; for a sink kind without a count or a count
            without a kind.
    """

    model_type = "sinklab_diffusion"
    sub_configs = {"backbone": AutoConfig}  # noqa: RUF012 (transformers reads a plain class attribute)
    has_no_defaults_at_init = True

    def __init__(
        self,
        backbone: PreTrainedConfig | dict[str, Any] | None = None,
        sink_kind: str = "none",
        sink_count: int = 0,
        sink_side: str = "front",
        gate: str = "none",
        gate_bias: float | None = None,
        mask_token_id: int | None = None,
        logit_shift: bool = False,
        text_vocab_size: int | None = None,
        output_vocab_size: int | None = None,
        rope_dtype: str = "float32",
        eot_token_id: int | None = None,
        context: int | None = None,
        **kwargs: Any,
    ) -> None:
        theirs = {field.name for field in dataclasses.fields(PreTrainedConfig)} | PreTrainedConfig().to_dict().keys()
        refuse_unknown(kwargs, theirs | _OF_TRANSFORMERS)
        if backbone is None:
            raise ValueError(
                "DiffusionLMConfig needs a backbone: pass LlamaConfig(...), Qwen2Config(...) or Qwen3Config(...)"
            )
        if isinstance(backbone, dict):
            fields = dict(backbone)
            _one_of("the backbone's model_type", fields.get("model_type"), BACKBONES)
            backbone = AutoConfig.for_model(fields.pop("model_type"), **fields)
        else:
            # the caller's config may belong to a causal model that is still in use
            backbone = copy.deepcopy(backbone)
        _one_of("the backbone's model_type", backbone.model_type, BACKBONES)
        _one_of("sink_kind", sink_kind, SINK_KINDS)
        _one_of("sink_count", sink_count, SINK_COUNTS)
        _one_of("sink_side", sink_side, SINK_SIDES)
        _one_of("gate", gate, GATES)
        _one_of("rope_dtype", rope_dtype, ROPE_DTYPES)
        if (sink_kind == "none") != (sink_count == 0):
            raise ValueError(
                f"sink_kind and sink_count must agree, but are {sink_kind!r} and {sink_count}; use "
                "kind 'none' with count 0"
            )
        if sink_kind == "kv" and sink_side != "front":
            raise ValueError(
                "sink_side must be 'front' for sink_kind 'kv', whose keys have no position, but is "
                f"{sink_side!r}; leave it out"
            )
        _check_numbers({"text_vocab_size": text_vocab_size, "output_vocab_size": output_vocab_size, "context": context})
        _check_numbers({"mask_token_id": mask_token_id, "eot_token_id": eot_token_id})
        _check_numbers({name: kwargs[name] for name in SPECIAL if name in kwargs})
        if gate_bias is not None and (isinstance(gate_bias, bool) or not isinstance(gate_bias, int | float)):
            raise ValueError(f"gate_bias must be a number or None, but is {gate_bias!r}; give it without quotes")
        if context is not None and context < 1:
            raise ValueError(f"context must be at least 1 token, but is {context}; leave it out for no limit")
        _check_vocabulary(backbone, mask_token_id, text_vocab_size, output_vocab_size)
        if "sliding_attention" in (getattr(backbone, "layer_types", None) or ()):
            raise ValueError(
                "a bidirectional model needs full attention in every layer, but the backbone has sliding windows; "
                "set use_sliding_window=False"
            )
        backbone.is_causal = False
        self.backbone = backbone
        self.sink_kind = sink_kind
        self.sink_count = sink_count
        self.sink_side = sink_side
        self.gate = gate
        # an int would make a bias of whole numbers
        self.gate_bias = None if gate_bias is None else float(gate_bias)
        self.mask_token_id = mask_token_id
        self.logit_shift = logit_shift
        self.text_vocab_size = text_vocab_size
        self.output_vocab_size = output_vocab_size
        self.rope_dtype = rope_dtype
        self.eot_token_id = eot_token_id
        self.context = context
        kwargs.setdefault("tie_word_embeddings", backbone.tie_word_embeddings)
        for name in SPECIAL:
            kwargs.setdefault(name, getattr(backbone, name, None))
        super().__init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        """Size of the backbone's vocabulary."""
        return self.backbone.vocab_size

    @vocab_size.setter
    def vocab_size(self, value: int) -> None:
        self.backbone.vocab_size = value

    @property
    def text_positions(self) -> int:
        """Tokens of text that the positions reach; every sink that is a token takes one."""
        return self.backbone.max_position_embeddings - (0 if self.sink_kind == "kv" else self.sink_count)

    @property
    def text_start(self) -> int:
        """Position of the first token of text: behind the sinks that stand in front."""
        return self.sink_count if self.sink_side == "front" and self.sink_kind != "kv" else 0

    @property
    def sink_shape(self) -> tuple[int, ...]:
        """Shape of each of the sink's tensors: (N, D) for tokens, (layers, N, key heads, head width) for ``kv``."""
        if self.sink_kind == "kv":
            return (self.backbone.num_hidden_layers, self.sink_count, self.kv_heads, self.head_dim)
        return (self.sink_count, self.backbone.hidden_size)

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return (
            getattr(self.backbone, "head_dim", None) or self.backbone.hidden_size // self.backbone.num_attention_heads
        )

    @property
    def kv_heads(self) -> int:
        """Key/value heads of a layer."""
        return self.backbone.num_key_value_heads or self.backbone.num_attention_heads

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Every end-of-text id; Llama-3.1 has several, and a config may hold one, a list or none."""
        eos = self.eos_token_id
        return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)

    def get_text_config(self, *args: Any, **kwargs: Any) -> PreTrainedConfig:
        """The config that holds the decoder's sizes (asked for by transformers)."""
        return self
