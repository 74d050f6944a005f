"""Learned keys and values of each layer, without a position."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sinklab.core.models.sinks.base import Sink
from sinklab.core.registry import sinks

if TYPE_CHECKING:
    from torch import Tensor

    from sinklab.core.models.sinks.prefix import SinkPrefix


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
