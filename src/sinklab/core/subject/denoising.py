"""The model as a denoiser: ids in, logits at the wanted positions out.

Decoding evaluates one canvas again and again, so what does not depend on the text is computed once,
and a session remembers keys and values. An extra may register a faster subclass, which gives the
same numbers up to rounding.
"""

# B batch, S canvas, W columns that run, Q columns with a wanted position, M wanted positions
# (row-major), V vocabulary, D hidden size, N added sinks
from __future__ import annotations

from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from sinklab.core.attention.context import is_watched, running
from sinklab.core.compat import attention_of
from sinklab.core.errors import check_tensor
from sinklab.core.registry import caches
from sinklab.core.subject import masks
from sinklab.core.subject.canvas import Canvas, Places
from sinklab.core.subject.denoisers import Cache, Denoiser, Session
from sinklab.core.subject.masks import CanvasGeometry, take
from sinklab.core.subject.prefix import KeyValueStore


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


class ModelDenoiser(Denoiser):
    """The denoiser of a model, bound to its present weights and a padding, under
    ``torch.inference_mode``. With ``plain=True`` it has no exact cache.
    """

    def __init__(
        self, model: Any, attention_BS: Tensor | None = None, *, plain: bool = False
    ) -> None:
        self.model = model
        self.attention_BS = attention_BS
        self.plain = plain
        self._geometry: CanvasGeometry | None = None

    def logits(self, ids_BS: Tensor, at: Places) -> Tensor:
        """Logits (M, V) at the wanted positions, computed afresh."""
        with torch.inference_mode():
            return self.full_pass(ids_BS, at)

    def scored(self, ids_BS: Tensor, wanted_BS: Tensor, clean_BS: Tensor) -> Tensor:
        """Logits (M, V) for a score: blocks see clean ones before them."""
        if self.model.config.block_length is None:
            return self(ids_BS, wanted_BS)
        self.geometry(ids_BS, wanted_BS)
        with torch.inference_mode(), running(torch.cat([ids_BS, clean_BS], dim=1)):
            return self.model(
                ids_BS, self.attention_BS, logits_to_keep=wanted_BS, clean=clean_BS
            ).logits

    def begin(self, cache: Cache | None = None) -> ModelSession:
        """A memory for one run; without a cache the caller passes ``columns``."""
        own = None
        if cache is not None:
            own = cache.session(self)
        return own or ModelSession(self)

    def in_blocks(self, canvas: Canvas, block_length: int | None = None) -> Canvas:
        """The canvas, decoded in blocks of attention if there are any, or in parts of them.

        Raises:
            ValueError: for padding that this denoiser was not made with, or a ``block_length`` that
                does not divide a block of attention.
        """
        if self.attention_BS is None and not canvas.attention_BS.all():
            raise ValueError(
                "padding is text to a denoiser that was made without it, and this canvas has some; "
                "use model.denoiser(canvas.attention_BS), or denoise(model, canvas), which does"
            )
        size = self.model.config.block_length
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
        place_BS = masks.blocks(self.model.config, real_BS, ids_BS.shape[1], ids_BS.device, 1)
        part_BS = place_BS // block_length
        if self.model.config.first_alone:
            part_BS = 2 * part_BS + (place_BS % size != 0)
        return canvas.counted(part_BS.expand_as(ids_BS))

    def exact_cache(self) -> Cache | None:
        """The cache of attention in blocks; None while the model is watched."""
        if self.plain or is_watched(self.model) or self.model.config.block_length is None:
            return None
        return next((kind() for kind in caches.values() if kind.is_exact), None)

    def geometry(self, ids_BS: Tensor, wanted_BS: Tensor) -> CanvasGeometry:
        """The geometry of this shape. Raises ValueError if it does not fit."""
        check_tensor(
            "the wanted positions of a denoiser", wanted_BS, ids_BS.shape, "bool", "as the ids"
        )
        known = self._geometry
        backend = attention_of(self.model.model.config)
        if known is None or known.shape != ids_BS.shape or known.backend != backend:
            self.model.config.check_length(ids_BS.shape[1])
            real_BS = masks.real_positions(ids_BS, self.attention_BS)
            like = ids_BS.new_empty(0, dtype=self.model.dtype)
            known = CanvasGeometry.of(self.model, real_BS, like, ids_BS.shape)
            self._geometry = known
        return known

    def full_pass(self, ids_BS: Tensor, at: Places, store: Any = None) -> Tensor:
        """Logits (M, V) from all columns, which a store remembers."""
        geometry = self.geometry(ids_BS, at.wanted_BS)
        # call the whole model: a trace must see where a forward begins
        with running(ids_BS):
            return self.model(
                ids_BS,
                self.attention_BS,
                logits_to_keep=at.flat_M,
                sink_prefix=store or geometry.sinks,
                visible=self.seen_by_finished(at.wanted_BS),
            ).logits

    def seen_by_finished(self, wanted_BS: Tensor) -> Tensor | None:
        """Visibility, bool (B, query, key), if finished blocks attend causally; else None."""
        config = self.model.config
        length = wanted_BS.shape[1]
        size = config.block_length
        if size is None or length <= size or config.clean_attention == "block":
            return None
        real_BS = masks.real_positions(wanted_BS, self.attention_BS)
        block_BS = masks.blocks(config, real_BS, length, wanted_BS.device).expand_as(wanted_BS)
        first_B1 = wanted_BS.long().argmax(1, keepdim=True)
        return masks.block_causal(block_BS, block_BS.gather(1, first_B1)[:, 0])

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

    def __init__(self, denoiser: ModelDenoiser) -> None:
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
