"""Two kinds of added sink without a position: keys and values of each layer, and logits of each
head. «One Token Is Enough» has a token; others were published for causal models, and a comparison
needs them.

As the sinks of the core, the labels are there without torch.
"""

# B batch, N sinks, L layers, H query heads, K key/value heads, D head dim
from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sinklab.core.registry import sinks
from sinklab.core.subject.sinks import Sink

if TYPE_CHECKING:
    from torch import Tensor

    from sinklab.core.subject.prefix import SinkPrefix


def per_layer(keys_LNKD: Tensor, values_LNKD: Tensor) -> SinkPrefix:
    """These keys and values of each layer as a prefix of one row, without rotary positions."""
    from sinklab.core.subject.prefix import SinkPrefix

    keys, values = (
        tuple(row_NKD.transpose(0, 1)[None] for row_NKD in states_LNKD)
        for states_LNKD in (keys_LNKD, values_LNKD)
    )
    return SinkPrefix(keys, values)


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
            config.backbone.num_key_value_heads,
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
        return per_layer(model.sink_keys, model.sink_values)


@sinks.register("logit")
class LogitSink(Sink):
    """Learned logits b of each layer and query head, as one more term of its softmax.

    Weights become exp(s_ij) / (exp(b) + Σ_k exp(s_ik)).

    A key and a value of zero with b added to the scores; equal to the output without it times
    sigmoid(lse − b), with lse the log-sum-exp of the query's scores.
    """

    tensors = ("sink_logits",)
    positions = 0
    needs_mask = True

    def shape(self, config: Any, name: str) -> tuple[int, ...]:
        """(layers, query heads, N)."""
        backbone = config.backbone
        return (backbone.num_hidden_layers, backbone.num_attention_heads, config.sink_count)

    def attach(self, decoder: Any) -> None:
        """The hook that adds the logits to the mask of each layer."""
        from sinklab.lab.sink_logits import add_logits

        for layer in decoder.layers:
            layer.self_attn.register_forward_pre_hook(add_logits, with_kwargs=True)

    def prefix(self, model: Any, length: int, lengths_B: Tensor | None = None) -> SinkPrefix:
        """Keys and values of zero, with the parameters as their logits."""
        from sinklab.lab.sink_logits import LogitPrefix

        config = model.config
        logits_LHN = model.sink_logits
        zeros = logits_LHN.new_zeros(
            len(logits_LHN), config.sink_count, config.backbone.num_key_value_heads, config.head_dim
        )
        prefix = per_layer(zeros, zeros)
        return LogitPrefix(prefix.keys, prefix.values, tuple(logits_LHN))
