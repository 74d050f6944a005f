"""The model as a denoiser: ids in, logits at the wanted positions out, with or without a memory of
earlier evaluations.

The plain way is the model's own forward. An extra may register a faster denoiser, a subclass, which
gives the same numbers up to rounding: never while the model is watched.
"""

# B batch, S canvas, W columns that run, Q columns with a wanted position, M wanted positions
# (row-major), V vocabulary, D hidden size, N added sinks
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sinklab.core.attention.context import is_watched, reads_wait, running
from sinklab.core.compat import attention_of
from sinklab.core.errors import check_tensor
from sinklab.core.models import masks
from sinklab.core.models.masks import CanvasGeometry, take
from sinklab.core.models.prefix import KeyValueStore
from sinklab.core.registry import caches
from sinklab.core.sampling.canvas import Canvas, Places
from sinklab.core.sampling.denoisers import Cache, Denoiser, Session


@dataclass(frozen=True, eq=False)
class Read:
    """The outputs of the decoder that an evaluation reads.

    An example with shifted logits: position 5 is wanted in row 0, positions 5 and 7 in row 1. Then
    `wanted_Q` is (5, 7), `output_Q` (4, 6), and `pick` leaves three of the four states:
    ((True, False), (True, True)).
    """

    output_Q: Tensor
    """Columns whose states are wanted, int64 (Q,)."""
    pick: Tensor | None
    """Selection among the states (B, Q): bool (B, Q), int64 (M,) of the flattened ones, or None for
    all of a single row.
    """
    at: Places
    wanted_Q: Tensor
    """Columns that they predict."""


class ModelDenoiser(Denoiser):
    """The denoiser of a model, bound to its weights as they are now, and to a padding.

    Made by :meth:`DiffusionLM.denoiser`; runs under ``torch.inference_mode``: the model's own
    forward, bit for bit. Sinks, masks and rotary tables are kept while the shape of the canvas
    stays the same: after a change of the weights, ask the model for a new denoiser. With
    ``plain=True`` nothing is remembered between evaluations, whatever the attention.
    """

    def __init__(
        self, model: Any, attention_BS: Tensor | None = None, *, plain: bool = False
    ) -> None:
        self.model = model
        self.attention_BS = attention_BS
        self.plain = plain
        self._geometry: CanvasGeometry | None = None
        self._block: tuple[Any, Tensor, Tensor] | None = None

    def __repr__(self) -> str:
        return f"the denoiser of a {type(self.model).__name__}"

    def logits(self, ids_BS: Tensor, at: Places) -> Tensor:
        """Logits (M, V) at the wanted positions, everything computed afresh.

        Raises:
            ValueError: if shapes disagree, a row is all padding, or the canvas is longer than the
                context.
        """
        with torch.inference_mode():
            return self.full_pass(ids_BS, self.read(at))

    def scored(self, ids_BS: Tensor, wanted_BS: Tensor, clean_BS: Tensor) -> Tensor:
        """Logits (M, V) for a score: with attention in blocks each block sees the clean ones before
        it (``clean`` of the model's forward). With full attention ``clean_BS`` changes nothing.
        """
        if self.model.config.block_length is None:
            return self(ids_BS, wanted_BS)
        self.geometry(ids_BS, wanted_BS)
        with torch.inference_mode(), running(torch.cat([ids_BS, clean_BS], dim=1)):
            return self.model(
                ids_BS, self.attention_BS, logits_to_keep=wanted_BS, clean=clean_BS
            ).logits

    def begin(self, cache: Cache | None = None) -> ModelSession:
        """A memory for one run over one canvas; without a cache the caller says what to compute."""
        own = None
        if cache is not None:
            own = cache.session(self)
        return own or ModelSession(self)

    def in_blocks(self, canvas: Canvas, block_length: int | None = None) -> Canvas:
        """The canvas with its decoding blocks aligned to those of attention, each of them in parts
        of ``block_length`` if that is shorter; unchanged if attention is full.

        Raises:
            ValueError: for a canvas with padding that this denoiser was not made with, and for a
                shorter ``block_length`` that does not divide a block of attention.
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
        """The cache of attention in blocks, which changes no result; None with full attention, or
        if each column is to be seen, or where none is registered.
        """
        if self.plain or is_watched(self.model) or self.model.config.block_length is None:
            return None
        return next((kind() for kind in caches.values() if kind.is_exact), None)

    def geometry(self, ids_BS: Tensor, wanted_BS: Tensor) -> CanvasGeometry:
        """Geometry shared by every canvas of this shape. Raises ValueError for one that does not
        fit.
        """
        check_tensor("the ids of a denoiser", ids_BS, (None, None))
        check_tensor(
            "the wanted positions of a denoiser", wanted_BS, ids_BS.shape, "bool", "as the ids"
        )
        known = self._geometry
        backend = attention_of(self.model.model.config)
        if known is None or known.shape != ids_BS.shape or known.backend != backend:
            self.model.config.check_length(ids_BS.shape[1])
            real_BS = masks.real_positions(ids_BS, self.attention_BS)
            like = ids_BS.new_empty(0, dtype=self.model.dtype)
            self._geometry = known = CanvasGeometry.of(
                self.model, real_BS, like, tuple(ids_BS.shape)
            )
        return known

    def full_pass(self, ids_BS: Tensor, read: Read, store: Any = None) -> Tensor:
        """Logits (M, V) with all columns computed; a store takes the place of the sinks, and
        remembers.
        """
        geometry = self.geometry(ids_BS, read.at.wanted_BS)
        # the whole model, so that a trace sees where a forward begins
        with running(ids_BS):
            return self.model(
                ids_BS,
                self.attention_BS,
                logits_to_keep=read.at.flat_M,
                sink_prefix=store or geometry.sinks,
                visible=self.seen_by_finished(read.at.wanted_BS),
            ).logits

    def seen_by_finished(self, wanted_BS: Tensor) -> Tensor | None:
        """Visibility, bool (B, query, key), if the blocks before the wanted positions attend
        causally; None if they attend as they did when they were written.
        """
        config = self.model.config
        length = wanted_BS.shape[1]
        if (
            config.block_length is None
            or config.clean_attention == "block"
            or length <= config.block_length
        ):
            return None
        real_BS = masks.real_positions(wanted_BS, self.attention_BS)
        block_BS = masks.blocks(config, real_BS, length, wanted_BS.device).expand_as(wanted_BS)
        first_B1 = wanted_BS.long().argmax(1, keepdim=True)
        return masks.block_causal(block_BS, block_BS.gather(1, first_B1)[:, 0])

    def read(self, at: Places) -> Read:
        """The columns whose outputs are read for the wanted positions: those that predict one in
        some row or, if finding them would mean a wait for the device, those of the whole block.
        Shifted logits are read one column to the left.
        """
        wanted_BS = at.wanted_BS
        starts_BS = self._starts_BS
        if at.columns is None or not reads_wait(wanted_BS.device):
            if starts_BS is not None and not bool((starts_BS & wanted_BS).any()):
                starts_BS = None
            wanted_Q = wanted_BS.any(0).nonzero()[:, 0]
            if starts_BS is None:
                pick = None
                if len(wanted_BS) > 1:
                    # in a single row every column that has a wanted position is wanted
                    pick = wanted_BS.index_select(1, wanted_Q)
                return Read(self._predictors(wanted_Q), pick, at, wanted_Q)
            output_Q = self._predictors(wanted_Q, starts_BS)
        else:
            if self._block is None or self._block[0] is not at.columns:
                columns = torch.arange(at.columns.start, at.columns.stop, device=wanted_BS.device)
                self._block = at.columns, columns, self._predictors(columns, starts_BS)
            _, wanted_Q, output_Q = self._block
        length = wanted_BS.shape[1]
        row_M = at.flat_M // length
        pick_M = row_M * len(output_Q) + torch.searchsorted(wanted_Q, at.flat_M % length)
        if starts_BS is not None:
            pick_M = pick_M + starts_BS.flatten().index_select(0, at.flat_M) * len(wanted_Q)
        return Read(output_Q, pick_M, at, wanted_Q)

    @cached_property
    def _starts_BS(self) -> Tensor | None:
        """Positions that predict themselves in a row that begins with padding; None if logits are
        not shifted.
        """
        if self.attention_BS is None or not self.model.config.logit_shift:
            return None
        return masks.starts(self.attention_BS)

    def _predictors(self, wanted_Q: Tensor, starts_BS: Tensor | None = None) -> Tensor:
        """Columns that predict these in a row; after them these themselves, if one starts a row."""
        before_Q = wanted_Q
        if self.model.config.logit_shift:
            before_Q = (wanted_Q - 1).clamp(min=0)
        if starts_BS is None:
            return before_Q
        return torch.cat([before_Q, wanted_Q])

    def columns_to_run(self, columns: slice | Tensor, read: Read) -> tuple[slice | Tensor, Tensor]:
        """The columns to run, and the indices among them of those whose outputs are read.

        With shifted logits every predecessor is added, wanted or not: the columns run in one row of
        a batch must not depend on the wishes of another row. Raises ValueError for a wanted
        position outside ``columns``.
        """
        self._check_inside(columns, read)
        is_shifted = self.model.config.logit_shift
        output_Q = read.output_Q
        if isinstance(columns, slice):
            start = max(columns.start - is_shifted, 0)
            return slice(start, columns.stop), output_Q - start
        columns_W = columns.to(output_Q.device)
        if is_shifted:
            columns_W = torch.cat([columns_W, (columns_W - 1).clamp(min=0)]).unique()
        return columns_W, torch.searchsorted(columns_W, output_Q)

    def _check_inside(self, columns: slice | Tensor, read: Read) -> None:
        # a loop whose cache hands over the block knows that it is inside
        held = read.at.columns
        if isinstance(columns, slice) and held is not None:
            inside = columns.start <= held.start and held.stop <= columns.stop
        elif isinstance(columns, slice):
            inside = bool(((read.wanted_Q >= columns.start) & (read.wanted_Q < columns.stop)).all())
        else:
            inside = bool(torch.isin(read.wanted_Q, columns.to(read.wanted_Q.device)).all())
        if not inside:
            wanted = read.wanted_Q.tolist()
            raise ValueError(
                f"wanted positions must lie in the columns that run, {columns}, but are in {wanted}"
            )

    def states(
        self,
        ids_BS: Tensor,
        columns: slice | Tensor,
        output_index_Q: Tensor,
        store: Any,
        **special: Any,
    ) -> Tensor:
        """Final states (B, Q, E) when some columns run and attend to the keys and values of the
        store.

        Args:
            ids_BS: token ids of the whole canvas.
            columns: those that run, the same in every row: a slice or int64 (W,).
            output_index_Q: indices among them of those whose states are wanted.
            store: takes the new keys and values and returns those of all columns
                (:class:`KeyValueStore`).
            special: ``mask``, bool, in place of the canvas's.
        """
        assert self._geometry is not None, "geometry() comes first"
        geometry = self._geometry
        decoder = self.model.model
        if "mask" in special:
            mask = special["mask"]
        else:
            mask = geometry.rows(columns)
        with running(ids_BS, columns):
            states_BWD = decoder(
                inputs_embeds=decoder.embed_tokens(take(ids_BS, columns)),
                attention_mask=mask,
                position_ids=take(geometry.position_ids_BS, columns),
                use_cache=False,
                is_causal=False,
                sink_prefix=store,
            ).last_hidden_state
        return states_BWD.index_select(1, output_index_Q.to(states_BWD.device))

    def head(self, states: Tensor) -> Tensor:
        """Logits of states."""
        return self.model.lm_head(states)

    def picked(self, states_BQD: Tensor, read: Read) -> Tensor:
        """Logits (M, V) from the states of the columns that are read."""
        pick = read.pick
        if pick is None:
            return self.head(states_BQD[0])
        if pick.dtype == torch.bool:
            return self.head(states_BQD[pick.to(states_BQD.device)])
        return self.head(states_BQD.flatten(0, 1).index_select(0, pick))


class ModelSession(Session):
    """A model's denoiser with a memory: the keys and values of every column, as last computed.

    A cache may bring a subclass (`Cache.session`), which writes `evaluate`.
    Made by :meth:`ModelDenoiser.begin`. After a change of the weights, begin with a new denoiser.
    """

    begins_anywhere = False
    """Whether any evaluation may be the first; else a full one."""

    def __init__(self, denoiser: ModelDenoiser) -> None:
        self.denoiser = denoiser
        self.store: KeyValueStore | None = None
        self._filled: torch.Size | None = None

    def logits(self, ids_BS: Tensor, at: Places, columns: slice | Tensor | None = None) -> Tensor:
        """Logits (M, V) at the wanted positions, inside ``columns``.

        Args:
            ids_BS: token ids of the whole canvas.
            at: the positions.
            columns: None computes everything and remembers all keys and values. A slice or sorted
                column numbers, int64 (W,), run these columns alone, the same in every row: they
                attend to all columns (and the sinks), to one another as they are now and to the
                others as remembered, and are remembered from now on. With shifted logits, the
                column before each of them runs as well.

        Raises:
            ValueError: if the first evaluation, or the first after one that failed, is not full; if
                the canvas has another shape than in the last full one; if a wanted position lies
                outside ``columns``.
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
            logits_MV = self.evaluate(ids_BS, self.denoiser.read(at), columns)
        # Set last: after an interrupted evaluation some layers are newer than others.
        self._filled = ids_BS.shape
        return logits_MV

    def evaluate(self, ids_BS: Tensor, read: Read, columns: Any) -> Tensor:
        """Logits (M, V); these columns are computed, or all for None."""
        denoiser = self.denoiser
        sinks = denoiser.geometry(ids_BS, read.at.wanted_BS).sinks
        if self.store is None or (columns is None and self.store.prefix is not sinks):
            self.store = KeyValueStore(sinks, len(denoiser.model.model.layers))
        self.store.columns = columns
        if columns is None:
            return denoiser.full_pass(ids_BS, read, self.store)
        columns, output_index_Q = denoiser.columns_to_run(columns, read)
        self.store.columns = columns
        states_BQD = denoiser.states(ids_BS, columns, output_index_Q, self.store)
        return denoiser.picked(states_BQD, read)
