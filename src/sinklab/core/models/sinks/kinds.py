"""Kinds of added sinks: the token of «One Token Is Enough», and others to compare it with."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sinklab.core.models.sinks.base import Sink
from sinklab.core.registry import sinks

if TYPE_CHECKING:
    from torch import Tensor

    from sinklab.core.models.sinks.prefix import SinkPrefix


@sinks.register("token")
class TokenSink(Sink):
    """A learned embedding, run through the layers, that sees itself alone (Eq. 5–6)."""

    label = ""


@sinks.register("zero")
class ZeroValueSink(Sink):
    """A learned embedding, run through the layers, with value states of zero in each (Table 5)."""

    label = "zero-value"

    def values(self, v_BKND: Tensor) -> Tensor:
        """Zeros."""
        return v_BKND.new_zeros(v_BKND.shape)


@sinks.register("kv")
class KeyValueSink(Sink):
    """Learned keys and values of each layer, without rotary positions: the text starts at 0."""

    label = "key/value"
    tensors = ("sink_keys", "sink_values")
    positions = 0

    def shape(self, config: Any, name: str) -> tuple[int, ...]:
        """(layers, N, key/value heads, head dim)."""
        return (
            config.backbone.num_hidden_layers,
            config.sink_count,
            config.kv_heads,
            config.head_dim,
        )

    def initialize(self, name: str, tensor: Tensor, std: float) -> None:
        """Values of zero: a new sink takes attention, and adds nothing yet."""
        if name == "sink_values":
            tensor.zero_()
        else:
            tensor.normal_(std=std)

    def prefix(self, model: Any, length: int, lengths_B: Tensor | None = None) -> SinkPrefix:
        """The parameters themselves, the same in every row; keys are not rotated."""
        from sinklab.core.models.sinks.prefix import per_layer

        return per_layer(model.sink_keys, model.sink_values)


@sinks.register("logit")
class LogitSink(Sink):
    """Learned logits b of each layer and query head, as one more term of its softmax.

    Weights become exp(s_ij) / (exp(b) + Σ_k exp(s_ik)).

    A key and a value of zero with b added to the scores; equal to the output without it times
    sigmoid(lse − b), with lse the log-sum-exp of the query's scores
    (:func:`sinklab.core.attention.with_sink_logits`).
    """

    tensors = ("sink_logits",)
    positions = 0

    def shape(self, config: Any, name: str) -> tuple[int, ...]:
        """(layers, query heads, N)."""
        backbone = config.backbone
        return (backbone.num_hidden_layers, backbone.num_attention_heads, config.sink_count)

    def prefix(self, model: Any, length: int, lengths_B: Tensor | None = None) -> SinkPrefix:
        """Keys and values of zero, with the parameters as their logits."""
        from sinklab.core.models.sinks.prefix import per_layer

        config = model.config
        logits_LHN = model.sink_logits
        zeros = logits_LHN.new_zeros(
            len(logits_LHN), config.sink_count, config.kv_heads, config.head_dim
        )
        return replace(per_layer(zeros, zeros), logits=tuple(logits_LHN))
