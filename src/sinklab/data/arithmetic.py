"""Invented sums in words, in the form of GSM8K-Aug: question, steps, answer. Present on every machine."""

from __future__ import annotations

import random
from collections.abc import Iterator

ARITHMETIC = "arithmetic"
_NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Hana")
_THINGS = ("apples", "books", "coins", "cards", "pens", "shells", "stamps", "tickets")


def arithmetic_lines(count: int = 8000, seed: int = 0) -> Iterator[str]:
    """Lines ``question||<<3+4=7>> <<7*2=14>> #### 14`` of one to three steps; no two questions are the same.

    Args:
        count: number of lines, at most 50,000.
        seed: of the sums; the first lines of a longer run are those of a shorter one.

    Raises:
        ValueError: if the count is not 1 to 50,000.
    """
    if not 1 <= count <= 50_000:
        raise ValueError(f"count must be from 1 to 50,000, so that no question repeats, but is {count}")
    source = random.Random(seed)
    seen: set[str] = set()
    while len(seen) < count:
        question, steps, answer = _sum(source)
        if question not in seen:
            seen.add(question)
            yield f"{question}||{' '.join(steps)} #### {answer}"


def _sum(source: random.Random) -> tuple[str, list[str], int]:
    name, things = source.choice(_NAMES), source.choice(_THINGS)
    total = source.randint(2, 60)
    sentences, steps = [f"{name} has {total} {things}."], []
    for _ in range(source.randint(1, 3)):
        kind = source.choice(("gets", "gives", "times"))
        if kind == "times" and total <= 100:
            factor = source.randint(2, 4)
            sentences.append(f"Then {name} has {factor} times as many.")
            total, step = total * factor, f"{total}*{factor}"
        elif kind == "gives" and total > 1:
            less = source.randint(1, min(total - 1, 40))
            sentences.append(f"{name} gives away {less}.")
            total, step = total - less, f"{total}-{less}"
        else:
            more = source.randint(1, 40)
            sentences.append(f"{name} gets {more} more.")
            total, step = total + more, f"{total}+{more}"
        steps.append(f"<<{step}={total}>>")
    return f"{' '.join(sentences)} How many {things} does {name} have?", steps, total
