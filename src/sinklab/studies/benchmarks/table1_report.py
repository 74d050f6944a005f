"""The analysis paper's Table 1: accuracy over masked sinks, measured beside published, with the > 5 % verdict."""

import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sinklab.analysis.intervals import Z
from sinklab.reports.printed import Printed, save_figure, write_printed
from sinklab.reports.runs import labels
from sinklab.reports.style import MARKERS, Theme, theme_named, themed
from sinklab.studies.benchmarks import tables as paper
from sinklab.studies.benchmarks.tables import Benchmark, found_in, paired_drop

MEASURED, PUBLISHED = "measured", "published"


def table1_figure(numbers: pd.DataFrame, *, theme: str = "light") -> Figure:
    """Accuracy over the number of masked columns, a panel per task; measured with full lines, published faint.

    Bars are ± one binomial standard error.
    """
    look = theme_named(theme)
    tasks = list(dict.fromkeys(numbers["task"]))
    names: dict[str, int] = {}
    entries: dict[str, Any] = {}
    with themed(look):
        figure = Figure(figsize=(4.2 * max(len(tasks), 1.3), 3.4), layout="constrained")
        for axes, task in zip(np.atleast_1d(figure.subplots(1, len(tasks))), tasks, strict=True):
            _panel(axes, numbers[numbers["task"] == task], look, names)
            axes.set_title(_titled(task))
            handles, labels = axes.get_legend_handles_labels()
            entries |= dict(zip(labels, handles, strict=True))
        figure.legend(entries.values(), entries.keys(), loc="outside upper left", ncols=min(len(tasks) + 1, 3))
    return figure


def _panel(axes: Axes, numbers: pd.DataFrame, look: Theme, names: dict[str, int]) -> None:
    """`names`: a model and its published twin have one colour, in every panel."""
    ks = sorted({int(k) for k in numbers["k"]})
    for (source, model, control), cells in numbers.groupby(["source", "model", "control"], sort=False):
        stands_for = model if source == PUBLISHED else paper.published_model(model) or model
        index = names.setdefault(stands_for, len(names))
        base = numbers[(numbers["source"] == source) & (numbers["model"] == model) & (numbers["k"] == 0)]
        # every control begins at the unmasked score
        shown = (cells if control == "sinks" else pd.concat([base, cells])).sort_values("k")
        places = [ks.index(int(k)) + 0.03 * index for k in shown["k"]]
        measured = source == MEASURED
        axes.errorbar(
            places, 100 * shown["accuracy"], 100 * shown["stderr"], color=look.runs[index % len(look.runs)],
            marker=MARKERS[index % len(MARKERS)], linestyle=("-" if control == "sinks" else ":") if measured else "--",
            alpha=1 if measured else 0.45, capsize=2, elinewidth=1, linewidth=1.8 if measured else 1,
            label=f"{model}{'' if measured else ' (published)'}{'' if control == 'sinks' else f', {control}'}",
        )  # fmt: skip
    axes.set_xticks(range(len(ks)), ["none" if k == 0 else str(k) for k in ks])
    axes.set(xlabel="columns masked per layer and head", ylabel="right, %", ylim=(-2, None))
    axes.grid(axis="y")


POINTS = 0.05
"""What the summary calls a «> 5 % performance drop», as a difference of two accuracies."""
TITLE = "Accuracy with sinks masked (analysis paper, Table 1)"
VERDICT = "more than 5 points lost"
COLUMNS: tuple[str, ...] = ("task", "model", "source", "control", "k", "accuracy", "stderr", "samples", "drop")
COLUMNS += ("drop_low", "drop_high", "relative", "verdict", "no_answer", "removed")


def table1_numbers(benchmarks: Iterable[Benchmark]) -> pd.DataFrame:
    """One row per (task, model, control, k) that was scored, and per published cell of these tasks.

    accuracy, stderr (binomial), samples; drop: accuracy without masking less this one, with the ends of its 95 %
    interval, paired by question; relative: drop over the accuracy without masking; verdict: "drops" (more than 5
    points), "holds", "undecided", or "floor" where not even 5 points were right; no_answer: share of answers without
    the expected pattern; removed: mean share of attention that was masked, where it was watched. Runs are compared that
    differ in masking alone.

    Raises:
        ValueError: when two folders hold the same cell.
    """
    listed = list(benchmarks)
    # a label for each model under its settings
    firsts = {one.alike: one.run for one in reversed(listed)}
    order = [*dict.fromkeys(one.alike for one in listed)]
    names = dict(zip(order, labels([firsts[alike] for alike in order]), strict=True))
    rows: list[dict[str, Any]] = []
    tasks = dict.fromkeys(task for one in listed for task in one.tasks)
    for task in sorted(tasks, key=lambda task: [*paper.TITLES, task].index(task)):
        for alike, model in names.items():
            rows += _measured(task, model, [one for one in listed if one.alike == alike and task in one.tasks])
        rows += _published(task)
    numbers = pd.DataFrame(rows)
    numbers = numbers.reindex(columns=[*COLUMNS, *(name for name in numbers if name not in COLUMNS)])
    return numbers.fillna({"verdict": "–"})


def _measured(task: str, model: str, group: list[Benchmark]) -> list[dict[str, Any]]:
    cells: dict[tuple[str, int], Benchmark] = {}
    for one in sorted(group, key=lambda one: (one.control != "sinks", one.control, one.k)):
        key = (one.control if one.k else "sinks", one.k)
        if key in cells:
            raise ValueError(
                f"{cells[key].run.path} and {one.run.path} both hold {task} of {model} with {one.k} masked {key[0]}; "
                "read one of them"
            )
        cells[key] = one
    scores = {key: score for key, one in cells.items() if (score := one.score(task)) is not None}
    plain = scores.get(("sinks", 0))
    rows = []
    for (control, k), score in scores.items():
        one = cells[control, k]
        row: dict[str, Any] = {"task": task, "model": model, "source": MEASURED, "control": control, "k": k}
        row |= {"accuracy": score["value"], "removed": _removed(one, task)}
        row |= score[["stderr", "samples", "no_answer", "metric", "filter"]].to_dict() | {"run": str(one.run.path)}
        if k and plain is not None:
            right = cells["sinks", 0].right(task, plain), one.right(task, score)
            row |= _drop(plain["value"], *paired_drop(*right))
        rows.append(row)
    return rows


def _drop(plain: float, drop: float, low: float, high: float) -> dict[str, Any]:
    numbers = {"drop": drop, "drop_low": low, "drop_high": high, "relative": drop / plain if plain else math.nan}
    return numbers | {"verdict": verdict(plain, low, high)}


def verdict(plain: float, low: float, high: float) -> str:
    """Whether the interval of a drop lies beyond 5 points, within them, or neither; "floor" where less is right."""
    if plain <= POINTS:
        return "floor"
    if math.isnan(low):
        return "–"
    return "drops" if low > POINTS else "holds" if high <= POINTS else "undecided"


def _removed(one: Benchmark, task: str) -> float:
    frame = one.run.table("sinks") if "sinks" in one.run.tables else pd.DataFrame()
    return float(frame.loc[frame["task"] == task, "removed"].mean()) if "removed" in frame else math.nan


def _published(task: str) -> list[dict[str, Any]]:
    rows = []
    for model, cells in paper.TABLE1.get(paper.FORMS.get(task, task), {}).items():
        plain, error = cells[0]
        for k, (value, stderr) in zip(paper.KS, cells, strict=True):
            row: dict[str, Any] = {"task": task, "model": model, "source": PUBLISHED, "control": "sinks", "k": k}
            reach, drop = Z * math.hypot(error, stderr), plain - value
            row |= {"accuracy": value, "stderr": stderr}
            rows.append(row | (_drop(plain, drop, drop - reach, drop + reach) if k else {}))
    return rows


def _titled(task: object) -> str:
    return paper.TITLES.get(str(task), str(task))


def table1_text(numbers: pd.DataFrame) -> pd.DataFrame:
    """The table as people read it: a row per model, the paper's below those measured, a column per number of sinks.

    Published rows of models that were measured stand first among the published ones.
    """
    if numbers.empty:
        return pd.DataFrame()
    ks = sorted({int(k) for k in numbers["k"]})
    rows = []
    for task, of_task in numbers.groupby("task", sort=False):
        met = {paper.published_model(str(name)) for name in of_task.loc[of_task["source"] == MEASURED, "model"]}
        groups = list(of_task.groupby(["source", "model", "control"], sort=False))
        groups.sort(key=lambda group: (group[0][0] != MEASURED, group[0][1] not in met))
        for (source, model, control), cells in groups:
            by_k = {int(cell["k"]): cell for _, cell in cells.iterrows()}
            name = model if control == "sinks" else f"{model}, {control} columns"
            shown = {"none" if k == 0 else str(k): _cell(by_k.get(k)) for k in ks}
            of_row = {"task": _titled(task), "model": name, "source": source}
            rows.append(of_row | shown | {VERDICT: _lost(by_k)})
    return pd.DataFrame(rows)


def _cell(cell: pd.Series | None) -> str:
    if cell is None:
        return "–"
    digits = 3 if cell["source"] == MEASURED else 2
    return f"{cell['accuracy']:.{digits}f} ± {cell['stderr']:.{digits}f}"


def _lost(by_k: dict[int, pd.Series]) -> str:
    """In words: at which numbers of masked sinks."""
    verdicts = {k: cell["verdict"] for k, cell in by_k.items()}
    if "floor" in verdicts.values():
        return "not 5 points right"
    lost = [str(k) for k, word in verdicts.items() if word == "drops"]
    unsure = [f"{k} ({_points(-by_k[k]['drop'])})" for k, word in verdicts.items() if word == "undecided"]
    parts = [f"{text} {', '.join(ks)}" for text, ks in (("at", lost), ("undecided at", unsure)) if ks]
    return "; ".join(parts) or ("–" if set(verdicts.values()) <= {"–"} else "no")


def table1_notes(numbers: pd.DataFrame, unfinished: Iterable[Path] = ()) -> list[str]:
    """What has to be said below the table."""
    notes = list(paper.TABLE1_NOTES)
    measured = numbers[numbers["source"] == MEASURED] if len(numbers) else numbers
    for _, cell in measured.iterrows():
        if cell["verdict"] not in ("–", "floor"):
            relative = "" if math.isnan(cell["relative"]) else f", {-100 * cell['relative']:+.0f} % of the accuracy"
            notes.append(
                f"{_titled(cell['task'])}, {cell['model']}, {cell['k']} {cell['control']}: "
                f"{_points(-cell['drop'])} points ({_points(-cell['drop_high'])} … {_points(-cell['drop_low'])})"
                f"{relative.replace('-', '−')} on {int(cell['samples'])} questions: {cell['verdict']}"
            )
    for (task, model), cells in measured.groupby(["task", "model"], sort=False):
        if (share := cells["no_answer"].max()) > 0:
            notes.append(f"{_titled(task)}, {model}: no answer found in up to {share:.0%} of a cell")
        if (cells["verdict"] == "floor").any():
            notes.append(f"{_titled(task)}, {model}: too little is right for 5 points to be lost")
    return notes + [f"not finished, so left out: {path}" for path in unfinished]


def _points(share: float) -> str:
    # no −0.0
    return f"{round(100 * share, 1) + 0.0:+.1f}".replace("-", "−")


def write_table1(folders: Iterable[str | Path], out: str | Path, formats: Iterable[str] = ("png",)) -> Printed:
    """Read the run folders at or below `folders` and write table1.md, .tex, .csv and a figure into `out`.

    Raises:
        ValueError: for folders without a finished benchmark run, an unknown format, two runs of one cell.
    """
    found = found_in(folders)
    if not found.benchmarks:
        left = ", ".join(f"{path} is unfinished" for path in found.unfinished[:3])
        raise ValueError(
            f"Table 1 is made from benchmark runs that came to their end, and there is none{left and '; '}{left}; run "
            "sinklab table1 (it goes on where it stopped) or sinklab eval"
        )
    numbers = table1_numbers(found.benchmarks)
    notes, stem = table1_notes(numbers, found.unfinished), Path(out) / "table1"
    printed = write_printed(stem, TITLE, table1_text(numbers), numbers, notes)
    drawn = save_figure(lambda: table1_figure(numbers), stem, formats)
    return replace(printed, paths=(*printed.paths, *drawn))
