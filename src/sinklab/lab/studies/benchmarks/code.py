"""HumanEval for lm-eval: completions are run when its filters are applied, and its metric counts
those that passed.
"""

import contextlib
import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from sinklab.lab.studies.benchmarks.boundary import run_programs

NO_ANSWER = "[invalid]"
"""Result of lm-eval's regex filters if an answer lacks their pattern."""

_FENCE = re.compile(r"^```[\w+-]*[ \t]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)


def marked_answer(text: str, *, published: bool = False) -> str | None:
    """Text behind the last ``####`` of a worked problem, to the end of its line; None if there is
    none.

    Args:
        text: all that was written.
        published: the released code's expression, ``#### (.*)$``, which knows the text's last line
            alone and takes all behind the first mark in it. Source: One Token Is Enough
            (2601.19657), ``evaluate_gsm8k``.
    """
    if published:
        found = re.findall("#### (.*)$", text)
        return found[-1] if found else None
    _, mark, rest = text.rpartition("####")
    answer = rest.strip(" \t").split("\n")[0].strip()
    return answer if mark and answer else None


def same_answer(one: str, other: str, *, published: bool = False) -> bool:
    """Whether two answers to a worked problem are the same number; the same text, if one is no
    number.

    Args:
        one: an answer, as written: "$1,080.00", "18 eggs." is read as 18.
        other: another.
        published: as the released code compares without antlr4: as text, without dollars and
            thousands' commas, so that "18.0" is not "18".
    """
    if published:
        return _plain(one) == _plain(other)
    first, second = number_of(one), number_of(other)
    return one.strip() == other.strip() if first is None or second is None else first == second


def number_of(answer: str) -> Decimal | None:
    """The number that an answer begins with, after a currency sign; None if it begins with none."""
    found = re.match(r"\s*[$€£]?\s*([-+]?)\s*[$€£]?((?:\d[\d,]*)?\.?\d+|\d[\d,]*\.?)", answer)
    with contextlib.suppress(InvalidOperation):
        return Decimal(found[1] + found[2].replace(",", "").rstrip(".")) if found else None
    return None


def _plain(answer: str) -> str:
    text = answer.strip().replace("$", "")
    return text.replace(",", "") if text.replace(",", "").isdigit() else text


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
    if wrong := [number for number in k if not 1 <= number <= tries]:
        raise ValueError(
            f"pass@k needs 1 to {tries} tries, as many as completions, but k is {wrong[0]}"
        )
    return {
        f"pass@{number}": 1 - math.comb(tries - passed, number) / math.comb(tries, number)
        for number in k
    }
