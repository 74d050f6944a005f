"""HumanEval for lm-eval: completions are run when its filters are applied, and its metric counts those that passed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import comb
from typing import Any

from sinklab.evaluation.answers import program_of
from sinklab.evaluation.code_runs import run_programs


def run_completions(resps: Sequence[Sequence[str]], docs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A filter: each completion becomes the fate of its program under the question's tests, such as "passed".

    Args:
        resps: completions of each question.
        docs: the questions: ``prompt``, ``test``, ``entry_point``.
    """
    pairs = [(doc, text) for texts, doc in zip(resps, docs, strict=True) for text in texts]
    fates = iter(run_programs([tested(doc, text) for doc, text in pairs]))
    return [[str(next(fates)) for _ in texts] for texts in resps]


def tested(doc: Mapping[str, Any], completion: str) -> str:
    """The program that passes where the completion does: the function, the question's tests, and their call."""
    name = doc["entry_point"]
    return f"{program_of(doc['prompt'], completion, name)}\n{doc['test']}\ncheck({name})\n"


def pass_at_k(references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int]) -> dict[str, float]:
    """The chance that one of k completions passes, from all n of a question: 1 − C(n − c, k) / C(n, k).

    Args:
        references: the tests, which have been run already.
        predictions: what :func:`run_completions` gave for one question.
        k: the numbers of tries; each at most n.

    Raises:
        ValueError: for a k beyond the completions there are.

    Source: Chen et al. 2021 (2107.03374), Eq. 1.
    """
    (fates,) = predictions
    tries, passed = len(fates), sum(fate == "passed" for fate in fates)
    if wrong := [number for number in k if not 1 <= number <= tries]:
        raise ValueError(f"pass@k needs 1 to {tries} tries, as many as completions, but k is {wrong[0]}")
    return {f"pass@{number}": 1 - comb(tries - passed, number) / comb(tries, number) for number in k}
