"""Caches: which columns of the canvas are computed anew at each evaluation of a block, and which
are remembered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from sinklab.core.errors import unknown
from sinklab.core.registry import caches, value_of
from sinklab.core.sampling.canvas import Places
from sinklab.core.sampling.denoisers import Denoiser, Session

# B batch rows, S canvas positions, M wanted positions in row-major order, V vocabulary, W
# recomputed columns


class Cache:
    """Says what to recompute; keys and values of every other column stay as they were when last
    computed. A subclass writes `columns`, or `work` and `memory`.
    """

    is_exact: ClassVar[bool] = False
    """Whether it gives the results of computing afresh, for any columns."""

    def columns(self, start: int, stop: int, length: int, nth: int) -> slice | Tensor | None:
        """Columns to recompute, the same in every row: a slice, sorted column numbers int64 (W,),
        or None for all.

        Args:
            start, stop: the block occupies the columns [start, stop); they must be among those
                recomputed.
            length: columns of the canvas.
            nth: 0 at the first evaluation of the block, which must be full for the first block of a
                canvas.
        """
        raise NotImplementedError

    def work(self, start: int, stop: int, number: int, nth: int) -> BlockWork | None:
        """The nth evaluation of a block for a memory of the cache's own; None to use `columns`."""
        return None

    def memory(self, denoiser: Any) -> Any:
        """A memory of its own for one run of a model's denoiser: (ids_BS, at, work) -> logits_MV,
        with its size in `nbytes`; None to use the denoiser's.
        """
        return None


@dataclass(frozen=True, eq=False)
class BlockWork:
    """One evaluation under a cache that keeps a memory of its own (`sinklab.lab.caching`)."""

    block: slice
    """Canvas columns of the block."""
    number: int
    """Number of the block, from 0."""
    is_full: bool
    """Whether everything is computed; else the block (and the columns recomputed with it) alone."""
    is_choice: bool
    """Whether it is a full evaluation that chooses the keys that further ones attend to, or
    recompute.
    """


def cache_of(given: Cache | str | None) -> Cache | None:
    """The cache of this text, or the object itself; None for None and "none".

    Raises ValueError for an unknown name, and TypeError for an object that is no cache.
    """
    if given is None or given == "none":
        return None
    if isinstance(given, str):
        name = given.partition(":")[0].strip()
        if name not in caches:
            raise unknown("cache", name, [*caches, "none"], "pass one of these, or a cache object")
    return value_of(caches, given, Cache)


class Evaluation:
    """A denoiser as the loop calls it, for one run over one canvas; without a cache it computes
    everything every time, or takes the denoiser's exact cache.

    Batched rows give the same as alone, unequal prompts included. Raises ValueError for a cache
    with a denoiser that cannot remember, and if a block stands in different columns in different
    rows: a row alone would recompute other columns than the batch.

    Args:
        block_BS: int64, the block of each open position, -1 elsewhere.
    """

    def __init__(self, denoiser: Denoiser, cache: Cache | None, block_BS: Tensor) -> None:
        self.denoiser = denoiser
        self.cache = cache
        self.block_BS = block_BS
        self._session: Session | None = None
        self._spans: list[tuple[int, int]] = []
        if cache is not None:
            self._begin(cache)

    def _begin(self, cache: Cache) -> Session:
        self._spans = _spans(self.block_BS, must_agree=not cache.is_exact)
        self._session = self.denoiser.begin(cache)
        return self._session

    def __call__(self, ids_BS: Tensor, at: Places, block: int, nth: int) -> Tensor:
        """Logits (M, V) at these places: the nth evaluation (0 = first) of this block."""
        # asked every time: a trace, under which there is none, may begin between two evaluations
        cache = self.cache or self.denoiser.exact_cache()
        if cache is None:
            self._session = None
            return self.denoiser.logits(ids_BS, at)
        session = self._session or self._begin(cache)
        start, stop = self._spans[block]
        work = cache.work(start, stop, block, nth)
        if work is not None:
            return session.logits(ids_BS, at, work)
        return session.logits(ids_BS, at, cache.columns(start, stop, ids_BS.shape[1], nth))


def _spans(block_BS: Tensor, must_agree: bool) -> list[tuple[int, int]]:
    """First column of every block, and the column after its last; rows that lack a block have no
    say in it. If rows need not agree, of all rows together.
    """
    spans: list[tuple[int, int]] = []
    rows = block_BS.tolist()
    for block in range(int(block_BS.max()) + 1):
        held = {
            number: (row.index(block), len(row) - row[::-1].index(block))
            for number, row in enumerate(rows)
            if block in row
        }
        first = next(iter(held))
        for other, span in held.items():
            if must_agree and span != held[first]:
                raise ValueError(
                    f"a cache recomputes the same columns in every row, but block {block} stands "
                    f"in columns {held[first][0]} to {held[first][1] - 1} of row {first} and "
                    f"{span[0]} to {span[1] - 1} of row {other}; pad prompts on the left, decode "
                    "these rows one by one, or without a cache."
                )
        starts, stops = zip(*held.values(), strict=True)
        spans.append((min(starts), max(stops)))
    return spans
