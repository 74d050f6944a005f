"""Every built-in rule passes the suite of `sinklab check`."""

import numpy as np
import pytest

from sinklab.core.registry import rules
from sinklab.core.sinks import Excess, Gu, find_sinks
from sinklab.lab.analysis.rules import Top
from sinklab.lab.checks import check_rule, check_text

RULES = [
    Excess(),
    Excess(1.0, "percent"),
    Excess(0.1, "mean"),
    Excess(2.0, "zscore"),
    Gu(),
    Gu(0.8),
    Top(),
    Top(5),
]


@pytest.mark.parametrize("rule", RULES, ids=rules.as_text)
def test_every_built_in_rule_conforms(rule):
    check_rule(check_text(rules, rule))


@pytest.mark.parametrize("rule", RULES, ids=rules.as_text)
def test_neither_the_order_of_heads_nor_keys_that_no_query_sees_change_an_answer(rule):
    received = np.random.default_rng(0).dirichlet(np.full(24, 0.1), size=(2, 3, 24)).sum(-2)
    whole = find_sinks(received, rule, 24)
    turned = find_sinks(received.swapaxes(0, 1), rule, 24)
    np.testing.assert_array_equal(turned, whole.swapaxes(0, 1))
    unseen = np.concatenate([received, np.full((2, 3, 3), 48.0)], -1)
    found = find_sinks(unseen, rule, np.array([24] * 24 + [0, 0, np.nan]))
    np.testing.assert_array_equal(found[..., :24], whole)
    assert not found[..., 24:].any()


def test_every_built_in_rule_is_tried():
    assert {type(rule) for rule in RULES} >= {
        kind for kind in rules.values() if kind.__module__.startswith("sinklab.")
    }
