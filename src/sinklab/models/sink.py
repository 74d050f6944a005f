"""The sink token as a key/value prefix: it sees only itself, so its state in every layer does not depend on the
text.
"""

# B batch, H key/value heads, S keys of the text, N sinks, D head dim, L layers
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.attention import unobserved


@dataclass(frozen=True)
class SinkPrefix:
    """Keys and values of the sinks in every layer; in an attention layer it stands where a key/value cache stands.

    ``keys`` and ``values`` hold one tensor a layer, of shape (1 or B, H, N, D); rotary positions are already applied.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def count(self) -> int:
        """Number of sinks N."""
        return self.keys[0].shape[2]

    def update(self, k_BHSD: Tensor, v_BHSD: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Put the sinks in front of this layer's keys and values (the method a transformers attention calls on its
        cache).
        """
        batch = k_BHSD.shape[0]
        sink_k = self.keys[layer_idx].to(k_BHSD.dtype).expand(batch, -1, -1, -1)
        sink_v = self.values[layer_idx].to(v_BHSD.dtype).expand(batch, -1, -1, -1)
        return torch.cat([sink_k, k_BHSD], dim=2), torch.cat([sink_v, v_BHSD], dim=2)


class _Recorder:
    """A cache that keeps what one pass of isolated sinks puts into it, with values zeroed where asked."""

    def __init__(self, zero_values: bool) -> None:
        self.zero_values = zero_values
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        v = torch.zeros_like(v) if self.zero_values else v
        self.keys.append(k)
        self.values.append(v)
        return k, v


@contextmanager
def _no_checkpointing(decoder: Any) -> Iterator[None]:
    """The sinks' own pass writes what it computes into a recorder; a replay in the backward pass must not do it
    again.
    """
    flags = [getattr(layer, "gradient_checkpointing", False) for layer in decoder.layers]
    for layer in decoder.layers:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for layer, flag in zip(decoder.layers, flags, strict=True):
            layer.gradient_checkpointing = flag


def positions(model: Any, length: int, lengths_B: Tensor | None) -> Tensor:
    """Position of each sink, (1 or B, N), for texts of this length, or of these where rows differ."""
    start_U1 = torch.zeros(1, 1, dtype=torch.long, device=model.sink_embeddings.device)
    if model.config.sink_side == "end":
        start_U1 = start_U1 + length if lengths_B is None else lengths_B[:, None]
    return start_U1 + torch.arange(model.config.sink_count, device=start_U1.device)


def compute(decoder: PreTrainedModel, sinks_ND: Tensor, positions_UN: Tensor, *, zero_values: bool) -> SinkPrefix:
    """Run the sinks alone, each as a sequence of length 1, and keep their keys and values.

    Args:
        decoder: the backbone without its head.
        sinks_ND: embeddings of the N sinks.
        positions_UN: position of each sink, for U different rows.
        zero_values: force the value states to zero in every layer (Table 5).

    Returns:
        a prefix with U rows. Gradients flow through it.
    """
    rows, count = positions_UN.shape
    recorder = _Recorder(zero_values)
    with unobserved(), _no_checkpointing(decoder):
        # .forward: a compiled decoder would trace the recorder
        decoder.forward(
            inputs_embeds=sinks_ND.repeat(rows, 1)[:, None],
            position_ids=positions_UN.reshape(-1, 1),
            attention_mask=None,
            use_cache=False,
            sink_prefix=recorder,
            is_causal=False,
        )

    def rowwise(states: Tensor) -> Tensor:
        return states.view(rows, count, states.shape[1], states.shape[3]).transpose(1, 2)

    return SinkPrefix(tuple(map(rowwise, recorder.keys)), tuple(map(rowwise, recorder.values)))
