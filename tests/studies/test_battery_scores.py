"""The reasoning battery scored: a batch equals single texts, counts equal plain ones, runs go on
where they stopped.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from refusals import refused
from sinklab.core.probing.intervention import RemovalRecord
from sinklab.core.sinks import Excess, Gu
from sinklab.lab.analysis.intervals import paired_share_interval, wilson
from sinklab.lab.data.battery import Problem, problems
from sinklab.lab.measures import by_protocol
from sinklab.lab.records import open_run
from sinklab.lab.scoring import writing
from sinklab.lab.scoring.answers import write_batch
from sinklab.lab.scoring.prompts import encode
from sinklab.lab.studies.base import from_record
from sinklab.lab.studies.battery import run as battery
from sinklab.lab.studies.battery.run import Cell, Removed, accuracy, answer
from sinklab.lab.studies.battery.study import (
    CONTROLS,
    Battery,
    BatterySettings,
    Condition,
    score_battery,
)
from tiny_diffusion import tiny_loaded
from tiny_llama import tiny_llama

NEW = 6


def some_problems(count=3):
    return list(problems("test", count, seed=3))


def cell(condition, control="none", k=0):
    return Cell(Condition.named(condition), control, k, "planning", 1)


@pytest.mark.parametrize(
    ("family", "condition", "control", "k"),
    [
        ("diffusion", "pure", "sinks", 3),
        ("diffusion", "blocks-3", "clean_pass", 2),
        ("diffusion", "left_to_right+window-4", "sinks", 2),
        ("autoregressive", "greedy", "sinks", 2),
        ("autoregressive", "greedy", "clean_pass", 2),
        ("autoregressive", "greedy+window-4", "none", 0),
    ],
)
def test_a_batch_of_unequal_questions_is_answered_as_each_alone(family, condition, control, k):
    loaded = tiny_loaded(1) if family == "diffusion" else tiny_llama()
    one, asked = cell(condition, control, k), some_problems()
    rows = answer(loaded, one, asked, NEW, 0, Removed())
    for problem, row in zip(asked, rows, strict=True):
        assert [row] == answer(loaded, one, [problem], NEW, 0, Removed())
    assert len({row["written"] for row in rows}) > 1
    if k or "window" in condition:
        plain = answer(loaded, cell(condition.partition("+")[0]), asked, NEW, 0, Removed())
        assert [row["written"] for row in rows] != [row["written"] for row in plain], (
            "the edit changed nothing"
        )


def test_blocks_of_one_are_left_to_right():
    loaded, asked = tiny_loaded(), some_problems()
    texts = {
        name: [
            row["written"]
            for row in answer(loaded, cell(name, "sinks", 2), asked, NEW, 0, Removed())
        ]
        for name in ("blocks-1", "left_to_right", "pure")
    }
    assert texts["blocks-1"] == texts["left_to_right"] != texts["pure"]


def test_what_was_removed_is_measured():
    loaded, asked = tiny_loaded(), some_problems()
    removed = Removed()
    answer(loaded, cell("pure", "sinks", 3), asked, NEW, 0, removed)
    rows = removed.rows()
    assert [row["layer"] for row in rows] == [0, 1]
    assert all(row["keys"] == 3 for row in rows)
    # a closed loop cannot take the same key twice in a row
    assert all(row["overlap"] == 0 for row in rows)
    assert all(0 < row["share"] < 1 and 0 < row["mass"] < 1 for row in rows)
    lengths = [len(encode(loaded, problem.question).ids) + NEW for problem in asked]
    assert rows[0]["of_keys"] == pytest.approx(sum(3 / length for length in lengths) / 3, rel=1e-5)
    held = Removed()
    answer(loaded, cell("pure", "clean_pass", 3), asked, NEW, 0, held)
    assert all(row["overlap"] > 0.3 for row in held.rows())


@pytest.mark.parametrize("name", ["sinks", "held", "rule", "clean_pass"])
def test_the_dose_is_that_of_the_protocol_s_own_log(name):
    loaded, asked, rule = tiny_loaded(1), some_problems(1), Excess(1.5)
    one = replace(cell("pure", name, 2), rule=rule)
    assert one.edits(loaded, 3) == (by_protocol(CONTROLS[name][1], 2, rule, seed=3),)
    removed, logged = Removed(), list[RemovalRecord]()
    answer(loaded, one, asked, NEW, 0, removed)
    requests, edits = battery.asked_of(loaded, asked, 0), one.edits(loaded, 0)
    with writing.Writing(loaded, requests, one.condition.decoding(0), NEW, edits).begin() as writer:
        for _ in writer.steps():
            logged += writer.log.removals
            writer.log.removals.clear()
    names = {"keys": "keys", "mass": "held", "share": "removed", "overlap": "overlap"}
    for layer, row in enumerate(removed.rows()):
        own = {
            name: torch.cat([getattr(one, f"{name}_BLH")[:, layer] for one in logged])
            for name in (*names.values(), "sinks", "chosen")
        }
        for theirs, mine in names.items():
            assert row[theirs] == pytest.approx(float(own[mine].nanmean())), theirs
        assert row["sinks"] / row["chosen"] == pytest.approx(
            float(own["sinks"].nansum() / own["chosen"].nansum())
        )
        assert row["matched"] is None


def test_protocols_stand_beside_the_controls_under_names_that_older_runs_have():
    assert [CONTROLS[name] for name in ("sinks", "clean_pass", "random", "random_clean_pass")] == [
        ("sinks", "paper"),
        ("sinks", "clean"),
        ("random", "paper"),
        ("random", "clean"),
    ]
    settings = BatterySettings(
        ks=(2,), protocols=("paper", "held"), controls=("sinks", "equal_mass", "clean_pass")
    )
    assert [name for name, _ in settings.hidings()] == [
        "none",
        "sinks",
        "held",
        "matched",
        "matched_held",
        "equal_mass",
        "equal_mass_held",
        "clean_pass",
    ]
    (edit,) = cell("pure", "matched_held", 2).edits(tiny_loaded(), 0)
    assert edit == by_protocol("held", 2, matched=True)
    record = Battery().record(replace(settings, sink_rule="gu"))
    assert (record["protocols"], record["sink_rule"]) == (("paper", "held"), "gu")
    assert from_record(BatterySettings(), record) == replace(settings, sink_rule=Gu())


def test_rows_that_are_over_and_windows_are_not_counted_as_removed():
    loaded, asked = tiny_loaded(), some_problems(2)
    removed = Removed()
    answer(loaded, cell("pure+window-5"), asked, NEW, 0, removed)
    assert removed.rows() == []
    one, both = Removed(), Removed()
    answer(loaded, cell("pure", "sinks", 2), asked[:1], NEW, 0, one)

    class Half(writing.DenoisingWriter):
        def steps(self):
            for step in super().steps():
                step.active_B = torch.tensor([True, False])
                yield step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writing, "DenoisingWriter", Half)
        answer(loaded, cell("pure", "sinks", 2), asked, NEW, 0, both)
    for was, now in zip(one.rows(), both.rows(), strict=True):
        assert now == pytest.approx(was, abs=1e-5)


def spoken(texts, *, ends):
    """Rows that write these texts, with or without an end of text."""

    class Spoken:
        def __init__(self, texts, log):
            self.loaded, self.count, self.log = texts.loaded, len(texts.requests), log

        def steps(self):
            yield SimpleNamespace(active_B=torch.ones(self.count, dtype=torch.bool))

        def row(self, row):
            tokenizer = self.loaded.needed_tokenizer()
            ids: Any = tokenizer(texts[row], add_special_tokens=False)["input_ids"]
            return [*ids, *([tokenizer.eos_token_id, *ids] if ends[row] else [])]

    return Spoken


def test_answers_are_judged_up_to_their_end(monkeypatch):
    asked = [
        Problem("arithmetic", 1, "A3+5-2=", "86"),
        Problem("planning", 1, "Pabbdaccd?ad", "abd"),
        Problem("arithmetic", 1, "A3+5-2=", "86"),
        Problem("copying", 1, "Cab..=", "ab"),
        Problem("copying", 1, "Cab..=", "ab"),
    ]
    texts, ends = ["86", "acd", "87", "", "ab"], [True, True, True, True, False]
    monkeypatch.setattr(writing, "DenoisingWriter", spoken(texts, ends=ends))
    rows = answer(tiny_loaded(), cell("pure"), asked, NEW, 0, Removed())
    assert [row["written"] for row in rows] == texts
    assert [row["right"] for row in rows] == [True, True, False, False, True]
    assert [row["ended"] for row in rows] == ends
    counted = accuracy(
        [cell("pure").facts | {"problem": place} | row for place, row in enumerate(rows)]
    )[0]
    assert (counted["n"], counted["right"], counted["empty"], counted["endless"]) == (5, 3, 1, 1)


def graded(control, k, marks):
    return [
        {
            "condition": "pure",
            "control": control,
            "k": k,
            "skill": skill,
            "level": level,
            "problem": place,
        }
        | {"right": mark == "+", "written": "x", "ended": True}
        for (skill, level), row in marks.items()
        for place, mark in enumerate(row)
    ]


def test_differences_are_paired_and_leave_out_what_was_not_asked():
    rows = graded("none", 0, {("copying", 1): "++++", ("copying", 2): "++--"})
    rows += graded("sinks", 5, {("copying", 1): "+---", ("copying", 2): "-++-"})
    rows += graded("random", 5, {("copying", 2): "++--"})
    found = {(row["control"], row["skill"], row["level"]): row for row in accuracy(rows)}
    hidden = found["sinks", "copying", 0]
    assert (hidden["n"], hidden["right"], hidden["clean"], hidden["gained"], hidden["lost"]) == (
        8,
        3,
        0.75,
        1,
        4,
    )
    assert hidden["delta"] == pytest.approx(3 / 8 - 6 / 8)
    assert (hidden["low"], hidden["high"]) == wilson(3, 8)
    assert (hidden["delta_low"], hidden["delta_high"]) == paired_share_interval(1, 4, 8)
    # level 1 has no answers with random columns hidden, and is no part of the comparison
    short = found["random", "all", 0]
    assert (short["n"], short["clean"], short["delta"], short["delta_p"]) == (4, 0.5, 0.0, 1.0)
    assert (hidden["beyond"], hidden["beyond_n"], hidden["delta_n"]) == (0.0, 4, 8)
    assert (hidden["beyond_low"], hidden["beyond_high"]) == paired_share_interval(1, 1, 4)
    assert found["sinks", "copying", 1]["beyond"] is None
    assert short["beyond"] is None
    assert found["sinks", "copying", 2]["n"] == 4
    assert found["none", "all", 0]["delta"] == 0


def test_each_way_to_hide_sinks_has_its_random_control():
    rows = graded("none", 0, {("copying", 1): "++++"})
    rows += graded("clean_pass", 5, {("copying", 1): "+---"}) + graded(
        "random", 5, {("copying", 1): "++++"}
    )
    assert {
        row["control"]: row["beyond"]
        for row in accuracy(rows)
        if row["skill"] == "copying" and row["level"]
    } == {
        "none": None,
        "clean_pass": -0.75,
        "random": None,
    }
    rows += graded("random_clean_pass", 5, {("copying", 1): "+++-"})
    assert {row["beyond"] for row in accuracy(rows) if row["control"] == "clean_pass"} == {-0.5}
    rows += graded("matched_held", 5, {("copying", 1): "+---"}) + graded(
        "equal_mass_held", 5, {("copying", 1): "++--"}
    )
    rows += graded("rule", 5, {("copying", 1): "+---"})
    beyond = {row["control"]: row["beyond"] for row in accuracy(rows)}
    assert (beyond["matched_held"], beyond["equal_mass_held"], beyond["rule"]) == (
        -0.25,
        None,
        None,
    )


def small(**changes):
    fields = {
        "skills": ("arithmetic", "copying"),
        "levels": (1,),
        "problems": 3,
        "ks": (2,),
        "new_tokens": 4,
    }
    return BatterySettings(**{**fields, "controls": ("sinks", "random"), "twin": False, **changes})


def test_a_run_folder_holds_answers_accuracy_and_removed_shares(tmp_path):
    stages: list[str] = []
    loaded, conditions = tiny_loaded(), ("pure", "blocks-2")
    settings = small(skills=("copying",), conditions=conditions)
    run = open_run(score_battery(loaded, tmp_path / "run", settings, progress=stages.append))
    assert (run.info.kind, run.info.status) == ("battery", "complete")
    assert run.info.settings["conditions"] == [*conditions]
    answers, shares, removed = (run.table(name) for name in ("answers", "accuracy", "removed"))
    asked = list(problems("test", 3, skills=("copying",), levels=(1,)))
    assert len(answers) == 2 * 3 * 3
    assert set(answers["question"]) == {problem.question for problem in asked}
    cell = "condition == 'pure' and control == 'sinks'"
    row = shares.query(f"{cell} and skill == 'copying' and level == 1").iloc[0]
    assert (row["right"], row["n"]) == (answers.query(cell)["right"].sum(), 3)
    assert set(removed["control"]) == {"sinks", "random"}
    assert (removed["keys"] == 2).all()
    assert stages[:3] == [
        "pure, nothing blocked",
        "pure, 2 blocked, sinks",
        "pure, 2 blocked, random",
    ]
    assert "skipped" not in run.tables
    seen = run.table("phenomenon")
    assert set(seen["control"]) == {"none"} and seen["gu_rate"].between(0, 1).all()
    assert seen.groupby("condition").size().to_dict() == dict.fromkeys(conditions, 3)
    requests = battery.asked_of(loaded, asked[1:2], 0)
    how = Condition.named("blocks-2").decoding(0), settings.new_tokens
    (alone,) = write_batch(loaded, requests, *how, watch=True)
    expected = sum(layer["share"] for layer in alone.sinks) / len(alone.sinks)
    share = seen.query("condition == 'blocks-2' and problem == 1")["share"].item()
    assert share == pytest.approx(expected, rel=1e-4)


def test_an_interrupted_run_goes_on_and_comes_to_the_same(tmp_path, monkeypatch):
    loaded, settings = tiny_loaded(), small(problems=2, new_tokens=2, controls=("sinks",))
    whole = open_run(score_battery(loaded, tmp_path / "whole", settings))
    real, calls = battery.answer, list[str]()

    def failing(after):
        def call(loaded, one, *rest):
            calls.append(one.skill)
            if len(calls) > after:
                raise KeyboardInterrupt
            return real(loaded, one, *rest)

        return call

    monkeypatch.setattr(battery, "answer", failing(2))
    with pytest.raises(KeyboardInterrupt):
        score_battery(loaded, tmp_path / "run", settings)
    assert open_run(tmp_path / "run").info.status == "interrupted"
    assert len(open_run(tmp_path / "run").parts("answers")) == 2
    calls.clear()
    monkeypatch.setattr(battery, "answer", failing(100))
    again = open_run(score_battery(loaded, tmp_path / "run", settings, resume=True))
    assert len(calls) == 2
    for name in ("answers", "accuracy", "removed"):
        assert again.table(name).equals(whole.table(name)), name
    refused(
        r"\['problems'\] is 2, and now",
        score_battery,
        loaded,
        tmp_path / "run",
        replace(settings, problems=3),
        resume=True,
    )


def test_questions_too_short_for_so_many_columns_are_skipped_and_said(tmp_path):
    loaded = tiny_llama()
    length = len(
        encode(loaded, next(problems("test", 1, skills=("arithmetic",), levels=(1,))).question).ids
    )
    settings = small(skills=("arithmetic",), ks=(length // 2, length), levels=(1,))
    run = open_run(score_battery(loaded, tmp_path / "run", settings))
    skipped = run.table("skipped")
    assert list(zip(skipped["control"], skipped["k"], strict=True)) == [
        ("sinks", length),
        ("random", length),
    ]
    assert skipped["why"][0] == f"{length} keys of {length}"
    assert skipped["why"][1] == f"{length} random keys beside as many others of {length}"
    assert set(run.table("accuracy")["k"]) == {0, length // 2}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"skills": ("planing",)},
            "skills must be one of arithmetic, .*, but is 'planing'; did you mean 'planning'",
        ),
        ({"skills": ()}, "skills must not be empty"),
        ({"levels": (5,)}, "levels must be one of 1, 2, 3, 4, but is 5"),
        (
            {"controls": ("sink",)},
            "controls must be one of sinks, .*, but is 'sink'; did you mean 'sinks'",
        ),
        ({"ks": (-1,)}, "ks must be at least 0, but is -1"),
        ({"problems": 0}, "problems must be at least 1, but is 0"),
        (
            {"conditions": ("blokcs-6",)},
            "a condition is made of pure, .*, got 'blokcs-6'; did you mean 'blocks-N'",
        ),
        ({"conditions": ("blocks-0",)}, "got 'blocks-0'"),
        (
            {"conditions": ("pure+random",)},
            "a condition says each thing once, got 'pure\\+random'; leave out random",
        ),
        ({"conditions": ("greedy+blocks-3",)}, "greedy is token after token, without blocks"),
    ],
)
def test_settings_that_make_no_sense_are_refused(fields, message):
    refused(message, BatterySettings, **fields)


def test_nothing_hidden_is_always_asked_and_names_may_stand_alone():
    settings = BatterySettings(skills="copying", ks=5, levels=1, conditions="pure")
    assert (settings.skills, settings.ks, settings.levels) == (("copying",), (0, 5), (1,))
    assert settings.hidings()[:2] == [("none", 0), ("sinks", 5)]


@pytest.mark.parametrize(
    ("loaded", "fields", "message"),
    [
        (
            tiny_loaded,
            {"conditions": ("greedy",)},
            "tiny test model is diffusion, got .greedy.*",
        ),
        (
            tiny_llama,
            {"conditions": ("pure",)},
            "tiny llama is autoregressive, got .pure.",
        ),
        (
            tiny_loaded,
            {"conditions": ("blocks-3",)},
            "blocks must divide the 4 new tokens evenly, got 'blocks-3'",
        ),
        (
            lambda: tiny_loaded(context=8),
            {},
            "must fit the context of tiny test model, 8 positions, got",
        ),
        (
            lambda: tiny_loaded(mask_token_id=None),
            {},
            "needs a model with a mask token, but tiny test model has",
        ),
        (lambda: replace(tiny_loaded(), tokenizer=None), {}, "has no tokenizer files"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_before_a_folder_is_taken(
    loaded, fields, message, tmp_path
):
    refused(message, score_battery, loaded(), tmp_path / "run", small(**fields))
    assert not (tmp_path / "run").exists()
