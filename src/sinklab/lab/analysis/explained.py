"""Semantic or positional: how much of received attention is explained by the token of a key, and
how much by its position.
"""

# N samples, C classes or positions, X pairs of class and position
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from sinklab.lab.analysis.estimates import FEWEST, Estimate, jackknife, mean_over


@dataclass(frozen=True)
class Explained:
    """Shares of the variance of received attention that carry over from sample to sample.

    Effects are fitted by least squares on all samples but one; the share is the covariance of that
    sample with the fit, over its variance, summed over the samples left out. Noise that lasts over
    the steps of a sample, such as a sink that stands still at a place of its own, explains 0 on
    average. R^2 by squared errors is less than that by the error of the fit, about 1 / (samples -
    1) of the noise. Intervals are the jackknife's over samples. A share may be a little below 0 or
    above 1. NaN with fewer than 8 samples, and if attention does not vary.
    """

    cells: Sequence[pd.DataFrame]
    """`cells_of` each sample"""

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

    @property
    def shares(self) -> np.ndarray:
        """Shares explained by class and by position (2,), without their intervals, which take a fit
        a sample.
        """
        return self._over(lambda shares, samples: shares(np.arange(samples)))

    @cached_property
    def _shares(self) -> np.ndarray:
        """Pseudo-values (2, N) of the shares by class and by position; NaN for too few samples."""
        return self._over(jackknife).reshape(2, -1)

    def _over(self, how: Callable[..., np.ndarray]) -> np.ndarray:
        """What ``how`` makes of the shares of some samples, and the number of all."""
        samples = len(self.cells)
        if samples < FEWEST:
            return np.full(2, np.nan)
        whole = pd.concat([*self.cells], keys=range(samples), names=["sample"])
        whole = whole.unstack("sample", fill_value=0)
        sums_3XN = np.array([whole[name] for name in ("count", "total", "squares")])
        is_in_CX = [
            (codes == np.arange(codes.max() + 1)[:, None]).astype(float)
            for codes in map(np.asarray, whole.index.codes)
        ]
        return how(lambda some: _shares(sums_3XN[..., some], is_in_CX), samples)


def _shares(sums_3XN: np.ndarray, is_in_CX: list[np.ndarray]) -> np.ndarray:
    """Shares (2,) by class and by position over samples left out in turn; NaN if attention does not
    vary.
    """
    count_XN, total_XN, squares_XN = sums_3XN
    count_N, total_N = count_XN.sum(0), total_XN.sum(0)
    spread = squares_XN.sum() - total_N.sum() ** 2 / count_N.sum()
    if spread <= 1e-12 * squares_XN.sum():
        return np.full(2, np.nan)
    others_XN, sums_XN = (one.sum(1, keepdims=True) - one for one in (count_XN, total_XN))
    mean_N = (total_N.sum() - total_N) / (count_N.sum() - count_N)
    apart_XN = total_XN - count_XN * mean_N
    shares = []
    for one_CX in is_in_CX:
        count_CN, total_CN = one_CX @ others_XN, one_CX @ sums_XN
        # a class or a position that no other sample has is not told apart from the mean
        fit_CN = np.where(count_CN > 0, total_CN / np.maximum(count_CN, 1) - mean_N, 0)
        shares.append((apart_XN * (one_CX.T @ fit_CN)).sum() / spread)
    return np.array(shares)


def cells_of(received: Any, classes: Any) -> pd.DataFrame:
    """Attention that the places of one sample received: count, total and squares by class and
    position.

    Args:
        received: (..., position) received attention of each place of the sample: share or score,
            mean over heads (and layers), or numbers of sink events. Added sink columns left out.
            NaN if there is no place.
        classes: labels of the same shape (``token_classes``), None if there is no place.

    Raises ValueError when shapes differ or no place is left.
    """
    y, names = np.asarray(received, dtype=float), np.asarray(classes, dtype=object)
    if y.ndim < 1 or y.shape != names.shape:
        raise ValueError(
            f"One class per position: received has shape {y.shape}, classes {names.shape}."
        )
    here = np.isfinite(y) & (names != None)  # noqa: E711 - elementwise
    if not here.any():
        raise ValueError(
            "cells_of needs at least one position that holds a token and a finite number: got none."
        )
    row, labels = pd.factorize(names[here])
    places = pd.MultiIndex.from_product([labels.astype(str), range(y.shape[-1])])
    cell = row * y.shape[-1] + np.broadcast_to(np.arange(y.shape[-1]), y.shape)[here]
    weights = {"count": None, "total": y[here], "squares": y[here] ** 2}
    sums = {name: np.bincount(cell, one, len(places)) for name, one in weights.items()}
    return pd.DataFrame(sums, places)
