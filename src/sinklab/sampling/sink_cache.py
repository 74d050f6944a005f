"""Block caches that evict columns, with or without protected sinks, and one that keeps its sinks fresh.

Where a block begins everything is computed; from what the block's queries attend to there, each layer and key head
chooses the columns that the block's further evaluations attend to beside the block itself. The others' keys and values
are thrown away until the next full evaluation. A sink that was added to the model is no column, and always stays.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property

from sinklab.sampling.eviction import Budget
from sinklab.sampling.refreshing import BlockCache


@dataclass(frozen=True, eq=False)
class BlockWork:
    """What a session of the model's denoiser is asked for under these caches, in place of columns."""

    policy: EvictingCache | SinkRefreshCache
    block: slice
    """Where the block stands, as canvas columns."""
    number: int
    """Of the block, from 0."""
    is_full: bool
    """Everything is computed; else the block (and what is refreshed with it) alone."""
    is_choice: bool
    """A full evaluation that chooses what further ones attend to, or refresh."""


@dataclass(frozen=True)
class EvictingCache(BlockCache):
    """The one mechanism: keep a share of the columns outside the block, by a score, sinks first where asked.

    At equal `keep` all scores and all numbers of protected sinks attend to equally many columns. Raises ValueError for
    numbers that make no sense.
    """

    keep: float = 0.5
    """Share of the columns outside the block that partial evaluations attend to, rounded down; 1 keeps all."""
    sinks: int = 0
    """So many of them, per layer and key head, are the columns that receive most attention from the block."""
    neighbours: int = 0
    """Columns on either side of the block that come next, before the score decides."""
    protect: str = "now"
    """Whose sinks: of the evaluation that chooses (now), of the first that chose on this canvas (first), or of the
    block before (earlier; now for the first block)."""
    score: str = "nearest"
    """What ranks the rest: nearest, received, aligned or random."""
    delay: int = 0
    """Full evaluations before the one that chooses."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delay < 0:
            raise ValueError(f"delay counts evaluations, at least 0, got {self.delay}.")
        _ = self.budget

    @cached_property
    def budget(self) -> Budget:
        """What is kept, without when."""
        return Budget(**{field.name: getattr(self, field.name) for field in fields(Budget)})

    def columns(self, start: int, stop: int, length: int, nth: int) -> slice | None:
        """The block alone; None (everything) where a refresh is due."""
        return None if self.phase(nth) <= self.delay else slice(start, stop)

    def work(self, start: int, stop: int, number: int, nth: int) -> BlockWork:
        """What the nth evaluation of this block does."""
        phase = self.phase(nth)
        return BlockWork(self, slice(start, stop), number, phase <= self.delay, phase == self.delay)


@dataclass(frozen=True)
class SinkCache(EvictingCache):
    """Keep the sinks and the block's neighbours: after the protected sinks, the nearest columns fill the budget."""

    sinks: int = 4


@dataclass(frozen=True)
class EvictCache(EvictingCache):
    """Keep the columns that the block's mean query points to, chosen at the second evaluation; no protection by itself.

    Source: Sparse-dLLM (2508.02558): dot product without softmax, highest of three neighbours, all heads alike.
    """

    score: str = "aligned"
    delay: int = 1


@dataclass(frozen=True)
class ReceivedCache(EvictingCache):
    """Keep the columns that receive most attention from the block's queries, per key head: sinks keep themselves."""

    score: str = "received"


@dataclass(frozen=True)
class RandomCache(EvictingCache):
    """Keep random columns, the same for all rows relative to the block: the control at equal budget."""

    score: str = "random"


@dataclass(frozen=True)
class SinkRefreshCache(BlockCache):
    """A dual cache that recomputes its sinks with the block, since those of a diffusion model move and go stale.

    The columns that receive most attention from the block's queries, over all layers and heads, run at every partial
    evaluation. Raises ValueError for a number of sinks below 1.
    """

    sinks: int = 8
    """Columns outside the block that are recomputed with it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks < 1:
            raise ValueError(
                f"sinks counts the columns recomputed with the block, at least 1, got {self.sinks}; without any "
                "this is the dual cache."
            )

    def columns(self, start: int, stop: int, length: int, nth: int) -> slice | None:
        """The block (its sinks run with it); None (everything) where a refresh is due."""
        return None if self.phase(nth) == 0 else slice(start, stop)

    def work(self, start: int, stop: int, number: int, nth: int) -> BlockWork:
        """What the nth evaluation of this block does."""
        is_full = self.phase(nth) == 0
        return BlockWork(self, slice(start, stop), number, is_full, is_full)
