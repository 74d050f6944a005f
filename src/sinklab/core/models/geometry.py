"""The geometry of a canvas under evaluation: positions, mask and sinks, and the keys and values
that it leaves.
"""

# B batch, S canvas, W columns that run, K key/value heads, N added sinks, J keys = N + S, D head
# dim, Q queries
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sinklab.core.compat import attention_of
from sinklab.core.models import masks
from sinklab.core.models.sinks.prefix import SinkPrefix, logits_of


@dataclass(frozen=True, eq=False)
class CanvasGeometry:
    """Everything that depends on the shape of the canvas and its padding alone: computed once, for
    all columns.
    """

    shape: tuple[int, ...]
    backend: str
    position_ids_BS: Tensor
    mask: Tensor | None
    """Mask as the decoder takes it; None when nothing is blocked."""
    sinks: SinkPrefix | None

    @classmethod
    def of(
        cls,
        model: Any,
        real_BS: Tensor | None,
        like: Tensor,
        shape: tuple[int, ...],
        *,
        sinks: SinkPrefix | None = None,
        causal: bool = False,
        visible: Tensor | None = None,
        is_doubled: bool = False,
    ) -> CanvasGeometry:
        """Computed for texts of this shape and padding.

        Args:
            model: a :class:`~sinklab.core.models.DiffusionLM`.
            real_BS: from :func:`~sinklab.core.models.masks.real_positions`.
            like: a tensor of the dtype and device of the states.
            shape: of the ids, (B, S).
            sinks: keys and values of the sinks if they are known; else they are computed.
            causal, visible: as in :meth:`DiffusionLM.forward`.
            is_doubled: the clean text follows the noisy one, which has this shape and padding.
        """
        config = model.config
        length = shape[1]
        backend = attention_of(model.model.config)
        position_ids_BS = masks.position_ids(
            real_BS, length, start=config.text_start, device=like.device
        )
        if sinks is None:
            lengths_B = None
            if real_BS is not None:
                lengths_B = real_BS.sum(dim=1)
            sinks = model.sink_prefix(length, lengths_B)
        seen = masks.whole_text(config.attention, real_BS, length, like.device)
        if config.block_length is not None and (is_doubled or length > config.block_length):
            block_BS = masks.blocks(config, real_BS, length, like.device)
            if is_doubled:
                seen = masks.noisy_and_clean(block_BS, config.clean_attention == "causal")
            else:
                seen = masks.block_causal(block_BS)
        if is_doubled and real_BS is not None:
            real_BS = torch.cat([real_BS, real_BS], dim=1)
        if is_doubled:
            position_ids_BS = torch.cat([position_ids_BS, position_ids_BS], dim=1)
            length = 2 * length
        # the logits of added sinks are added to a mask
        if real_BS is None and sinks is not None and logits_of(sinks) is not None:
            real_BS = torch.ones(1, length, dtype=torch.bool, device=like.device)
        mask = masks.attention_mask(
            real_BS,
            length,
            sinks=config.sink_count,
            causal=causal,
            backend=backend,
            like=like,
            visible=visible,
            seen=seen,
        )
        return cls(tuple(shape), backend, position_ids_BS, mask, sinks)

    def rows(self, columns: slice | Tensor, seen: Tensor | None = None) -> Tensor | None:
        """The mask for the queries in these columns; of those keys alone that may be ``seen``, bool
        (B, S, S).
        """
        mask = self.mask
        if mask is None or mask.shape[2] == 1:
            return mask
        if seen is not None:
            seen_B1QJ = nn.functional.pad(
                seen[:, None], (mask.shape[-1] - seen.shape[-1], 0), value=True
            )
            if mask.dtype == torch.bool:
                mask = mask & seen_B1QJ
            else:
                mask = mask.masked_fill(~seen_B1QJ, torch.finfo(mask.dtype).min)
        # the columns before the heads: those of each row may be its own
        return take(mask.transpose(1, 2), columns).transpose(1, 2)


def take(values: Tensor, columns: slice | Tensor) -> Tensor:
    """Take these columns of (1 or B, S, …): a slice or int64 (W,) of all rows, or int64 (B, W),
    each row's own.
    """
    if isinstance(columns, slice):
        return values[:, columns]
    if columns.ndim == 1:
        return values.index_select(1, columns)
    values = values.expand(len(columns), *values.shape[1:])
    return values[torch.arange(len(columns), device=values.device)[:, None], columns]


class KeyValueStore:
    """One buffer of keys and one of values a layer: sinks in the first N columns, then the canvas.

    An attention layer takes it as its key/value cache (a ``sink_prefix`` that also remembers).
    """

    def __init__(self, prefix: SinkPrefix | None, layers: int) -> None:
        self.prefix = prefix
        self.sinks = 0
        self.logits: tuple[Tensor, ...] = ()
        if prefix is not None:
            self.sinks = prefix.count
            self.logits = prefix.logits
        self.columns: slice | Tensor | None = None
        """Columns of the canvas that the next :meth:`update` of each layer brings: None for all, a
        slice or int64 (W,) for the same in every row, int64 (B, W) for each row its own."""
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

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values that are held; every evaluation attends to all of them."""
        return sum(tensor.nbytes for tensor in (*self._keys, *self._values) if tensor is not None)

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
        elif isinstance(columns, Tensor) and columns.ndim == 2:
            known.scatter_(2, (columns + sinks)[:, None, :, None].expand_as(new_BKWD), new_BKWD)
        elif isinstance(columns, slice):
            known.narrow(2, sinks + columns.start, columns.stop - columns.start).copy_(new_BKWD)
        else:
            known.index_copy_(2, columns + sinks, new_BKWD)
        return known
