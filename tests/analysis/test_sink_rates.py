import warnings

import numpy as np
import pytest
import torch

from sinklab.analysis import DEFAULT_RULES, absorb_rate, compare_rules, sink_rate
from sinklab.sinks import Excess, Gu, Top, find_sinks


def causal(first: float, keys: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Column sums of causal attention whose queries give ``first`` to the first key, and the queries per key."""
    attention = np.tril(np.ones((keys, keys)))
    attention[:, 0] = 0
    attention *= (1 - first) / np.maximum(attention.sum(-1, keepdims=True), 1)
    attention[:, 0] = first
    attention[0, 0] = 1
    return attention.sum(0), np.arange(keys, 0, -1)


def test_sink_rate_of_causal_heads_is_that_of_gu():
    # Three heads give the first token 0.5, 0.35 and 0.2 (one query of 64, the first, always gives it 1).
    columns = [causal(first) for first in (0.5, 0.35, 0.2)]
    received, visible = np.stack([received for received, _ in columns]), columns[0][1]
    np.testing.assert_allclose(received[:, 0] / 64, [(1 + 63 * first) / 64 for first in (0.5, 0.35, 0.2)])
    for threshold, heads in ((0.1, 3), (0.3, 2), (0.45, 1), (0.8, 0)):
        np.testing.assert_allclose(sink_rate(received, Gu(threshold), visible), 100 * heads / 3)
    assert sink_rate(received, Gu(0.3), visible, key=1) == 0
    # The last token gives itself at most 0.5 / 63.
    assert sink_rate(received, Gu(0.3), visible, key=-1) == 0
    assert sink_rate(received, Gu(0.3), visible, key=None) == 200 / 3


def test_sink_rate_of_bidirectional_heads_divides_by_all_queries():
    # (layer, head, key): 0.5 of the attention of every query on key 3 in one of four heads.
    received = np.ones((2, 2, 8))
    received[1, 0] = 4 / 7
    received[1, 0, 3] = 4
    assert sink_rate(received, key=3) == 25 and sink_rate(received) == 0 and sink_rate(received, key=None) == 25
    assert sink_rate(torch.from_numpy(received), key=3) == 25
    # A quarter of the queries ran.
    partial = sink_rate(received / 4, Excess(2.5), np.full(8, 2.0), np.full((2, 2), 8), key=3)
    assert partial == 25 and sink_rate(received / 4, Excess(2.5), np.full(8, 2.0), key=3) == 0
    gone = np.concatenate([received, np.full((2, 2, 8), np.nan)])
    assert sink_rate(gone, key=3) == 25 and np.isnan(sink_rate(gone[2:]))
    with pytest.raises(ValueError, match=r"one of 8 keys \(or None: any\): got 8"):
        sink_rate(received, key=8)


def test_absorb_rate_by_hand():
    received = np.array([[[2.0, 1.0, 1.0, np.nan], [4.0, 0.0, 0.0, np.nan]]])
    sinks = np.array([True, False, True, True])
    np.testing.assert_allclose(absorb_rate(received, None, sinks), [[0.75, 1.0]])
    # The third key is not there.
    np.testing.assert_allclose(absorb_rate(received, [4, 4, 0, 0], sinks), [[2 / 3, 1.0]])
    assert absorb_rate(received, None, np.zeros(4, dtype=bool)).tolist() == [[0, 0]]
    assert np.isnan(absorb_rate(np.full((2, 3), np.nan), None, np.ones(3, dtype=bool))).all()
    deep = np.random.default_rng(0).random((2, 3, 4, 5, 6)).astype(np.float16)
    flags = find_sinks(deep, Top(2))
    wide = deep.astype(float)
    np.testing.assert_allclose(absorb_rate(deep, None, flags), (wide * flags).sum(-1) / wide.sum(-1), rtol=1e-6)
    torches = absorb_rate(torch.from_numpy(deep), None, torch.from_numpy(flags))
    np.testing.assert_allclose(torches, (wide * flags).sum(-1) / wide.sum(-1), rtol=1e-6)


def test_rules_side_by_side_by_hand():
    # Two heads of 64 keys. One has two sinks of 20 and 5 times an even share, the other attends evenly.
    received = np.ones((1, 1, 2, 64))
    received[0, 0, 0] = (64 - 25) / 62
    received[0, 0, 0, [4, 9]] = 20, 5
    rows = {row.name: row for row in compare_rules(received)}
    assert list(rows) == list(DEFAULT_RULES)
    first = rows["excess, sum, 3"]
    assert (first.heads, first.keys, first.sinks, first.with_sink) == (2, 128, 2, 1)
    assert first.per_head == 1 and first.rate == 0.5 and first.filtered == 1 - 2 / 128 and first.agreement == 1
    np.testing.assert_allclose(first.absorb, 25 / 128)
    printed = rows["excess, mean, 3 (as printed)"]
    assert printed.sinks == 0 and printed.filtered == 1 and printed.absorb == 0 and printed.agreement == 0
    # As a mean weight the sinks are 20/64 and 5/64: only the first is over 0.3; percent 3 asks for 4.5 %: both.
    assert rows["mean weight over 0.3 (Gu)"].sinks == 1 and rows["mean weight over 0.3 (Gu)"].agreement == 0.5
    assert rows["excess, percent, 3"].sinks == 2
    assert rows["excess, z-score, 3"].sinks == 1
    top = rows["top 1"]
    # Of the even head the first key: 2 of 3 flagged keys are not shared.
    assert top.sinks == 2 and top.agreement == 1 / 3
    np.testing.assert_allclose(top.absorb, 21 / 128)


def test_rows_of_samples_add_up():
    rng = np.random.default_rng(0)
    one, two = (rng.standard_exponential((steps, 2, 3, 20)) ** 4 for steps in (3, 5))
    rules = {"sum": Excess(3.0), "top": Top(2)}
    visible, positions = np.full(20, 20.0), np.full((1, 1, 1), 20)
    parts = [compare_rules(part, visible, positions, rules) for part in (one, two)]
    together = compare_rules(np.concatenate([one, two]), visible, positions, rules)
    for a, b, both in zip(*parts, together, strict=True):
        added = a + b
        assert (added.sinks, added.keys, added.heads, added.both, added.either, added.with_sink) == (
            both.sinks, both.keys, both.heads, both.both, both.either, both.with_sink,
        )  # fmt: skip
        np.testing.assert_allclose([added.absorb, added.agreement], [both.absorb, both.agreement])
    with pytest.raises(ValueError, match="got 'sum' and 'top'"):
        parts[0][0] + parts[1][1]
    with pytest.raises(ValueError, match="at least one rule"):
        compare_rules(one, rules={})
    nothing = compare_rules(np.full((1, 1, 1, 4), np.nan), rules=rules)[0]
    assert np.isnan([nothing.per_head, nothing.rate, nothing.filtered, nothing.absorb, nothing.agreement]).all()


def test_the_literal_mean_is_listed_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rule = DEFAULT_RULES["excess, mean, 3 (as printed)"]
    assert isinstance(rule, Excess) and (rule.epsilon, rule.scale) == (3.0, "mean")
