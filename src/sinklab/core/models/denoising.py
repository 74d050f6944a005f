"""The model as a denoiser: ids in, logits at the wanted positions out, with or without a memory of
earlier evaluations.

The plain way is the model's own forward. If a fast decoder is registered and faithful to this
model, it takes its place and gives the same numbers up to rounding: never while the model is
watched.
"""

# B batch, S canvas, W columns that run, Q columns with a wanted position, M wanted positions
# (row-major), V vocabulary, E hidden size, H key/value heads, N sinks, K keys = N + S, D head dim
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
from sinklab.core.models.geometry import CanvasGeometry, KeyValueStore, take
from sinklab.core.registry import caches, fast_decoders, fast_path
from sinklab.core.sampling.canvas import Canvas, Places


@dataclass(frozen=True, eq=False)
class Read:
    """The outputs of the decoder that an evaluation reads."""

    output_Q: Tensor
    """Columns whose states are wanted, int64 (Q,)."""
    pick: Tensor | None
    """Selection among the states (B, Q): bool (B, Q), int64 (M,) of the flattened ones, or None for
    all of a single row.
    """
    places: Places | None
    wanted_Q: Tensor
    """Columns that they predict."""


class ModelDenoiser:
    """(ids_BS, wanted_BS) -> logits_MV, bound to a model, its weights as they are now, and a
    padding.

    Made by :meth:`DiffusionLM.denoiser`; runs under ``torch.inference_mode``. With ``plain=True``,
    and while the model is watched, it is the model's own forward, bit for bit; else a fast decoder
    may stand for it. Sinks, masks and rotary tables are kept while the shape of the canvas stays
    the same: after a change of the weights, ask the model for a new denoiser.
    """

    def __init__(
        self, model: Any, attention_BS: Tensor | None = None, *, plain: bool = False
    ) -> None:
        self.model = model
        self.attention_BS = attention_BS
        self.plain = plain
        self.takes_places = True
        self._geometry: CanvasGeometry | None = None
        self._block: tuple[Any, Tensor, Tensor] | None = None

    def __call__(
        self,
        ids_BS: Tensor,
        wanted_BS: Tensor,
        *,
        places: Places | None = None,
        clean_BS: Tensor | None = None,
    ) -> Tensor:
        """Logits (M, V) at the wanted positions, everything computed afresh.

        Args:
            ids_BS, wanted_BS: the canvas, and the positions.
            places: the same positions as numbers; those that a loop knows need not be read from the
                device.
            clean_BS: the right ids, for a score: with attention in blocks each block then sees the
                clean ones before it (``clean`` of the model's forward). With full attention it
                changes nothing.

        Raises:
            ValueError: if shapes disagree, a row is all padding, or the canvas is longer than the
                context.
        """
        with torch.inference_mode():
            if clean_BS is not None and self.model.config.block_length is not None:
                self.geometry(ids_BS, wanted_BS)
                with running(torch.cat([ids_BS, clean_BS], dim=1)):
                    return self.model(
                        ids_BS, self.attention_BS, logits_to_keep=wanted_BS, clean=clean_BS
                    ).logits
            return self.full_pass(ids_BS, wanted_BS, self.read(wanted_BS, places))

    def session(self) -> ModelSession:
        """A session of this denoiser: with a memory, for one run over one canvas."""
        return ModelSession(self)

    @cached_property
    def _fast(self) -> Any:
        return None if self.plain else fast_path(fast_decoders, self.model)

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

    @property
    def own_cache(self) -> str | None:
        """The cache that saves time and changes no result; None if there is none, or each column is
        to be seen.
        """
        has_blocks = (
            self.model.config.block_length is not None
            and not self.plain
            and not is_watched(self.model)
        )
        return "committed" if has_blocks and "committed" in caches else None

    @property
    def is_fast(self) -> bool:
        """Whether the fast decoder stands for the model's own in an evaluation made now."""
        return self._fast is not None and self._fast.is_faithful()

    def geometry(self, ids_BS: Tensor, wanted_BS: Tensor) -> CanvasGeometry:
        """Geometry shared by every canvas of this shape. Raises ValueError for one that does not
        fit.
        """
        check_tensor("the ids of a denoiser", ids_BS, (None, None))
        check_tensor(
            "the wanted positions of a denoiser", wanted_BS, ids_BS.shape, "bool", "as the ids"
        )
        known, backend = self._geometry, attention_of(self.model.model.config)
        if known is None or known.shape != ids_BS.shape or known.backend != backend:
            self.model.config.check_length(ids_BS.shape[1])
            real_BS = masks.real_positions(ids_BS, self.attention_BS)
            like = ids_BS.new_empty(0, dtype=self.model.dtype)
            self._geometry = known = CanvasGeometry.of(
                self.model, real_BS, like, tuple(ids_BS.shape)
            )
        return known

    def full_pass(self, ids_BS: Tensor, wanted_BS: Tensor, read: Read, store: Any = None) -> Tensor:
        """Logits (M, V) with all columns computed; a store takes the place of the sinks, and
        remembers.
        """
        geometry, seen = self.geometry(ids_BS, wanted_BS), self.seen_by_finished(wanted_BS)
        # the fast decoder may leave padding out on a CPU
        may_miss = (
            geometry.mask is not None
            and self.attention_BS is not None
            and not reads_wait(wanted_BS.device)
        )
        if self.is_fast and not (may_miss and bool((wanted_BS & (self.attention_BS == 0)).any())):
            every = slice(0, ids_BS.shape[1])
            special = {} if seen is None else {"mask": geometry.rows(every, seen)}
            states_BQE = self.states(
                ids_BS, every, read.output_Q, store or geometry.sinks, **special
            )
            return self.logits(states_BQE, read)
        # the whole model, so that a trace sees where a forward begins
        wanted = wanted_BS if read.places is None else read.places.flat_M
        with running(ids_BS):
            return self.model(
                ids_BS,
                self.attention_BS,
                logits_to_keep=wanted,
                sink_prefix=store or geometry.sinks,
                visible=seen,
            ).logits

    def seen_by_finished(self, wanted_BS: Tensor) -> Tensor | None:
        """Visibility, bool (B, query, key), if the blocks before the wanted positions attend
        causally; None if they attend as they did when they were written.
        """
        config, length = self.model.config, wanted_BS.shape[1]
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

    def read(self, wanted_BS: Tensor, places: Places | None = None) -> Read:
        """The columns whose outputs are read for the wanted positions: those that predict one in
        some row or, if finding them would mean a wait for the device, those of the whole block.
        Shifted logits are read one column to the left.
        """
        check_tensor("the wanted positions of a denoiser", wanted_BS, (None, None), "bool")
        starts_BS = self._starts_BS
        if places is None or not reads_wait(wanted_BS.device):
            if starts_BS is not None and not bool((starts_BS & wanted_BS).any()):
                starts_BS = None
            # in a single row every column that has a wanted position is wanted
            is_single = len(wanted_BS) == 1 and starts_BS is None
            wanted_Q = places.flat_M if is_single and places else wanted_BS.any(0).nonzero()[:, 0]
            if starts_BS is None:
                pick = None if is_single else wanted_BS.index_select(1, wanted_Q)
                return Read(self._predictors(wanted_Q), pick, places, wanted_Q)
            flat_M, output_Q = (
                wanted_BS.flatten().nonzero()[:, 0],
                self._predictors(wanted_Q, starts_BS),
            )
        else:
            if self._block is None or self._block[0] is not places.columns:
                columns = places.columns
                if isinstance(columns, slice):
                    columns = torch.arange(columns.start, columns.stop, device=wanted_BS.device)
                self._block = places.columns, columns, self._predictors(columns, starts_BS)
            (_, wanted_Q, output_Q), flat_M = self._block, places.flat_M
        row_M, length = flat_M // wanted_BS.shape[1], wanted_BS.shape[1]
        pick_M = row_M * len(output_Q) + torch.searchsorted(wanted_Q, flat_M - row_M * length)
        if starts_BS is not None:
            pick_M = pick_M + starts_BS.flatten().index_select(0, flat_M) * len(wanted_Q)
        return Read(output_Q, pick_M, places, wanted_Q)

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
        before_Q = (wanted_Q - 1).clamp(min=0) if self.model.config.logit_shift else wanted_Q
        return before_Q if starts_BS is None else torch.cat([before_Q, wanted_Q])

    def columns_to_run(self, columns: slice | Tensor, read: Read) -> tuple[slice | Tensor, Tensor]:
        """The columns to run, and the indices among them of those whose outputs are read.

        With shifted logits every predecessor is added, wanted or not: the columns run in one row of
        a batch must not depend on the wishes of another row. Raises ValueError for a wanted
        position outside ``columns``.
        """
        self._check_inside(columns, read)
        is_shifted, output_Q = self.model.config.logit_shift, read.output_Q
        if isinstance(columns, slice):
            start = max(columns.start - 1, 0) if is_shifted else columns.start
            return slice(start, columns.stop), output_Q - start if start else output_Q
        columns_W = columns.to(output_Q.device)
        if is_shifted:
            columns_W = torch.cat([columns_W, (columns_W - 1).clamp(min=0)]).unique()
        return columns_W, torch.searchsorted(columns_W, output_Q)

    def _check_inside(self, columns: slice | Tensor, read: Read) -> None:
        # a loop whose cache hands over the block knows that it is inside
        held = None if read.places is None else read.places.columns
        if isinstance(columns, slice) and isinstance(held, slice):
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
            columns: those that run: a slice or int64 (W,) for the same in every row, int64 (B, W)
                for each its own.
            output_index_Q: indices among them of those whose states are wanted.
            store: takes the new keys and values and returns those of all columns
                (:class:`KeyValueStore`).
            special: ``mask``, bool, in place of the canvas's, and ``choose`` for the fast decoder
                alone (:mod:`sinklab.lab.caching`).
        """
        assert self._geometry is not None, "geometry() comes first"
        geometry, decoder = self._geometry, self.model.model
        embeds_BWE = decoder.embed_tokens(take(ids_BS, columns))
        if self.is_fast:
            return self._fast(embeds_BWE, geometry, columns, output_index_Q, store, **special)
        # columns that differ between rows are never watched: a trace reads columns that all rows
        # share
        shared = columns[0] if isinstance(columns, Tensor) and columns.ndim == 2 else columns
        with running(ids_BS, shared):
            states_BWE = decoder(
                inputs_embeds=embeds_BWE,
                attention_mask=special.get("mask", geometry.rows(columns)),
                position_ids=take(geometry.position_ids_BS, columns),
                use_cache=False,
                is_causal=False,
                sink_prefix=store,
            ).last_hidden_state
        return states_BWE.index_select(1, output_index_Q.to(states_BWE.device))

    def logits(self, states_BQE: Tensor, read: Read) -> Tensor:
        """Logits (M, V) from the states of the columns that are read."""
        pick, head = read.pick, self._fast.head if self.is_fast else self.model.lm_head
        if pick is None:
            return head(states_BQE[0])
        if pick.dtype == torch.bool:
            return head(states_BQE[pick.to(states_BQE.device)])
        return head(states_BQE.flatten(0, 1).index_select(0, pick))


class ModelSession:
    """(ids_BS, wanted_BS, columns) -> logits_MV with a memory of keys and values.

    Made by :meth:`ModelDenoiser.session`. After a change of the weights, begin with a new denoiser.
    """

    def __init__(self, denoiser: ModelDenoiser) -> None:
        self._denoiser = denoiser
        self._store: KeyValueStore | None = None
        self._memory: Any = None
        """Memory of a cache that brings its own, in place of the store."""
        self._filled: torch.Size | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values held now, which a partial evaluation attends to (added sinks
        included).
        """
        return sum(held.nbytes for held in (self._store, self._memory) if held is not None)

    def __call__(
        self, ids_BS: Tensor, wanted_BS: Tensor, columns: Any = None, places: Places | None = None
    ) -> Tensor:
        """Logits at the wanted positions.

        Args:
            ids_BS: token ids of the whole canvas.
            wanted_BS: bool; inside ``columns``.
            columns: None computes everything and remembers all keys and values. A slice or sorted
                column numbers, int64 (W,), run these columns alone, the same in every row: they
                attend to all columns (and the sinks), to one another as they are now and to the
                others as remembered, and are remembered from now on. With shifted logits, the
                column before each of them runs as well. A ``sampling.caches.BlockWork`` evaluates
                with the memory that its cache brings.
            places: as :meth:`ModelDenoiser.__call__` takes them.

        Raises:
            ValueError: if the first evaluation, or the first after one that failed, is not full; if
                the canvas has another shape than in the last full one; if a wanted position lies
                outside ``columns``.
        """
        filled, self._filled = self._filled, None
        policy = getattr(columns, "policy", None)
        if policy != (None if self._memory is None else self._memory.policy):
            self._store, self._memory, filled = None, None, None
        is_full = columns is None if policy is None else columns.is_full
        if filled is None and getattr(policy, "is_exact", False):
            # it may begin anywhere
            self._memory, is_full = None, True
        if not is_full and filled != ids_BS.shape:
            fact = (
                "nothing is"
                if filled is None
                else f"the canvas was {tuple(filled)} and is {tuple(ids_BS.shape)}"
            )
            raise ValueError(
                f"columns can be recomputed only while all others are remembered, but {fact}; call "
                "the session with columns=None first"
            )
        with torch.inference_mode():
            read = self._denoiser.read(wanted_BS, places)
            if policy is None:
                logits_MV = self._remembered(ids_BS, wanted_BS, read, columns)
            else:
                self._memory = self._memory or policy.memory(self._denoiser)
                logits_MV = self._memory(ids_BS, wanted_BS, columns, read)
        # Set last: after an interrupted evaluation some layers are newer than others.
        self._filled = ids_BS.shape
        return logits_MV

    def _remembered(
        self, ids_BS: Tensor, wanted_BS: Tensor, read: Read, columns: slice | Tensor | None
    ) -> Tensor:
        denoiser = self._denoiser
        sinks = denoiser.geometry(ids_BS, wanted_BS).sinks
        if self._store is None or (columns is None and self._store.prefix is not sinks):
            self._store = KeyValueStore(sinks, len(denoiser.model.model.layers))
        self._store.columns = columns
        if columns is None:
            return denoiser.full_pass(ids_BS, wanted_BS, read, self._store)
        columns, output_index_Q = denoiser.columns_to_run(columns, read)
        if isinstance(columns, slice) and denoiser.is_fast and reads_wait(ids_BS.device):
            # numbers on the device: the same kernels for every block
            columns = torch.arange(columns.start, columns.stop, device=ids_BS.device)
        self._store.columns = columns
        states_BQE = denoiser.states(ids_BS, self._store.columns, output_index_Q, self._store)
        return denoiser.logits(states_BQE, read)
