"""Sinks as a key/value prefix.

A sink token sees only itself, so its state in every layer does not depend on the text (Eq. 5–6): it
is run alone, without a mask, and its keys and values are put in front of those of the text.
"""

# B batch, S text, N added sinks, K key/value heads, J keys = N + S, D head dim or hidden size,
# L layers, U rows with positions of their own
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from sinklab.core.attention.context import unobserved
from sinklab.core.compat import stated


@dataclass(frozen=True)
class SinkPrefix:
    """Keys, rotated, and values of the sinks, one tensor a layer, (1 or B, K, N, D); an attention
    layer takes it as its key/value cache.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]

    @property
    def count(self) -> int:
        """Number of sinks N."""
        return self.keys[0].shape[2]

    def update(
        self, k_BKSD: Tensor, v_BKSD: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Put the sinks in front of this layer's keys and values."""
        sink_k = self.keys[layer_idx].to(k_BKSD).expand(len(k_BKSD), -1, -1, -1)
        sink_v = self.values[layer_idx].to(v_BKSD).expand(len(v_BKSD), -1, -1, -1)
        return torch.cat([sink_k, k_BKSD], dim=2), torch.cat([sink_v, v_BKSD], dim=2)


class _PassCache:
    """A cache that keeps the keys and values of one pass of isolated sinks."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        self.change = change
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def update(
        self, k: Tensor, v: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        self.keys.append(k)
        self.values.append(self.change(v))
        return k, self.values[-1]


@contextmanager
def _no_checkpointing(decoder: Any) -> Iterator[None]:
    """Replay no layer in backward, where an intervention would take sinks for text."""
    flags = [stated(layer, "gradient_checkpointing", False) for layer in decoder.layers]
    for layer in decoder.layers:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for layer, flag in zip(decoder.layers, flags, strict=True):
            layer.gradient_checkpointing = flag


def positions(config: Any, length: int, lengths_B: Tensor | None, device: torch.device) -> Tensor:
    """Position of each sink, (1 or B, N), for texts of these lengths (Eq. 5, 7)."""
    number_N = torch.arange(config.sink_count, device=device)
    if config.sink_side == "front":
        return number_N[None]
    if lengths_B is None:
        return number_N[None] + length
    return number_N.to(lengths_B.device) + lengths_B[:, None]


def run_alone(
    decoder: PreTrainedModel,
    sinks_ND: Tensor,
    positions_UN: Tensor,
    values: Callable[[Tensor], Tensor],
) -> SinkPrefix:
    """A prefix of U rows, from sinks run as sequences of length 1; gradients flow through it.

    ``values`` changes the value states of a layer, (U·N, K, 1, D).
    """
    rows, count = positions_UN.shape
    cache = _PassCache(values)
    with unobserved(), _no_checkpointing(decoder):
        # not decoder(…): compiled, it would trace the cache
        decoder.forward(
            inputs_embeds=sinks_ND.repeat(rows, 1)[:, None],
            position_ids=positions_UN.reshape(-1, 1),
            attention_mask=None,
            use_cache=False,
            sink_prefix=cache,
            is_causal=False,
        )

    def rowwise(states: Tensor) -> Tensor:
        return states.view(rows, count, states.shape[1], states.shape[3]).transpose(1, 2)

    return SinkPrefix(tuple(map(rowwise, cache.keys)), tuple(map(rowwise, cache.values)))


def take_prefix(attention: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The hook before every attention layer, which gives it the ``sink_prefix`` as its cache.

    transformers would drop ``past_key_values`` under gradient checkpointing. ``without_mask``
    removes a mask without sinks, built by transformers < 5.23 when compiled.
    """
    if kwargs.pop("without_mask", False):
        kwargs["attention_mask"] = None
    prefix = kwargs.pop("sink_prefix", None)
    if prefix is not None:
        kwargs["past_key_values"] = prefix
    return args, kwargs
