"""What each layer did, accumulated over the samples of a run."""

# T steps, H heads, K keys (added sinks first), R text keys
from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np

from sinklab.sinks import main_sink

from .samples import Sample


@dataclass(frozen=True)
class LayerFacts:
    """What one layer did, over all samples, recorded steps and heads."""

    layer: int
    """number of the layer"""
    added_share: float
    """mean attention weight on the added sink columns together; NaN without any"""
    text_share: float
    """mean attention weight on the one text position that receives most, per head and step"""
    absorbed: float
    """mean share of the attention that all sinks of a head take together"""
    added_norm: float
    """mean length of the added sinks' value vectors; NaN without any, or where value_norm was not recorded"""
    text_norm: float
    """the same over all text positions"""
    sink_norm: float
    """the same over text positions where a head has a sink, each head counting once; NaN without any"""
    rest_norm: float
    """the same over text positions where a head has none"""
    added_key_norm: float
    """mean length of the added sinks' key vectors; NaN without any, or where key_norm was not recorded"""
    sink_key_norm: float
    """the same over text positions where a head has a sink"""
    rest_key_norm: float
    """the same over text positions where a head has none"""
    events: int
    """number of (sample, step, head, key) that are sinks"""
    added_events: int
    """those of them that are added sink columns"""
    sinks: float
    """mean number of sinks of a head at a step"""
    score: float
    """mean score of a sink, as a multiple of an even share; NaN without any"""
    mains: int
    """number of (sample, step, head) that exist"""
    added_mains: int
    """those of them whose greatest key is an added sink"""
    moves: int
    """changes of the greatest key from one recorded step to the next, added sinks included"""
    text_moves: int
    """the same among text positions alone"""
    transitions: int
    """pairs of successive recorded steps: the most that either can be"""
    main_share_H: np.ndarray
    """mean attention weight on the greatest key, per recorded head"""


class Means:
    """Running weighted means; numbers that are NaN do not count."""

    def __init__(self) -> None:
        self._total: defaultdict[str, float] = defaultdict(float)
        self._weight: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, values: np.ndarray, weights: np.ndarray | None = None) -> None:
        """Add every number of ``values``, once or ``weights`` times."""
        here = ~np.isnan(values)
        counts = here.astype(np.float64) if weights is None else np.where(here, weights, 0).astype(np.float64)
        self._total[name] += float((np.where(here, values, 0) * counts).sum())
        self._weight[name] += float(counts.sum())

    @property
    def names(self) -> list[str]:
        """What was added so far."""
        return list(self._weight)

    def mean(self, name: str) -> float:
        """The mean so far; NaN when nothing was added."""
        weight = self._weight.get(name, 0.0)
        return self._total[name] / weight if weight else float("nan")


class LayerCount:
    """Adds samples up to one LayerFacts."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.means = Means()
        self.counts: defaultdict[str, int] = defaultdict(int)
        self._share_H: np.ndarray | int = 0
        self._steps = 0

    def add(self, sample: Sample, place: int) -> None:
        """Count one sample; ``place`` is where the layer stands among the recorded ones."""
        added, sinks_THK, share_THK = sample.added, sample.sinks_TLHK[:, place], sample.share_TLHK[:, place]
        main_TH, exists_TK = sample.main_TLH[:, place], sample.exists_TK
        greatest_TH = np.fmax.reduce(share_THK, axis=-1)
        if added:
            self.means.add("added_share", share_THK[..., :added].sum(-1))
        self.means.add("text_share", np.fmax.reduce(share_THK[..., added:], axis=-1) if added else greatest_TH)
        received_THK = np.where(exists_TK[:, None], sample.received_TLHK[:, place], 0)
        taken_TH = np.where(sinks_THK, received_THK, 0).sum(-1)
        all_TH = received_THK.sum(-1)
        here_TH = main_TH >= 0
        self.means.add("absorbed", (taken_TH / np.where(all_TH > 0, all_TH, np.nan))[here_TH])
        self.means.add("score", (share_THK * sample.positions_T[:, None, None])[sinks_THK])
        self._count(sinks_THK, main_TH, share_THK, added)
        self._norms(sample, place, sinks_THK.sum(1), here_TH.sum(1))
        self._share_H = self._share_H + np.nansum(greatest_TH, axis=0)
        self._steps += int(here_TH.any(1).sum())

    def _count(self, sinks_THK: np.ndarray, main_TH: np.ndarray, share_THK: np.ndarray, added: int) -> None:
        text_TH = main_sink(share_THK[..., added:]) if added else main_TH
        pairs = (main_TH[1:] >= 0) & (main_TH[:-1] >= 0)
        text_pairs = (text_TH[1:] >= 0) & (text_TH[:-1] >= 0)
        for name, count in {
            "events": sinks_THK.sum(),
            "added_events": sinks_THK[..., :added].sum(),
            "mains": (main_TH >= 0).sum(),
            "added_mains": ((main_TH >= 0) & (main_TH < added)).sum(),
            "moves": (pairs & (main_TH[1:] != main_TH[:-1])).sum(),
            "text_moves": (text_pairs & (text_TH[1:] != text_TH[:-1])).sum(),
            "transitions": pairs.sum(),
        }.items():
            self.counts[name] += int(count)

    def _norms(self, sample: Sample, place: int, events_TK: np.ndarray, heads_T: np.ndarray) -> None:
        for suffix, norm_TLK in (("norm", sample.value_norm_TLK), ("key_norm", sample.key_norm_TLK)):
            if norm_TLK is None:
                continue
            norm_TK = np.where(sample.exists_TK, norm_TLK[:, place], np.nan)
            text_TR, events_TR = norm_TK[:, sample.added :], events_TK[:, sample.added :]
            self.means.add(f"added_{suffix}", norm_TK[:, : sample.added])
            self.means.add(f"text_{suffix}", text_TR)
            self.means.add(f"sink_{suffix}", text_TR, events_TR)
            self.means.add(f"rest_{suffix}", text_TR, heads_T[:, None] - events_TR)

    def facts(self) -> LayerFacts:
        """The sums as means."""
        means: dict[str, Any] = {name: self.means.mean(name) for name in _MEANS}
        counts: dict[str, Any] = {name: self.counts[name] for name in _COUNTS}
        mains = counts["mains"]
        return LayerFacts(
            layer=self.layer,
            sinks=counts["events"] / mains if mains else float("nan"),
            main_share_H=np.asarray(self._share_H / self._steps if self._steps else self._share_H, dtype=np.float64),
            **means,
            **counts,
        )


_MEANS = (
    "added_share", "text_share", "absorbed", "added_norm", "text_norm", "sink_norm", "rest_norm", "added_key_norm",
    "sink_key_norm", "rest_key_norm", "score",
)  # fmt: skip
_COUNTS = ("events", "added_events", "mains", "added_mains", "moves", "text_moves", "transitions")
