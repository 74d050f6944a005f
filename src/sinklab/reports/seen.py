"""What one pass over the attention of a sample leaves, to make tables, figures and the page of."""

# T recorded steps, L recorded layers, H recorded heads, K keys (added sinks first)
from functools import cached_property

import numpy as np

from sinklab.analysis.counts import Slab, counted
from sinklab.analysis.movement import MotionCounter
from sinklab.analysis.overlap import jaccard, overlap_by_head
from sinklab.sinks.normalize import even_share, main_sink, only
from sinklab.sinks.rules import Rule


class Seen:
    """What one pass over the attention of a sample leaves: numbers of heads and of keys, not of both together."""

    def __init__(
        self, shape: tuple[int, ...], added: int, rule: Rule, visible_TK: np.ndarray, positions_T: np.ndarray
    ) -> None:
        """visible_TK: queries that see the key, as if all positions had run; NaN where the key is not there."""
        steps, layers, heads, keys = shape
        self._rule, self._added, self._visible_TK, self._positions_T = rule, added, visible_TK, positions_T
        self.main_TLH = np.full((steps, layers, heads), -1, dtype=np.int32)
        """key with the greatest share; -1 where nothing is there"""
        self.share_TLH = np.full((steps, layers, heads), np.nan, dtype=np.float32)
        """its share"""
        self.text_main_TLH, self.text_share_TLH = self.main_TLH, self.share_TLH
        """the same of the text positions alone, counted from 0"""
        if self._added:
            self.text_main_TLH, self.text_share_TLH = self.main_TLH.copy(), self.share_TLH.copy()
        self.added_share_TLH = np.full((steps, layers, heads), np.nan, dtype=np.float32)
        """share of the added sink columns together; NaN without any"""
        self.sinks_TLH = np.zeros((steps, layers, heads), dtype=np.int32)
        """number of sinks"""
        self.taken_TLH, self.total_TLH = np.zeros((2, steps, layers, heads), dtype=np.float32)
        """what the sinks receive, and all keys"""
        self.stays_TLH = np.full((steps, layers, heads), np.nan)
        """overlap of the sinks with those of the step before"""
        self.alike_TL = np.full((steps, layers), np.nan)
        """overlap of the sinks of two heads, mean over pairs"""
        self.score_TL = np.zeros((steps, layers))
        """scores of all sinks together, in multiples of an even share"""
        self.received_TLK = np.full((steps, layers, keys), np.nan, dtype=np.float32)
        """received attention, mean over heads"""
        self.events_TLK = np.zeros((steps, layers, keys), dtype=np.uint16)
        """number of heads that have a sink at the key"""

        self.greatest = 0.0
        """the most that any key of any head receives"""
        self._before_LHK = np.zeros((layers, heads, keys), dtype=bool)

    def add(self, slab: Slab) -> None:
        """Take the next step."""
        (step,), added, sinks_LHK = slab.at, self._added, slab.sinks(self._rule)
        self.sinks_TLH[step], self.taken_TLH[step] = counted(sinks_LHK), slab.taken(self._rule)
        self.total_TLH[step] = slab.known.sum(-1)
        # where all keys are seen by as many queries, what they receive is in the order of their shares
        queries, weight_LHK = slab.queries, only(slab.exists, slab.received, np.nan)
        scored_LH = slab.taken(self._rule)
        if queries is None:
            visible_K, queries = self._visible_TK[step], 1.0
            weight_LHK = weight_LHK / visible_K
            scored_LH = np.vecdot(sinks_LHK, np.nan_to_num(weight_LHK))
        self.score_TL[step] = scored_LH.sum(1, dtype=float) * self._positions_T[step] / queries
        self.main_TLH[step], greatest_LH = _greatest(weight_LHK)
        self.share_TLH[step] = greatest_LH / queries
        if added:
            self.text_main_TLH[step], greatest_LH = _greatest(weight_LHK[..., added:])
            self.text_share_TLH[step] = greatest_LH / queries
            self.added_share_TLH[step] = weight_LHK[..., :added].sum(-1) / queries
        self.received_TLK[step] = slab.received.mean(1)
        most_LH1 = np.take_along_axis(slab.known, np.maximum(slab.main, 0)[..., None], -1)
        self.greatest = max(self.greatest, float(most_LH1.max(initial=0)))
        narrow = np.uint8 if sinks_LHK.shape[1] < 256 else np.uint16
        self.events_TLK[step] = sinks_LHK.view(np.uint8).sum(1, dtype=narrow)
        self.alike_TL[step] = overlap_by_head(sinks_LHK)
        if step:
            self.stays_TLH[step] = jaccard(self._before_LHK, sinks_LHK)
        self._before_LHK = sinks_LHK

    share_TLK = cached_property[np.ndarray](lambda seen: seen.received_TLK / seen._visible_TK[:, None])
    """mean weight over heads; NaN where the key is not there"""


def _greatest(values_LHK: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The greatest key of every head, -1 where all are NaN, and its value, NaN there."""
    main_LH = main_sink(values_LHK)
    return main_LH, np.take_along_axis(values_LHK, np.maximum(main_LH, 0)[..., None], -1)[..., 0]


class TextMotion:
    """Motion among the text positions alone."""

    def __init__(self, shape: tuple[int, ...], added: int, rule: Rule, positions_T: np.ndarray) -> None:
        self.counter = MotionCounter((*shape[:-1], shape[-1] - added), rule)
        self._added, self._positions_T = added, positions_T

    def add(self, slab: Slab) -> None:
        """Take the text of the next step."""
        received, visible = (values[..., self._added :] for values in (slab.received, slab.visible))
        positions = np.full((1, 1), self._positions_T[slab.at[0]])
        self.counter.add(Slab(slab.at, *even_share(received, visible, positions)))
