import numpy as np
import pytest
from numpy.testing import assert_allclose

from sinklab.lab.analysis.movement import trend


def walks(kind, steps, paths):
    """Paths (step, path) without drift whose wobble has no, some or endless memory, or changes with
    the block.
    """
    noise = np.random.default_rng(7).standard_normal((steps, paths))
    if kind == "independent":
        return noise
    if kind == "blocks":
        return np.repeat(noise[:4], steps // 4, axis=0)
    keep = {"memory": 0.9, "walk": 1.0}[kind]
    for step in range(1, steps):
        noise[step] += keep * noise[step - 1]
    return noise


@pytest.mark.parametrize("steps", [16, 32, 128])
@pytest.mark.parametrize("kind", ["independent", "memory", "walk", "blocks"])
@pytest.mark.parametrize("drift", [0.0, -0.7])
def test_the_interval_holds_the_drift_in_about_95_percent(steps, kind, drift):
    path = walks(kind, steps, 4000) + drift * np.arange(steps)[:, None]
    found = trend(path, np.ones(path.shape, dtype=bool))
    held = ((found.low <= drift) & (drift <= found.high)).mean()
    # The random walk is the case the quantile is made for; what has less memory is held at least as
    # often.
    assert held >= 0.94 and (kind != "walk" or held <= 0.965)


@pytest.mark.parametrize("present", [slice(40, 64), slice(0, 128, 4)])
def test_the_interval_fits_the_stretch_that_has_points(present):
    path = walks("walk", 128, 4000)
    here = np.zeros(path.shape, dtype=bool)
    here[present] = True
    found = trend(path, here)
    assert 0.935 <= ((found.low <= 0) & (found.high >= 0)).mean() <= 0.965
    # A record that goes on without points says the same.
    longer = trend(np.concatenate([path, path]), np.concatenate([here, np.zeros_like(here)]))
    assert_allclose(longer.high, found.high)


def test_a_clear_drift_is_seen_through_block_jumps():
    # The sink sits in the middle of the block that is being written, and wanders a little: 128
    # steps, blocks of 32.
    rng = np.random.default_rng(0)
    path = np.repeat(16 + 32 * np.arange(4), 32)[:, None] + rng.normal(0, 3, (128, 200))
    found = trend(path, np.ones(path.shape, dtype=bool))
    assert (found.low > 0).mean() > 0.99 and abs(found.slope.mean() - 0.94) < 0.01


def test_slope_equals_least_squares_where_points_are_missing():
    rng = np.random.default_rng(2)
    path, here = rng.normal(size=(30, 5)), rng.random((30, 5)) < 0.6
    found = trend(np.where(here, path, 1e6), here)
    for place in range(5):
        steps = np.flatnonzero(here[:, place])
        assert_allclose(found.slope[place], np.polyfit(steps, path[steps, place], 1)[0], atol=1e-9)
    assert_allclose(found.scores.sum(0), 0, atol=1e-12)
    assert (found.scores[~here] == 0).all()
    assert (found.low < found.slope).all() and (found.slope < found.high).all()


def test_too_few_points_have_no_interval():
    steps = np.arange(10)[:, None]
    here = steps < np.array([0, 1, 2, 7, 8])
    found = trend(np.broadcast_to(2.0 * steps, here.shape), here)
    assert_allclose(found.slope, [np.nan, np.nan, 2, 2, 2])
    assert np.isnan(found.low).tolist() == [True, True, True, True, False]
    assert_allclose(found.high[-1], 2)
