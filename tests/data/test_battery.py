import random
import re
from collections import Counter
from itertools import pairwise

import pytest
import torch

from refusals import refused
from sinklab.lab.data import LEVELS, SKILLS, Problem, is_right, pair_rows, problems, read_pairs
from sinklab.lab.data.battery import split_of
from tiny_diffusion import tiny_tokenizer


def solved(problem):
    """The answer, worked out from the text of the question alone."""
    body = problem.question[1:]
    if problem.skill == "arithmetic":
        total, answer = int(body[0]), ""
        for sign, number in re.findall(r"([+-])(\d)", body):
            total = eval(f"{total}{sign}{number}") % 10
            answer += str(total)
        return answer
    if problem.skill == "copying":
        return body.rstrip("=").rstrip(".")
    if problem.skill == "rewriting":
        text, rules = body.split(":")
        answer = ""
        for old, new in rules.split(","):
            text = "".join(new if letter == old else letter for letter in text)
            answer += text
        return answer
    facts, asked = body.split("?")
    if problem.skill == "retrieval":
        values = dict(zip(facts[::2], facts[1::2], strict=True))
        return "".join(values[key] for key in asked)
    if problem.skill == "planning":
        edges = {facts[place : place + 2] for place in range(0, len(facts), 2)}
        ways = [asked[0]]
        while not any(way[-1] == asked[1] for way in ways):
            ways = [way + edge[1] for way in ways for edge in edges if edge[0] == way[-1]]
        return next(way for way in ways if way[-1] == asked[1])
    known = dict(re.findall(r"([a-z])([01])", facts))
    rules = {
        after: (sign, before) for after, sign, before in re.findall(r"([a-z])([=!])([a-z])", facts)
    }
    chain = [asked]
    while chain[0] in rules:
        chain.insert(0, rules[chain[0]][1])
    value, answer = known[chain[0]], chain[0] + known[chain[0]]
    for after in chain[1:]:
        value = value if rules[after][0] == "=" else "10"[int(value)]
        answer += after + value
    return answer


@pytest.mark.parametrize("split", ["train", "test"])
def test_answers_follow_from_the_questions(split):
    made = list(problems(split, 600))
    assert {(one.skill, one.level) for one in made} == {
        (skill, level) for skill in SKILLS for level in LEVELS
    }
    for problem in made:
        assert solved(problem) == problem.answer, problem
        assert is_right(problem, problem.answer)
        assert not is_right(problem, problem.answer[:-1]) and not is_right(
            problem, problem.answer + "x"
        )
        assert not is_right(problem, "")
        assert len(problem.question) <= 37 and len(problem.answer) <= 16


def test_a_plan_may_take_any_way_of_the_graph():
    problem = Problem("planning", 1, "Pabbcaddc?ac", "abc")
    assert is_right(problem, "abc") and is_right(problem, "adc")
    assert (
        not is_right(problem, "ac")
        and not is_right(problem, "abdc")
        and not is_right(problem, "ab")
    )


def test_more_of_everything_at_a_higher_level():
    for skill, make in SKILLS.items():
        lengths = [len(make(level, random.Random(0))[0]) for level in LEVELS]
        assert all(one < other for one, other in pairwise(lengths)), skill


def test_splits_never_overlap_and_do_not_depend_on_the_call():
    train = {one.question for one in problems("train", 1000, seed=1)}
    test = {one.question for one in problems("test", 1000, seed=2)}
    assert len(train) == len(test) == 1000 and not train & test
    assert all(split_of(question) == "test" for question in test)
    few = list(problems("train", 50))
    assert few == list(problems("train", 80))[:50]
    assert few != list(problems("train", 50, seed=1))


def test_levels_and_skills_are_chosen():
    made = list(problems("test", 300, skills=("planning", "copying"), levels=(2, 4)))
    counts = Counter((one.skill, one.level) for one in made)
    assert set(counts) == {(skill, level) for skill in ("planning", "copying") for level in (2, 4)}
    assert min(counts.values()) > 40, "equally often in tests"
    easy = Counter(one.level for one in problems("train", 600, skills=("planning",)))
    assert easy[1] > easy[3], "easy ones come more often in training"


@pytest.mark.parametrize(
    "given, message",
    [
        (
            {"split": "trian"},
            "split must be one of train, test, but is 'trian'; did you mean 'train'",
        ),
        ({"skills": ("plan",)}, "skill must be one of arithmetic, .* but is 'plan'"),
        ({"skills": ()}, "a battery needs skills"),
        ({"levels": (0, 1)}, r"levels among \(1, 2, 3, 4\)"),
        ({"count": 0}, "count must be at least 1"),
    ],
)
def test_what_does_not_exist_is_refused(given, message):
    given = {"split": "test", "count": 10} | given
    refused(message, lambda: list(problems(given.pop("split"), given.pop("count"), **given)))


def test_more_problems_than_there_are_are_refused(monkeypatch):
    monkeypatch.setitem(SKILLS, "copying", lambda level, source: (f"C{source.choice('ab')}", ""))
    asked = {"skills": ("copying",), "levels": (1,)}
    (split,) = {split_of("Ca"), split_of("Cb")}
    assert len(list(problems(split, 2, **asked))) == 2
    refused(f"no 3 different {split} problems of copying", list, problems(split, 3, **asked))


def test_the_battery_is_a_source_of_pairs():
    pairs = read_pairs("battery:test:40")
    assert [(pair.question, pair.answer) for pair in pairs] == [
        (one.question, one.answer) for one in problems("test", 40)
    ]
    assert next(iter(read_pairs("battery:train:1"))).question == next(problems("train", 1)).question
    for wrong in ("battery:tests", "battery:test:x", "battery:test:1:2"):
        refused(r"split must be|called battery", read_pairs, wrong)


def test_a_completion_is_what_a_canvas_holds():
    tokenizer = tiny_tokenizer()
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    pairs = read_pairs("battery:test:60")
    rows, counts = pair_rows(pairs, tokenizer, 64, style="completion", answer_length=20)
    rows = rows.dense()
    assert counts.lines == len(rows.ids_RS) == 60 and rows.attention_RS is not None
    for pair, ids, maskable, seen in zip(
        pairs, rows.ids_RS, rows.maskable_RS, rows.attention_RS, strict=True
    ):
        question, answer = (tokenizer(text)["input_ids"] for text in (pair.question, pair.answer))
        window = answer + [end] * (20 - len(answer))
        filled = len(question) + 20
        assert ids.tolist() == question + window + [pad] * (64 - filled)
        assert maskable.nonzero()[:, 0].tolist() == list(range(len(question), filled))
        assert torch.equal(seen, torch.arange(64) < filled)
    short, counts = pair_rows(pairs, tokenizer, 64, style="completion", answer_length=10)
    fits = [pair for pair in pairs if len(tokenizer(pair.answer)["input_ids"]) < 10]
    assert counts.lines == len(short.ids_RS) == len(fits) < 60
    assert counts.dropped == 60 - len(fits), "an answer has room for its end token, or is left out"
