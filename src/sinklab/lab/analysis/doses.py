"""Cost of an edit against the attention it removed: maps over heads, and models at the same removed
mass.
"""

# R rows of text, C cells of a map (layers or heads), K doses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # its modules load where they are first used

from sinklab.lab.analysis.estimates import (
    FEWEST,
    LEVEL,
    Estimate,
    jackknife,
    mean_interval,
    mean_over,
)

FEWEST_CELLS = 10
PHENOMENON = 0.05
"""A model has heavy sinks if one key holds more than 30 % of the attention in no smaller share of
its heads.
"""
MATCHED = 0.5
"""With fewer heads that have a control of equal mass, the comparison hardly describes the model."""


def told_apart(deltas_RC: np.ndarray) -> np.ndarray:
    """Signs of the cells of a map, (C,) of 1 (above zero), −1 (below) and 0 (inconclusive).

    The t-tests of all cells together, at a false discovery rate of 5 % (Benjamini and Hochberg
    1995; on rows that the cells share, it holds under positive dependence too), and the cell's own
    interval (`mean_over`) must leave out 0. With fewer than 8 rows all cells are inconclusive.
    """
    if len(deltas_RC) < FEWEST:
        return np.zeros(deltas_RC.shape[1], dtype=int)
    low_C, high_C = mean_interval(deltas_RC.T)
    mean_C, error_C = deltas_RC.mean(0), deltas_RC.std(0, ddof=1) / math.sqrt(len(deltas_RC))
    # a cell in which nothing changes at all has no test
    ratio_C = np.divide(mean_C, error_C, out=np.zeros_like(mean_C), where=error_C > 0)
    p_C = 2 * scipy.stats.t.sf(np.abs(ratio_C), len(deltas_RC) - 1)
    sure_C = (scipy.stats.false_discovery_control(p_C) <= 1 - LEVEL) & ((low_C > 0) | (high_C < 0))
    return np.where(sure_C, np.sign(mean_C), 0).astype(int)


def rank_correlation(weights_RC: np.ndarray, deltas_RC: np.ndarray) -> Estimate:
    """Spearman's correlation over cells of the two maps (means over rows), with an interval over
    rows (`jackknife`).

    NaN if a map is the same in all cells, or has fewer than 10 of them: an interval over rows knows
    nothing of how coarse ranks of so few cells are. Noise of a map makes a correlation smaller, not
    larger.
    """
    if deltas_RC.shape[1] < FEWEST_CELLS:
        return mean_over([])

    def correlation(rows: np.ndarray) -> np.ndarray:
        # by scipy.stats.spearmanr two equal maps correlate by one less than 1 in the last place
        one_C = scipy.stats.rankdata(weights_RC[rows].mean(0))
        other_C = scipy.stats.rankdata(deltas_RC[rows].mean(0))
        one_C, other_C = one_C - one_C.mean(), other_C - other_C.mean()
        spread = math.sqrt((one_C**2).sum() * (other_C**2).sum())
        return np.array(np.divide((one_C * other_C).sum(), spread or math.nan))

    found = mean_over(jackknife(correlation, len(weights_RC)))
    value = float(correlation(np.arange(len(weights_RC))))
    return Estimate(value, max(found.low, -1.0), min(found.high, 1.0), found.samples)


def no_phenomenon(model: str, rate: float, share: float) -> str:
    """Reason that a model has no heavy sinks to remove, or that it is not known; empty if it has
    them.

    rate: share of heads and steps in which one sink holds more than 30 % of the attention, with
    nothing blocked. share: share of the strongest key there, on average.
    """
    if math.isnan(rate):
        return f"the attention of {model} was not watched with nothing blocked"
    if rate >= PHENOMENON:
        return ""
    return (
        f"{model} hardly has such sinks: one holds more than 30 % of the attention in "
        f"{100 * rate:.1f} % of its heads "
        f"(Gu rate), and the key that receives most holds {100 * share:.1f} % on average"
    )


@dataclass(frozen=True)
class Doses:
    """Costs of rising doses of one edit for a model."""

    masses_K: np.ndarray
    """Share of attention that each dose really removed, mean over rows."""
    costs_RK: np.ndarray
    """Excess cost of each row under the edit, in any unit that the models share."""

    def at(self, mass: float) -> np.ndarray:
        """The cost (R,) at a mass between two doses, linear between them. NaN outside of the
        doses.
        """
        order = np.argsort(self.masses_K, kind="stable")
        masses_K, costs_RK = self.masses_K[order], self.costs_RK[:, order]
        return np.array(
            [np.interp(mass, masses_K, cost_K, math.nan, math.nan) for cost_K in costs_RK]
        )


@dataclass(frozen=True)
class Contrast:
    """Two models at one dose."""

    mass: float
    """The removed mass they are compared at; NaN if they have none in common."""
    one: Estimate
    """Cost for the first."""
    other: Estimate
    """Cost for the second."""
    difference: Estimate
    """The first less the second, its interval by Welch's t; no samples if there is no common
    mass.
    """
    p: float = math.nan
    """p-value of that test; NaN without an interval."""


def at_equal_mass(one: Doses, other: Doses) -> Contrast:
    """Two models at the greatest removed mass that the measured doses of both reach; never beyond
    the doses of either.

    Only doses that removed something count: between nothing and its first dose a model was not
    measured.
    """
    masses = [doses.masses_K[doses.masses_K > 0] for doses in (one, other)]
    if any(not len(some) for some in masses):
        return contrast([], [])
    most = min(some.max() for some in masses)
    if most < max(some.min() for some in masses):
        return contrast([], [])
    return contrast(one.at(most), other.at(most), float(most))


def contrast(
    one_R: Sequence[float] | np.ndarray,
    other_R: Sequence[float] | np.ndarray,
    mass: float = math.nan,
) -> Contrast:
    """Costs of rows of two models; rows are not paired, since tokenizers may cut the text
    otherwise.
    """
    one, other = mean_over(one_R), mean_over(other_R)
    value, samples = one.value - other.value, min(one.samples, other.samples)
    low = high = p = math.nan
    if samples >= FEWEST:
        test = scipy.stats.ttest_ind(one_R, other_R, equal_var=False)
        low, high = test.confidence_interval(LEVEL)
        p = float(test.pvalue)
    return Contrast(mass, one, other, Estimate(value, float(low), float(high), samples), p)
