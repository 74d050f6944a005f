"""The conformance suite of sink rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from sinklab.registry import rules
from sinklab.sinks.rules import Rule, find_sinks
from sinklab.testing.values import check_text_and_json


def check_rule(rule: Rule | str) -> None:
    """Hold a registered sink rule to what every part of the lab expects of it.

    The answer is boolean, of the same kind (array or tensor) and shape as what was received; heads and steps are judged
    each by itself; what is padding, or seen by no query, is never a sink and changes nothing; ``threshold``, if there
    is one and it does not refuse, is what a sink exceeds; the rule is written as text and as JSON and read again.

    Args:
        rule: a value, such as ``Excess(3.0)``, or its text; one that needs at most 24 keys.

    Raises:
        AssertionError: naming what does not hold.
        ValueError: if the rule's class is not registered.
    """
    rule = rules.parse(rule)
    check_text_and_json(rules, rule)
    keys, random = 24, np.random.default_rng(0)
    received = random.dirichlet(np.full(keys, 0.1), size=(2, 3, 4, keys)).sum(-2)
    given = received.copy()
    whole = find_sinks(received, rule)
    np.testing.assert_array_equal(received, given, "the rule changes what it is given")
    _same_answer(whole, find_sinks(torch.from_numpy(received), rule).numpy(), "numpy and torch disagree")
    half = torch.from_numpy(received).half()
    answer = find_sinks(half.double().numpy(), rule)
    _same_answer(find_sinks(half, rule).numpy(), answer, "half precision is not widened")

    turned = find_sinks(received.transpose(2, 0, 1, 3), rule)
    _same_answer(turned, whole.transpose(2, 0, 1, 3), "the order of the leading axes matters")
    alone = np.array([find_sinks(row, rule) for row in received.reshape(-1, keys)])
    _same_answer(alone.reshape(whole.shape), whole, "a head is judged by what other heads receive")

    padded = np.concatenate([received, np.full((*whole.shape[:-1], 3), np.nan)], -1)
    _same_answer(find_sinks(padded, rule)[..., :keys], whole, "padding (NaN) changes the answer")
    unseen = np.concatenate([received, np.full((*whole.shape[:-1], 3), 2.0 * keys)], -1)
    found = find_sinks(unseen, rule, np.array([keys] * keys + [0, 0, np.nan]))
    _same_answer(found[..., :keys], whole, "keys that no query sees change the answer")
    assert not found[..., keys:].any(), "a key that no query sees is a sink"
    assert not find_sinks(np.full_like(padded, np.nan), rule).any(), "padding (NaN) is a sink"

    _check_threshold(rule, received, whole)


def _same_answer(found: Any, expected: Any, message: str) -> None:
    assert found.dtype == bool and found.shape == expected.shape, f"{message}: {found.dtype}, {found.shape}"
    np.testing.assert_array_equal(found, expected, message)


def _check_threshold(rule: Any, received: np.ndarray, whole: np.ndarray) -> None:
    try:
        limit = rule.threshold(received.shape[-1])
    except (AttributeError, ValueError):
        # there is none, or it depends on the scores
        return
    _same_answer(received > limit, whole, "the sinks are not those above the threshold")
