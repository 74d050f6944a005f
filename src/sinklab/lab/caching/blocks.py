"""Block caches: Fast-dLLM's two, and the exact one of models with attention in
blocks.
"""

# B batch, S canvas, Q queries, K = N sinks + S, M wanted positions (row-major), V vocabulary
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sinklab.core.errors import Checked, limited
from sinklab.core.registry import caches
from sinklab.core.subject import masks
from sinklab.core.subject.canvas import Places
from sinklab.core.subject.denoisers import Cache
from sinklab.core.subject.masks import CanvasGeometry
from sinklab.core.subject.prefix import SinkPrefix
from sinklab.lab.caching.session import ColumnDenoiser, KeyValueStore, ModelSession


@dataclass(frozen=True)
class BlockCache(Cache, Checked):
    """Computes everything when a block begins. Raises ValueError for a refresh_every below 1."""

    refresh_every: int | None = limited(None, at_least=1, remedy="it counts evaluations of a block")
    """Recompute everything every N evaluations of a block as well; 1 is the same as no cache."""

    def phase(self, nth: int) -> int:
        """Evaluations since everything was last due to be computed: 0 if it is due now."""
        if self.refresh_every is None:
            return nth
        return nth % self.refresh_every


@caches.register("prefix")
@dataclass(frozen=True)
class PrefixCache(BlockCache):
    """Remember everything to the left of the block; the block and everything to its right are
    computed anew.

    Everything is recomputed when a block begins. Source: Fast-dLLM (2505.22618), prefix cache.
    """

    def columns(self, start: int, stop: int, length: int, nth: int) -> slice | None:
        """Columns from the block to the end of the canvas; None (everything) if a refresh is
        due.
        """
        if self.phase(nth) == 0:
            return None
        return slice(start, length)


@caches.register("dual")
@dataclass(frozen=True)
class DualCache(BlockCache):
    """Remember everything on both sides of the block, masks still to come included; the block is
    computed anew.

    Everything is recomputed when a block begins. Source: Fast-dLLM (2505.22618), dual cache.
    """

    def columns(self, start: int, stop: int, length: int, nth: int) -> slice | None:
        """The block alone; None (everything) where a refresh is due."""
        if self.phase(nth) == 0:
            return None
        return slice(start, stop)


@caches.register("committed")
@dataclass(frozen=True)
class CommittedCache(Cache):
    """Keep the keys and values of finished blocks, for models with attention in blocks: exact, and
    their default.

    The columns before a block never change again in them. A block that is finished runs once more,
    together with the first evaluation of the next one, and is only read from then on.
    """

    is_exact = True

    def columns(self, start: int, stop: int, length: int, nth: int) -> slice:
        """The block; the session adds what must run with it."""
        return slice(start, stop)

    def session(self, denoiser: ColumnDenoiser) -> CommittedSession:
        """Memory for one run over one canvas."""
        return CommittedSession(denoiser)


def narrowed(geometry: CanvasGeometry, seen_BSS: Tensor | None) -> CanvasGeometry:
    """The geometry with a mask of those keys alone that may be seen, bool (query, key); itself for
    None.
    """
    mask = geometry.mask
    if seen_BSS is None or mask is None:
        return geometry
    seen_B1SK = F.pad(seen_BSS[:, None], (mask.shape[-1] - seen_BSS.shape[-1], 0), value=True)
    if mask.dtype == torch.bool:
        return replace(geometry, mask=mask & seen_B1SK)
    return replace(geometry, mask=mask.masked_fill(~seen_B1SK, torch.finfo(mask.dtype).min))


class BlockStore(KeyValueStore):
    """Keys and values of a canvas, of which a first evaluation may bring a part."""

    def __init__(self, prefix: SinkPrefix | None, layers: int, length: int) -> None:
        super().__init__(prefix, layers)
        self.length = length
        self.seen = length
        """Columns that :meth:`update` returns, from the left."""

    def update(
        self, k_BKWD: Tensor, v_BKWD: Tensor, layer_idx: int, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write these columns in place and return the keys and values of those that are seen."""
        keys, values = super().update(k_BKWD, v_BKWD, layer_idx)
        seen = self.sinks + self.seen
        return keys[:, :, :seen], values[:, :, :seen]

    def write(self, known: Tensor | None, new_BKWD: Tensor, sink_BKND: Tensor | None) -> Tensor:
        """The buffer, a new one at first, with these columns in it."""
        if known is None:
            known = self.empty(self.length, new_BKWD, sink_BKND)
        return super().write(known, new_BKWD, sink_BKND)


class CommittedSession(ModelSession):
    """Memory of finished blocks.

    Raises:
        ValueError: for a model with full attention, in which the columns before a block change with
            it.
    """

    begins_anywhere = True
    store: Any

    def __init__(self, denoiser: ColumnDenoiser) -> None:
        super().__init__(denoiser)
        if denoiser.model.config.block_length is None:
            raise ValueError(
                "the cache 'committed' is exact for attention in blocks, but this model has full "
                "attention; use 'prefix' or 'dual', or load the model with block_length="
            )

    def evaluate(self, ids_BS: Tensor, at: Places, columns: Any) -> Tensor:
        """The block of attention around the block, and with its first evaluation the one that was
        finished before.
        """
        denoiser, length = self.denoiser, ids_BS.shape[1]
        wanted_BS = at.wanted_BS
        geometry = denoiser.geometry(ids_BS, wanted_BS)
        if self.store is None:
            self.store = BlockStore(geometry.sinks, len(denoiser.model.model.layers), length)
            self.last = 0
            real_BS = masks.real_positions(ids_BS, denoiser.attention_BS)
            self.has_padding = real_BS is not None
            self.block_BS = masks.blocks(
                denoiser.model.config, real_BS, length, torch.device("cpu")
            )
        start, stop = self._around(columns)
        outputs = denoiser.outputs(at)
        columns, output_index_Q = denoiser.columns_to_run(
            slice(min(self.last, start), stop), outputs
        )
        assert isinstance(columns, slice), "of a slice the columns to run are one"
        self.last, self.store.columns = start, columns
        mask = narrowed(geometry, denoiser.visible(wanted_BS)).rows(columns)
        if denoiser.is_fast:
            self.store.seen = stop
            sees_all = columns.start == start and not self.has_padding
            if sees_all:
                mask = None
            if mask is not None:
                mask = mask[..., : self.store.sinks + stop]
        else:
            self.store.seen = length
        states_BQE = denoiser.states(ids_BS, columns, output_index_Q, self.store, mask=mask)
        return denoiser.head(outputs.of_states(states_BQE))

    def _around(self, block: slice) -> tuple[int, int]:
        """First column of the blocks of attention around these columns in any row, and the column
        after their last.
        """
        first_B1 = self.block_BS[:, block.start, None]
        last_B1 = self.block_BS[:, block.stop - 1, None]
        start = int((self.block_BS < first_B1).sum(1).min())
        return start, int((self.block_BS <= last_B1).sum(1).max())
