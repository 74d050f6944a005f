"""The analysis paper's Table 1: accuracy over blocked keys by protocol, beside published; which
losses are sure, with their doses, and keys against others of equal mass.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pandas as pd

from sinklab.core.instrument.edits.dose import DOSE_COLUMNS
from sinklab.lab.analysis.differences import effects
from sinklab.lab.analysis.doses import MATCHED
from sinklab.lab.reports import Printed, percent, signed, write_printed
from sinklab.lab.reports.runs import labels
from sinklab.lab.studies import Row
from sinklab.lab.studies.benchmarks import tables as paper
from sinklab.lab.studies.benchmarks.tables import (
    KEYS,
    Benchmark,
    as_printed,
    found_in,
)

POINTS = 0.05
"""Least loss that counts as the summary's «> 5 % performance drop», as a difference of two
accuracies.
"""
KEY = ["protocol", "control", "k"]
CELL = ["task", "model", *KEY]
PLAIN = ("", "sinks", 0)
"""Cell with nothing blocked."""
TITLE = "Accuracy with the most attended keys blocked (analysis paper, Table 1)"
LOST_TITLE = "What each cell lost, and which keys were blocked"
SHARES = {"sinks": "of them sinks", "held": "attention held", "removed": "attention removed"}
SHARES |= {"matched": "heads matched"}
"""Number of a dose -> its heading."""


def read_cells(benchmarks: Iterable[Benchmark]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Scored tasks of runs, a row each, and their answers, a row each: ``right`` by question.

    A cell is named by task, model, protocol, control and k. The protocol is "" if nothing is
    blocked.

    Raises:
        ValueError: if two runs are the same cell.
    """
    listed = list(benchmarks)
    firsts = {one.alike: one.run for one in reversed(listed)}
    alike = [*dict.fromkeys(one.alike for one in listed)]
    names = dict(zip(alike, labels([firsts[each] for each in alike]), strict=True))
    cells, answers = [], []
    for one in listed:
        for task in one.tasks:
            cell, right = _cell(one, task)
            cells.append({"task": task, "model": names[one.alike]} | cell)
            answers.append(right.assign(**{name: cells[-1][name] for name in CELL}))
    found = pd.DataFrame(cells).sort_values(["task", "model", "k"], ignore_index=True)
    twice = found[found.duplicated(CELL, keep=False)]
    if len(twice):
        task, model, *key = twice.iloc[0][CELL]
        run, other = twice["run"][:2]
        raise ValueError(f"{run} and {other} both hold {task} of {model}, {key}; read one of them")
    return found, pd.concat(answers, ignore_index=True)


def _cell(one: Benchmark, task: str) -> tuple[Row, pd.DataFrame]:
    """A scored task, and its answers."""
    score = one.score(task)
    assert score is not None
    samples = one.run.table("samples")
    samples = samples[(samples["task"] == task) & (samples["filter"] == score["filter"])]
    right = [
        json.loads(metrics).get(score["metric"], first)
        for metrics, first in zip(samples["metrics"], samples["right"], strict=True)
    ]
    # guessing gets one in the number of choices right, and no text
    choices = samples.get("logprobs", pd.Series([], dtype=object)).map(len)
    chance = (1 / choices[choices > 1]).sum() / max(len(choices), 1)
    floor = POINTS
    if chance:
        floor = max(POINTS, chance + 2 * score["stderr"])
    cell: Row = dict(zip(KEY, PLAIN, strict=True))
    if one.k:
        cell |= {"control": one.control, "k": one.k}
        # likelihoods know a clean pass alone, whatever was asked for
        doses = one.run.table("doses").set_index("task")
        cell |= doses.loc[task, ["protocol", *DOSE_COLUMNS]].to_dict()
    cell |= {"accuracy": score["value"], "floor": floor, "run": str(one.run.path)}
    cell |= score[["stderr", "samples", "no_answer", "metric", "filter"]].to_dict()
    return cell, pd.DataFrame({"doc_id": samples["doc_id"].to_numpy(), "right": right})


def table1_numbers(cells: pd.DataFrame, answers: pd.DataFrame) -> pd.DataFrame:
    """One row per cell of `read_cells`, and per published cell of these tasks.

    accuracy, stderr (binomial), samples; mean: accuracy less that with nothing blocked, with the
    ends of its 95 % interval, paired by question (`effects`); verdict: "drops" (by more than 5
    points), "holds", "inconclusive" (corrected for all cells of the model and task), or "floor" if
    the unmasked accuracy is no more than ``floor``: 5 points, or chance and two standard errors;
    no_answer: share of answers without the expected pattern; the other columns are those of `Dose`.
    Runs are compared that differ in masking alone.
    """
    how: dict[str, Any] = {"base": PLAIN, "threshold": -POINTS, "words": ("holds", "drops")}
    lines = [pd.DataFrame(columns=[*CELL, "mean", "low", "high", "verdict"])]
    for named, some in _models(answers):
        if PLAIN in _keys(some) and len(_keys(some)) > 1:
            lines.append(_effects(some, **how).assign(**named))
    found = cells.merge(pd.concat(lines)[lines[0].columns], "left", CELL).assign(source="measured")
    plain = found[found["k"] == 0].set_index(CELL[:2])
    at_floor = plain.index[plain["accuracy"] <= plain["floor"]]
    found.loc[(found["k"] > 0) & found.set_index(CELL[:2]).index.isin(at_floor), "verdict"] = (
        "floor"
    )
    published = [row for task in cells["task"].unique() for row in published_numbers(task)]
    return pd.concat([found, pd.DataFrame(published)], ignore_index=True)


def _models(rows: pd.DataFrame) -> Iterable[tuple[Row, pd.DataFrame]]:
    """Rows of each model on each task, with these two names."""
    for names, some in rows.groupby(CELL[:2], sort=False):
        yield dict(zip(CELL, names, strict=False)), some


def _keys(rows: pd.DataFrame) -> list[tuple[Any, ...]]:
    return [*rows[KEY].drop_duplicates().itertuples(index=False, name=None)]


def _effects(answers: pd.DataFrame, **how: Any) -> pd.DataFrame:
    """Cells of one model and task against each other; those of a metric that knows more than right
    and wrong, as if they had no answers.
    """
    right = answers["right"].where(answers["right"].isin((0, 1)))
    return effects(
        answers.assign(right=right), "right", arm=KEY, unit="doc_id", design="binary", **how
    )


def published_numbers(task: str) -> list[Row]:
    """The paper's cells of a task, as rows of `table1_numbers`; none for a task that it has not."""
    rows = []
    for model, cells in paper.TABLE1.get(paper.FORMS.get(task, task), {}).items():
        about: Row = {"task": task, "model": model, "source": "published", "control": "sinks"}
        for k, (value, stderr) in zip(paper.KS, cells, strict=True):
            about["protocol"] = {0: ""}.get(k, "paper")
            rows.append(about | {"k": k, "accuracy": value, "stderr": stderr})
    return rows


def table1_text(numbers: pd.DataFrame) -> pd.DataFrame:
    """The table as people read it: a row per model and control, the paper's below those measured, a
    column per number of keys and protocol.
    """
    rows = []
    for cell in numbers.sort_values("source", kind="stable").to_dict("records"):
        digits = {"measured": 3, "published": 2}[cell["source"]]
        text = f"{cell['accuracy']:.{digits}f} ± {cell['stderr']:.{digits}f}"
        rows.append(
            _named(cell) | {"source": cell["source"], "column": _masked(cell), "text": text}
        )
    columns = numbers.sort_values(["k", "protocol"]).apply(_masked, axis=1).unique()
    return as_printed(pd.DataFrame(rows), ["task", "model", "source"], columns)


def _named(cell: Any) -> Row:
    """Task and model of a row, with the keys if these are a control."""
    model = cell["model"]
    if cell["control"] != "sinks":
        model += f", {KEYS[cell['control']]}"
    return {"task": paper.TITLES.get(cell["task"], cell["task"]), "model": model}


def _masked(cell: Any) -> str:
    """Number of blocked keys, and the protocol."""
    if cell["k"] == 0:
        return "none"
    return f"{cell['k']}, {cell['protocol']}"


def lost_text(numbers: pd.DataFrame) -> pd.DataFrame:
    """Each masked cell as people read it: points lost, and the dose: keys, sinks among them, their
    attention.
    """
    rows = []
    masked = numbers[(numbers["source"] == "measured") & (numbers["k"] > 0)]
    for cell in masked.to_dict("records"):
        row = _named(cell) | {"masked": _masked(cell), "points": points(cell)}
        row |= {"questions": str(int(cell["samples"])), "verdict": cell["verdict"]}
        row |= {"no answer": percent(cell["no_answer"]), "keys a head": f"{cell['keys']:.2f}"}
        rows.append(row | {heading: percent(cell[name]) for name, heading in SHARES.items()})
    return pd.DataFrame(rows)


def points(line: Any) -> str:
    """A difference of shares in percentage points, with its interval if it has one."""
    mean, low, high = (signed(100 * line[end], 1) for end in ("mean", "low", "high"))
    if math.isnan(line["mean"]):
        return mean
    if math.isnan(line["low"]):
        return f"{mean}, too few questions for an interval"
    return f"{mean} ({low} … {high})"


def equal_mass_text(cells: pd.DataFrame, answers: pd.DataFrame) -> pd.DataFrame:
    """The protocol's keys against others of equal mass, in the same heads, in points of accuracy;
    inconclusive if fewer than half of the heads have such others.
    """
    rows = []
    for named, some in _models(answers):
        keys = _keys(some)
        both = [((way, "matched", k), (way, "equal_mass", k)) for way, _, k in keys]
        pairs = [*dict.fromkeys(pair for pair in both if {*pair} <= {*keys})]
        if not pairs:
            continue
        lines = _effects(some, pairs=pairs, words=("cost less", "cost more"))
        for line in lines.to_dict("records"):
            cell = (*named.values(), *(line[name] for name in KEY))
            heads = cells.set_index(CELL).loc[cell, "matched"]
            verdict = line["verdict"]
            if not heads >= MATCHED:
                verdict = f"inconclusive, {percent(heads)} of heads have such others"
            row = _named(named | line | {"control": "sinks"}) | {"masked": _masked(line)}
            rows.append(row | {"points": points(line), "verdict": verdict})
    return pd.DataFrame(rows)


def write_table1(folders: Iterable[str | Path], out: str | Path) -> Printed:
    """Read the run folders at or below `folders` and write table1.md, .tex and .csv into `out`.

    Raises:
        ValueError: for folders without a finished benchmark run, and two runs of one cell.
    """
    benchmarks, _ = found_in(folders)
    if not benchmarks:
        raise ValueError(
            "Table 1 is made from benchmark runs that came to their end, and there is none; run "
            "sinklab table1 (it goes on where it stopped) or sinklab eval"
        )
    cells, answers = read_cells(benchmarks)
    numbers = table1_numbers(cells, answers)
    beside = {
        LOST_TITLE: lost_text(numbers),
        "Most attended keys less others of equal mass": equal_mass_text(cells, answers),
    }
    beside = {title: table for title, table in beside.items() if len(table)}
    return write_printed(
        Path(out) / "table1", TITLE, table1_text(numbers), numbers, paper.TABLE1_NOTES, beside
    )
