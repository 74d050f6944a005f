"""Configuration of a diffusion language model: a backbone's config plus what makes it a DLM."""

from __future__ import annotations

import difflib
from typing import Any

from transformers import AutoConfig, PreTrainedConfig

SINK_KINDS = ("none", "token", "zero")
SINK_SIDES = ("front", "end")
GATES = ("none", "elementwise")
SINK_COUNTS = (0, 1, 2, 4)
BACKBONES = ("llama", "qwen2", "qwen3")


def _one_of(name: str, value: object, allowed: tuple) -> None:
    if value not in allowed:
        near = difflib.get_close_matches(str(value), [str(a) for a in allowed], n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, but is {value!r}{hint}")


class DiffusionLMConfig(PreTrainedConfig):
    """Config of :class:`~sinklab.models.DiffusionLM`. A variant of the model is a value in here, never another class.

    Args:
        backbone: config of the Hugging Face decoder (a config object, or its ``to_dict()``), of type llama, qwen2 or
            qwen3.
        sink_kind: ``none``; ``token`` (a learned embedding run through the layers, Eq. 5–6); ``zero`` (the same with
            its value states forced to zero in every layer, Table 5).
        sink_count: number of sink tokens, each isolated from the others (0, 1, 2 or 4).
        sink_side: ``front`` (sinks take positions 0…n−1, text starts at n, Eq. 5) or ``end`` (Eq. 7).
        gate: ``elementwise`` multiplies the attention output by sigmoid(X·W_g) before the output projection (Eq. 8–10).
        gate_bias: None for a gate without bias, as in Eq. 9 (starts near 0.5); a number adds a bias that starts there
            (4 opens it).
        mask_token_id: id of [MASK] in the backbone's vocabulary.
        logit_shift: True when the output at position i − 1 predicts position i (Dream).

    Raises:
        ValueError: for an unknown value, naming the near ones; for a sink kind without a count or a count without a
            kind.
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
        **kwargs: Any,
    ) -> None:
        if backbone is None:
            raise ValueError(
                "DiffusionLMConfig needs a backbone: pass LlamaConfig(...), Qwen2Config(...) or Qwen3Config(...)"
            )
        if isinstance(backbone, dict):
            fields = dict(backbone)
            _one_of("the backbone's model_type", fields.get("model_type"), BACKBONES)
            backbone = AutoConfig.for_model(fields.pop("model_type"), **fields)
        _one_of("the backbone's model_type", backbone.model_type, BACKBONES)
        _one_of("sink_kind", sink_kind, SINK_KINDS)
        _one_of("sink_count", sink_count, SINK_COUNTS)
        _one_of("sink_side", sink_side, SINK_SIDES)
        _one_of("gate", gate, GATES)
        if (sink_kind == "none") != (sink_count == 0):
            raise ValueError(
                f"sink_kind and sink_count must agree, but are {sink_kind!r} and {sink_count}; use "
                "kind 'none' with count 0"
            )
        if mask_token_id is not None and not 0 <= mask_token_id < backbone.vocab_size:
            raise ValueError(
                f"mask_token_id must be an id of the backbone's vocabulary (0…{backbone.vocab_size - 1}), "
                f"but is {mask_token_id}; add a row for [MASK] to the vocabulary"
            )
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
        self.gate_bias = gate_bias
        self.mask_token_id = mask_token_id
        self.logit_shift = logit_shift
        kwargs.setdefault("tie_word_embeddings", backbone.tie_word_embeddings)
        for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
            kwargs.setdefault(name, getattr(backbone, name, None))
        super().__init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        """Size of the backbone's vocabulary."""
        return self.backbone.vocab_size

    def get_text_config(self, *args: Any, **kwargs: Any) -> PreTrainedConfig:
        """The config that holds the decoder's sizes (asked for by transformers)."""
        return self
