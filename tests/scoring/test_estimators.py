import math
from collections import Counter

import numpy as np
import pytest

from likelihood_twin import every_mask
from refusals import refused
from sinklab.lab.scoring.requests import chain_rule, monte_carlo
from sinklab.lab.scoring.settings import LikelihoodSettings

NOISES = pytest.mark.parametrize("noise", ["llada", "smdm"])


def shown(plan):
    """The mask of each sample, (n, L); all False for one that masks nothing."""
    masked_NL = plan.masked_NL.numpy()
    return np.array(
        [masked_NL[row] if row >= 0 else np.zeros(masked_NL.shape[1], bool) for row in plan.rows_n]
    )


@pytest.mark.parametrize("tokens", [1, 3, 8, 20])
def test_llada_counts_are_spread_evenly_and_weighted_by_their_share(tokens):
    plan = monte_carlo(tokens, 5, LikelihoodSettings(samples=120))
    counts = shown(plan).sum(1)
    assert np.allclose(plan.weights_n, tokens / counts)
    found = Counter(counts.tolist())
    assert set(found) == set(range(1, tokens + 1))
    assert max(found.values()) - min(found.values()) <= 2, (
        "each count as often as any other, up to the ends"
    )


@NOISES
def test_the_expectation_is_the_weight_of_every_mask(noise):
    tokens, samples = 3, 20_000
    plan = monte_carlo(tokens, 0, LikelihoodSettings(samples=samples, noise=noise))
    weights = {}
    for mask, weight in zip(map(tuple, shown(plan).tolist()), plan.weights_n, strict=True):
        weights[mask] = weights.get(mask, 0.0) + weight / samples
    weights.pop((False,) * tokens, None)
    full = every_mask(tokens)
    assert len(full.masked_NL) == 7
    for mask, weight in zip(map(tuple, full.masked_NL.tolist()), full.weights_n, strict=True):
        assert weights[mask] == pytest.approx(weight, abs=0.03), mask


@NOISES
def test_a_longer_continuation_of_the_group_shares_what_it_can(noise):
    settings = LikelihoodSettings(samples=64, noise=noise)
    short, long, other = (
        monte_carlo(tokens, group, settings) for tokens, group in ((6, 1), (9, 1), (6, 2))
    )
    if noise == "smdm":
        assert np.array_equal(shown(short), shown(long)[:, :6])
        assert np.array_equal(short.weights_n, long.weights_n)
    else:
        agreement = (shown(short) == shown(long)[:, :6]).mean()
        apart = (shown(short) == shown(other)).mean()
        assert agreement > 0.85 > apart + 0.2
    assert not np.array_equal(shown(short), shown(other))
    again = monte_carlo(6, 1, LikelihoodSettings(samples=64, noise=noise, seed=1))
    assert not np.array_equal(shown(short), shown(again))


@NOISES
def test_equal_masks_run_once_and_mean_the_same(noise):
    settings = LikelihoodSettings(samples=100, noise=noise)
    merged, plain = monte_carlo(3, 4, settings), monte_carlo(3, 4, settings, merge=False)
    assert len(merged.masked_NL) == 7
    assert len(plain.masked_NL) == (shown(plain).any(1)).sum() > 60
    assert np.array_equal(shown(merged), shown(plain))
    of_mask = {
        mask: -float(1 + place) for place, mask in enumerate(map(tuple, merged.masked_NL.tolist()))
    }
    results = [
        plan.result(np.array([of_mask[tuple(mask)] for mask in plan.masked_NL.tolist()]))
        for plan in (merged, plain)
    ]
    assert results[0] == pytest.approx(results[1])
    assert len(monte_carlo(1, 0, settings).masked_NL) == 1, "of one token there is one mask"


def test_the_chain_rule_hides_a_token_and_all_after_it():
    plan = chain_rule(3)
    assert plan.masked_NL.int().tolist() == [[1, 1, 1], [0, 1, 1], [0, 0, 1]]
    assert plan.wanted_NL.int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]
    assert plan.result(np.array([-1.0, -2.0, -4.0])) == (-7.0, 0.0)


def test_a_sample_that_masks_nothing_counts_as_nothing():
    plan = monte_carlo(1, 3, LikelihoodSettings(samples=8, noise="smdm"))
    empty = int((plan.rows_n < 0).sum())
    assert 0 < empty < 8
    values = np.where(plan.rows_n < 0, 0, -2 * plan.weights_n)
    expected = values.mean(), values.std(ddof=1) / math.sqrt(8)
    assert plan.result(np.array([-2.0])) == pytest.approx(expected)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"estimator": "montecarlo"}, "estimator must be one of .*did you mean 'monte_carlo'"),
        ({"noise": "lada"}, "noise must be one of llada, smdm, but is 'lada'"),
        ({"samples": 0}, "samples must be at least 1, but is 0"),
        ({"cfg_scale": -0.5}, "cfg_scale must be at least 0 and finite, but is -0.5"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields, message):
    refused(message, LikelihoodSettings, **fields)
