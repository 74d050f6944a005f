"""Every built-in rule passes the conformance suite."""

import numpy as np
import pytest

from conformance.probing import check_rule
from sinklab.core.registry import rules
from sinklab.core.sinks import Excess, Gu
from sinklab.lab.analysis.rules import Top
from sinklab.lab.measures.soft_rule import Soft

RULES = [
    Excess(),
    Excess(1.0, "percent"),
    Excess(0.1, "mean"),
    Excess(2.0, "zscore"),
    Gu(),
    Gu(0.8),
    Top(),
    Top(5),
    Soft(),
    Soft(2.0, 0.3),
]


@pytest.mark.parametrize("rule", RULES, ids=rules.as_text)
def test_every_built_in_rule_conforms(rule):
    check_rule(rule)


@pytest.mark.parametrize("rule", RULES, ids=rules.as_text)
def test_the_number_of_queries_may_be_a_plain_one(rule):
    received = np.random.default_rng(0).exponential(size=(4, 50))
    exists = np.ones(received.shape, dtype=bool)
    exists[1:, 40:] = False
    assert np.array_equal(rule(received, 50, exists), rule(received, np.full((4, 1), 50.0), exists))


def test_every_built_in_rule_is_tried():
    assert {type(rule) for rule in RULES} >= {
        kind for kind in rules.values() if kind.__module__.startswith("sinklab.")
    }
