"""The reasoning battery: its problems, its statistics against plain ones, and the smallest run."""

import itertools
import math
import re
import sys

import pandas as pd
import pytest

from launched import script

pytestmark = pytest.mark.ring("lab")

study = script("studies/reasoning_battery")


def solved(question):
    """The answer to an unambiguous question, found in another way than it was made."""
    body = question[1:]
    if question[0] == "A":
        steps = re.findall(r"[+-]?\d", body)
        return "".join(str(eval("".join(steps[: n + 1])) % 10) for n in range(1, len(steps)))
    if question[0] == "D":
        facts, asked = body.split("?")
        known = dict(re.findall(r"([a-z])([01])", facts))
        rules = re.findall(r"([a-z])([=!])([a-z])", facts)
        after = {other: (one, sign) for one, sign, other in rules}
        before = {one: other for one, _, other in rules}
        name = asked
        while name in before:
            name = before[name]
        found = f"{name}{known[name]}"
        while name != asked:
            name, sign = after[name]
            found += f"{name}{int(found[-1]) ^ (sign == '!')}"
        return found
    if question[0] == "S":
        text, rules = body.split(":")
        texts = [text]
        for old, new in rules.split(","):
            texts.append("".join(new if letter == old else letter for letter in texts[-1]))
        return "".join(texts[1:])
    if question[0] == "R":
        pairs, asked = body.split("?")
        return "".join(pairs[pairs[::2].index(key) * 2 + 1] for key in asked)
    return body.rstrip("=").rstrip(".")


@pytest.mark.parametrize("skill", study.SKILLS)
def test_answers_are_right_and_no_others_are(skill):
    for level in study.LEVELS:
        some = [*study.problems("test", 40, (skill,), (level,))]
        assert len({question for question, _ in some}) == 40
        for question, answer in some:
            assert study.is_right(question, answer, answer)
            if skill != "planning":
                assert solved(question) == answer
            for wrong in ("", answer[:-1], answer + answer[-1], answer[:-1] + "?"):
                assert not study.is_right(question, answer, wrong)


def test_a_plan_may_take_any_way_of_the_graph():
    assert all(study.is_right("Pabbdaccd?ad", "abd", way) for way in ("abd", "acd"))
    assert not any(study.is_right("Pabbdaccd?ad", "abd", way) for way in ("ad", "abcd", "ab", "d"))


@pytest.mark.slow
def test_splits_never_overlap_and_training_is_easier():
    train, test = ([*study.problems(split, 3000)] for split in ("train", "test"))
    assert not {one for one, _ in train} & {one for one, _ in test}
    assert [*study.problems("test", 20)] == test[:20]
    shares = [sum(one.startswith("D") for one, _ in some) / 3000 for some in (train, test)]
    assert shares[0] == pytest.approx(3 / 8, abs=0.03)
    assert shares[1] == pytest.approx(1 / 6, abs=0.03)


def made_up():
    """Answers of two series: the first loses 20 of 40 problems to its keys and 8 to random ones,
    the second 30 and 8, of one skill at two levels.
    """
    kept = {("one", "sinks"): 20, ("one", "random"): 32}
    kept |= {("two", "sinks"): 10, ("two", "random"): 32}
    lines = []
    for series, level in itertools.product(("denoising", "autoregressive"), (1, 2)):
        named = {"denoising": "one", "autoregressive": "two"}[series]
        for control, number in itertools.product(("none", "sinks", "random"), range(20)):
            right = number < kept.get((named, control), 40) // 2
            fact = {"series": series, "control": control, "k": int(control != "none")}
            fact |= {"skill": "copying", "level": level, "problem": number, "right": right}
            lines.append(fact | {"written": "x" if right else "", "ended": right})
    return pd.DataFrame(lines)


def test_shares_and_paired_differences_are_those_of_plain_counts():
    found = study.accuracy(made_up()).set_index([*study.ARM, "skill", "level"])
    whole = found.loc["denoising", "sinks", 1, study.ALL, 0]
    assert (whole["n"], whole["right"], whole["share"], whole["clean"]) == (40, 20, 0.5, 1.0)
    assert (whole["gained"], whole["lost"], whole["delta"]) == (0, 20, -0.5)
    assert (whole["empty"], whole["endless"]) == (20, 20)
    assert whole["beyond"] == -0.3 and whole["beyond_n"] == 40
    assert whole["delta_p"] == pytest.approx(2 * 0.5**20)
    # half a problem is added to each cell of the table
    middle, spread = -20 / 42, 21 - 20**2 / 42
    half = 1.959964 * math.sqrt(spread) / 42
    assert [whole["delta_low"], whole["delta_high"]] == pytest.approx(
        [middle - half, middle + half]
    )
    assert found.loc["denoising", "sinks", 1, "copying", 1]["n"] == 20
    assert found.loc["denoising", "none", 0, "copying", 0]["beyond_n"] == 0


def test_series_are_contrasted_on_the_same_problems_where_both_are_able():
    answers = made_up()
    found = study.contrasts(answers).set_index("control")
    sinks = found.loc["sinks"]
    assert (sinks["series"], sinks["reference"]) == ("autoregressive", "denoising")
    assert (sinks["cells"], sinks["n"]) == (2, 40)
    assert (sinks["drop"], sinks["reference_drop"]) == (-0.75, -0.5)
    assert sinks["low"] < sinks["difference"] == -0.25 < sinks["high"] < 0
    assert found.loc["random", "difference"] == 0
    unable = (answers["level"] == 2) & (answers["problem"] < 3)
    answers.loc[unable & (answers["control"] == "none"), "right"] = False
    assert study.contrasts(answers)["cells"].tolist() == [1, 1]


@pytest.mark.slow
def test_committed_intervals_are_those_of_the_committed_counts():
    """Nothing is drawn from counts to intervals: 577 rows of the page's scores."""
    scores = pd.read_csv(study.Path(study.__file__).with_suffix("") / "scores.csv")
    for row in scores.to_dict("records"):
        change = [1] * row["gained"] + [-1] * row["lost"]
        change += [0] * (row["delta_n"] - len(change))
        found = study.difference(pd.Series(change), "delta")
        assert {name: round(value, 4) for name, value in found.items()} == {
            name: row[name] for name in found
        }


@pytest.mark.slow
def test_the_smallest_run_writes_every_table_and_goes_on_where_it_stopped(
    tmp_path, monkeypatch, capsys
):
    parts = "denoising", "autoregressive"
    monkeypatch.setattr(study, "EASY", (1,))
    monkeypatch.setattr(study, "PARTS", {name: study.PARTS[name] for name in parts})
    monkeypatch.setattr(sys, "argv", ["battery", "--smallest", "--out", str(tmp_path)])
    study.main()
    tables = {path.stem: pd.read_csv(path) for path in tmp_path.glob("*.csv")}
    # nobody is able, so that there is nothing to contrast
    assert {*tables} == {"gate", "scores", "summary", "by_level", "taken"}
    taken = tables["taken"].set_index(study.ARM)
    assert (taken[["share", "mass", "of_keys"]] < 1).all(axis=None)
    assert (tmp_path / "models_level_1.png").stat().st_size > 5000
    cells = {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
    monkeypatch.setattr(study, "load", None)
    monkeypatch.setattr(study, "draw", lambda *_: None)
    study.main()
    assert cells == {path: path.stat().st_mtime_ns for path in (tmp_path / "cells").iterdir()}
