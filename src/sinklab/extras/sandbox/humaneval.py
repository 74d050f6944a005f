"""HumanEval for lm-eval: completions are run when its filters are applied, and its metric counts
those that passed.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sinklab.core.registry import sandboxes
from sinklab.extras.sandbox.boundary import boundary, run_programs

_FENCE = re.compile(r"^```[\w+-]*[ \t]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)


@sandboxes.register("humaneval")
@dataclass(frozen=True)
class HumanEvalSandbox:
    """HumanEval's functions for lm-eval, and the boundary that they run programs behind."""

    def boundary(self) -> str:
        """Name of the boundary. Raises ValueError if none holds; see `boundary.boundary`."""
        return boundary()

    def task_file(self) -> Path:
        """Task file that names the functions, to be included in place of lm-eval's own."""
        return Path(__file__).with_name("humaneval.yaml")


def program_of(prompt: str, completion: str, entry_point: str) -> str:
    """The function that a completion writes, with the parts of its prompt that it needs.

    A plain completion continues the prompt, as lm-eval takes it. A chat model answers in a code
    fence, often with the whole function again: then the fence that defines the function is taken
    (else the first one), behind the lines of the prompt before that function (its imports and
    helpers). A completion that begins inside the function, indented, ends at its first fence.

    Args:
        prompt: of the question: imports, helpers, the function's head and docstring.
        completion: written by the model.
        entry_point: name of the function.
    """
    first = re.search(r"^```(.*)$", completion, re.MULTILINE)
    if first is None:
        return prompt + completion
    if completion.lstrip("\n")[:1] in (" ", "\t") and not first[1].strip():
        return prompt + completion[: first.start()]
    fenced = [code for code in _FENCE.findall(completion) if code.strip()] or [
        completion[: first.start()]
    ]
    head = _head(entry_point)
    whole = next((code for code in fenced if head.search(code)), None)
    if whole is None:
        return prompt + fenced[0]
    before = head.split(prompt, maxsplit=1)[0]
    return f"{before.rstrip()}\n\n{whole}" if before.strip() else whole


def run_completions(
    resps: Sequence[Sequence[str]], docs: Sequence[Mapping[str, Any]]
) -> list[list[str]]:
    """A filter: each completion becomes the fate of its program under the question's tests, such as
    "passed".

    Args:
        resps: completions of each question.
        docs: the questions: ``prompt``, ``test``, ``entry_point``.
    """
    pairs = [(doc, text) for texts, doc in zip(resps, docs, strict=True) for text in texts]
    fates = iter(run_programs([tested(doc, text) for doc, text in pairs]))
    return [[str(next(fates)) for _ in texts] for texts in resps]


def tested(doc: Mapping[str, Any], completion: str) -> tuple[str, str, str]:
    """The program that a completion makes, the tests of its function with the prompt's own helpers,
    and its name.
    """
    name = doc["entry_point"]
    helpers = _head(name).split(doc["prompt"], maxsplit=1)[0]
    return (
        program_of(doc["prompt"], completion, name),
        f"{helpers}\n{doc['test']}\ncheck({name})\n",
        name,
    )


def _head(name: str) -> re.Pattern[str]:
    return re.compile(rf"^def {re.escape(name)}\b", re.MULTILINE)


def pass_at_k(
    references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int]
) -> dict[str, float]:
    """The chance that one of k completions passes, from all n of a question: 1 − C(n − c, k) / C(n,
    k).

    Args:
        references: the tests, which have been run already.
        predictions: results of :func:`run_completions` for one question.
        k: the numbers of tries; each at most n.

    Raises:
        ValueError: for a k beyond the completions there are.

    Source: Chen et al. 2021 (2107.03374), Eq. 1.
    """
    (fates,) = predictions
    tries, passed = len(fates), sum(fate == "passed" for fate in fates)
    wrong = [number for number in k if not 1 <= number <= tries]
    if wrong:
        raise ValueError(
            f"pass@k needs 1 to {tries} tries, as many as completions, but k is {wrong[0]}"
        )
    return {
        f"pass@{number}": 1 - math.comb(tries - passed, number) / math.comb(tries, number)
        for number in k
    }
