"""The reasoning battery: problems made by rule, with known answers, a difficulty dial and a split
that never overlaps.

Each skill asks for the way to the answer and not for its end alone, so that guessing does not pay
and a text of several tokens is written. All of it is single letters and digits: a byte-level
vocabulary is enough.
"""

import hashlib
import random
import re
import string
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from sinklab.core.errors import one_of

BATTERY = "battery"
SPLITS = ("train", "test")
LEVELS = (1, 2, 3, 4)
"""1 is easy; the docstring of each skill says how the level changes it."""
_COUNTS = {"train": 300_000, "test": 2400}
_LEVEL_WEIGHTS = (4, 3, 2, 2)
# how often a skill comes in training, beside 1: chains of truth values are learned long after the
# rest
_SKILL_WEIGHTS = {"deduction": 3}
# one question in ten is for tests, by its own text
_TEST_SHARE = 26 / 256


@dataclass(frozen=True)
class Problem:
    """A question and one right answer (of planning there may be others: see :func:`is_right`)."""

    skill: str
    level: int
    question: str
    answer: str


def arithmetic(level: int, source: random.Random) -> tuple[str, str]:
    """A chain of 2, 3, 5 or 8 additions and subtractions modulo ten; the answer is every running
    result.

    ``A3+5-2=`` → ``86``
    """
    total = source.randrange(10)
    question = f"A{total}"
    answer = ""
    for _ in range((2, 3, 5, 8)[level - 1]):
        sign = source.choice("+-")
        number = source.randrange(10)
        total = (total + {"+": number, "-": -number}[sign]) % 10
        question += f"{sign}{number}"
        answer += str(total)
    return f"{question}=", answer


def deduction(level: int, source: random.Random) -> tuple[str, str]:
    """A known truth value and 1, 1, 2 or 3 rules that lead from it to the one asked for; from level
    2 on among as many that do not lead to it.

    ``Db=aa1d!cc0?b`` says: b equals a; a is true; d is the opposite of c; c is false; what is b? →
    ``a1b1``
    """
    hops = (1, 1, 2, 3)[level - 1]
    names = source.sample(string.ascii_lowercase, 2 * (hops + 1))
    facts: list[str] = []
    answers = []
    chains = [names[: hops + 1]]
    if level > 1:
        chains.append(names[hops + 1 :])
    for chain in chains:
        value = source.randrange(2)
        facts.append(f"{chain[0]}{value}")
        answer = facts[-1]
        for before, after in pairwise(chain):
            sign = source.choice("=!")
            if sign == "!":
                value = 1 - value
            facts.append(f"{after}{sign}{before}")
            answer += f"{after}{value}"
        answers.append(answer)
    source.shuffle(facts)
    return f"D{''.join(facts)}?{names[hops]}", answers[0]


def planning(level: int, source: random.Random) -> tuple[str, str]:
    """The way of 2, 3, 4 or 5 steps from one node of a directed graph to another; every fork but
    the right one is a dead end.

    ``Pabbdaccf?ad`` has the edges a→b, b→d, a→c, c→f and asks for the way from a to d → ``abd``
    """
    steps = (2, 3, 4, 5)[level - 1]
    names = source.sample(string.ascii_lowercase, 2 * steps + 1)
    way = names[: steps + 1]
    edges = [one + other for one, other in pairwise(way)]
    # the other way out of the start is as long as the right one, the rest of the dead ends hang
    # where chance has it
    aside = way[0]
    for number, node in enumerate(names[steps + 1 :]):
        edges.append(aside + node)
        aside = node
        if number + 1 >= steps - 1:
            aside = source.choice(way[:-1])
    source.shuffle(edges)
    return f"P{''.join(edges)}?{way[0]}{way[-1]}", "".join(way)


def rewriting(level: int, source: random.Random) -> tuple[str, str]:
    """1, 2, 3 or 4 rules, applied one after the other to every letter of a string of four; the
    answer is the string after each.

    ``Sabca:ac,cb`` replaces a by c, then c by b → ``cbcc`` and ``bbbb``, written without a break
    """
    text = "".join(source.choice("abcdef") for _ in range(4))
    question = f"S{text}:"
    answer = ""
    rules = []
    for _ in range(level):
        old = source.choice(sorted(set(text)))
        new = source.choice([letter for letter in "abcdef" if letter != old])
        text = text.replace(old, new)
        rules.append(old + new)
        answer += text
    return question + ",".join(rules), answer


def retrieval(level: int, source: random.Random) -> tuple[str, str]:
    """Keys with values, 4, 8, 12 or 16 of them; the answer is the values of three of the keys, in
    the order asked.

    ``Rk3v8m1p7?mkv`` → ``138``
    """
    keys = source.sample(string.ascii_lowercase, 4 * level)
    values = [str(source.randrange(10)) for _ in keys]
    queried = source.sample(range(len(keys)), 3)
    pairs = "".join(key + value for key, value in zip(keys, values, strict=True))
    return f"R{pairs}?{''.join(keys[place] for place in queried)}", "".join(
        values[place] for place in queried
    )


def copying(level: int, source: random.Random) -> tuple[str, str]:
    """A string of 4, 8, 12 or 16 letters behind as many dots, to be written again.

    ``Cdabf....=`` → ``dabf``
    """
    text = "".join(source.choice(string.ascii_lowercase) for _ in range(4 * level))
    return f"C{text}{'.' * (4 * level)}=", text


SKILLS: dict[str, Callable[[int, random.Random], tuple[str, str]]] = {
    skill.__name__: skill
    for skill in (arithmetic, deduction, planning, rewriting, retrieval, copying)
}
"""Skill -> maker of a problem from a level of difficulty and a generator: the question, and its
answer.
"""


def problems(
    split: str,
    count: int,
    *,
    seed: int = 0,
    skills: Iterable[str] = tuple(SKILLS),
    levels: Iterable[int] = LEVELS,
) -> Iterator[Problem]:
    """Problems of a split; no two questions of one call are the same, and none is in both splits.

    Args:
        split: ``train`` or ``test``: which of the two a question belongs to depends on its text
            alone.
        count: of problems.
        seed: of their choice; a longer run begins like a shorter one.
        skills: among :data:`SKILLS`; deduction more often in ``train``, which is learned last, all
            equally often in ``test``.
        levels: among :data:`LEVELS`; the easy ones more often in ``train``, equally often in
            ``test``.

    Raises:
        ValueError: for an unknown split or skill, naming the near one, a level that is none, or if
            so many different questions do not exist.
    """
    skills = tuple(skills)
    levels = tuple(levels)
    one_of("split", split, SPLITS)
    for skill in skills:
        one_of("skill", skill, SKILLS)
    if not skills or not levels or not set(levels) <= set(LEVELS):
        raise ValueError(
            f"a battery needs skills, and levels among {LEVELS}, but has {skills} and {levels}"
        )
    if count < 1:
        raise ValueError(f"count must be at least 1, but is {count}")
    return _drawn(split, count, random.Random(f"{split} {seed}"), skills, levels)


def _drawn(
    split: str, count: int, source: random.Random, skills: tuple[str, ...], levels: tuple[int, ...]
) -> Iterator[Problem]:
    weights = [1 for _ in levels]
    often = [1 for _ in skills]
    if split == "train":
        weights = [_LEVEL_WEIGHTS[level - 1] for level in levels]
        often = [_SKILL_WEIGHTS.get(skill, 1) for skill in skills]
    seen: set[str] = set()
    misses = 0
    while len(seen) < count:
        skill = source.choices(skills, often)[0]
        level = source.choices(levels, weights)[0]
        question, answer = SKILLS[skill](level, source)
        if split_of(question) != split:
            continue
        if question in seen:
            misses += 1
            # the few questions of the easiest sums run out long before the others
            if misses > 20 * count + 10_000:
                raise ValueError(
                    f"there are no {count} different {split} problems of {', '.join(skills)} at "
                    f"levels {', '.join(map(str, levels))}: {len(seen)} were found; request fewer, "
                    "or more levels"
                )
            continue
        seen.add(question)
        yield Problem(skill, level, question, answer)


def split_of(question: str) -> str:
    """The split a question belongs to, by a hash of its text."""
    if hashlib.sha256(question.encode()).digest()[0] < 256 * _TEST_SHARE:
        return "test"
    return "train"


def is_right(problem: Problem, written: str) -> bool:
    """Whether a text is a right answer. A plan may take any way of the graph; all else must be the
    answer itself.
    """
    if problem.skill != "planning":
        return written == problem.answer
    edges, ends = problem.question[1:].split("?")
    known = {edges[place : place + 2] for place in range(0, len(edges), 2)}
    steps = {one + other for one, other in pairwise(written)}
    return len(written) > 1 and written[0] + written[-1] == ends and steps <= known


def named_problems(source: str) -> Iterator[Problem]:
    """The problems that a name such as ``battery``, ``battery:test`` or ``battery:train:5000``
    stands for.

    Raises:
        ValueError: for another form of name.
    """
    named = re.fullmatch(rf"{BATTERY}(?::(\w+))?(?::(\d+))?", source)
    if not named:
        raise ValueError(
            f"the reasoning battery is called {BATTERY}, {BATTERY}:SPLIT or "
            f"{BATTERY}:SPLIT:COUNT, but is {source!r}"
        )
    split = named[1] or "train"
    one_of("split", split, SPLITS)
    return problems(split, int(named[2] or _COUNTS[split]))
