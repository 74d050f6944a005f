"""How many tokens a rule lets through, over its threshold, and how the scores are spread."""

# E thresholds, L layers, H heads, K keys
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from .rules import Excess
from .scale import slabs

EPSILONS = tuple(np.linspace(0, 10, 21).tolist())
"""thresholds of the published curve, 0 to 10 in halves"""


@dataclass(frozen=True)
class EpsilonCurve:
    """Share of tokens that are not sinks, over epsilon (Rulli et al., Fig. 10). Curves of several samples add up."""

    epsilon: np.ndarray
    """(E,) thresholds, rising"""
    scale: str
    """unit of the threshold, as in ``Excess``"""
    sinks_LE: np.ndarray
    """(layer, E) number of (step, head, key) that are sinks"""
    places_L: np.ndarray
    """(layer,) number of (step, head, key) there are"""

    @property
    def filtered(self) -> np.ndarray:
        """(E,) share of (step, layer, head, key) that are no sinks; NaN when nothing was counted."""
        return 1 - self.sinks_LE.sum(0) / (float(self.places_L.sum()) or np.nan)

    @property
    def filtered_by_layer(self) -> np.ndarray:
        """(layer, E) the same in each layer."""
        return 1 - self.sinks_LE / np.where(self.places_L > 0, self.places_L, np.nan)[:, None]

    def at(self, epsilon: float = 3.0) -> float:
        """Filtered share at a threshold that was counted. Raises ValueError for any other."""
        found = np.flatnonzero(np.isclose(self.epsilon, epsilon))
        if not len(found):
            raise ValueError(
                f"The curve was counted at epsilon {self.epsilon.tolist()}: got {epsilon}. "
                "Pass it to epsilon_curve(epsilons=...)."
            )
        return float(self.filtered[found[0]])

    @property
    def holds_96(self) -> bool:
        """Whether epsilon = 3 filters at least 96 % of the tokens, as stated for three published models (App. B)."""
        return self.at(3.0) >= 0.96

    def __add__(self, other: EpsilonCurve) -> EpsilonCurve:
        if self.scale != other.scale or not np.array_equal(self.epsilon, other.epsilon):
            raise ValueError(
                f"Curves add up when their thresholds are the same: got {len(self.epsilon)} on scale {self.scale!r} "
                f"and {len(other.epsilon)} on scale {other.scale!r}."
            )
        if self.places_L.shape != other.places_L.shape:
            raise ValueError(
                "Curves add up when they have the same layers: got "
                f"{len(self.places_L)} and {len(other.places_L)} layers."
            )
        return replace(self, sinks_LE=self.sinks_LE + other.sinks_LE, places_L=self.places_L + other.places_L)


def epsilon_curve(
    received: Any,
    visible: Any = None,
    positions: Any = None,
    *,
    epsilons: Any = EPSILONS,
    scale: str = "sum",
) -> EpsilonCurve:
    """Count the sinks of ``Excess(epsilon, scale)`` over epsilon.

    received: (..., layer, head, key); visible, positions: as in ``find_sinks``.
    Time O(size), whatever the number of thresholds; working memory a few (layer, head, key) slabs.
    Raises ValueError for fewer than three axes, thresholds that do not rise, or an unknown scale.
    """
    grid = np.asarray(epsilons, dtype=float).reshape(-1)
    if len(grid) == 0 or not (np.diff(grid) > 0).all() or not grid[0] >= 0:
        raise ValueError(f"epsilons must rise from at least 0: got {grid.tolist()}.")
    # Below 1 even the literal mean does not warn; what is wanted here is the check of the scale.
    Excess(0.0, scale)
    shape = np.shape(received)
    if len(shape) < 3:
        raise ValueError(f"epsilon_curve needs (..., layer, head, key): got shape {shape}.")
    layers, bins = shape[-3], len(grid) + 1
    counts_LE, places_L = np.zeros((layers, bins), dtype=np.int64), np.zeros(layers, dtype=np.int64)
    for _, a_LHK, seen_LHK in slabs(received, visible, positions, 3):
        exists_LHK = ~np.isnan(a_LHK) & (seen_LHK > 0)
        places_L += exists_LHK.sum((1, 2))
        excess_LHK = _excess(a_LHK, np.where(seen_LHK > 0, seen_LHK, 1), exists_LHK, scale)
        # Most keys are below every threshold; only the others need a bin.
        above_LHK = exists_LHK & (excess_LHK > grid[0])
        layer, head, key = np.nonzero(above_LHK)
        # A threshold that is met exactly is not exceeded: the left side.
        passed = np.searchsorted(grid, excess_LHK[layer, head, key].astype(float), side="left")
        counts_LE += np.bincount(layer * bins + passed, minlength=layers * bins).reshape(layers, bins)
    # A key that passed p thresholds is a sink at the first p of them.
    sinks_LE = counts_LE[:, ::-1].cumsum(1)[:, ::-1][:, 1:]
    return EpsilonCurve(grid, scale, sinks_LE, places_L)


def _excess(a: np.ndarray, seen: np.ndarray, exists: np.ndarray, scale: str) -> np.ndarray:
    """The epsilon at which a key stops being a sink: ``Excess`` solved for its threshold."""
    if scale == "zscore":
        share, weight = np.where(exists, a / seen, 0), exists.sum(-1, keepdims=True).clip(1)
        mean = share.sum(-1, keepdims=True) / weight
        deviation = np.sqrt((np.where(exists, share - mean, 0) ** 2).sum(-1, keepdims=True) / weight)
        flat = deviation <= 1e-6 * mean
        return np.where(flat, -1, (share - mean) / np.where(flat, 1, deviation))
    unit = {"sum": 1.0, "mean": seen, "percent": seen / 100}[scale]
    room = unit * (seen - 1) / seen
    # One query alone gives its whole weight away: the threshold is then 1 whatever epsilon is.
    return (a - 1) / np.where(room > 0, room, 1)


@dataclass(frozen=True)
class ScoreHistogram:
    """How the scores are spread (Rulli et al., Fig. 3 and 9). Histograms of several samples add up."""

    counts: np.ndarray
    """(bins,) number of (step, layer, head, key) with a score in the bin"""
    edges: np.ndarray
    """(bins + 1,) borders of the bins, in multiples of an even share"""
    below: int
    """scores below the first border"""
    above: int
    """scores at or above the last one"""

    def __add__(self, other: ScoreHistogram) -> ScoreHistogram:
        if not np.array_equal(self.edges, other.edges):
            raise ValueError(
                "Histograms add up when their bins are the same: got "
                f"{len(self.counts)} from {self.edges[0]:g} to {self.edges[-1]:g} and "
                f"{len(other.counts)} from {other.edges[0]:g} to {other.edges[-1]:g}."
            )
        return ScoreHistogram(
            self.counts + other.counts, self.edges, self.below + other.below, self.above + other.above
        )


def score_histogram(
    received: Any,
    visible: Any = None,
    positions: Any = None,
    *,
    bins: int = 64,
    span: tuple[float, float] | None = None,
    log: bool = False,
) -> ScoreHistogram:
    """Count the scores a_j as multiples of an even share, in equal bins (``log``: equal on a logarithmic scale).

    received: (..., key); visible, positions: as in ``find_sinks``; keys that do not exist or that nobody sees do not
    count. span: first and last border, by default 0 to 64, or 2**-8 to 2**12 with ``log``: fixed, so that histograms of
    samples of different lengths add up. Time O(size), working memory a few slabs.
    Raises ValueError when the span is empty or, with ``log``, begins at 0 or less.
    """
    low, high = span or ((2.0**-8, 2.0**12) if log else (0.0, 64.0))
    if bins < 1 or not low < high or (log and low <= 0):
        raise ValueError(
            f"A histogram needs bins of at least 1 and a span that rises, above 0 on a logarithmic scale: "
            f"got bins={bins}, span=({low:g}, {high:g}), log={log}."
        )
    first, last = (np.log(low), np.log(high)) if log else (low, high)
    counts = np.zeros(bins + 2, dtype=np.int64)
    for _, a, seen in slabs(received, visible, positions, min(3, np.ndim(received))):
        score = a[np.isfinite(a) & (seen > 0)]
        if log:
            score = np.log(np.maximum(score, low / 2))
        place = np.clip(np.floor((score - first) * (bins / (last - first))), -1, bins).astype(np.int64)
        counts += np.bincount(place + 1, minlength=bins + 2)
    edges = np.geomspace(low, high, bins + 1) if log else np.linspace(low, high, bins + 1)
    return ScoreHistogram(counts[1:-1], edges, int(counts[0]), int(counts[-1]))
