"""Evaluations of a block under a cache that chooses its columns: which of them run, and what they attend to."""

# B batch, H query heads, Q columns wanted, S canvas, W columns that run, M wanted positions (row-major), V vocabulary
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sinklab.attention.context import is_watched
from sinklab.caching.store import BlockStore, Window
from sinklab.models.denoising import CanvasGeometry, ModelDenoiser
from sinklab.sampling.caches import BlockWork


class BlockSession:
    """(ids_BS, wanted_BS, work) -> logits_MV: the memory that a choosing cache brings to a session of a denoiser."""

    def __init__(self, denoiser: ModelDenoiser, policy: Any) -> None:
        self.denoiser, self.policy = denoiser, policy
        self._geometry: CanvasGeometry | None = None
        self._history: list[dict[int, Tensor]] = []
        self._store: BlockStore | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values held now."""
        return 0 if self._store is None else self._store.nbytes

    def __call__(self, ids_BS: Tensor, wanted_BS: Tensor, work: BlockWork) -> Tensor:
        """Logits (M, V): of a full evaluation, which chooses where the work says so, or of the window.

        Raises:
            ValueError: for a wanted position outside the block at a choice or a partial evaluation, and attention that
                cannot be read; for a partial evaluation where nothing was chosen, or for another block; and for a batch
                whose rows recompute columns of their own while attention is watched.
        """
        geometry = self.denoiser.geometry(ids_BS, wanted_BS)
        if not work.is_full:
            return self._partial(ids_BS, wanted_BS, work)
        if self._geometry is not geometry:
            self._geometry, self._history = geometry, [{} for _ in self.denoiser.model.model.layers]
        self._store = None
        if not work.is_choice:
            return self.denoiser.whole(ids_BS, wanted_BS)
        start = max(work.block.start - 1, 0) if self.denoiser.model.config.logit_shift else work.block.start
        padding_BS = self.denoiser.attention_BS
        real_BS = torch.ones_like(ids_BS) if padding_BS is None else padding_BS.to(ids_BS.device)
        store = BlockStore(geometry.sinks, Window(work, slice(start, work.block.stop), real_BS.bool()), self._history)
        logits_MV = self._choosing(ids_BS, wanted_BS, store)
        self._store = store
        return logits_MV

    def _choosing(self, ids_BS: Tensor, wanted_BS: Tensor, store: BlockStore) -> Tensor:
        denoiser, run = self.denoiser, store.window.run
        where_Q = self._where(wanted_BS, run)
        if denoiser.is_fast:
            # the last layer runs the queries of the whole window too, since it chooses by them
            window_W = torch.arange(run.start, run.stop, device=ids_BS.device)
            every = slice(0, ids_BS.shape[1])
            states_BWE = denoiser.states(ids_BS, every, window_W, store, choose=store.choose)
            return denoiser.logits(states_BWE.index_select(1, where_Q), wanted_BS)
        with _Queries(store):
            logits_MV = denoiser.whole(ids_BS, wanted_BS, store)
        if store.chosen != len(self._history):
            kind = denoiser.model.model.config._attn_implementation
            raise ValueError(
                f"{self.policy} chooses columns by the queries of scaled_dot_product_attention, but the model made "
                f"such calls in {store.chosen} of {len(self._history)} layers (attn_implementation is "
                f'{kind!r}); call model.set_attn_implementation("sdpa"), and do not compile its layers'
            )
        return logits_MV

    def _partial(self, ids_BS: Tensor, wanted_BS: Tensor, work: BlockWork) -> Tensor:
        denoiser, store = self.denoiser, self._store
        if store is None:
            raise ValueError(
                "a partial evaluation attends to what a full one chose, but none has chosen yet; call the session with "
                "a full evaluation that chooses first"
            )
        known, is_fast = store.window.work.block, denoiser.is_fast
        if known != work.block:
            raise ValueError(
                f"the last choice was made for the block at {known}, but the one at {work.block} is to run; "
                "begin a block with a full evaluation"
            )
        columns, where_Q = store.resume(spread=not is_fast), self._where(wanted_BS, store.window.run)
        fast: dict[str, Any] = {"mask": store.compact_mask()} if self.policy.evicts else {}
        if not self.policy.evicts and len(ids_BS) > 1 and is_watched(denoiser.model):
            raise ValueError(
                "each row recomputes its own sinks, and a trace or intervention reads columns that all rows share, "
                f"but there are {len(ids_BS)} rows; decode them one by one while attention is watched"
            )
        with _hiding(denoiser.model.model, store) if self.policy.evicts and not is_fast else nullcontext():
            states_BQE = denoiser.states(ids_BS, columns, where_Q, store, **fast)
        return denoiser.logits(states_BQE, wanted_BS)

    def _where(self, wanted_BS: Tensor, run: slice) -> Tensor:
        """Where in the window those columns stand whose outputs predict the wanted positions."""
        at_Q = self.denoiser.predictors(wanted_BS)
        if len(at_Q) and not (run.start <= int(at_Q[0]) and int(at_Q[-1]) < run.stop):
            raise ValueError(f"wanted positions must lie in the block that runs, columns {run}, but some do not")
        return at_Q - run.start


@contextmanager
def _hiding(decoder: Any, store: BlockStore) -> Iterator[None]:
    """While the block lasts, every layer is given the mask of what it kept."""

    def hook(mask: Tensor) -> Any:
        return lambda attention, args, kwargs: (args, kwargs | {"attention_mask": mask})

    heads = decoder.config.num_attention_heads
    handles = [
        layer.self_attn.register_forward_pre_hook(
            # before the logits of added sinks
            hook(store.spread_mask(index, heads)),
            with_kwargs=True,
            prepend=True,
        )
        for index, layer in enumerate(decoder.layers)
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Queries(TorchFunctionMode):
    """Hands the queries of every attention call to the store, as the model (or an intervention) makes them."""

    def __init__(self, store: BlockStore) -> None:
        super().__init__()
        self.store = store

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        given = kwargs or {}
        if func is F.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
            call = dict(zip(names, args, strict=False)) | given
            query, scale = call["query"], call.get("scale")
            scale = query.shape[-1] ** -0.5 if scale is None else scale
            self.store.choose(self.store.layer, query, call.get("attn_mask"), scale)
        return func(*args, **given)
