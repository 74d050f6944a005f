"""The model as a denoiser: ids in, logits at the wanted positions out, with or without a memory of what was computed.

The plain way is the model's own forward. Where a fast decoder is registered and faithful to this model, it takes its
place and gives the same numbers up to rounding: never while the model is watched.
"""

# B batch, S canvas, W columns that run, Q columns with a wanted position, M wanted positions (row-major), V vocabulary,
# E hidden size, H key/value heads, N sinks, K keys = N + S, D head dim
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sinklab.attention.context import reads_wait, running
from sinklab.errors import check_tensor
from sinklab.models import masks
from sinklab.models.sinks.prefix import SinkPrefix, logits_of
from sinklab.registry import fast_decoders, fast_path
from sinklab.sampling.canvas import Places


@dataclass(frozen=True, eq=False)
class CanvasGeometry:
    """What depends on the shape of the canvas and its padding alone: computed once, for all columns."""

    shape: tuple[int, ...]
    backend: str
    position_ids_BS: Tensor
    mask: Tensor | None
    """As the decoder takes it; None when nothing is hidden."""
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
    ) -> CanvasGeometry:
        """Computed for texts of this shape and padding.

        Args:
            model: a :class:`~sinklab.models.DiffusionLM`.
            real_BS: from :func:`~sinklab.models.masks.real_positions`.
            like: a tensor of the dtype and device of the states.
            shape: of the ids, (B, S).
            sinks: keys and values of the sinks where they are known; else they are computed.
            causal, visible: as in :meth:`DiffusionLM.forward`.
        """
        config, length, backend = model.config, shape[1], model.model.config._attn_implementation
        position_ids_BS = masks.position_ids(real_BS, length, start=config.text_start, device=like.device)
        if sinks is None:
            sinks = model.sink_prefix(length, None if real_BS is None else real_BS.sum(dim=1))
        # the logits of added sinks are added to a mask
        needs_mask = sinks is not None and (logits_of(sinks) is not None or masks.transformers_makes_one(model.model))
        if real_BS is None and needs_mask:
            real_BS = torch.ones(1, length, dtype=torch.bool, device=like.device)
        mask = masks.attention_mask(
            real_BS, length, sinks=config.sink_count, causal=causal, backend=backend, like=like, visible=visible
        )
        return cls(tuple(shape), backend, position_ids_BS, mask, sinks)


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
        """Columns of the canvas that the next :meth:`update` of each layer brings: None for all, a slice or int64 (W,)
        for the same in every row, int64 (B, W) for each row its own."""
        self.graphs: dict[Any, Any] = {}
        """What a fast decoder has recorded of evaluations into these buffers, by their shapes."""
        self._keys: list[Tensor | None] = [None] * layers
        self._values: list[Tensor | None] = [None] * layers

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
                self.graphs.clear()
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


@dataclass(frozen=True, eq=False)
class Read:
    """Which outputs of the decoder an evaluation reads."""

    output_Q: Tensor
    """Columns whose states are wanted, int64 (Q,)."""
    pick: Tensor | None
    """Which of the states (B, Q): bool (B, Q), int64 (M,) of the flattened ones, or None for all of a single row."""
    places: Places | None
    wanted_Q: Tensor
    """Columns that they predict."""


class ModelDenoiser:
    """(ids_BS, wanted_BS) -> logits_MV, bound to a model, its weights as they are now, and a padding.

    Made by :meth:`DiffusionLM.denoiser`; runs under ``torch.inference_mode``. With ``plain=True``, and while the model
    is watched, it is the model's own forward, bit for bit; else a fast decoder may stand for it. Sinks, masks and
    rotary tables are kept while the shape of the canvas stays the same: after a change of the weights, ask the model
    for a new denoiser.
    """

    def __init__(self, model: Any, attention_BS: Tensor | None = None, *, plain: bool = False) -> None:
        self.model = model
        self.attention_BS = attention_BS
        self.plain = plain
        self.takes_places = True
        self._geometry: CanvasGeometry | None = None
        self._block: tuple[Any, Tensor, Tensor] | None = None

    def __call__(self, ids_BS: Tensor, wanted_BS: Tensor, *, places: Places | None = None) -> Tensor:
        """Logits (M, V) at the wanted positions, everything computed afresh.

        Args:
            ids_BS, wanted_BS: the canvas, and the positions.
            places: the same positions in numbers; what a loop knows of them need not be read from the device.

        Raises:
            ValueError: if shapes disagree, a row is all padding, or the canvas is longer than the context.
        """
        with torch.inference_mode():
            return self.full_pass(ids_BS, wanted_BS, self.read(wanted_BS, places))

    def session(self) -> ModelSession:
        """The same denoiser with a memory, for one run over one canvas."""
        return ModelSession(self)

    @cached_property
    def _fast(self) -> Any:
        return None if self.plain else fast_path(fast_decoders, self.model)

    @property
    def is_fast(self) -> bool:
        """Whether the fast decoder stands for the model's own in an evaluation made now."""
        return self._fast is not None and self._fast.is_faithful()

    def geometry(self, ids_BS: Tensor, wanted_BS: Tensor) -> CanvasGeometry:
        """What is the same for every canvas of this shape. Raises ValueError for one that does not fit."""
        check_tensor("the ids of a denoiser", ids_BS, (None, None))
        check_tensor("the wanted positions of a denoiser", wanted_BS, ids_BS.shape, "bool", "as the ids")
        known, backend = self._geometry, self.model.model.config._attn_implementation
        if known is None or known.shape != ids_BS.shape or known.backend != backend:
            self.model.config.check_length(ids_BS.shape[1])
            real_BS = masks.real_positions(ids_BS, self.attention_BS)
            like = ids_BS.new_empty(0, dtype=self.model.dtype)
            self._geometry = known = CanvasGeometry.of(self.model, real_BS, like, tuple(ids_BS.shape))
        return known

    def full_pass(self, ids_BS: Tensor, wanted_BS: Tensor, read: Read, store: Any = None) -> Tensor:
        """Logits (M, V) with all columns computed; a store stands where the sinks stand, and remembers."""
        geometry = self.geometry(ids_BS, wanted_BS)
        if self.is_fast:
            every = slice(0, ids_BS.shape[1])
            states_BQE = self.states(ids_BS, every, read.output_Q, store or geometry.sinks)
            return self.logits(states_BQE, read)
        # the whole model, so that a trace sees where a forward begins
        wanted = wanted_BS if read.places is None else read.places.flat_M
        with running(ids_BS):
            return self.model(
                ids_BS, self.attention_BS, logits_to_keep=wanted, sink_prefix=store or geometry.sinks
            ).logits

    def read(self, wanted_BS: Tensor, places: Places | None = None) -> Read:
        """The columns whose outputs are read for the wanted positions: those that predict one in some row, or, where
        to find them would take a wait for the device, those of the whole block. Shifted logits are read one column to
        the left.
        """
        check_tensor("the wanted positions of a denoiser", wanted_BS, (None, None), "bool")
        if places is None or not reads_wait(wanted_BS.device):
            # in a single row every column that has a wanted position is wanted
            is_single = len(wanted_BS) == 1
            wanted_Q = places.flat_M if is_single and places else _columns_of(wanted_BS)
            pick = None if is_single else wanted_BS.index_select(1, wanted_Q)
            return Read(self._predictors(wanted_Q), pick, places, wanted_Q)
        if self._block is None or self._block[0] is not places.columns:
            columns = places.columns
            if isinstance(columns, slice):
                columns = torch.arange(columns.start, columns.stop, device=wanted_BS.device)
            self._block = places.columns, columns, self._predictors(columns)
        _, wanted_Q, output_Q = self._block
        row_M, length = places.flat_M // wanted_BS.shape[1], wanted_BS.shape[1]
        pick_M = row_M * len(wanted_Q) + torch.searchsorted(wanted_Q, places.flat_M - row_M * length)
        return Read(output_Q, pick_M, places, wanted_Q)

    def _predictors(self, wanted_Q: Tensor) -> Tensor:
        return (wanted_Q - 1).clamp(min=0) if self.model.config.logit_shift else wanted_Q

    def columns_to_run(self, columns: slice | Tensor, read: Read) -> tuple[slice | Tensor, Tensor]:
        """The columns to run, and where among them those stand whose outputs are read.

        Where logits are shifted, every predecessor is added, wanted or not: what runs in one row of a batch must not
        depend on what another row wants. Raises ValueError for a wanted position outside ``columns``.
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
            raise ValueError(f"wanted positions must lie in the columns that run, {columns}, but are in {wanted}")

    def states(
        self, ids_BS: Tensor, columns: slice | Tensor, output_index_Q: Tensor, store: Any, **fast: Any
    ) -> Tensor:
        """Final states (B, Q, E) where some columns run and attend to what the store gives.

        Args:
            ids_BS: token ids of the whole canvas.
            columns: those that run: a slice or int64 (W,) for the same in every row, int64 (B, W) for each its own.
            output_index_Q: where among them those stand whose states are wanted.
            store: takes the new keys and values and returns those of all columns (:class:`KeyValueStore`).
            fast: ``mask`` and ``choose`` for the fast decoder alone (:mod:`sinklab.caching`).
        """
        assert self._geometry is not None, "geometry() comes first"
        geometry, decoder = self._geometry, self.model.model
        embeds_BWE = decoder.embed_tokens(take(ids_BS, columns))
        if self.is_fast:
            return self._fast(embeds_BWE, geometry, columns, output_index_Q, store, **fast)
        # columns that differ between rows are never watched: a trace reads columns that all rows share
        shared = columns[0] if isinstance(columns, Tensor) and columns.ndim == 2 else columns
        with running(ids_BS, shared):
            states_BWE = decoder(
                inputs_embeds=embeds_BWE,
                attention_mask=geometry.mask,
                position_ids=take(geometry.position_ids_BS, columns),
                use_cache=False,
                is_causal=False,
                sink_prefix=store,
            ).last_hidden_state
        return states_BWE.index_select(1, output_index_Q.to(states_BWE.device))

    def logits(self, states_BQE: Tensor, read: Read) -> Tensor:
        """Logits (M, V) from the states of the columns that are read."""
        pick = read.pick
        if pick is None:
            return self.model.lm_head(states_BQE[0])
        if pick.dtype == torch.bool:
            return self.model.lm_head(states_BQE[pick.to(states_BQE.device)])
        return self.model.lm_head(states_BQE.flatten(0, 1).index_select(0, pick))


class ModelSession:
    """(ids_BS, wanted_BS, columns) -> logits_MV with a memory of keys and values.

    Made by :meth:`ModelDenoiser.session`. After a change of the weights, begin with a new denoiser.
    """

    def __init__(self, denoiser: ModelDenoiser) -> None:
        self._denoiser = denoiser
        self._store: KeyValueStore | None = None
        self._memory: Any = None
        """That of a cache which brings its own, in place of the store."""
        self._filled: torch.Size | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values held now: what a partial evaluation attends to (added sinks included)."""
        return sum(held.nbytes for held in (self._store, self._memory) if held is not None)

    def __call__(self, ids_BS: Tensor, wanted_BS: Tensor, columns: Any = None, places: Places | None = None) -> Tensor:
        """Logits at the wanted positions.

        Args:
            ids_BS: token ids of the whole canvas.
            wanted_BS: bool; inside ``columns``.
            columns: None computes everything and remembers all keys and values. A slice or sorted column numbers,
                int64 (W,), run these columns alone, the same in every row: they attend to all columns (and the sinks),
                to one another as they are now and to the others as remembered, and are remembered from now on. Where
                logits are shifted, the column before each of them runs as well. A ``sampling.caches.BlockWork``
                evaluates with the memory that its cache brings.
            places: as :meth:`ModelDenoiser.__call__` takes them.

        Raises:
            ValueError: if the first evaluation, or the first after one that failed, is not full; if the canvas has
                another shape than in the last full one; if a wanted position lies outside ``columns``.
        """
        filled, self._filled = self._filled, None
        policy = getattr(columns, "policy", None)
        is_full = columns is None if policy is None else columns.is_full
        if policy != (None if self._memory is None else self._memory.policy):
            self._store, self._memory, filled = None, None, None
        if not is_full and filled != ids_BS.shape:
            fact = "nothing is" if filled is None else f"the canvas was {tuple(filled)} and is {tuple(ids_BS.shape)}"
            raise ValueError(
                f"columns can be recomputed only while all others are remembered, but {fact}; call the session with "
                "columns=None first"
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

    def _remembered(self, ids_BS: Tensor, wanted_BS: Tensor, read: Read, columns: slice | Tensor | None) -> Tensor:
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


def _columns_of(wanted_BS: Tensor) -> Tensor:
    """Columns in which some row wants a logit."""
    wanted_S = wanted_BS[0] if len(wanted_BS) == 1 else wanted_BS.any(0)
    return wanted_S.nonzero()[:, 0]
