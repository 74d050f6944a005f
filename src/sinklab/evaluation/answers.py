"""What a written answer says: the number of a worked problem, the code of a programming question."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

NO_ANSWER = "[invalid]"
"""What lm-eval's regex filters give where an answer lacks their pattern."""

_FENCE = re.compile(r"^```[\w+-]*[ \t]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)


def marked_answer(text: str, *, published: bool = False) -> str | None:
    """What stands behind the last ``####`` of a worked problem, to the end of its line; None where there is none.

    Args:
        text: all that was written.
        published: the released code's expression, ``#### (.*)$``, which knows the text's last line alone and takes all
            behind the first mark in it. Source: One Token Is Enough (2601.19657), ``evaluate_gsm8k``.
    """
    if published:
        found = re.findall("#### (.*)$", text)
        return found[-1] if found else None
    _, mark, rest = text.rpartition("####")
    answer = rest.strip(" \t").split("\n")[0].strip()
    return answer if mark and answer else None


def same_answer(one: str, other: str, *, published: bool = False) -> bool:
    """Whether two answers to a worked problem are the same number; where one is no number, the same text.

    Args:
        one: an answer, as written: "$1,080.00", "18 eggs." is read as 18.
        other: another.
        published: as the released code compares without antlr4: as text, without dollars and thousands' commas, so
            that "18.0" is not "18".
    """
    if published:
        return _plain(one) == _plain(other)
    first, second = number_of(one), number_of(other)
    return one.strip() == other.strip() if first is None or second is None else first == second


def number_of(answer: str) -> Decimal | None:
    """The number that an answer begins with, after a currency sign; None where it begins with none."""
    found = re.match(r"\s*[$€£]?\s*([-+]?)\s*[$€£]?((?:\d[\d,]*)?\.?\d+|\d[\d,]*\.?)", answer)
    if not found:
        return None
    try:
        return Decimal(found[1] + found[2].replace(",", "").rstrip("."))
    except InvalidOperation:
        return None


def _plain(answer: str) -> str:
    text = answer.strip().replace("$", "")
    return text.replace(",", "") if text.replace(",", "").isdigit() else text


def program_of(prompt: str, completion: str, entry_point: str) -> str:
    """The function that a completion writes, with what its prompt brings along.

    A plain completion goes on where the prompt ends, as lm-eval takes it. A chat model answers in a code fence, often
    with the whole function again: then the fence that defines the function is taken (else the first one), behind the
    lines of the prompt before that function (its imports and helpers). A completion that begins inside the function,
    indented, ends at its first fence.

    Args:
        prompt: of the question: imports, helpers, the function's head and docstring.
        completion: what the model wrote.
        entry_point: name of the function.
    """
    first = re.search(r"^```(.*)$", completion, re.MULTILINE)
    if first is None:
        return prompt + completion
    if completion.lstrip("\n")[:1] in (" ", "\t") and not first[1].strip():
        return prompt + completion[: first.start()]
    fenced = [code for code in _FENCE.findall(completion) if code.strip()] or [completion[: first.start()]]
    chosen = next((code for code in fenced if _defines(code, entry_point)), fenced[0])
    return _joined(prompt, chosen, entry_point)


def _joined(prompt: str, code: str, entry_point: str) -> str:
    if not _defines(code, entry_point):
        return prompt + code
    before = re.split(rf"^def {re.escape(entry_point)}\b", prompt, maxsplit=1, flags=re.MULTILINE)[0]
    return f"{before.rstrip()}\n\n{code}" if before.strip() else code


def _defines(code: str, name: str) -> bool:
    return re.search(rf"^def {re.escape(name)}\b", code, re.MULTILINE) is not None
