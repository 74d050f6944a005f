"""Block caches: Fast-dLLM's two, and the exact one of models with attention in
blocks.
"""

# B batch, S canvas, Q queries, K = N sinks + S, M wanted positions (row-major), V vocabulary
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sinklab.core.errors import Checked, limited
from sinklab.core.models import masks
from sinklab.core.models.denoising import ModelDenoiser, ModelSession, Read
from sinklab.core.models.prefix import KeyValueStore
from sinklab.core.registry import caches
from sinklab.core.sampling.denoisers import Cache


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

    def session(self, denoiser: ModelDenoiser) -> CommittedSession:
        """Memory for one run over one canvas."""
        return CommittedSession(denoiser)


class CommittedSession(ModelSession):
    """Memory of finished blocks.

    Raises:
        ValueError: for a model with full attention, in which the columns before a block change with
            it.
    """

    begins_anywhere = True
    store: Any

    def __init__(self, denoiser: ModelDenoiser) -> None:
        super().__init__(denoiser)
        if denoiser.model.config.block_length is None:
            raise ValueError(
                "the cache 'committed' is exact for attention in blocks, but this model has full "
                "attention; use 'prefix' or 'dual', or load the model with block_length="
            )

    def evaluate(self, ids_BS: Tensor, read: Read, columns: Any) -> Tensor:
        """The block of attention around the block, and with its first evaluation the one that was
        finished before.
        """
        denoiser, length = self.denoiser, ids_BS.shape[1]
        wanted_BS = read.at.wanted_BS
        geometry = denoiser.geometry(ids_BS, wanted_BS)
        if self.store is None:
            self.store = KeyValueStore(geometry.sinks, len(denoiser.model.model.layers))
            self.store.length, self.last = length, 0
            real_BS = masks.real_positions(ids_BS, denoiser.attention_BS)
            self.has_padding = real_BS is not None
            self.block_BS = masks.blocks(
                denoiser.model.config, real_BS, length, torch.device("cpu")
            )
        start, stop = self._around(columns)
        columns, output_index_Q = denoiser.columns_to_run(slice(min(self.last, start), stop), read)
        assert isinstance(columns, slice), "of a slice the columns to run are one"
        self.last, self.store.columns = start, columns
        mask = geometry.rows(columns, denoiser.seen_by_finished(wanted_BS))
        if denoiser.is_fast:
            self.store.seen = stop
            sees_all = columns.start == start and not self.has_padding
            if sees_all:
                mask = None
            if mask is not None:
                mask = mask[..., : self.store.sinks + stop]
        else:
            self.store.seen = None
        states_BQE = denoiser.states(ids_BS, columns, output_index_Q, self.store, mask=mask)
        return denoiser.picked(states_BQE, read)

    def _around(self, block: slice) -> tuple[int, int]:
        """First column of the blocks of attention around these columns in any row, and the column
        after their last.
        """
        first_B1 = self.block_BS[:, block.start, None]
        last_B1 = self.block_BS[:, block.stop - 1, None]
        start = int((self.block_BS < first_B1).sum(1).min())
        return start, int((self.block_BS <= last_B1).sum(1).max())
