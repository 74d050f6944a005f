"""Caches: which columns of the canvas are computed anew at each evaluation of a block, and which
are remembered.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sinklab.core.errors import unknown
from sinklab.core.registry import caches, value_of

# W recomputed columns


class Cache:
    """Says what to recompute; keys and values of every other column stay as they were when last
    computed.

    There are two kinds. Most caches write `columns`: the model's denoiser keeps keys and values and
    recomputes those columns. One that drops or chooses keys, as those that evict in
    `sinklab.lab.caching`, writes `work` and `memory`, and keeps them itself.
    """

    is_exact = False
    """Whether it gives the results of computing afresh, for any columns."""

    def columns(self, start: int, stop: int, length: int, nth: int) -> slice | Tensor | None:
        """Columns to recompute, left padding counted, the same in every row: a slice, sorted column
        numbers int64 (W,), or None for all.

        Args:
            start, stop: the block occupies the columns [start, stop); they must be among those
                recomputed.
            length: columns of the canvas.
            nth: 0 at the first evaluation of the block, which must be full for the first block of a
                canvas.
        """
        raise NotImplementedError(f"{self} has no method columns of its own; write it")

    def work(self, start: int, stop: int, number: int, nth: int) -> BlockWork | None:
        """The nth evaluation of a block for a memory of the cache's own; None to use `columns`."""
        return None

    def memory(self, denoiser: Any) -> Any:
        """A `ModelSession` of its own for one run of a model's denoiser; None to use the
        denoiser's.
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
