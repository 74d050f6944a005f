"""A model's denoiser that remembers: under a cache some columns run, and attend to the keys and
values of the others as last computed. Without this the core computes every column in every step.
"""

# B batch, S canvas, W columns that run, Q columns with a wanted position, M wanted positions
# (row-major), V vocabulary, D hidden size or head dim, N added sinks, K key/value heads, J keys =
# N + S
from __future__ import annotations

from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from sinklab.core.attention.context import is_watched, running
from sinklab.core.registry import caches, denoisers
from sinklab.core.subject import masks
from sinklab.core.subject.canvas import Canvas, Places
from sinklab.core.subject.denoisers import Cache, Session
from sinklab.core.subject.denoising import ModelDenoiser
from sinklab.core.subject.masks import take
from sinklab.core.subject.prefix import SinkPrefix


class KeyValueStore:
    """A ``sink_prefix`` that remembers: a buffer of keys and one of values for each layer, the
    sinks in front.
    """

    def __init__(self, prefix: SinkPrefix | None, layers: int) -> None:
        self.prefix = prefix
        self.sinks = 0
        if prefix is not None:
            self.sinks = prefix.count
        self.columns: slice | Tensor | None = None
        """Columns that the next :meth:`update` of each layer brings; None for all."""
        self.graphs: dict[Any, Any] = {}
        """A fast decoder's recordings of evaluations into these buffers, by shape."""
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers

    def update(
        self, k_BKWD: Tensor, v_BKWD: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write these columns; returns the keys and values of all, (B, K, J, D)."""
        sink_k = sink_v = None
        if self.prefix is not None:
            sink_k = self.prefix.keys[layer_idx]
            sink_v = self.prefix.values[layer_idx]
        keys = self.write(self._keys[layer_idx], k_BKWD, sink_k)
        values = self.write(self._values[layer_idx], v_BKWD, sink_v)
        self._keys[layer_idx] = keys
        self._values[layer_idx] = values
        return keys, values

    def empty(self, length: int, like_BKWD: Tensor, sink_BKND: Tensor | None) -> Tensor:
        """A buffer with the sinks in front and zeros elsewhere."""
        batch, heads, _, width = like_BKWD.shape
        # zeros, as a mask blocks unfilled entries unless they are NaN
        new = like_BKWD.new_zeros(batch, heads, self.sinks + length, width)
        self.graphs.clear()
        if sink_BKND is not None:
            new[:, :, : self.sinks] = sink_BKND
        return new

    def write(self, known: Tensor | None, new_BKWD: Tensor, sink_BKND: Tensor | None) -> Tensor:
        """The buffer, or a new one if it does not fit, with these columns in it."""
        columns = self.columns
        sinks = self.sinks
        if columns is None:
            batch, heads, length, width = new_BKWD.shape
            if known is None or known.shape != (batch, heads, sinks + length, width):
                known = self.empty(length, new_BKWD, sink_BKND)
            known[:, :, sinks:] = new_BKWD
            return known
        assert known is not None, "a full evaluation comes first"
        if isinstance(columns, slice):
            known.narrow(2, sinks + columns.start, columns.stop - columns.start).copy_(new_BKWD)
        else:
            known.index_copy_(2, columns + sinks, new_BKWD)
        return known


@dataclass(frozen=True, eq=False)
class Outputs:
    """The states behind the logits at the wanted positions.

    With shifted logits, position 5 wanted in row 0, and 5 and 7 in row 1, `columns_Q` is (4, 6),
    `pick_M` (0, 2, 3).
    """

    at: Places
    columns_Q: Tensor
    """Columns whose states are needed in some row, ascending."""
    pick_M: Tensor
    """Index of each wanted state in the flattened (B, Q)."""

    @classmethod
    def of(cls, at: Places, source_M: Tensor, columns_Q: Tensor | None = None) -> Outputs:
        """From the index of each wanted state in the flattened canvas."""
        length = at.wanted_BS.shape[1]
        column_M = source_M % length
        if columns_Q is None:
            columns_Q = column_M.unique()
        row_M = source_M // length
        pick_M = row_M * len(columns_Q) + torch.searchsorted(columns_Q, column_M)
        return cls(at, columns_Q, pick_M)

    def of_states(self, states_BQD: Tensor) -> Tensor:
        """The wanted states (M, D) among those of the columns."""
        return states_BQD.flatten(0, 1).index_select(0, self.pick_M.to(states_BQD.device))


@denoisers.register("columns")
class ColumnDenoiser(ModelDenoiser):
    """The denoiser of a model, of which some columns may run. With ``plain=True`` it has no exact
    cache.
    """

    plain = False

    @classmethod
    def serving(
        cls, model: Any, attention_BS: Tensor | None, plain: bool = False
    ) -> ColumnDenoiser | None:
        """The denoiser of any model."""
        denoiser = cls(model, attention_BS)
        denoiser.plain = plain
        return denoiser

    def begin(self, cache: Cache | None = None) -> ModelSession:
        """A memory for one run; without a cache the caller passes ``columns``."""
        own = None
        if cache is not None:
            own = cache.session(self)
        return own or ModelSession(self)

    def exact_cache(self) -> Cache | None:
        """The cache of attention in blocks; None while the model is watched."""
        if self.plain or is_watched(self.model) or self.model.config.block_length is None:
            return None
        return next((kind() for kind in caches.values() if kind.is_exact), None)

    def in_blocks(self, canvas: Canvas, block_length: int | None = None) -> Canvas:
        """The canvas, decoded in blocks of attention if there are any, or in parts of them. Raises
        ValueError for a `block_length` that does not divide a block of attention.
        """
        canvas = super().in_blocks(canvas)
        config = self.model.config
        size = config.block_length
        if size is None or canvas.block_BS is not None:
            return canvas
        block_length = min(block_length or size, size)
        if size % block_length:
            raise ValueError(
                "a block of attention is decoded as a whole or in equal parts, but block_length is "
                f"{block_length} and the model attends in blocks of {size}; leave block_length "
                f"out, or give a divisor of {size}"
            )
        ids_BS = canvas.ids_BS
        real_BS = masks.real_positions(ids_BS, canvas.attention_BS)
        place_BS = masks.blocks(config, real_BS, ids_BS.shape[1], ids_BS.device, 1)
        part_BS = place_BS // block_length
        if config.first_alone:
            part_BS = 2 * part_BS + (place_BS % size != 0)
        return canvas.counted(part_BS.expand_as(ids_BS))

    def scored(self, ids_BS: Tensor, wanted_BS: Tensor, clean_BS: Tensor) -> Tensor:
        """Logits (M, V) for a score: blocks see clean ones before them."""
        if self.model.config.block_length is None:
            return self(ids_BS, wanted_BS)
        self.geometry(ids_BS, wanted_BS)
        with torch.inference_mode(), running(torch.cat([ids_BS, clean_BS], dim=1)):
            return self.model(
                ids_BS, self.attention_BS, logits_to_keep=wanted_BS, clean=clean_BS
            ).logits

    def visible(self, wanted_BS: Tensor) -> Tensor | None:
        """Visibility if finished blocks attend causally."""
        config = self.model.config
        length = wanted_BS.shape[1]
        size = config.block_length
        if size is None or length <= size or config.clean_attention == "block":
            return None
        real_BS = masks.real_positions(wanted_BS, self.attention_BS)
        block_BS = masks.blocks(config, real_BS, length, wanted_BS.device).expand_as(wanted_BS)
        first_B1 = wanted_BS.long().argmax(1, keepdim=True)
        is_open_BS = block_BS >= block_BS.gather(1, first_B1)
        seen_BQJ = masks.block_causal(block_BS)
        return seen_BQJ & (is_open_BS[..., None] | torch.ones_like(seen_BQJ).tril())

    def outputs(self, at: Places) -> Outputs:
        """The states that these positions need."""
        return Outputs.of(at, self.sources(at))

    def sources(self, at: Places) -> Tensor:
        """Index (M,) in the flattened canvas of the state that predicts each position."""
        flat_M = at.flat_M
        if not self.model.config.logit_shift:
            return flat_M
        begins_M = flat_M % at.wanted_BS.shape[1] == 0
        if self.attention_BS is not None:
            starts_BS = masks.starts(self.attention_BS)
            begins_M = begins_M | starts_BS.flatten().index_select(0, flat_M)
        return flat_M - (~begins_M).long()

    def with_sources(self, columns: slice | Tensor) -> slice | Tensor:
        """These columns and, with shifted logits, the left neighbours of all: what runs must not
        depend on other rows.
        """
        if not self.model.config.logit_shift:
            return columns
        if isinstance(columns, slice):
            return slice(max(columns.start - 1, 0), columns.stop)
        return torch.cat([columns, (columns - 1).clamp(min=0)]).unique()

    def columns_to_run(
        self, columns: slice | Tensor, outputs: Outputs
    ) -> tuple[slice | Tensor, Tensor]:
        """The columns to run, and the indices among them of the states needed.

        Raises ValueError for a wanted position outside ``columns``.
        """
        if isinstance(columns, Tensor):
            columns = columns.to(outputs.columns_Q.device)
        _check_inside(columns, outputs.at)
        columns = self.with_sources(columns)
        if isinstance(columns, slice):
            return columns, outputs.columns_Q - columns.start
        return columns, torch.searchsorted(columns, outputs.columns_Q)

    def states(
        self,
        ids_BS: Tensor,
        columns: slice | Tensor,
        output_index_Q: Tensor,
        store: Any,
        mask: Tensor | EllipsisType | None = ...,
    ) -> Tensor:
        """Final states (B, Q, D) when some columns run and attend to the store.

        Args:
            ids_BS: the whole canvas.
            columns: the columns that run in every row, a slice or int64 (W,).
            output_index_Q: indices among them of the wanted states.
            store: a :class:`KeyValueStore`.
            mask: replaces the canvas's.
        """
        assert self._geometry is not None, "geometry() comes first"
        geometry = self._geometry
        if mask is ...:
            mask = geometry.rows(columns)
        with running(ids_BS, columns):
            states_BWD = self.model.decoder_states(
                self.model.model.embed_tokens(take(ids_BS, columns)),
                mask,
                take(geometry.position_ids_BS, columns),
                store,
            )
        return states_BWD.index_select(1, output_index_Q.to(states_BWD.device))

    def head(self, states: Tensor) -> Tensor:
        """Logits."""
        return self.model.lm_head(states)


def _check_inside(columns: slice | Tensor, at: Places) -> None:
    block = at.columns
    if isinstance(columns, slice) and block is not None:
        # reads no position from the device
        is_inside = columns.start <= block.start and block.stop <= columns.stop
    else:
        outside_BS = at.wanted_BS.clone()
        outside_BS[:, columns] = False
        is_inside = not bool(outside_BS.any())
    if not is_inside:
        raise ValueError(
            f"wanted positions must lie in the columns that run, {columns}, but are in "
            f"{at.wanted_BS.any(0).nonzero()[:, 0].tolist()}"
        )


class ModelSession(Session):
    """A model's denoiser with the keys and values of every column as last computed; a cache may
    bring a subclass with its own `evaluate`.
    """

    begins_anywhere = False
    """Whether the first evaluation may compute some columns only."""

    def __init__(self, denoiser: ColumnDenoiser) -> None:
        self.denoiser = denoiser
        self.store: KeyValueStore | None = None
        self._filled: torch.Size | None = None

    def logits(self, ids_BS: Tensor, at: Places, columns: slice | Tensor | None = None) -> Tensor:
        """Logits (M, V) at the wanted positions, inside ``columns``.

        Args:
            ids_BS: the whole canvas.
            at: the positions.
            columns: None computes everything. A slice or sorted int64 (W,) runs only these (with
                shifted logits also the left neighbour of each), which attend to one another as
                they are now and to all others as remembered.

        Raises:
            ValueError: if nothing of this shape is remembered, or a position lies outside
                ``columns``.
        """
        filled = self._filled
        self._filled = None
        if filled is None and self.begins_anywhere:
            self.store = None
        elif columns is not None and filled != ids_BS.shape:
            fact = "nothing is"
            if filled is not None:
                fact = f"the canvas was {tuple(filled)} and is {tuple(ids_BS.shape)}"
            raise ValueError(
                f"columns can be recomputed only while all others are remembered, but {fact}; call "
                "the session with columns=None first"
            )
        with torch.inference_mode():
            logits_MV = self.evaluate(ids_BS, at, columns)
        # set last: an interruption leaves layers of different age
        self._filled = ids_BS.shape
        return logits_MV

    def evaluate(self, ids_BS: Tensor, at: Places, columns: Any) -> Tensor:
        """Logits (M, V), computing these columns, or all for None."""
        denoiser = self.denoiser
        sinks = denoiser.geometry(ids_BS, at.wanted_BS).sinks
        if self.store is None or (columns is None and self.store.prefix is not sinks):
            self.store = KeyValueStore(sinks, len(denoiser.model.model.layers))
        self.store.columns = columns
        if columns is None:
            return denoiser.full_pass(ids_BS, at, self.store)
        outputs = denoiser.outputs(at)
        columns, output_index_Q = denoiser.columns_to_run(columns, outputs)
        self.store.columns = columns
        states_BQD = denoiser.states(ids_BS, columns, output_index_Q, self.store)
        return denoiser.head(outputs.of_states(states_BQD))
