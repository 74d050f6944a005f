"""Results of one pass over the attention of a sample, for tables, figures and the page, and workers
that make such passes.
"""

# T recorded steps, L recorded layers, H recorded heads, K keys (added sinks first)
import gc
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from functools import cached_property
from multiprocessing import current_process, get_context
from typing import Any

import numpy as np

from sinklab.core.sinks import Rule, even_share
from sinklab.lab.analysis.counts import Slab, main_sink, ratio
from sinklab.lab.analysis.movement import MotionCounter
from sinklab.lab.analysis.overlap import overlap_by_head

MOST_AT_ONCE = 4


class Seen:
    """Results of one pass over the attention of a sample: numbers of heads and of keys, not of both
    together.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        added: int,
        rule: Rule,
        visible_TK: np.ndarray,
        positions_T: np.ndarray,
    ) -> None:
        """visible_TK: queries that see the key, as if all positions had run; NaN if the key does
        not exist.
        """
        steps, layers, heads, keys = shape
        by_head = shape[:3]
        self._rule, self._added = rule, added
        self._visible_TK, self._positions_T = visible_TK, positions_T
        self.main_TLH = np.full(by_head, -1, dtype=np.int32)
        """the strongest key; -1 if none is defined"""
        self.share_TLH = np.full(by_head, np.nan, dtype=np.float32)
        """its share"""
        self.text_main_TLH, self.text_share_TLH = self.main_TLH, self.share_TLH
        """the same of the text positions alone, counted from 0"""
        if self._added:
            self.text_main_TLH, self.text_share_TLH = self.main_TLH.copy(), self.share_TLH.copy()
        self.added_share_TLH = np.full(by_head, np.nan, dtype=np.float32)
        """share of the added sink columns together; NaN without any"""
        self.sinks_TLH = np.zeros(by_head, dtype=np.int32)
        """number of sinks"""
        self.taken_TLH, self.total_TLH = np.zeros((2, *by_head), dtype=np.float32)
        """attention received by the sinks, and by all keys"""
        self.stays_TLH = np.full(by_head, np.nan)
        """overlap of the sinks with those of the step before"""
        self.alike_TL = np.full((steps, layers), np.nan)
        """overlap of the sinks of two heads, mean over pairs"""
        self.score_TL = np.zeros((steps, layers))
        """scores of all sinks together, in multiples of an even share"""
        self.received_TLK = np.full((steps, layers, keys), np.nan, dtype=np.float32)
        """received attention as a multiple of an even share, mean over heads; NaN if no key is
        defined
        """
        self.events_TLK = np.zeros((steps, layers, keys), dtype=np.uint16)
        """number of heads that have a sink at the key"""

        self.greatest = 0.0
        """the most that any key of any head receives"""
        self._before = np.zeros((layers, heads, keys), dtype=bool)

    def add(self, slab: Slab) -> None:
        """Take the next steps."""
        (at,), added, found = slab.at, self._added, slab.found(self._rule)
        self.sinks_TLH[at], self.taken_TLH[at], self.total_TLH[at] = (
            found.number,
            found.taken,
            slab.total,
        )
        score_TLHK, main_TLH = slab.score, slab.main
        queries, scored_TLH = slab.queries, found.taken
        if queries is None:
            queries = np.fmax.reduce(slab.visible, axis=(1, 2, 3), keepdims=True, initial=1)
            scored_TLH = np.vecdot(found.flags, np.nan_to_num(score_TLHK))
        queries_T11 = queries[..., 0]
        self.score_TL[at] = (
            scored_TLH.sum(2, dtype=float) * self._positions_T[at, None] / queries_T11[..., 0]
        )
        strongest_TLH = slab.at_main(score_TLHK)
        self.main_TLH[at], self.share_TLH[at] = main_TLH, strongest_TLH / queries_T11
        if added:
            self.text_main_TLH[at] = main_sink(score_TLHK[..., added:])
            self.text_share_TLH[at] = (
                _at(self.text_main_TLH[at], score_TLHK[..., added:]) / queries_T11
            )
            self.added_share_TLH[at] = score_TLHK[..., :added].sum(-1) / queries_T11
        heads = slab.received.shape[2]
        # as a product, quicker than as a mean
        self.received_TLK[at] = np.ones(heads, np.float32) @ score_TLHK / heads
        self.greatest = max(self.greatest, float(np.nan_to_num(strongest_TLH).max(initial=0)))
        narrow = np.uint8 if heads < 256 else np.uint16
        self.events_TLK[at] = found.flags.view(np.uint8).sum(2, dtype=narrow)
        self.alike_TL[at] = overlap_by_head(found.flags)
        # of each step the sinks of the one before: a cell is the same key there
        before = np.concatenate([self._before[None], found.flags[:-1]])
        common_TLH = found.by_head(before.reshape(-1)[found.cells])
        earlier = np.arange(at.start - 1, at.stop - 1)
        self.stays_TLH[at] = ratio(common_TLH, found.number + self.sinks_TLH[earlier] - common_TLH)
        self.stays_TLH[:1] = np.nan
        self._before = found.flags[-1].copy()

    @cached_property
    def share_TLK(self) -> np.ndarray:
        """Mean weight over heads; NaN if no key is defined."""
        most_T = np.fmax.reduce(self._visible_TK, axis=1, initial=np.nan)
        return self.received_TLK / most_T[:, None, None]


def _at(main_TLH: np.ndarray, values_TLHK: np.ndarray) -> np.ndarray:
    """The value at one key of every head; at the first for a negative key."""
    return np.take_along_axis(values_TLHK, np.maximum(main_TLH, 0)[..., None], -1)[..., 0]


class TextMotion:
    """Motion among the text positions alone."""

    def __init__(
        self, shape: tuple[int, ...], added: int, rule: Rule, positions_T: np.ndarray
    ) -> None:
        self.counter = MotionCounter((*shape[:-1], shape[-1] - added), rule)
        self._added, self._positions_T = added, positions_T

    def add(self, slab: Slab) -> None:
        """Take the text of the next steps."""
        received, visible = (values[..., self._added :] for values in (slab.received, slab.visible))
        self.counter.add(
            Slab(slab.at, *even_share(received, visible, self._positions_T[slab.at[0], None, None]))
        )


_functions: list[Callable[[int], Any]] = []
"""of a process that measures samples: its function is the last"""


def _begin(function: Callable[[int], Any]) -> None:
    # objects of the parent are not garbage, and to visit them would copy their pages
    gc.freeze()
    _functions.append(function)


def _call(place: int) -> Any:
    return _functions[-1](place)


def begun(function: Callable[[int], Any], places: Sequence[int]) -> tuple[Executor, Iterator[Any]]:
    """Workers that compute the function of every place, and the results in their order: threads, or
    on Linux forked processes. These need no copy of the run and wait for no lock.
    """
    many = max(1, min(MOST_AT_ONCE, os.cpu_count() or 1, len(places)))
    if sys.platform != "linux" or current_process().daemon:
        threads = ThreadPoolExecutor(many)
        return threads, threads.map(function, places)
    forks = ProcessPoolExecutor(many, get_context("fork"), _begin, (function,))
    with warnings.catch_warnings():
        # the threads that Python warns of are those of libraries, which end or begin them anew
        warnings.simplefilter("ignore", DeprecationWarning)
        return forks, forks.map(_call, places)
