"""The model as a denoiser: ids in, logits at the wanted positions out, with or without a memory of what was computed.

Two roads give the same numbers up to rounding. The plain one calls the decoder; it is taken while a tap hangs on a
model, and for everything the other does not know. The lean one (:mod:`sinklab.fast.decoder`) computes what is asked.
"""

# B batch, S canvas, W columns that run, Q columns with a wanted position, M wanted positions (row-major), V vocabulary,
# E hidden size
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sinklab.attention.context import is_watched, running
from sinklab.caching.policies import BlockWork
from sinklab.caching.sessions import Keeping
from sinklab.fast import decoder as lean
from sinklab.models import masks
from sinklab.models.keyvalues import KeyValueStore
from sinklab.models.sinks.prefix import SinkPrefix


@dataclass(frozen=True, eq=False)
class _Place:
    """What depends on the shape of the canvas and its padding alone: computed once, for all columns."""

    shape: tuple[int, ...]
    backend: str
    position_ids_BS: Tensor
    mask: Tensor | None
    sinks: SinkPrefix | None
    view: lean.View

    @classmethod
    def of(cls, model: Any, ids_BS: Tensor, attention_BS: Tensor | None) -> _Place:
        config, decoder = model.config, model.model
        length = ids_BS.shape[1]
        real_BS = masks.padding(ids_BS, attention_BS)
        lengths_B = None if real_BS is None else real_BS.sum(dim=1)
        position_ids_BS = masks.position_ids(real_BS, length, start=config.text_start, device=ids_BS.device)
        state_11E = decoder.embed_tokens(ids_BS[:1, :1])
        backend = decoder.config._attn_implementation
        mask = masks.attention_mask(
            real_BS, length, sinks=config.sink_count, causal=False, backend=backend, like=state_11E
        )
        # Made additive once: SDPA would do it in every layer.
        added = mask if mask is None or mask.is_floating_point() else lean.additive(mask, state_11E.dtype)
        cos_BSD, sin_BSD = decoder.rotary_emb(state_11E, position_ids_BS)
        view = lean.View(cos_BSD[:, :, None], lean.signed(sin_BSD)[:, :, None], added, None)
        sinks = model.sink_prefix(length, lengths_B)
        return cls(tuple(ids_BS.shape), backend, position_ids_BS, mask, sinks, view)


class ModelDenoiser:
    """(ids_BS, wanted_BS) -> logits_MV, bound to a model, its weights as they are now, and a padding.

    Made by :meth:`DiffusionLM.denoiser`; runs under ``torch.inference_mode``. Called itself, it is the model's own
    forward, bit for bit, traced or not; :meth:`session` gives the fast form. Sinks, masks and rotary tables are kept
    while the shape of the canvas stays the same: after a change of the weights, ask the model for a new denoiser.
    """

    def __init__(self, model: Any, attention_BS: Tensor | None = None) -> None:
        self.model = model
        self.attention_BS = attention_BS
        self._place: _Place | None = None

    def __call__(self, ids_BS: Tensor, wanted_BS: Tensor) -> Tensor:
        """Logits (M, V) at the wanted positions, everything computed afresh.

        Raises:
            ValueError: if shapes disagree, a row is all padding, or the canvas is longer than the context.
        """
        with torch.inference_mode():
            sinks = self.place(ids_BS, wanted_BS).sinks
            with running(ids_BS):
                return self.model(ids_BS, self.attention_BS, logits_to_keep=wanted_BS, sink_prefix=sinks).logits

    def session(self) -> Session:
        """The same denoiser with a memory, for one run over one canvas."""
        return Session(self)

    def place(self, ids_BS: Tensor, wanted_BS: Tensor) -> _Place:
        """What is the same for every canvas of this shape. Raises ValueError for one that does not fit."""
        if ids_BS.ndim != 2 or wanted_BS.dtype != torch.bool or wanted_BS.shape != ids_BS.shape:
            raise ValueError(
                "a denoiser takes ids (B, S) and a bool tensor of wanted positions of the same shape, but got ids of "
                f"shape {tuple(ids_BS.shape)} and {wanted_BS.dtype} of shape {tuple(wanted_BS.shape)}"
            )
        place, backend = self._place, self.model.model.config._attn_implementation
        if place is None or place.shape != ids_BS.shape or place.backend != backend:
            limit = self.model.config.text_positions
            if ids_BS.shape[1] > limit:
                raise ValueError(
                    f"the canvas has {ids_BS.shape[1]} tokens, but the model's context is {limit}; shorten the prompt "
                    "or ask for fewer new tokens"
                )
            self._place = place = _Place.of(self.model, ids_BS, self.attention_BS)
        return place


class Session:
    """(ids_BS, wanted_BS, columns) -> logits_MV with a memory of the keys and values of every column.

    Made by :meth:`ModelDenoiser.session`. After a change of the weights, begin with a new denoiser.
    """

    def __init__(self, denoiser: ModelDenoiser) -> None:
        self._denoiser = denoiser
        self._model = denoiser.model
        self._lean = lean.Decoder(denoiser.model)
        self._store: KeyValueStore | None = None
        self._keeping: Keeping | None = None
        self._filled: torch.Size | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values held now: what a partial evaluation attends to (added sinks included)."""
        return sum(memory.nbytes for memory in (self._store, self._keeping) if memory is not None)

    def __call__(self, ids_BS: Tensor, wanted_BS: Tensor, columns: slice | Tensor | BlockWork | None = None) -> Tensor:
        """Logits at the wanted positions.

        Args:
            ids_BS: token ids of the whole canvas.
            wanted_BS: bool; inside ``columns``.
            columns: None computes everything and remembers all keys and values. A slice or sorted column numbers,
                int64 (W,), run these columns alone, the same in every row: they attend to all columns (and the sinks),
                to one another as they are now and to the others as remembered, and are remembered from now on. Where
                logits are shifted, the column before each of them runs as well. A ``BlockWork`` runs everything, or
                the block on what the last full evaluation chose (:mod:`sinklab.caching.policies`).

        Raises:
            ValueError: if the first evaluation, or the first after one that failed, is not full; if the canvas has
                another shape than in the last full one; if a wanted position lies outside ``columns``.
        """
        filled, self._filled = self._filled, None
        is_partial = not columns.is_full if isinstance(columns, BlockWork) else columns is not None
        if is_partial and (self._keeping is None) == isinstance(columns, BlockWork):
            filled = None
        if is_partial and filled != ids_BS.shape:
            fact = "nothing is" if filled is None else f"the canvas was {tuple(filled)} and is {tuple(ids_BS.shape)}"
            raise ValueError(
                f"columns can be recomputed only while all others are remembered, but {fact}; call the session with "
                "columns=None first"
            )
        with torch.inference_mode():
            place = self._denoiser.place(ids_BS, wanted_BS)
            if isinstance(columns, BlockWork):
                logits_MV = self._kept(ids_BS, wanted_BS, columns, place)
            else:
                logits_MV = self._evaluate(ids_BS, wanted_BS, columns, place)
        # Set last: after an interrupted evaluation some layers are newer than others.
        self._filled = ids_BS.shape
        return logits_MV

    def _kept(self, ids_BS: Tensor, wanted_BS: Tensor, work: BlockWork, place: _Place) -> Tensor:
        keeping, attention_BS = self._keeping, self._denoiser.attention_BS
        if not work.is_full:
            assert keeping is not None
            return keeping.partial(ids_BS, attention_BS, wanted_BS, work)
        self._store = None
        if keeping is None or keeping.place is not place or keeping.policy != work.policy:
            self._keeping = keeping = Keeping(self._model, self._lean, place, work)
        return keeping.full(ids_BS, attention_BS, wanted_BS, work)

    def _evaluate(self, ids_BS: Tensor, wanted_BS: Tensor, columns: slice | Tensor | None, place: _Place) -> Tensor:
        model = self._model
        is_plain = is_watched(model) or not self._lean.is_faithful()
        if columns is None:
            self._keeping = None
            if self._store is None or self._store.prefix is not place.sinks:
                self._store = KeyValueStore(place.sinks, len(self._lean.layers))
            if is_plain:
                # The whole model, so that a trace sees where a forward begins; the store stands where the sinks stand.
                store, attention_BS = self._store, self._denoiser.attention_BS
                with running(ids_BS):
                    return model(
                        ids_BS, attention_BS, logits_to_keep=wanted_BS, sink_prefix=store.expecting(None)
                    ).logits
        is_full = columns is None
        wanted_Q = _columns_of(wanted_BS)
        columns = slice(0, ids_BS.shape[1]) if columns is None else columns
        columns, where_Q = _placed(columns, wanted_Q, shifted=model.config.logit_shift)
        assert self._store is not None
        store = self._store.expecting(None if is_full else columns)
        embeds_BWE = model.model.embed_tokens(_take(ids_BS, columns))
        if is_plain:
            with running(ids_BS, columns):
                states_BQE = model.model(
                    inputs_embeds=embeds_BWE,
                    attention_mask=place.mask,
                    position_ids=_take(place.position_ids_BS, columns),
                    use_cache=False,
                    is_causal=False,
                    sink_prefix=store,
                ).last_hidden_state
            states_BQE = states_BQE.index_select(1, where_Q.to(states_BQE.device))
        else:
            whole = place.view
            view = lean.View(_take(whole.cos_BW1D, columns), _take(whole.sin_BW1D, columns), whole.mask_B11K, where_Q)
            states_BQE = self._lean(embeds_BWE, view, store)
        # In a single row every column that has a wanted position is wanted.
        if len(wanted_BS) == 1:
            return model.lm_head(states_BQE[0])
        return model.lm_head(states_BQE[wanted_BS.index_select(1, wanted_Q).to(states_BQE.device)])


def _columns_of(wanted_BS: Tensor) -> Tensor:
    """Columns in which some row wants a logit."""
    wanted_S = wanted_BS[0] if len(wanted_BS) == 1 else wanted_BS.any(0)
    return wanted_S.nonzero()[:, 0]


def _take(values_BS: Tensor, columns: slice | Tensor) -> Tensor:
    return values_BS[:, columns] if isinstance(columns, slice) else values_BS.index_select(1, columns)


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
