"""Keys and values of a canvas that outlive one evaluation."""

# B batch, H key/value heads, S canvas, W recomputed columns, N sinks, K keys = N + S, D head dim
from __future__ import annotations

import torch
from torch import Tensor

from sinklab.models.sinks.prefix import SinkPrefix


def take(values: Tensor, columns: slice | Tensor) -> Tensor:
    """These columns of (1 or B, S, …): a slice or int64 (W,) of all rows, or int64 (B, W), each row's own."""
    if isinstance(columns, slice):
        return values[:, columns]
    if columns.ndim == 1:
        return values.index_select(1, columns)
    values = values.expand(len(columns), *values.shape[1:])
    return values[torch.arange(len(columns), device=values.device)[:, None], columns]


class KeyValueStore:
    """One buffer of keys and one of values a layer: sinks in the first N columns, then the canvas.

    In an attention layer it stands where a key/value cache stands (a ``sink_prefix`` that also remembers).
    """

    def __init__(self, prefix: SinkPrefix | None, layers: int) -> None:
        self.prefix = prefix
        self.sinks = 0 if prefix is None else prefix.count
        self.logits = () if prefix is None else prefix.logits
        self.columns: slice | Tensor | None = None
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers

    def expecting(self, columns: slice | Tensor | None) -> KeyValueStore:
        """This store, told which columns of the canvas the next :meth:`update` of each layer brings.

        None for all, a slice or int64 (W,) for the same in every row, int64 (B, W) for each row its own.
        """
        self.columns = columns
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values that are held; every evaluation attends to all of them."""
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values) if tensor is not None)

    def update(self, k_BHWD: Tensor, v_BHWD: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Write these columns in place and return the keys and values of all columns, (B, H, K, D)."""
        sink_k = sink_v = None
        if self.prefix is not None:
            sink_k, sink_v = self.prefix.keys[layer_idx], self.prefix.values[layer_idx]
        self._keys[layer_idx] = self._written(self._keys[layer_idx], k_BHWD, sink_k)
        self._values[layer_idx] = self._written(self._values[layer_idx], v_BHWD, sink_v)
        return self.held(layer_idx)

    def held(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer as they are held now. Raises ValueError where nothing is."""
        keys, values = self._keys[layer], self._values[layer]
        if keys is None or values is None:
            raise ValueError(f"a full evaluation fills the keys and values of layer {layer}, but none was made")
        return keys, values

    def _written(self, known: Tensor | None, new_BHWD: Tensor, sink_BHND: Tensor | None) -> Tensor:
        columns, sinks = self.columns, self.sinks
        if columns is None:
            batch, heads, length, width = new_BHWD.shape
            shape = (batch, heads, sinks + length, width)
            if known is None or known.shape != shape:
                known = new_BHWD.new_empty(shape)
                if sink_BHND is not None:
                    known[:, :, :sinks] = sink_BHND
            known[:, :, sinks:] = new_BHWD
            return known
        if known is None:
            raise ValueError("columns can be recomputed only after a full evaluation has filled the others")
        if isinstance(columns, Tensor) and columns.ndim == 2:
            known.scatter_(2, (columns + sinks)[:, None, :, None].expand_as(new_BHWD), new_BHWD)
        elif isinstance(columns, slice):
            known.narrow(2, sinks + columns.start, columns.stop - columns.start).copy_(new_BHWD)
        else:
            known.index_copy_(2, columns + sinks if sinks else columns, new_BHWD)
        return known
