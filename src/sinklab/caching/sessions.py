"""Evaluations of a block under caches that choose their columns: which road, which mask, which columns run."""

# B batch, H query heads, Q queries, S canvas, W columns that run, Q columns wanted, K keys, V vocabulary, E hidden size
from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sinklab.attention.context import is_watched, running
from sinklab.caching.policies import BlockWork, EvictingCache
from sinklab.caching.stores import KeptStore, RefreshedStore, Window
from sinklab.fast import decoder as lean


class Keeping:
    """The memory of one run under such a cache, and how an evaluation of it is made; see `Session`."""

    def __init__(self, model: Any, decoder: lean.Decoder, place: Any, work: BlockWork) -> None:
        kind = KeptStore if isinstance(work.policy, EvictingCache) else RefreshedStore
        self.store: KeptStore | RefreshedStore = kind(place.sinks, len(decoder.layers))
        self.model, self.lean, self.place, self.policy = model, decoder, place, work.policy

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values held now."""
        return self.store.nbytes

    def full(self, ids_BS: Tensor, attention_BS: Tensor | None, wanted_BS: Tensor, work: BlockWork) -> Tensor:
        """Logits (M, V) with everything computed; chooses where the work says so.

        Raises:
            ValueError: for a choice with a wanted position outside the block, and attention that cannot be read.
        """
        run = self._begin(ids_BS, attention_BS, work, "full")
        where_Q = self._outputs(wanted_BS, run if work.is_choice else None)
        if not self._is_lean():
            with running(ids_BS), self._reading(work.is_choice):
                kept = {"logits_to_keep": wanted_BS, "sink_prefix": self.store}
                logits_MV = self.model(ids_BS, attention_BS, **kept).logits
            self._refuse_unread(work.is_choice)
            return logits_MV
        view = self.place.view
        # the last layer runs the queries of the whole window too, since it chooses by them
        asked_Q = torch.arange(run.start, run.stop, device=ids_BS.device) if work.is_choice else where_Q
        choose = self.store.choose if work.is_choice else None
        view = lean.View(view.cos_BW1D, view.sin_BW1D, view.mask_B11K, asked_Q, choose)
        states_BQE = self.lean(self.model.model.embed_tokens(ids_BS), view, self.store)
        if work.is_choice:
            states_BQE = states_BQE.index_select(1, where_Q - run.start)
        return self._logits(states_BQE, wanted_BS)

    def partial(self, ids_BS: Tensor, attention_BS: Tensor | None, wanted_BS: Tensor, work: BlockWork) -> Tensor:
        """Logits (M, V) with the window computed, and what is refreshed with it.

        Raises:
            ValueError: where nothing was chosen before, or for another block; for a wanted position outside the block;
                and for a batch whose rows refresh columns of their own while attention is watched.
        """
        if not self.store.is_chosen:
            raise ValueError(
                "a partial evaluation attends to what a full one chose, but none has chosen yet; call the session with "
                "a full evaluation that chooses first"
            )
        known = self.store.window
        if known is not None and known.work.block != work.block:
            raise ValueError(
                f"the last choice was made for the block at {known.work.block}, but the one at {work.block} is to run; "
                "begin a block with a full evaluation"
            )
        is_lean = self._is_lean()
        run = self._begin(ids_BS, attention_BS, work, "compact" if is_lean else "spread")
        where_Q = self._outputs(wanted_BS, run)
        columns: slice | Tensor = run
        if isinstance(self.store, RefreshedStore):
            columns = self.store.columns_BW()
            if not is_lean and len(ids_BS) > 1:
                raise ValueError(
                    "each row recomputes its own sinks, and a trace or intervention reads columns that all rows share, "
                    f"but there are {len(ids_BS)} rows; decode them one by one while attention is watched"
                )
            self.store.expecting(columns)
        embeds_BWE = self.model.model.embed_tokens(_rows(ids_BS, columns))
        if is_lean:
            states_BQE = self._run_lean(embeds_BWE, columns, where_Q - run.start)
        else:
            states_BQE = self._run_plain(ids_BS, embeds_BWE, columns).index_select(1, where_Q - run.start)
        return self._logits(states_BQE, wanted_BS)

    def _run_lean(self, embeds_BWE: Tensor, columns: slice | Tensor, where_Q: Tensor) -> Tensor:
        whole, mask = self.place.view, self.place.view.mask_B11K
        if isinstance(self.store, KeptStore):
            seen = self.store.compact_mask()
            mask = None if seen is None else lean.additive(seen, embeds_BWE.dtype)
        view = lean.View(_rows(whole.cos_BW1D, columns), _rows(whole.sin_BW1D, columns), mask, where_Q)
        return self.lean(embeds_BWE, view, self.store)

    def _run_plain(self, ids_BS: Tensor, embeds_BWE: Tensor, columns: slice | Tensor) -> Tensor:
        # one row: what it refreshes is what all rows refresh
        shared = columns if isinstance(columns, slice) else columns[0]
        with running(ids_BS, shared), self._hiding():
            return self.model.model(
                inputs_embeds=embeds_BWE,
                attention_mask=self.place.mask,
                position_ids=_rows(self.place.position_ids_BS, columns),
                use_cache=False,
                is_causal=False,
                sink_prefix=self.store,
            ).last_hidden_state

    def _begin(self, ids_BS: Tensor, attention_BS: Tensor | None, work: BlockWork, mode: str) -> slice:
        shifted = self.model.config.logit_shift
        run = slice(max(work.block.start - 1, 0) if shifted else work.block.start, work.block.stop)
        real_BS = torch.ones_like(ids_BS, dtype=torch.bool) if attention_BS is None else attention_BS.bool()
        self.store.begin(Window(work, run, real_BS.to(ids_BS.device)), mode)
        return run

    def _is_lean(self) -> bool:
        return not is_watched(self.model) and self.lean.is_faithful()

    def _outputs(self, wanted_BS: Tensor, run: slice | None) -> Tensor:
        """The columns whose outputs predict the wanted ones of some row; they must lie in ``run`` where it is given."""
        wanted_Q = wanted_BS.any(0).nonzero()[:, 0]
        where_Q = (wanted_Q - 1).clamp(min=0) if self.model.config.logit_shift else wanted_Q
        if run is not None and len(where_Q) and not (run.start <= int(where_Q[0]) and int(where_Q[-1]) < run.stop):
            raise ValueError(f"wanted positions must lie in the block that runs, columns {run}, but some do not")
        return where_Q

    def _logits(self, states_BQE: Tensor, wanted_BS: Tensor) -> Tensor:
        wanted_BQ = wanted_BS.index_select(1, wanted_BS.any(0).nonzero()[:, 0])
        return self.model.lm_head(states_BQE[wanted_BQ.to(states_BQE.device)])

    def _refuse_unread(self, is_choice: bool) -> None:
        if is_choice and not self.store.is_chosen:
            kind = self.model.model.config._attn_implementation
            raise ValueError(
                f"{self.policy} chooses columns by the queries of scaled_dot_product_attention, but the model made "
                f"such calls in {self.store.chosen} of {len(self.lean.layers)} layers (attn_implementation is "
                f'{kind!r}); call model.set_attn_implementation("sdpa"), and do not compile its layers'
            )

    @contextmanager
    def _reading(self, is_choice: bool) -> Iterator[None]:
        if not is_choice:
            yield
            return
        with _Queries(self.store):
            yield

    @contextmanager
    def _hiding(self) -> Iterator[None]:
        """While the block lasts, every layer is given the mask of what it kept."""
        store, hooks = self.store, []
        if isinstance(store, KeptStore):
            heads = self.model.model.config.num_attention_heads
            for index, layer in enumerate(self.model.model.layers):
                hook = _Masked(store.spread_mask(index, heads))
                hooks.append(layer.self_attn.register_forward_pre_hook(hook, with_kwargs=True))
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()


class _Masked:
    def __init__(self, mask: Tensor) -> None:
        self.mask = mask

    def __call__(self, attention: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        return args, kwargs | {"attention_mask": self.mask}


class _Queries(TorchFunctionMode):
    """Hands the queries of every attention call to the store, as the model (or an intervention) makes them."""

    def __init__(self, store: KeptStore | RefreshedStore) -> None:
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


def _rows(values: Tensor, columns: slice | Tensor) -> Tensor:
    """These columns of (1 or B, S, …): a slice of all rows, or (B, W), each row's own."""
    if isinstance(columns, slice):
        return values[:, columns]
    values = values.expand(len(columns), *values.shape[1:])
    return values[torch.arange(len(columns), device=values.device)[:, None], columns]
