"""Every built-in rule passes the suite of `sinklab check`."""

import pytest

from sinklab.core.registry import rules
from sinklab.core.sinks import Excess, Gu
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


def test_every_built_in_rule_is_tried():
    assert {type(rule) for rule in RULES} >= {
        kind for kind in rules.values() if kind.__module__.startswith("sinklab.")
    }
