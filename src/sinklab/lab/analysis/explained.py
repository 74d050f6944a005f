"""Semantic or positional: how much of received attention is explained by the token of a key, and
how much by its position.
"""

# N samples, C classes or positions, X pairs of class and position
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from sinklab.lab.analysis.estimates import FEWEST


def explained(cells: Sequence[pd.DataFrame]) -> np.ndarray:
    """Shares (2,) of the variance of received attention that carry over from sample to sample with
    the class of a token, and with its position.

    Effects are fitted by least squares on all samples but one; the share is the covariance of that
    sample with the fit, over its variance, summed over the samples left out. Noise that lasts over
    the steps of a sample, such as a sink that stands still at a place of its own, explains 0 on
    average. A share may be a little below 0 or above 1. NaN with fewer than 8 samples, and if
    attention does not vary.

    cells: `cells_of` each sample.
    """
    if len(cells) < FEWEST:
        return np.full(2, np.nan)
    whole = pd.concat([*cells], keys=range(len(cells)), names=["sample"])
    whole = whole.unstack("sample", fill_value=0)
    count_XN, total_XN, squares_XN = (
        whole[name].to_numpy() for name in ("count", "total", "squares")
    )
    count_N, total_N = count_XN.sum(0), total_XN.sum(0)
    spread = squares_XN.sum() - total_N.sum() ** 2 / count_N.sum()
    if spread <= 1e-12 * squares_XN.sum():
        return np.full(2, np.nan)
    others_XN, sums_XN = (one.sum(1, keepdims=True) - one for one in (count_XN, total_XN))
    mean_N = (total_N.sum() - total_N) / (count_N.sum() - count_N)
    apart_XN = total_XN - count_XN * mean_N
    shares = []
    for codes_X in map(np.asarray, whole.index.codes):
        is_in_CX = (codes_X == np.arange(codes_X.max() + 1)[:, None]).astype(float)
        count_CN, total_CN = is_in_CX @ others_XN, is_in_CX @ sums_XN
        # a class or a position that no other sample has is not told apart from the mean
        fit_CN = np.where(count_CN > 0, total_CN / np.maximum(count_CN, 1) - mean_N, 0)
        shares.append((apart_XN * (is_in_CX.T @ fit_CN)).sum() / spread)
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
