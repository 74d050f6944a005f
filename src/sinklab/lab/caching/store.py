"""A block under a cache that chooses columns: its evaluations, the keys and values that they attend
to, the choice.
"""

# B batch, H query heads, G key/value heads, Q queries or columns wanted, S canvas, W columns that
# run, N sinks, C kept, K = N + S, D dim, E hidden size, M wanted positions (row-major), V
# vocabulary
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from sinklab.core.attention import is_watched, received_attention
from sinklab.core.compat import attention_of
from sinklab.core.models.denoising import ModelDenoiser, ModelSession, Read
from sinklab.core.models.masks import CanvasGeometry
from sinklab.core.models.prefix import KeyValueStore, SinkPrefix
from sinklab.core.sampling.denoisers import BlockWork


@dataclass(frozen=True, eq=False)
class Window:
    """Columns that run at the partial evaluations of a block, and those that are real."""

    work: BlockWork
    run: slice
    """The block, and if logits are shifted the column before it."""
    real_BS: Tensor

    @cached_property
    def candidates_BS(self) -> Tensor:
        """The real columns outside the window, bool."""
        candidates_BS = self.real_BS.clone()
        candidates_BS[:, self.run] = False
        return candidates_BS


@dataclass(frozen=True, eq=False)
class Seen:
    """One layer at an evaluation that chooses: the data by which a cache ranks the columns,
    computed on demand.
    """

    layer: int
    window: Window
    query_BHQD: Tensor
    """Queries of the whole canvas, or of the window alone."""
    key_BGKD: Tensor
    """Added sinks first, then the canvas."""
    mask: Tensor | None
    scale: float
    history: dict[int, Tensor]
    """Notes of this layer over one canvas: anything a cache keeps of one block for later ones, by
    number of the block.
    """

    @property
    def block(self) -> slice:
        """Canvas columns of the block."""
        return self.window.work.block

    @property
    def number(self) -> int:
        """Number of the block, from 0."""
        return self.window.work.number

    @property
    def heads(self) -> int:
        """Key/value heads G."""
        return self.key_BGKD.shape[1]

    @property
    def candidates_BS(self) -> Tensor:
        """The columns to choose from, bool: real, and not among those that run."""
        return self.window.candidates_BS

    @cached_property
    def _queries_BHWD(self) -> Tensor:
        if self.query_BHQD.shape[2] < self.window.real_BS.shape[1]:
            return self.query_BHQD
        return self.query_BHQD[:, :, self.window.run]

    @cached_property
    def received_BGS(self) -> Tensor:
        """Attention from the window's real queries, summed over them and over the query heads of a
        key head.
        """
        mask, real_BW = self.mask, self.window.real_BS[:, self.window.run]
        if mask is not None and mask.shape[2] == self.window.real_BS.shape[1]:
            mask = mask[:, :, self.window.run]
        received_B1HK = received_attention(
            self._queries_BHWD,
            self.key_BGKD,
            mask=mask,
            scale=self.scale,
            groups_BGQ=real_BW[:, None],
        )
        received_BHS = received_B1HK[:, 0, :, -self.window.real_BS.shape[1] :]
        return received_BHS.unflatten(1, (self.heads, -1)).sum(2)

    @cached_property
    def aligned_BS(self) -> Tensor:
        """Mean query of the window · key, averaged over heads, no scale, no softmax
        (2508.02558).
        """
        queries_BHWD, real_BW = self._queries_BHWD, self.window.real_BS[:, self.window.run]
        weight_BW = real_BW.to(torch.promote_types(queries_BHWD.dtype, torch.float32))
        weight_B1W1 = (weight_BW / weight_BW.sum(1, keepdim=True))[:, None, :, None]
        mean_BHD = (queries_BHWD.to(weight_BW.dtype) * weight_B1W1).sum(2)
        mean_BGD = mean_BHD.unflatten(1, (self.heads, -1)).mean(2)
        text_BGSD = self.key_BGKD[:, :, -self.window.real_BS.shape[1] :].to(mean_BGD.dtype)
        return torch.einsum("bgd,bgsd->bs", mean_BGD, text_BGSD) / self.heads


class BlockStore(KeyValueStore):
    """The memory of one block: filled by a full evaluation that chooses, attended to by the partial
    ones after it.

    A cache that evicts leaves a layer [added sinks; kept columns; window]. While attention is
    watched the same keys are spread over the canvas, the evicted columns as zeros behind a mask, so
    that a trace finds a column in its place. One that refreshes leaves everything, and recomputes
    the columns that rank highest over all layers and heads.
    """

    def __init__(
        self,
        prefix: SinkPrefix | None,
        window: Window,
        policy: Any,
        history: list[dict[int, Tensor]],
    ) -> None:
        super().__init__(prefix, len(history))
        self.window, self.policy, self.history = window, policy, history
        counts_B = self.policy.counts(window.candidates_BS)
        self.counts_B, self.most = counts_B.to(window.real_BS.device), int(counts_B.max())
        self.layer = 0
        """The one that was updated last."""
        self.chosen = 0
        """Layers that have chosen."""
        self._is_spread = False
        self._kept: list[Tensor] = []
        self._total_BS: Any = 0

    def update(
        self, k_BKWD: Tensor, v_BKWD: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Keys and values to attend to, for those of the columns that run."""
        self.layer = layer_idx
        keys, values = super().update(k_BKWD, v_BKWD, layer_idx)
        if not self._is_spread:
            return keys, values
        return self._spread(keys), self._spread(values)

    def choose(self, layer: int, q_BHQD: Tensor, mask: Tensor | None, scale: float) -> None:
        """After :meth:`update` of the full evaluation: rank by these queries; keep the best, or add
        the ranks up.
        """
        keys, values = self.held(layer)
        ranks_BGS = self.policy.ranks(
            Seen(layer, self.window, q_BHQD, keys, mask, scale, self.history[layer])
        )
        if self.policy.evicts:
            columns_BGC = self._best(ranks_BGS.expand(-1, keys.shape[1], -1))
            self._kept.append(columns_BGC)
            at_BGCD = (columns_BGC + self.sinks)[..., None].expand(-1, -1, -1, keys.shape[3])
            run = slice(self.sinks + self.window.run.start, self.sinks + self.window.run.stop)
            self._keys[layer], self._values[layer] = (
                torch.cat([x[:, :, : self.sinks], x.gather(2, at_BGCD), x[:, :, run]], 2)
                for x in (keys, values)
            )
        else:
            self._total_BS = self._total_BS + ranks_BGS.sum(1)
        self.chosen += 1

    def resume(self, *, spread: bool) -> slice | Tensor:
        """Before a partial evaluation: the columns that run, a slice, or int64 (B, W) for each row
        its own.
        """
        run, is_evicting = self.window.run, self.policy.evicts
        self._is_spread = spread and is_evicting
        if not is_evicting:
            self.columns = self._recomputed_BW
            return self.columns
        self.columns = slice(self.most, self.most + run.stop - run.start)
        return run

    @cached_property
    def _recomputed_BW(self) -> Tensor:
        """The window, and the highest-ranked columns beside it; a row with fewer runs the window's
        first column again.
        """
        run = self.window.run
        best_BC = self._best(self._total_BS[:, None])[:, 0]
        best_BC = torch.where(self._valid_BC, best_BC, run.start)
        window_W = torch.arange(run.start, run.stop, device=best_BC.device)
        return torch.cat([window_W.expand(len(best_BC), -1), best_BC], 1)

    def _best(self, ranks_BGS: Tensor) -> Tensor:
        """Columns by rank, the highest first, ties from the left, (B, G, C); of row b the first
        counts_B[b] count.
        """
        if not ranks_BGS.is_floating_point():
            ranks_BGS = ranks_BGS.float()
        ranks_BGS = ranks_BGS.masked_fill(~self.window.candidates_BS[:, None], -torch.inf)
        return ranks_BGS.sort(dim=-1, descending=True, stable=True).indices[..., : self.most]

    @cached_property
    def _valid_BC(self) -> Tensor:
        return torch.arange(self.most, device=self.counts_B.device) < self.counts_B[:, None]

    @cached_property
    def compact_mask(self) -> Tensor | None:
        """bool (B, 1, 1, N + C + W), the same in every layer: False at filling and padding; None if
        all is True.
        """
        real_BW = self.window.real_BS[:, self.window.run]
        seen_BK = torch.cat(
            [real_BW.new_ones(len(real_BW), self.sinks), self._valid_BC, real_BW], 1
        )
        if bool(seen_BK.all()):
            return None
        return seen_BK[:, None, None]

    def spread_mask(self, layer: int, shared: int) -> Tensor:
        """bool (B, H, 1, N + S): which columns of the canvas the layer's heads still see;
        ``shared`` a key head.
        """
        columns_BGC, real_BS, run = self._kept[layer], self.window.real_BS, self.window.run
        batch, groups, _ = columns_BGC.shape
        # filling may name a column twice: counts are added up
        seen_BGS = torch.zeros(
            batch, groups, real_BS.shape[1], dtype=torch.int64, device=real_BS.device
        )
        seen_BGS.scatter_add_(2, columns_BGC, self._valid_BC[:, None].expand_as(columns_BGC).long())
        seen_BGS[:, :, run] = real_BS[:, None, run].long()
        seen_BGK = torch.cat([seen_BGS.new_ones(batch, groups, self.sinks), seen_BGS], 2) > 0
        return seen_BGK.repeat_interleave(shared, dim=1)[:, :, None]

    def _spread(self, held: Tensor) -> Tensor:
        columns_BGC, sinks, run = self._kept[self.layer], self.sinks, self.window.run
        own, kept, window = held.split([sinks, self.most, run.stop - run.start], 2)
        whole = held.new_zeros(*held.shape[:2], sinks + self.window.real_BS.shape[1], held.shape[3])
        whole[:, :, :sinks], whole[:, :, sinks + run.start : sinks + run.stop] = own, window
        return whole.scatter_(2, (columns_BGC + sinks)[..., None].expand_as(kept), kept)


class BlockSession(ModelSession):
    """Memory of a cache that chooses columns."""

    store: Any
    """A `BlockStore`, once columns were chosen."""

    def __init__(self, denoiser: ModelDenoiser, policy: Any) -> None:
        attention = denoiser.model.config.attention
        if policy.evicts and attention != "full":
            raise ValueError(
                "a cache that evicts keys needs a model with full attention, but this one has "
                f"{attention!r}; use cache 'prefix' or 'dual', or none"
            )
        super().__init__(denoiser)
        self.policy = policy
        self._geometry: CanvasGeometry | None = None
        self._history: list[dict[int, Tensor]] = []

    def evaluate(self, ids_BS: Tensor, read: Read, work: BlockWork) -> Tensor:
        """Logits (M, V): of a full evaluation, which chooses if the work says so, or of the window.

        Raises:
            ValueError: for a wanted position outside the block at a choice or a partial evaluation,
                and attention that cannot be read; for a partial evaluation if nothing was chosen,
                or for another block; and for a batch whose rows recompute columns of their own
                while attention is watched.
        """
        geometry = self.denoiser.geometry(ids_BS, read.at.wanted_BS)
        if not work.is_full:
            return self._partial(ids_BS, read, work)
        if self._geometry is not geometry:
            self._geometry, self._history = geometry, [{} for _ in self.denoiser.model.model.layers]
        self.store = None
        if not work.is_choice:
            return self.denoiser.full_pass(ids_BS, read)
        run, output_index_Q = self.denoiser.columns_to_run(work.block, read)
        assert isinstance(run, slice), "of a slice the columns to run are one"
        padding_BS = self.denoiser.attention_BS
        real_BS = torch.ones_like(ids_BS, dtype=torch.bool)
        if padding_BS is not None:
            real_BS = padding_BS.to(ids_BS.device).bool()
        mask = geometry.rows(slice(run.stop - 1, run.stop))
        if mask is not None and mask.dtype == torch.bool:
            # with attention in blocks nothing behind the block is seen
            real_BS = real_BS & mask[:, 0, 0, mask.shape[-1] - ids_BS.shape[1] :]
        window = Window(work, run, real_BS)
        store = BlockStore(geometry.sinks, window, self.policy, self._history)
        logits_MV = self._choosing(ids_BS, read, output_index_Q, store)
        self.store = store
        return logits_MV

    def _choosing(
        self, ids_BS: Tensor, read: Read, output_index_Q: Tensor, store: BlockStore
    ) -> Tensor:
        denoiser, run = self.denoiser, store.window.run
        if denoiser.is_fast:
            # the last layer runs the queries of the whole window too, since it chooses by them
            window_W = torch.arange(run.start, run.stop, device=ids_BS.device)
            every = slice(0, ids_BS.shape[1])
            states_BWE = denoiser.states(ids_BS, every, window_W, store, choose=store.choose)
            return denoiser.picked(states_BWE.index_select(1, output_index_Q), read)
        with _Queries(store):
            logits_MV = denoiser.full_pass(ids_BS, read, store)
        if store.chosen != len(self._history):
            kind = attention_of(denoiser.model.model.config)
            raise ValueError(
                f"{self.policy} chooses columns by the queries of scaled_dot_product_attention, "
                f"but the model made such calls in {store.chosen} of {len(self._history)} layers "
                "(attn_implementation is "
                f'{kind!r}); call model.set_attn_implementation("sdpa"), and do not compile its '
                "layers"
            )
        return logits_MV

    def _partial(self, ids_BS: Tensor, read: Read, work: BlockWork) -> Tensor:
        denoiser, store = self.denoiser, self.store
        known = store and store.window.work.block
        if store is None or known != work.block:
            last = "none has chosen yet"
            if known:
                last = f"the last chose for the block at {known}"
            raise ValueError(
                f"a partial evaluation of the block at {work.block} attends to what a full one "
                f"chose, but {last}; begin a block with a full evaluation that chooses"
            )
        is_fast = denoiser.is_fast
        columns, (_, output_index_Q) = (
            store.resume(spread=not is_fast),
            denoiser.columns_to_run(work.block, read),
        )
        fast: dict[str, Any] = {}
        if self.policy.evicts:
            fast["mask"] = store.compact_mask
        if not self.policy.evicts and len(ids_BS) > 1 and is_watched(denoiser.model):
            raise ValueError(
                "each row recomputes its own sinks, and a trace or intervention reads columns that "
                f"all rows share, but there are {len(ids_BS)} rows; decode them one by one while "
                "attention is watched"
            )
        config = denoiser.model.config
        shared = config.backbone.num_attention_heads // config.kv_heads
        with ExitStack() as hooks:
            for index, layer in enumerate(
                denoiser.model.model.layers if self.policy.evicts and not is_fast else ()
            ):
                hook, attention = (
                    partial(_masked, store.spread_mask(index, shared)),
                    layer.self_attn,
                )
                # before the logits of added sinks
                hooks.enter_context(
                    attention.register_forward_pre_hook(hook, with_kwargs=True, prepend=True)
                )
            states_BQE = denoiser.states(ids_BS, columns, output_index_Q, store, **fast)
        return denoiser.picked(states_BQE, read)


def _masked(
    mask: Tensor, attention: Any, args: tuple, kwargs: dict[str, Any]
) -> tuple[tuple, dict[str, Any]]:
    """The hook that gives a layer the mask of the keys it kept."""
    return args, kwargs | {"attention_mask": mask}


class _Queries(TorchFunctionMode):
    """Hands the queries of every attention call to the store, as the model (or an intervention)
    makes them.
    """

    def __init__(self, store: BlockStore) -> None:
        super().__init__()
        self.store = store

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func is F.scaled_dot_product_attention:
            names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
            call = dict(zip(names, args, strict=False)) | given
            query = call["query"]
            scale = call.get("scale")
            if scale is None:
                scale = query.shape[-1] ** -0.5
            self.store.choose(self.store.layer, query, call.get("attn_mask"), scale)
        return func(*args, **given)
