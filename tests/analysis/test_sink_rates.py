import warnings

import numpy as np
import pytest
from numpy.testing import assert_allclose

from refusals import refused, refusing
from sinklab.core.sinks import Excess, Gu, find_sinks
from sinklab.lab.analysis import DEFAULT_RULES, compare_rules
from sinklab.lab.analysis.rules import Top


def test_rules_side_by_side_by_hand():
    # Two heads of 64 keys. One has two sinks of 20 and 5 times an even share, the other attends
    # evenly.
    received = np.ones((1, 1, 2, 64))
    received[0, 0, 0] = (64 - 25) / 62
    received[0, 0, 0, [4, 9]] = 20, 5
    rows = {row.name: row for row in compare_rules(received)}
    assert list(rows) == list(DEFAULT_RULES)
    first = rows["excess, sum, 3"]
    assert (first.heads, first.keys, first.sinks, first.with_sink) == (2, 128, 2, 1)
    assert (
        first.per_head == 1
        and first.rate == 0.5
        and first.filtered == 1 - 2 / 128
        and first.agreement == 1
    )
    assert_allclose(first.absorb, 25 / 128)
    printed = rows["excess, mean, 3 (as printed)"]
    assert (
        printed.sinks == 0
        and printed.filtered == 1
        and printed.absorb == 0
        and printed.agreement == 0
    )
    # As a mean weight the sinks are 20/64 and 5/64: only the first is over 0.3; percent 3 asks for
    # 4.5 %: both.
    assert (
        rows["mean weight over 0.3 (Gu)"].sinks == 1
        and rows["mean weight over 0.3 (Gu)"].agreement == 0.5
    )
    assert rows["excess, percent, 3"].sinks == 2
    assert rows["excess, z-score, 3"].sinks == 1
    top = rows["top 1"]
    # Of the even head the first key: 2 of 3 flagged keys are not shared.
    assert top.sinks == 2 and top.agreement == 1 / 3
    assert_allclose(top.absorb, 21 / 128)


def test_rows_of_samples_add_up():
    rng = np.random.default_rng(0)
    one, two = (rng.standard_exponential((steps, 2, 3, 20)) ** 4 for steps in (3, 5))
    rules = {"sum": Excess(3.0), "top": Top(2)}
    visible, positions = np.full(20, 20.0), np.full((1, 1, 1), 20)
    parts = [compare_rules(part, visible, positions, rules) for part in (one, two)]
    together = compare_rules(np.concatenate([one, two]), visible, positions, rules)
    for a, b, both in zip(*parts, together, strict=True):
        added = a + b
        assert (
            added.sinks,
            added.keys,
            added.heads,
            added.both,
            added.either,
            added.with_sink,
        ) == (
            both.sinks,
            both.keys,
            both.heads,
            both.both,
            both.either,
            both.with_sink,
        )
        assert_allclose([added.absorb, added.agreement], [both.absorb, both.agreement])
    with refusing("got 'sum' and 'top'"):
        parts[0][0] + parts[1][1]
    refused("at least one rule", compare_rules, one, rules={})
    nothing = compare_rules(np.full((1, 1, 1, 4), np.nan), rules=rules)[0]
    assert np.isnan(
        [nothing.per_head, nothing.rate, nothing.filtered, nothing.absorb, nothing.agreement]
    ).all()


def test_the_literal_mean_is_listed_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rule = DEFAULT_RULES["excess, mean, 3 (as printed)"]
    assert isinstance(rule, Excess) and (rule.epsilon, rule.scale) == (3.0, "mean")


@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_what_is_counted_is_what_find_sinks_finds(missing, causal):
    # Bounds in any order: what is found under a lower one is where a higher one is looked for.
    rng = np.random.default_rng(3)
    received = (rng.standard_exponential((4, 2, 3, 40)) ** 3 / 6).astype(np.float16)
    visible = np.arange(40, 0, -1.0) if causal else np.full(40, 40.0)
    if missing:
        received[1, ..., 7], received[2, 0, 1] = np.nan, np.nan
    named = {
        "zscore": Excess(3.0, "zscore"),
        "3": Excess(3.0),
        "1": Excess(1.0),
        "2": Excess(2.0),
        "never": Excess(50.0),
        "Gu": Gu(0.1),
        "top": Top(2),
        "percent": Excess(3.0, "percent"),
    }
    first, known = (
        find_sinks(received, named["zscore"], visible),
        np.nan_to_num(received.astype(np.float32)),
    )
    for row, rule in zip(
        compare_rules(received, visible, rules=named), named.values(), strict=True
    ):
        flags = find_sinks(received, rule, visible)
        assert (row.sinks, row.with_sink) == (flags.sum(), flags.any(-1).sum())
        assert (row.both, row.either) == ((flags & first).sum(), (flags | first).sum())
        assert row.absorbed == pytest.approx(known[flags].sum(dtype=float), rel=1e-6)
    assert row.received == pytest.approx(known.sum(dtype=float), rel=1e-6)
