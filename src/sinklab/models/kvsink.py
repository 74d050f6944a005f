"""A sink that is no token: learned keys and values of each layer, in front of those of the text."""

# L layers, N sinks, G key/value heads, D head dim
from __future__ import annotations

from typing import Any

from torch import Tensor

from sinklab.models.sink import SinkPrefix


def prefix(decoder: Any, keys_LNGD: Tensor, values_LNGD: Tensor) -> SinkPrefix:
    """The sinks as attention takes them: one row, each layer's part where the layer is. Gradients flow through it.

    Keys are not rotated, so that they mean the same at every distance.
    """
    places = [layer.input_layernorm.weight.device for layer in decoder.layers]

    def placed(states_LNGD: Tensor) -> tuple[Tensor, ...]:
        rows = (states_NGD.transpose(0, 1)[None] for states_NGD in states_LNGD.unbind())
        # the weights of an offloaded layer are on no device until it runs
        return tuple(row if at.type == "meta" else row.to(at) for row, at in zip(rows, places, strict=True))

    return SinkPrefix(placed(keys_LNGD), placed(values_LNGD))
