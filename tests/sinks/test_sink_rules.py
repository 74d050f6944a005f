import json

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from refusals import refused
from shared_data import shared
from sinklab.core.sinks import Excess, Gu, even_weight, find_sinks, is_judgeable


def one_hot(keys, at=1):
    """Every query gives all its attention to one key: a_j = S there."""
    attention_QS = np.zeros((keys, keys))
    attention_QS[:, at] = 1
    return attention_QS.sum(0)


RULES = [Excess(), Excess(2.0, "zscore"), Excess(3.0, "percent"), Excess(0.1, "mean"), Gu()]


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("keys", [8, 3000])
def test_uniform_attention_has_no_sink_and_one_hot_attention_one(rule, keys):
    uniform = np.full((keys, keys), 1 / keys).sum(0)
    assert not find_sinks(uniform, rule, uniform.shape[-1]).any()
    assert np.flatnonzero(find_sinks(one_hot(keys), rule, keys)).tolist() == [1]


def test_threshold_is_strict_and_in_closed_form():
    # S = 3, epsilon = 3: the threshold is 1 + 3 * 2 / 3 = 3, and 3 is all that three queries can
    # give.
    assert Excess().threshold(3) == 3
    assert not find_sinks(one_hot(3), Excess(), 3).any()
    assert find_sinks(one_hot(3), Excess(2.999), 3).any()
    a = np.array([3.953125, np.nextafter(3.953125, 4)] + [0.9] * 62)
    assert Excess().threshold(64) == 3.953125
    # a causal call could have left these sums, so that the number of queries has to be said
    assert find_sinks(a, Excess(), 64).tolist() == [False, True] + [False] * 62


@pytest.mark.parametrize("epsilon", [0.5, 3.0])
@pytest.mark.parametrize("scale", ["sum", "percent", "mean"])
def test_closed_form_equals_the_printed_equation(epsilon, scale):
    generator = np.random.default_rng(0)
    weights = generator.dirichlet([3.0, 1.0] + [0.05] * 38, size=(3, 40))
    a = weights.sum(1)
    factor = {"sum": 1.0, "percent": 100 / 40, "mean": 1 / 40}[scale]
    epsilon = epsilon / 10 if scale == "mean" else epsilon
    score = a * factor
    mean_of_others = (score.sum(-1, keepdims=True) - score) / 39
    expected = score > mean_of_others + epsilon
    assert expected.any() and not expected.all()
    assert (find_sinks(a, Excess(epsilon, scale), 40) == expected).all()


def test_literal_mean_warns_that_it_cannot_fire():
    with pytest.warns(UserWarning, match="epsilon=3.0 on scale 'mean'"):
        rule = Excess(3.0, "mean")
    assert not find_sinks(one_hot(64), rule, 64).any()


def causal(map_QS):
    """What a causal map leaves: column sums, and how many queries see each key."""
    keys = len(map_QS)
    return map_QS.sum(0), np.arange(keys, 0, -1)


def uniform_rows(keys):
    return np.tril(np.ones((keys, keys))) / np.arange(1, keys + 1)[:, None]


def test_visible_counts_replace_the_number_of_keys():
    # Causal attention over 24 keys, all on the first: key j is seen by 24 - j queries.
    a, visible = causal(np.eye(24)[[0] * 24])
    assert find_sinks(a, Excess(), visible).tolist() == [True] + [False] * 23
    # Added sink columns: 6 keys, 4 queries. Without the counts the threshold would be 1 + 3 * 5/6 =
    # 3.5.
    prefix = np.array([3.4, 0.0, 0.6, 0.0, 0.0, 0.0])
    assert find_sinks(prefix, Excess(), np.full(6, 4)).tolist() == [True] + [False] * 5


@pytest.mark.ring("lab")
@pytest.mark.parametrize("keys", [24, 500])
def test_uniform_causal_attention_and_previous_tokens_have_no_sinks(keys):
    from sinklab.lab.analysis.rules import Top

    even, visible = causal(uniform_rows(keys))
    # the column sum of the first key is that of the harmonic series, above the threshold of a full
    # canvas
    assert even[0] > Excess().threshold(64) or keys < 64
    before = 0.9 * np.eye(keys)[np.maximum(np.arange(keys) - 1, 0)] + 0.1 * uniform_rows(keys)
    for rule in (Excess(), Gu(0.3)):
        assert not find_sinks(even, rule, visible).any()
        assert not find_sinks(before.sum(0), rule, visible).any()
    first = 0.5 * np.eye(keys)[[0] * keys] + 0.5 * before
    for rule in (Excess(), Gu(0.3), Top(1)):
        assert np.flatnonzero(find_sinks(first.sum(0), rule, visible)).tolist() == [0]


def test_the_even_weight_is_the_mean_of_one_over_the_keys_that_are_seen():
    keys = 40
    # of a causal mask, of one of blocks of 5, with 3 keys of padding on the left, and with two that
    # every query sees
    sees = [
        np.tril(np.ones((keys, keys), bool)),
        np.arange(keys)[:, None] // 5 >= np.arange(keys) // 5,
    ]
    sees.append(sees[0] & (np.arange(keys) >= 3))
    sees.append(np.concatenate([np.ones((keys, 2), bool), sees[0]], 1))
    for sees_QS in sees:
        number_Q = sees_QS.sum(1)
        inverse_Q = 1 / np.maximum(number_Q, 1)
        visible = (sees_QS & (number_Q > 0)[:, None]).sum(0).astype(float)
        with np.errstate(invalid="ignore"):
            expected = (sees_QS * inverse_Q[:, None]).sum(0) / visible
        assert_allclose(even_weight(visible), expected, rtol=1e-12)
        assert_allclose(even_weight(torch.from_numpy(visible)).numpy(), expected, rtol=1e-12)
        # counts that were scaled say the same
        assert_allclose(even_weight(1.5 * visible), expected, rtol=1e-12)
    assert even_weight(np.array([8.0, 8.0, 0.0])).tolist()[:2] == [1 / 8, 1 / 8]


@pytest.mark.ring("lab")
def test_keys_that_few_queries_see_are_never_sinks():
    from sinklab.lab.analysis.counts import main_sink, mean_weight

    keys = 60
    visible = np.arange(keys, 0, -1)
    # every query looks at itself alone: the last key has a mean weight of 1, from one row
    a = np.ones(keys)
    assert is_judgeable(visible).tolist() == [True] * 41 + [False] * 19
    assert find_sinks(1.0 * visible, Gu(0.9), visible).tolist() == is_judgeable(visible).tolist()
    assert not find_sinks(a, Excess(), visible).any()
    assert np.isnan(mean_weight(a, visible)[41:]).all() and mean_weight(a, visible)[40] == 1 / 20
    assert main_sink(mean_weight(a, visible)) == 40 and main_sink(a) == 0
    # fewer than eight keys, each seen by another number: none is defined
    assert main_sink(mean_weight(np.ones(7), np.arange(7, 0, -1))) == -1
    # where all are seen by the same queries, however few, all are
    assert is_judgeable(np.array([1.0, 1.0, 0.0, np.nan])).tolist() == [True, True, False, False]


def test_float16_scores_do_not_overflow():
    # 40,000 and 30,000 fit into float16, their sum does not: the z-score must be taken in a wider
    # type.
    a = np.full(100, 30000.0, dtype=np.float16)
    a[7] = 40000
    for given in (a, torch.from_numpy(a)):
        assert np.flatnonzero(
            find_sinks(given, Excess(3.0, "zscore"), given.shape[-1])
        ).tolist() == [7]
    # what keys differ by in the last digits is no spread to measure with
    assert not find_sinks(np.array([1.0, 1.0, 1.0, 1.0 + 1e-12]), Excess(0.5, "zscore"), 4).any()


@pytest.mark.ring("lab")
@pytest.mark.parametrize("kind", [np.asarray, torch.tensor])
def test_top_gives_ties_to_the_earlier_key(kind):
    found = find_sinks(kind([1.0, 2.0, 2.0, 2.0, 0.0]), "top:k=2", 5)
    assert np.flatnonzero(found).tolist() == [1, 2]


@pytest.mark.ring("lab")
def test_errors():
    from sinklab.lab.analysis.rules import Top

    refused(r"k=4 of 4 keys. Choose k < 4", find_sinks, np.ones(4), Top(4), 4)
    refused(r"k must be at least 1, but is 0", Top, 0)
    refused(r"'sums'; did you mean 'sum'\?", Excess, 3.0, "sums")
    refused("epsilon must be at least 0", Excess, float("nan"))
    refused("weight must be at least 0", Gu, 3)
    refused(
        r"\(2, 3\) and \(2, 5, 3, 4\)", find_sinks, np.ones((2, 5, 3, 4)), Excess(), np.ones((2, 3))
    )
    refused("pass recording.visible", find_sinks, np.ones(4), Excess(), None)
    refused("sink rule .*excess, gu.* got 3", find_sinks, np.ones(4), 3, 4)
    refused("depends on the scores", Excess(3.0, "zscore").threshold, 5)


def test_sinks_equal_those_of_the_original_code():
    from safetensors.numpy import load_file

    expected = load_file(shared("golden/attention/expected.safetensors"))
    cases = json.loads(shared("golden/attention/cases.json").read_text())
    sinks = cases["runs"][0]["sinks"]
    a = expected["base.received"]
    assert len(sinks) > 1
    for case in sinks:
        got = find_sinks(a, Excess(case["eps"]), a.shape[-1])
        assert (got == expected[f"base.sinks.eps{case['eps']}"]).all() and got.sum() == case[
            "count"
        ]
