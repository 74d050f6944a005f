"""Semantic or positional: how much of received attention is explained by the token of a key, and
how much by its position.
"""

# N samples, C classes, P positions
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sinklab.lab.analysis.estimates import FEWEST, Estimate, jackknife, mean_over


class Cells(NamedTuple):
    """Attention that the places of one sample received, by class and position."""

    labels: tuple[str, ...]
    """classes, in the order of the rows"""
    count_CP: np.ndarray
    """(class, position) number of places"""
    total_CP: np.ndarray
    """(class, position) sum of received attention"""
    squares: float
    """sum of the squares"""


@dataclass(frozen=True)
class Explained:
    """Shares of the variance of received attention that carry over from sample to sample. Samples
    add up with ``+``.

    Effects are fitted by least squares on all samples but one; the share is the covariance of that
    sample with the fit, over its variance, summed over the samples left out. Noise that lasts over
    the steps of a sample, such as a sink that stands still at a place of its own, explains 0 on
    average. R^2 by squared errors is less than that by the error of the fit, about 1 / (samples -
    1) of the noise. Intervals are the jackknife's over samples. A share may be a little below 0 or
    above 1. NaN with fewer than 8 samples, and if attention does not vary.
    """

    cells: tuple[Cells, ...]
    """a sample each"""

    @cached_property
    def labels(self) -> tuple[str, ...]:
        """Classes that occur, in alphabetical order."""
        return tuple(sorted({label for sample in self.cells for label in sample.labels}))

    @property
    def by_class(self) -> Estimate:
        """Share explained by the class of the token alone: the semantic score."""
        return mean_over(self._shares[0])

    @property
    def by_position(self) -> Estimate:
        """Share explained by the position alone: the positional score."""
        return mean_over(self._shares[1])

    @property
    def class_over_position(self) -> Estimate:
        """The semantic score less the positional one: above 0 sinks are rather semantic, below 0
        rather positional.
        """
        return mean_over(self._shares[0] - self._shares[1])

    @property
    def word(self) -> str | None:
        """Better explanation, "semantic" or "positional": the one that explains more, and more than
        nothing; None when inconclusive.
        """
        more = self.class_over_position.above()
        if more is None or not (self.by_class if more else self.by_position).above():
            return None
        return "semantic" if more else "positional"

    @cached_property
    def _shares(self) -> np.ndarray:
        """Pseudo-values (2, N) of the shares by class and by position; NaN for too few samples."""
        if len(self.cells) < FEWEST:
            return np.full((2, len(self.cells)), np.nan)
        width = max(sample.count_CP.shape[1] for sample in self.cells)
        count_NCP, total_NCP = np.zeros((2, len(self.cells), len(self.labels), width))
        for number, (labels, count_CP, total_CP, _) in enumerate(self.cells):
            at = np.ix_([self.labels.index(label) for label in labels], range(count_CP.shape[1]))
            count_NCP[number][at], total_NCP[number][at] = count_CP, total_CP
        squares_N = np.array([sample.squares for sample in self.cells])
        return jackknife(
            lambda some: _shares(count_NCP[some], total_NCP[some], squares_N[some]), len(self.cells)
        )

    def __add__(self, other: Explained) -> Explained:
        return Explained(self.cells + other.cells)


def _shares(count_NCP: np.ndarray, total_NCP: np.ndarray, squares_N: np.ndarray) -> np.ndarray:
    """Shares (2,) by class and by position over samples left out in turn; NaN if attention does not
    vary.
    """
    count_N, total_N = count_NCP.sum((1, 2)), total_NCP.sum((1, 2))
    mean = total_N.sum() / count_N.sum()
    spread = squares_N.sum() - total_N.sum() * mean
    if spread <= 1e-12 * squares_N.sum():
        return np.full(2, np.nan)
    others, sums = count_NCP.sum(0) - count_NCP, total_NCP.sum(0) - total_NCP
    mean_N11 = ((total_N.sum() - total_N) / (count_N.sum() - count_N))[:, None, None]
    apart_NCP = total_NCP - count_NCP * mean_N11
    fits = (_means(others, sums, 2), _means(others, sums, 1))
    # a class or a position that no other sample has is not told apart from the mean
    return np.array([(apart_NCP * np.nan_to_num(fit - mean_N11)).sum() for fit in fits]) / spread


def _means(count_NCP: np.ndarray, total_NCP: np.ndarray, axis: int) -> np.ndarray:
    """Means over an axis, which is kept; NaN for cells that do not occur."""
    count, total = count_NCP.sum(axis, keepdims=True), total_NCP.sum(axis, keepdims=True)
    return np.divide(total, count, out=np.full_like(total, np.nan), where=count > 0)


def explained_mass(received: Any, classes: Any, positions: Any = None) -> Explained:
    """How much of the variance of one sample's received attention classes and positions explain;
    add up samples.

    Args:
        received: (..., position) received attention of each place of the sample: share or score,
            mean over heads (and layers), or numbers of sink events. Added sink columns left out.
            NaN if there is no place.
        classes: labels of the same shape (``token_classes``), None if there is no place.
        positions: whole numbers of at least 0, broadcastable to received; None: the place on the
            last axis. Any other notion of position will do, such as the distance to the rightmost
            masked position.

    Raises ValueError when shapes differ or no place is left.
    """
    y, names = np.asarray(received, dtype=float), np.asarray(classes, dtype=object)
    if y.ndim < 1 or y.shape != names.shape:
        raise ValueError(
            f"One class per position: received has shape {y.shape}, classes {names.shape}."
        )
    where = np.arange(y.shape[-1]) if positions is None else np.asarray(positions)
    if not np.issubdtype(where.dtype, np.integer) or where.min(initial=0) < 0:
        raise ValueError(
            f"positions are whole numbers of at least 0: got {where.dtype} from "
            f"{where.min(initial=0)}."
        )
    where = np.broadcast_to(where, y.shape)
    here = np.isfinite(y) & (names != None)  # noqa: E711 - elementwise
    if not here.any():
        raise ValueError(
            "explained_mass needs at least one position that holds a token and a finite number: "
            "got none."
        )
    y, where = y[here], where[here]
    row, labels = pd.factorize(names[here].astype(str).astype(object), sort=True)
    shape = (len(labels), int(where.max()) + 1)
    cell = row * shape[1] + where
    count_CP, total_CP = (
        np.bincount(cell, what, len(labels) * shape[1]).reshape(shape) for what in (None, y)
    )
    return Explained((Cells(tuple(labels), count_CP, total_CP, float((y**2).sum())),))
