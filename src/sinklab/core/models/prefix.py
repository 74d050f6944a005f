"""Sinks as a key/value prefix.

A sink token sees only itself, so its state in every layer does not depend on the text (Eq. 5–6): it
is run alone, as a sequence of length 1, and its keys and values stand before those of the text.
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
    """Keys and values of the sinks in every layer; an attention layer takes it in place of a
    key/value cache.

    ``keys`` and ``values`` hold one tensor a layer, of shape (1 or B, G, N, D); rotary positions
    are already applied.
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
        """Put the sinks in front of this layer's keys and values (the method that an attention
        calls on its cache).
        """
        # of the layer's type, and on its device, which may be another than the parameters'
        sink_k = self.keys[layer_idx].to(k_BKSD).expand(len(k_BKSD), -1, -1, -1)
        sink_v = self.values[layer_idx].to(v_BKSD).expand(len(v_BKSD), -1, -1, -1)
        return torch.cat([sink_k, k_BKSD], dim=2), torch.cat([sink_v, v_BKSD], dim=2)


class _PassCache:
    """A cache that keeps everything that one pass of isolated sinks puts into it."""

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
    """The sinks' own pass is not to be run again in the backward pass: an intervention would take
    it for text there.
    """
    flags = [stated(layer, "gradient_checkpointing", False) for layer in decoder.layers]
    for layer in decoder.layers:
        layer.gradient_checkpointing = False
    try:
        yield
    finally:
        for layer, flag in zip(decoder.layers, flags, strict=True):
            layer.gradient_checkpointing = flag


def positions(config: Any, length: int, lengths_B: Tensor | None, device: torch.device) -> Tensor:
    """Position of each sink token, (1 or B, N), for texts of this length, or of these if rows
    differ (Eq. 5, 7).
    """
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
    """Run sink tokens, each as a sequence of length 1, and keep their keys and values.

    Args:
        decoder: the backbone without its head.
        sinks_ND: embeddings of the N sinks.
        positions_UN: position of each sink, for U different rows.
        values: changes the value states of a layer, (U·N, G, 1, D).

    Returns:
        a prefix with U rows. Gradients flow through it.
    """
    rows, count = positions_UN.shape
    cache = _PassCache(values)
    with unobserved(), _no_checkpointing(decoder):
        # .forward: a compiled decoder would trace the cache
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


def per_layer(keys_LNKD: Tensor, values_LNKD: Tensor) -> SinkPrefix:
    """Given keys and values of each layer as a prefix of one row. Gradients flow through it.

    Keys are not rotated, so that they mean the same at every distance.
    """
    keys, values = (
        tuple(row_NKD.transpose(0, 1)[None] for row_NKD in states_LNKD)
        for states_LNKD in (keys_LNKD, values_LNKD)
    )
    return SinkPrefix(keys, values)


def take_prefix(attention: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The hook before every attention layer of a transformers decoder, which gives it the
    ``sink_prefix`` as its cache.

    That travels as a plain keyword and not as ``past_key_values`` because transformers drops caches
    under gradient checkpointing, which would make the sink vanish with no more than a warning.
    ``without_mask`` says that nothing is blocked: when compiled, transformers below 5.23 makes a
    mask all the same, which knows no sinks.
    """
    if kwargs.pop("without_mask", False):
        kwargs["attention_mask"] = None
    prefix = kwargs.pop("sink_prefix", None)
    if prefix is not None:
        kwargs["past_key_values"] = prefix
    return args, kwargs


class KeyValueStore:
    """One buffer of keys and one of values a layer: sinks in the first N columns, then the canvas.

    An attention layer takes it as its key/value cache (a ``sink_prefix`` that also remembers).
    """

    def __init__(self, prefix: SinkPrefix | None, layers: int) -> None:
        self.prefix = prefix
        self.sinks = 0
        if prefix is not None:
            self.sinks = prefix.count
        self.columns: slice | Tensor | None = None
        """Columns of the canvas that the next :meth:`update` of each layer brings: None for all, a
        slice or int64 (W,)."""
        self.length: int | None = None
        """Columns of the canvas, if a first evaluation may bring some of them; None if it brings
        all.
        """
        self.seen: int | None = None
        """Columns that :meth:`update` returns, from the left; None for all."""
        self.graphs: dict[Any, Any] = {}
        """Recordings by a fast decoder of evaluations into these buffers, by their shapes."""
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers

    def update(
        self, k_BKWD: Tensor, v_BKWD: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write these columns in place and return the keys and values of all columns, (B, K, J,
        D).
        """
        sink_k = sink_v = None
        if self.prefix is not None:
            sink_k = self.prefix.keys[layer_idx]
            sink_v = self.prefix.values[layer_idx]
        self._keys[layer_idx] = self._written(self._keys[layer_idx], k_BKWD, sink_k)
        self._values[layer_idx] = self._written(self._values[layer_idx], v_BKWD, sink_v)
        keys, values = self.held(layer_idx)
        if self.seen is None:
            return keys, values
        seen = self.sinks + self.seen
        return keys[:, :, :seen], values[:, :, :seen]

    def held(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer as they held now. Raises ValueError if there are none."""
        keys = self._keys[layer]
        values = self._values[layer]
        if keys is None or values is None:
            raise ValueError(
                f"a full evaluation fills the keys and values of layer {layer}, but none was made"
            )
        return keys, values

    def _written(self, known: Tensor | None, new_BKWD: Tensor, sink_BKND: Tensor | None) -> Tensor:
        columns = self.columns
        sinks = self.sinks
        batch, heads, length, width = new_BKWD.shape
        if columns is not None:
            length = self.length or 0
        if columns is None or (known is None and length):
            shape = (batch, heads, sinks + length, width)
            if known is None or known.shape != shape:
                # zeros: a mask blocks entries that no evaluation has filled, but not NaN
                known = new_BKWD.new_zeros(shape)
                self.graphs.clear()
                if sink_BKND is not None:
                    known[:, :, :sinks] = sink_BKND
        if known is None:
            raise ValueError(
                "columns can be recomputed only after a full evaluation has filled the others"
            )
        if columns is None:
            known[:, :, sinks:] = new_BKWD
        elif isinstance(columns, slice):
            known.narrow(2, sinks + columns.start, columns.stop - columns.start).copy_(new_BKWD)
        else:
            known.index_copy_(2, columns + sinks, new_BKWD)
        return known
