"""Intervals and tests against the books, against scipy, and against cases that can be counted by hand."""

import math

import numpy as np
import pytest

from sinklab.analysis.intervals import (
    bootstrap_mean,
    mcnemar,
    newey_west_error,
    paired_share_interval,
    percentile_interval,
    resampled_weights,
    wilson,
)


def test_wilson_is_newcombes_and_knows_its_ends() -> None:
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert (wilson(0, 20)[0], wilson(20, 20)[1]) == (0.0, 1.0)
    assert all(map(math.isnan, wilson(0, 0)))
    with pytest.raises(ValueError):
        wilson(3, 2)


def test_mcnemar_counts_as_many_splits_as_there_are() -> None:
    assert mcnemar(0, 5) == 2 / 32 and mcnemar(3, 3) == mcnemar(0, 0) == 1.0
    assert mcnemar(2, 9) == pytest.approx(2 * (1 + 11 + 55) / 2**11)


def test_a_paired_share_has_a_width_without_any_change() -> None:
    low, high = paired_share_interval(0, 0, 100)
    assert low == -high < 0
    # either order of the two gives the same interval, turned round
    assert paired_share_interval(3, 9, 50) == tuple(-end for end in reversed(paired_share_interval(9, 3, 50)))
    assert all(map(math.isnan, paired_share_interval(0, 0, 0)))


def test_resampled_weights_are_counts_over_samples() -> None:
    weights_NS = resampled_weights(7, 200, 3)
    assert weights_NS.shape == (200, 7) and np.allclose(weights_NS.sum(1), 1)
    assert np.array_equal(weights_NS * 7, np.round(weights_NS * 7))
    assert np.array_equal(weights_NS, resampled_weights(7, 200, 3))


def test_percentile_interval_leaves_out_what_is_not_finite() -> None:
    assert percentile_interval([*range(101), np.nan, np.inf]) == pytest.approx((2.5, 97.5))
    assert all(map(math.isnan, percentile_interval([np.nan])))


def test_the_bootstrap_of_a_mean_covers_it() -> None:
    draws = np.random.default_rng(5).exponential(size=(400, 40))
    held = [low <= 1 <= high for low, high in (bootstrap_mean(values, 500) for values in draws)]
    assert 0.88 <= np.mean(held) <= 0.97
    assert bootstrap_mean([2.0] * 9) == (2.0, 2.0)


def test_dependent_steps_widen_the_error() -> None:
    scores = np.repeat(np.random.default_rng(2).normal(size=(16, 200)), 4, axis=0)
    here = np.ones(scores.shape, dtype=bool)
    assert 1.5 < (newey_west_error(scores, here) / np.sqrt((scores**2).sum(0))).mean() < 2
    # eight steps: the window of 2 holds one lag, with half its weight
    few = scores[:8, 0]
    expected = np.sqrt((few**2).sum() + (few[1:] * few[:-1]).sum())
    assert newey_west_error(few, here[:8, 0]) == pytest.approx(expected)
