"""Tables, sentences and figures of the reasoning battery, from run folders whose numbers are
planted.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from refusals import refused
from sinklab.lab.records import RunWriter, open_run
from sinklab.lab.reports.samples import NotRecorded
from sinklab.lab.studies.battery import figures
from sinklab.lab.studies.battery.figures import (
    as_series,
    battery_by_removed,
    battery_by_skill,
    battery_contrasts,
    battery_gate,
    battery_scores,
    battery_sentences,
    write_battery_figures,
    write_battery_tables,
)
from sinklab.lab.studies.battery.run import accuracy

PROBLEMS = 20
Marks = dict[tuple[str, str, int, str, int], int]
"""(condition, control, k, skill, level) -> how many of 20 problems are right, the first ones."""


def planted(
    folder,
    marks,
    *,
    kind="battery",
    finished=True,
    dose=None,
    rate=None,
):
    answers, removed = list[dict[str, Any]](), list[dict[str, Any]]()
    for (condition, control, k, skill, level), right in marks.items():
        facts = {"condition": condition, "control": control, "k": k, "skill": skill, "level": level}
        for place in range(PROBLEMS):
            texts = {"question": f"{skill}{level}-{place}", "written": "x", "ended": True}
            answers.append(facts | {"problem": place, "right": place < right} | texts)
        if k and dose:
            removed += [facts | {"layer": layer} | dose for layer in (0, 1)]
        elif k:
            share = {"sinks": 0.06, "random": 0.02}[control] * k
            removed += [
                facts | {"layer": layer, "share": share + layer / 100, "of_keys": k / 40}
                for layer in (0, 1)
            ]
    with RunWriter(folder, kind=kind, model={"name": "x"}, settings={}, seed=0) as run:
        run.table("answers", pd.DataFrame(answers))
        if finished:
            run.table("accuracy", pd.DataFrame(accuracy(answers)))
        if rate is not None:
            kept = [
                (condition, skill, level)
                for condition, control, _, skill, level in marks
                if control == "none"
            ]
            seen = pd.DataFrame(kept, columns=["condition", "skill", "level"])
            run.table(
                "phenomenon", seen.assign(control="none", k=0, problem=0, share=0.2, gu_rate=rate)
            )
        if removed:
            run.table("removed", pd.DataFrame(removed))
    return open_run(folder)


SKILLS = ("arithmetic", "copying")


def robust(folder, rate=None):
    """Loses 2 of 20 in copying at k = 5, and nothing else; too weak at level 2 of arithmetic to
    tell.
    """
    marks: Marks = {}
    for skill in SKILLS:
        for level in (1, 2):
            clean = 10 if (skill, level) == ("arithmetic", 2) else 20
            marks["pure", "none", 0, skill, level] = clean
            for k in (1, 5):
                marks["pure", "sinks", k, skill, level] = clean - (
                    2 if (skill, k) == ("copying", 5) else 0
                )
                marks["pure", "random", k, skill, level] = clean
    return planted(folder, marks, rate=rate)


def fragile(folder, rate=None):
    """Loses 10 and 16 of 20 everywhere; random columns cost 5; 5 do not fit level 1 of
    arithmetic.
    """
    marks: Marks = {}
    for skill in SKILLS:
        for level in (1, 2):
            clean = 17 if (skill, level) == ("copying", 1) else 20
            marks["greedy", "none", 0, skill, level] = clean
            for k, lost in ((1, 10), (5, 16)):
                if (skill, level, k) != ("arithmetic", 1, 5):
                    marks["greedy", "sinks", k, skill, level] = clean - lost
                    marks["greedy", "random", k, skill, level] = clean - 5
    return planted(folder, marks, rate=rate)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return [robust(root / "dlm"), fragile(root / "ar")]


def test_curves_are_named_by_folder_and_by_condition_where_there_are_several(tmp_path, runs):
    both = planted(
        tmp_path / "both", {(name, "none", 0, "copying", 1): 9 for name in ("pure", "blocks-6")}
    )
    assert [one.label for one in as_series([*runs, both])] == [
        "dlm",
        "ar",
        "both, pure",
        "both, blocks-6",
    ]
    assert as_series(runs)[0].controls == ["sinks", "random"]


def test_the_gate_is_the_easiest_level_with_nothing_hidden(runs):
    gate = battery_gate(runs).set_index(["series", "skill"])
    assert gate["share"].to_dict() == {
        ("dlm", "arithmetic"): 1.0,
        ("dlm", "copying"): 1.0,
        ("ar", "arithmetic"): 1.0,
        ("ar", "copying"): 0.85,
    }
    assert gate["holds"].to_list() == [True, True, True, False]
    assert set(gate["level"]) == {1}


def test_scores_hold_differences_and_what_was_taken_away(runs):
    scores = battery_scores(runs).set_index(["series", "skill", "control", "k"])
    row = scores.loc["dlm", "copying", "sinks", 5]
    assert (row["n"], row["share"], row["clean"]) == (40, 0.9, 1.0)
    assert row["delta"] == row["beyond"] == pytest.approx(-0.1)
    # the mean over two layers and both levels
    assert row["removed"] == pytest.approx(0.305)
    assert row["of_keys"] == pytest.approx(5 / 40)
    assert scores.loc["dlm", "all", "sinks", 5]["removed"] == pytest.approx(0.305)
    assert pd.isna(scores.loc["dlm", "all", "none", 0]["removed"])
    left_out = scores.loc["ar", "all", "sinks", 5]
    assert (left_out["n"], left_out["clean"]) == (60, 57 / 60)
    by_level = battery_scores(runs, by_level=True)
    assert set(by_level["level"]) == {1, 2}
    assert (
        len(
            by_level.query(
                "series == 'dlm' and skill == 'copying' and control == 'sinks' and k == 5"
            )
        )
        == 2
    )


def test_contrasts_compare_drops_where_both_models_are_able(runs, monkeypatch):
    table = battery_contrasts(runs).set_index(["control", "k"])
    one = table.loc["sinks", 1]
    # arithmetic 2 is out for the first model, copying 1 for the second
    assert (one["cells"], one["n"]) == (2, 2 * PROBLEMS)
    assert (one["drop"], one["reference_drop"]) == (-0.5, 0.0)
    assert one["low"] < one["difference"] == -0.5 < one["high"] < 0
    five = table.loc["sinks", 5]
    assert (five["cells"], five["n"]) == (1, PROBLEMS)
    assert five["difference"] == pytest.approx(-0.8 + 0.1)
    turned = battery_contrasts(runs[::-1]).set_index(["control", "k"]).loc["sinks", 1]
    assert (turned["series"], turned["difference"]) == ("dlm", 0.5)
    assert battery_contrasts(runs[:1]).empty
    # as at the gate, a model is able above the share and not at it
    for share, cells in ((0.4, 4), (0.85, 2)):
        monkeypatch.setattr(figures, "GATE", share)
        table = battery_contrasts(runs).set_index(["control", "k"])
        assert table.loc["sinks", 1]["cells"] == cells


@pytest.mark.slow
def test_a_contrast_asks_both_models_for_heavy_sinks(tmp_path, runs):
    assert set(battery_contrasts(runs)["verdict"]) == {
        "inconclusive: the attention of ar was not watched with nothing blocked"
    }
    for name, rates, verdict in (
        ("both", (0.1, 0.05), "it loses more"),
        (
            "one",
            (0.04, 0.3),
            "inconclusive: dlm hardly has such sinks: one holds more than 30 % of the attention in "
            "4.0 %",
        ),
        ("other", (0.3, 0.0), "inconclusive: ar hardly has such sinks"),
    ):
        made = [
            robust(tmp_path / name / "dlm", rates[0]),
            fragile(tmp_path / name / "ar", rates[1]),
        ]
        table = battery_contrasts(made).set_index(["control", "k"])
        assert table.loc["sinks", 1]["verdict"].startswith(verdict), name
        same = battery_contrasts([made[0], made[0]]).set_index(["control", "k"])["verdict"]
        assert same["sinks", 1] == "inconclusive" or rates[0] < 0.05


def test_sentences_say_the_gate_and_the_curves(runs):
    lines = battery_sentences(runs)
    assert lines[0] == "dlm: 2 of 2 skills are above 90% at level 1 with nothing blocked"
    assert lines[1].startswith(
        "dlm: most attended keys, protocol paper: 87.5% at 0, 87.5% at 1, 82.5% at 5 blocked; -5.0"
    )
    assert lines[1].endswith("against as many random keys")
    assert (
        lines[3]
        == "ar: 1 of 2 skills are above 90% at level 1 with nothing blocked (not copying 85%)"
    )
    # five columns do not fit all questions, so that the curve ends before them
    assert lines[4].startswith(
        "ar: most attended keys, protocol paper: 96.2% at 0, 46.2% at 1 blocked; -50.0 ("
    )


def test_what_a_control_loses_stands_beside_it(tmp_path):
    """Of 20: the model loses 12 and 3 more than to random keys; its twin 4 and none more."""
    marks: Marks = {("pure", "none", 0, "copying", 1): 20}
    marks |= {("pure", "sinks", 5, "copying", 1): 8, ("pure", "random", 5, "copying", 1): 11}
    run = planted(tmp_path / "run", marks)
    assert battery_sentences(run)[-1].startswith("No untrained control of run was run")
    theirs = planted(
        tmp_path / "twin", {key: min(right, 4) - 4 * bool(key[2]) for key, right in marks.items()}
    )
    with RunWriter(
        tmp_path / "run", kind="battery", model={"name": "x"}, settings={}, seed=0, resume=True
    ) as writer:
        writer.table("accuracy-permuted", theirs.table("accuracy"))
        writer.table(
            "twins",
            pd.DataFrame({"twin": ["initialised", "permuted"], "made": [False, True], "why": ""}),
        )
    said = battery_sentences(open_run(tmp_path / "run"))
    assert len(said) == 3 and "points (shuffled weights -20.0), -15.0 (" in said[1]
    assert said[1].endswith("against as many random keys (shuffled weights +0.0)"), (
        "it loses as much to random keys"
    )


def test_sentences_and_legends_say_the_dose(tmp_path):
    marks: Marks = {("pure", "none", 0, "copying", 1): 20, ("pure", "matched", 5, "copying", 1): 10}
    marks["pure", "equal_mass", 5, "copying", 1] = 18
    dose = {
        "keys": 5.0,
        "mass": 0.4,
        "share": 0.3,
        "overlap": 0.0,
        "chosen": 5.0,
        "sinks": 1.0,
        "of_keys": 0.2,
    }
    run = planted(tmp_path / "run", marks, dose=dose | {"matched": 0.75})
    said = battery_sentences(run)
    words = (
        "run: most attended keys in heads with a control of equal mass, protocol paper: "
        "100.0% at 0, 50.0% at 5 blocked"
    )
    assert said[1].startswith(words)
    assert said[1].endswith(
        "against other keys of equal mass; 5.00 keys a head (20\u00a0% sinks), held 40.0\u00a0% of "
        "the attention, 30.0\u00a0% removed, matched in 75.0\u00a0% of heads"
    )
    scores = battery_scores(run).set_index(["skill", "control"]).loc[("all", "matched")]
    assert scores[["keys", "sinks", "held", "removed", "matched"]].to_list() == [
        5.0,
        0.2,
        0.4,
        0.3,
        0.75,
    ]
    legend = battery_by_skill(run, controls=["matched", "equal_mass"]).legends[0].get_texts()
    assert (
        legend[1].get_text()
        == "other keys of equal mass, protocol paper (20 % sinks, 30 % of attention removed at 5)"
    )
    few = planted(tmp_path / "few", marks, dose=dose | {"matched": 0.25})
    assert (
        ": inconclusive, 25 % of heads have other keys of equal mass; 5.00 keys a head"
        in battery_sentences(few)[1]
    )


def test_tables_are_written_as_csv_and_markdown(tmp_path, runs):
    names = {path.name for path in write_battery_tables(runs, tmp_path / "report")}
    assert names == {
        f"battery_{name}.{form}"
        for name in ("gate", "scores", "levels", "contrasts")
        for form in ("csv", "md")
    }
    read = pd.read_csv(tmp_path / "report" / "battery_scores.csv")
    assert len(read) == len(battery_scores(runs))
    assert (
        (tmp_path / "report" / "battery_gate.md")
        .read_text("utf-8")
        .startswith("| series | skill | level |")
    )
    assert len(write_battery_tables(runs[:1], tmp_path / "one")) == 6


def lines_of(axes):
    return {
        (line.get_color(), str(line.get_linestyle())): line.get_ydata().tolist()
        for line in axes.lines
        if line.get_linestyle() != "None"
    }


@pytest.mark.slow
def test_a_panel_per_skill_shows_shares_over_hidden_columns(runs):
    figure = battery_by_skill(runs, labels=["denoises", "writes on"])
    panels = {axes.get_title(loc="left"): axes for axes in figure.axes if axes.get_visible()}
    assert list(panels) == ["arithmetic", "copying", "all skills"]
    curves = lines_of(panels["copying"])
    assert next(iter(curves.values())) == pytest.approx([100, 100, 90])
    assert len(curves) == 4
    assert [text.get_text() for text in panels["copying"].get_xticklabels()] == ["0", "1", "5"]
    # where some questions are too short, a mean over the others is no point of the same curve
    assert [len(ys) for ys in lines_of(panels["arithmetic"]).values()] == [3, 3, 2, 2]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == [
        "denoises",
        "writes on",
        *(
            f"{keys} keys, protocol paper ({share} % of attention removed at 5)"
            for keys, share in (("most attended", 30.5), ("random", 10.5))
        ),
    ]
    assert len(battery_by_skill(runs, levels=(1, 2)).axes) == 6
    refused("labels name every curve", battery_by_skill, runs, labels=["one"])


def test_accuracy_stands_over_the_attention_taken_away(runs):
    axes = battery_by_removed(runs)
    first = axes.lines[0]
    assert list(first.get_xdata()) == pytest.approx([0, 6.5, 30.5])
    assert list(first.get_ydata()) == pytest.approx([100, 100, 100 * 66 / 70])
    assert len(axes.lines) == 4


@pytest.mark.slow
def test_figures_are_written_and_left_out_where_nothing_was_hidden(tmp_path, runs):
    written = write_battery_figures(runs, tmp_path / "report")
    assert [path.name for path in written] == ["battery_by_skill.png", "battery_by_removed.png"]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in written)
    bare = planted(tmp_path / "bare", {("pure", "none", 0, "copying", 1): 3})
    assert write_battery_figures([bare], tmp_path / "none") == []
    assert battery_scores(bare)["removed"].isna().all()
    with pytest.raises(NotRecorded, match=r"and .*bare has none"):
        battery_by_removed(bare)


def test_other_runs_are_refused(tmp_path):
    marks = {("pure", "none", 0, "copying", 1): 3}
    with pytest.raises(NotRecorded, match="kind 'study'"):
        as_series(planted(tmp_path / "study", marks, kind="study"))
    with pytest.raises(NotRecorded, match="begun is"):
        as_series(planted(tmp_path / "begun", marks, finished=False))
