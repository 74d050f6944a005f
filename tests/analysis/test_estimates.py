"""Estimates over samples against the books and against cases that can be counted by hand."""

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from scipy import stats

from refusals import refused
from sinklab.lab.analysis.estimates import (
    FEWEST,
    SEEDS,
    jackknife,
    mean_interval,
    mean_over,
    mean_p,
    median_interval,
    median_over,
    median_p,
)


def test_too_few_samples_are_a_range_and_no_verdict():
    few = mean_over([1.0, 2.0, 3.0, np.nan])
    assert (few.value, few.low, few.high, few.samples) == (2, 1, 3, 3)
    assert not few.is_interval and few.above() is None and few.above(9) is None
    none = median_over([np.nan])
    assert none.samples == 0 and math.isnan(none.value) and none.above() is None
    refused(r"axis, but got shape \(2, 2\)", mean_over, [[1, 2], [3, 4]])


def test_eight_samples_that_agree_are_enough_for_the_six_verdicts_of_two_runs():
    assert FEWEST == 8 and 2 * 0.5**8 < 0.05 / 6 < 2 * 0.5**7
    assert median_p([1.0] * 8, 0.9) == 2 * 0.5**8
    assert median_over([1.0] * 8).above(0.9) is True and median_over([1.0] * 7).above(0.9) is None
    assert (
        median_over([0.1] * 8).above(0.9) is False
        and median_over([0.1] * 6 + [1.0, 1.0]).above(0.9) is None
    )


def test_seeds_of_trained_models_are_judged_from_six_on():
    agree = [0.9, 1.0, 1.1, 1.0, 0.9, 1.1]
    assert mean_over(agree).above() is None and mean_over(agree, fewest=SEEDS).above() is True
    assert mean_over(agree[:5], fewest=SEEDS).above() is None


def test_the_interval_of_the_median_is_that_of_the_sign_test():
    for samples in range(FEWEST, 60):
        low, high = median_interval(np.arange(1.0, samples + 1))
        # samples below the lower end: as many as the sign test still rejects
        assert (
            stats.binomtest(int(low) - 1, samples).pvalue
            <= 0.05
            < stats.binomtest(int(low), samples).pvalue
        )
        assert low + high == samples + 1


def test_the_interval_of_the_mean_is_students_or_wider():
    values = np.random.default_rng(0).normal(size=(50, 12))
    low, high = mean_interval(values)
    student = stats.ttest_1samp(values, 0, axis=1).confidence_interval(0.95)
    assert (low <= student.low + 1e-12).all() and (high >= student.high - 1e-12).all()
    assert (high - low).max() <= 2.001 * (student.high - student.low).max()
    one = mean_over(values[3])
    assert (one.low, one.high) == pytest.approx((low[3], high[3]))
    # of skewed numbers the long side reaches farther
    skewed = np.random.default_rng(1).exponential(size=(200, 12))
    low, high = mean_interval(skewed)
    assert np.median((high - skewed.mean(1)) / (skewed.mean(1) - low)) > 1.3


def test_a_p_value_is_the_level_at_which_the_interval_meets_the_threshold():
    rng = np.random.default_rng(4)
    for samples in (8, 9, 30, 250):
        for values in (
            *rng.normal(0.6, 1, (40, samples)),
            *rng.exponential(1.3, (40, samples)) - 0.7,
        ):
            for over, p in ((mean_over, mean_p), (median_over, median_p)):
                found = p(values)
                assert 0 <= found <= 1
                # quantiles of resamples are interpolated, p counts them
                if abs(found - 0.05) > 0.004:
                    assert (over(values).above() is not None) == (found < 0.05), (samples, found)
    values = rng.normal(0.5, 1, 250)
    assert mean_p(values) == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    assert median_p([1.0] * 7 + [-1.0]) == pytest.approx(stats.binomtest(1, 8).pvalue)
    found = mean_over([0.25] * 8)
    assert (found.value, *found.interval) == (0.25, 0.25, 0.25) and found.above(0.2) is True
    assert mean_p([0.5] * 8) == 0 and mean_p([0.5] * 8, 0.5) == 1 and math.isnan(mean_p([1.0] * 7))


@pytest.mark.slow
def test_what_could_have_been_seen_is_seen_four_times_in_five():
    rng = np.random.default_rng(5)
    for samples in (8, 12, 30):
        worlds = rng.normal(size=(800, samples))
        for over, interval in ((mean_over, mean_interval), (median_over, median_interval)):
            reach = np.median([over(values).reach for values in worlds[:400]])
            low, _ = interval(worlds + reach)
            assert 74 <= 100 * (low > 0).mean() <= 97, (samples, over.__name__)
    assert math.isnan(mean_over([1.0] * 3).reach) and mean_over([1.0] * 9).reach == 0


def test_the_jackknife_of_a_mean_is_the_samples():
    values = np.random.default_rng(2).normal(size=9)
    assert_allclose(jackknife(lambda some: values[some].mean(), 9), values)
    both = jackknife(lambda some: np.array([values[some].mean(), values[some].var()]), 9)
    assert_allclose(both.mean(1), [values.mean(), values.var()])
    assert_array_equal(jackknife(lambda some: values[some].mean(), 1), values[:1])


def test_many_samples_are_left_out_in_groups():
    values, calls = np.random.default_rng(3).normal(size=173), []
    found = jackknife(lambda some: calls.append(len(some)) or values[some].mean(), 173)
    assert len(found) == 50 and len(calls) == 51 and set(calls[1:]) == {169, 170}
    assert found.mean() == pytest.approx(values.mean())
