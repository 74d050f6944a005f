"""The model as a denoiser: ids in, logits at the wanted positions out, with or without a memory of what was computed.

The plain way is the model's own forward. Where a fast decoder is registered and faithful to this model, it takes its
place and gives the same numbers up to rounding: never while the model is watched.
"""

# B batch, S canvas, W columns that run, Q columns with a wanted position, M wanted positions (row-major), V vocabulary,
# E hidden size
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sinklab.attention.context import running
from sinklab.models import masks
from sinklab.models.keyvalues import KeyValueStore, take
from sinklab.models.sinks.prefix import SinkPrefix, logits_of
from sinklab.registry import fast_decoders, fast_path


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
    def of(cls, model: Any, ids_BS: Tensor, attention_BS: Tensor | None) -> CanvasGeometry:
        """Computed for a canvas of these ids and this padding."""
        config, length = model.config, ids_BS.shape[1]
        real_BS = masks.real_positions(ids_BS, attention_BS)
        lengths_B = None if real_BS is None else real_BS.sum(dim=1)
        position_ids_BS = masks.position_ids(real_BS, length, start=config.text_start, device=ids_BS.device)
        sinks = model.sink_prefix(length, lengths_B)
        if real_BS is None and logits_of(sinks) is not None:
            # they are added to a mask
            real_BS = torch.ones(1, length, dtype=torch.bool, device=ids_BS.device)
        backend, like = model.model.config._attn_implementation, ids_BS.new_empty(0, dtype=model.dtype)
        mask = masks.attention_mask(real_BS, length, sinks=config.sink_count, causal=False, backend=backend, like=like)
        return cls(tuple(ids_BS.shape), backend, position_ids_BS, mask, sinks)


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
        self._geometry: CanvasGeometry | None = None

    def __call__(self, ids_BS: Tensor, wanted_BS: Tensor) -> Tensor:
        """Logits (M, V) at the wanted positions, everything computed afresh.

        Raises:
            ValueError: if shapes disagree, a row is all padding, or the canvas is longer than the context.
        """
        with torch.inference_mode():
            return self.whole(ids_BS, wanted_BS)

    def session(self) -> Session:
        """The same denoiser with a memory, for one run over one canvas."""
        return Session(self)

    @cached_property
    def _fast(self) -> Any:
        return None if self.plain else fast_path(fast_decoders, self.model)

    @property
    def is_fast(self) -> bool:
        """Whether the fast decoder stands for the model's own in an evaluation made now."""
        return self._fast is not None and self._fast.is_faithful()

    def geometry(self, ids_BS: Tensor, wanted_BS: Tensor) -> CanvasGeometry:
        """What is the same for every canvas of this shape. Raises ValueError for one that does not fit."""
        if ids_BS.ndim != 2 or wanted_BS.dtype != torch.bool or wanted_BS.shape != ids_BS.shape:
            raise ValueError(
                "a denoiser takes ids (B, S) and a bool tensor of wanted positions of the same shape, but got ids of "
                f"shape {tuple(ids_BS.shape)} and {wanted_BS.dtype} of shape {tuple(wanted_BS.shape)}"
            )
        known, backend = self._geometry, self.model.model.config._attn_implementation
        if known is None or known.shape != ids_BS.shape or known.backend != backend:
            limit = self.model.config.text_positions
            if ids_BS.shape[1] > limit:
                raise ValueError(
                    f"the canvas has {ids_BS.shape[1]} tokens, but the model's context is {limit}; shorten the prompt "
                    "or ask for fewer new tokens"
                )
            self._geometry = known = CanvasGeometry.of(self.model, ids_BS, self.attention_BS)
        return known

    def whole(self, ids_BS: Tensor, wanted_BS: Tensor, store: Any = None) -> Tensor:
        """Logits (M, V) with all columns computed; a store stands where the sinks stand, and remembers."""
        geometry = self.geometry(ids_BS, wanted_BS)
        if self.is_fast:
            every = slice(0, ids_BS.shape[1])
            states_BQE = self.states(ids_BS, every, self.predictors(wanted_BS), store or geometry.sinks)
            return self.logits(states_BQE, wanted_BS)
        # the whole model, so that a trace sees where a forward begins
        with running(ids_BS):
            return self.model(
                ids_BS, self.attention_BS, logits_to_keep=wanted_BS, sink_prefix=store or geometry.sinks
            ).logits

    def predictors(self, wanted_BS: Tensor) -> Tensor:
        """The columns whose outputs predict the wanted positions of some row, int64 (Q,); shifted logits are read one
        column to the left.
        """
        wanted_Q = _columns_of(wanted_BS)
        return (wanted_Q - 1).clamp(min=0) if self.model.config.logit_shift else wanted_Q

    def states(self, ids_BS: Tensor, columns: slice | Tensor, where_Q: Tensor, store: Any, **fast: Any) -> Tensor:
        """Final states (B, Q, E) where some columns run and attend to what the store gives.

        Args:
            ids_BS: token ids of the whole canvas.
            columns: those that run: a slice or int64 (W,) for the same in every row, int64 (B, W) for each its own.
            where_Q: where among them those stand whose states are wanted.
            store: takes the new keys and values and returns those of all columns (:class:`KeyValueStore`).
            fast: ``mask`` and ``choose`` for the fast decoder alone (:mod:`sinklab.caching`).
        """
        assert self._geometry is not None, "geometry() comes first"
        geometry, decoder = self._geometry, self.model.model
        embeds_BWE = decoder.embed_tokens(take(ids_BS, columns))
        if self.is_fast:
            return self._fast(embeds_BWE, geometry, columns, where_Q, store, **fast)
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
        return states_BWE.index_select(1, where_Q.to(states_BWE.device))

    def logits(self, states_BQE: Tensor, wanted_BS: Tensor) -> Tensor:
        """Logits (M, V) from the states of the columns in which some row wants one."""
        # In a single row every column that has a wanted position is wanted.
        if len(wanted_BS) == 1:
            return self.model.lm_head(states_BQE[0])
        wanted_BQ = wanted_BS.index_select(1, _columns_of(wanted_BS))
        return self.model.lm_head(states_BQE[wanted_BQ.to(states_BQE.device)])


class Session:
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

    def __call__(self, ids_BS: Tensor, wanted_BS: Tensor, columns: Any = None) -> Tensor:
        """Logits at the wanted positions.

        Args:
            ids_BS: token ids of the whole canvas.
            wanted_BS: bool; inside ``columns``.
            columns: None computes everything and remembers all keys and values. A slice or sorted column numbers,
                int64 (W,), run these columns alone, the same in every row: they attend to all columns (and the sinks),
                to one another as they are now and to the others as remembered, and are remembered from now on. Where
                logits are shifted, the column before each of them runs as well. A ``sampling.caches.BlockWork``
                evaluates with the memory that its cache brings.

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
            if policy is None:
                logits_MV = self._remembered(ids_BS, wanted_BS, columns)
            else:
                self._memory = self._memory or policy.memory(self._denoiser)
                logits_MV = self._memory(ids_BS, wanted_BS, columns)
        # Set last: after an interrupted evaluation some layers are newer than others.
        self._filled = ids_BS.shape
        return logits_MV

    def _remembered(self, ids_BS: Tensor, wanted_BS: Tensor, columns: slice | Tensor | None) -> Tensor:
        denoiser = self._denoiser
        sinks = denoiser.geometry(ids_BS, wanted_BS).sinks
        if self._store is None or (columns is None and self._store.prefix is not sinks):
            self._store = KeyValueStore(sinks, len(denoiser.model.model.layers))
        if columns is None:
            return denoiser.whole(ids_BS, wanted_BS, self._store.expecting(None))
        columns, where_Q = _placed(columns, _columns_of(wanted_BS), shifted=denoiser.model.config.logit_shift)
        states_BQE = denoiser.states(ids_BS, columns, where_Q, self._store.expecting(columns))
        return denoiser.logits(states_BQE, wanted_BS)


def _columns_of(wanted_BS: Tensor) -> Tensor:
    """Columns in which some row wants a logit."""
    wanted_S = wanted_BS[0] if len(wanted_BS) == 1 else wanted_BS.any(0)
    return wanted_S.nonzero()[:, 0]


def _placed(columns: slice | Tensor, wanted_Q: Tensor, *, shifted: bool) -> tuple[slice | Tensor, Tensor]:
    """The columns to run, and where among them those stand whose outputs predict the wanted ones.

    Shifted logits are read one column to the left. Every predecessor is added, wanted or not: what runs in one row of a
    batch must not depend on what another row wants.
    """
    numbers = wanted_Q.tolist()
    if isinstance(columns, slice):
        inside = not numbers or (columns.start <= numbers[0] and numbers[-1] < columns.stop)
    else:
        columns = columns.to(wanted_Q.device)
        inside = bool(torch.isin(wanted_Q, columns).all())
    if not inside:
        raise ValueError(f"wanted positions must lie in the columns that run, {columns}, but are in columns {numbers}")
    if shifted:
        wanted_Q = (wanted_Q - 1).clamp(min=0)
        if isinstance(columns, slice):
            columns = slice(max(columns.start - 1, 0), columns.stop)
        else:
            columns = torch.cat([columns, (columns - 1).clamp(min=0)]).unique()
    if isinstance(columns, slice):
        return columns, wanted_Q - columns.start if columns.start else wanted_Q
    return columns, torch.searchsorted(columns, wanted_Q)
