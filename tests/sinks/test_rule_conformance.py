"""Every built-in of every kind passes the conformance suite of its kind, and a broken one does
not.
"""

from dataclasses import dataclass

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
    check_rule(rules.as_text(rule))


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


def looks_at_all_heads(received, queries, exists):
    return received > received[exists].max() / 2


def changes_its_input(received, queries, exists):
    received += 1
    return received > 4


def counts_keys(received, queries, exists):
    return received > received.shape[-1] / 8


@pytest.mark.parametrize(
    "judge, message",
    [
        (looks_at_all_heads, "other heads"),
        (changes_its_input, "changes what it is given"),
        (counts_keys, "padding"),
    ],
)
def test_a_rule_that_breaks_the_contract_is_named(scratch, judge, message):
    scratch(rules)

    @dataclass(frozen=True)
    class Broken:
        def __call__(self, received, queries, exists):
            return judge(received, queries, exists)

    rules.register("broken")(Broken)
    with pytest.raises(AssertionError, match=message):
        check_rule(Broken())
