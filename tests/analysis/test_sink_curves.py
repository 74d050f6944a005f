import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose, assert_array_equal

from refusals import refused, refusing
from sinklab.core.sinks import Excess, find_sinks
from sinklab.lab.analysis import EPSILONS, epsilon_curve, score_histogram


def attention(shape=(5, 3, 4, 64), seed=0):
    """Column sums of random attention: (step, layer, head, key), an even share is 1."""
    rng = np.random.default_rng(seed)
    received = rng.standard_exponential(shape) ** 3
    return received / received.mean(-1, keepdims=True)


def test_the_curve_of_one_strong_sink_per_head_by_hand():
    # Layer 0: the sink has 21 times an even share. Layer 1: even attention.
    received = np.ones((2, 2, 3, 64))
    received[:, 0] = (64 - 21) / 63
    received[:, 0, :, 7] = 21
    curve = epsilon_curve(received, epsilons=[0, 3, 10, 20.2, 20.4])
    # a > 1 + epsilon * 63/64 holds for a = 21 up to epsilon = 20.3.
    assert curve.sinks_LE.tolist() == [[6, 6, 6, 6, 0], [0, 0, 0, 0, 0]]
    assert curve.places_L.tolist() == [384, 384]
    assert_allclose(curve.filtered, [1 - 6 / 768] * 4 + [1])
    assert_allclose(curve.filtered_by_layer, [[1 - 1 / 64] * 4 + [1], [1] * 5])
    assert curve.at(3.0) == curve.at() == 1 - 6 / 768
    assert curve.at(3.0) >= 0.96


@pytest.mark.parametrize("scale", ["sum", "percent", "zscore", "mean"])
@pytest.mark.parametrize("cached", [False, True])
def test_the_curve_counts_what_find_sinks_finds(scale, cached):
    received = attention().astype(np.float32)
    visible = positions = None
    if cached:
        received[3] = received[3] / 4
        received[4, ..., 50:] = np.nan
        visible = np.full((5, 1, 1, 64), 64.0)
        visible[3] = 16
        visible[4, ..., 50:] = np.nan
        positions = np.array([64, 64, 64, 64, 50])[:, None, None]
    grid = [0.0, 0.05, 0.1, 0.2] if scale == "mean" else list(EPSILONS)
    curve = epsilon_curve(received, visible, positions, epsilons=grid, scale=scale)
    for place, epsilon in enumerate(grid):
        seen_by = 64 if visible is None else visible
        flags = find_sinks(received, Excess(epsilon, scale), seen_by, positions)
        assert_array_equal(curve.sinks_LE[:, place], flags.sum((0, 2, 3)))
    assert 0 < curve.sinks_LE[:, 3].sum() < curve.sinks_LE[:, 0].sum()
    assert_array_equal(curve.places_L, (~np.isnan(received)).sum((0, 2, 3)))
    assert (np.diff(curve.filtered) >= 0).all()


def test_default_thresholds_are_those_of_the_published_curve():
    curve = epsilon_curve(attention())
    assert curve.epsilon.tolist() == [half / 2 for half in range(21)]
    # 75 % is what the rule guarantees at S = 64; 96 % is not guaranteed.
    assert curve.at(3.0) > 0.75
    crowded = np.zeros((1, 1, 64))
    crowded[..., :12] = 64 / 12
    assert epsilon_curve(crowded).at(3.0) == 1 - 12 / 64
    assert epsilon_curve(crowded).at(3.0) < 0.96


def test_a_threshold_that_is_met_exactly_is_not_exceeded():
    received = np.full((1, 1, 64), 0.5, dtype=np.float32)
    received[..., 0], received[..., 1] = 3.953125, np.nextafter(np.float32(3.953125), np.float32(4))
    assert (
        epsilon_curve(received).at(3.0) == 1 - 1 / 64
        and epsilon_curve(received, epsilons=[3]).at(3.0) == 1 - 1 / 64
    )


def test_even_attention_and_single_queries_have_no_sink_at_any_threshold():
    # As it comes out of a softmax in single precision: even up to rounding.
    even = (1 + 1e-7 * np.random.default_rng(0).standard_normal((2, 3, 4, 64))).astype(np.float32)
    for scale in ("sum", "percent", "zscore"):
        assert epsilon_curve(even, scale=scale).at(0.5) == 1
    # One query gives all its attention to one key: without the number of positions nothing exceeds
    # its whole weight.
    single, seen = np.zeros((1, 1, 6)), np.ones(6)
    single[..., 2] = 1
    assert epsilon_curve(single, seen).at(0.0) == 1
    assert epsilon_curve(single, seen, np.full((1, 1), 6)).at(3.0) == 1 - 1 / 6


def test_curves_of_samples_add_up():
    one, two = attention(seed=1), attention((2, 3, 4, 64), seed=2)
    both = epsilon_curve(one) + epsilon_curve(two)
    together = epsilon_curve(np.concatenate([one, two]))
    assert_array_equal(both.sinks_LE, together.sinks_LE)
    assert_array_equal(both.filtered, together.filtered)
    # Any axes in front do the same.
    assert_array_equal(epsilon_curve(one[None, None]).sinks_LE, epsilon_curve(one).sinks_LE)
    assert_array_equal(epsilon_curve(torch.from_numpy(one)).sinks_LE, epsilon_curve(one).sinks_LE)


def test_a_run_without_attention_filters_nothing():
    curve = epsilon_curve(np.full((2, 3, 4, 8), np.nan))
    assert np.isnan(curve.filtered).all() and np.isnan(curve.at(3.0))
    assert np.isnan(curve.filtered_by_layer).all()


def test_curve_errors():
    refused(r"key\): got shape \(4, 5\)", epsilon_curve, np.ones((4, 5)))
    refused("epsilons must rise from", epsilon_curve, np.ones((1, 2, 3)), epsilons=[3, 1])
    refused(r"'summ'; did you mean 'sum'\?", epsilon_curve, np.ones((1, 2, 3)), scale="summ")
    refused("Pass it to epsilon_curve", epsilon_curve(attention()).at, 2.2)
    with refusing("got 3 and 2 layers"):
        epsilon_curve(np.ones((3, 2, 8))) + epsilon_curve(np.ones((2, 2, 8)))
    with refusing("scale: got 'sum' and 'percent'"):
        epsilon_curve(np.ones((3, 2, 8))) + epsilon_curve(np.ones((3, 2, 8)), scale="percent")


def test_histogram_by_hand():
    scores = np.array([[0.0, 0.5, 0.99, 1.0, 3.5, 64.0, 99.0, np.nan]])
    found = score_histogram(scores, np.full(8, 8.0))
    assert len(found.counts) == 64 and found.edges.tolist() == list(range(65))
    assert (
        found.counts[0] == 3
        and found.counts[1] == 1
        and found.counts[3] == 1
        and found.counts.sum() == 5
    )
    assert found.below == 0 and found.above == 2
    logarithmic = score_histogram(scores, np.full(8, 8.0), bins=4, span=(0.25, 4.0), log=True)
    assert_allclose(logarithmic.edges, [0.25, 0.5, 1, 2, 4])
    assert (logarithmic.below, logarithmic.above) == (1, 2) and logarithmic.counts.sum() == 4
    assert logarithmic.counts[3] == 1


@pytest.mark.parametrize("log", [False, True])
def test_histogram_agrees_with_numpy_and_adds_up(log):
    one, two = attention(seed=1), attention((2, 3, 4, 64), seed=2)
    found = score_histogram(one, log=log) + score_histogram(two, log=log)
    values = np.concatenate([one.ravel(), two.ravel()])
    expected, edges = np.histogram(values, found.edges)
    assert_allclose(edges, found.edges)
    assert abs(found.counts - expected).max() <= 1
    assert found.counts.sum() + found.below + found.above == values.size
    assert found.below == (values < edges[0]).sum() and found.above == (values >= edges[-1]).sum()


def test_histogram_is_in_multiples_of_an_even_share_under_a_cache():
    # Two of eight queries ran: a raw sum of 1.25 is five times an even share.
    found = score_histogram(np.full((1, 1, 8), 1.25), np.full(8, 2.0), np.array([[8]]))
    assert found.counts[5] == 8
    unseen = score_histogram(np.full((1, 8), 1.25), np.array([8.0] * 6 + [0.0, np.nan]))
    assert unseen.counts.sum() == 6


def test_histogram_errors():
    refused(r"span=\(0, 64\), log=True", score_histogram, np.ones(4), span=(0, 64), log=True)
    refused("bins=0", score_histogram, np.ones(4), bins=0)
    with refusing("got 65 from 0 to 64 and 9 from"):
        score_histogram(np.ones(4)) + score_histogram(np.ones(4), bins=8)
