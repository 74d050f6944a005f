"""The analysis paper's Table 1: accuracy over blocked keys by protocol, with doses, beside
published; the verdicts; and the table as its authors made it: models, settings, cost, rows.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sinklab.lab.analysis.intervals import Z
from sinklab.lab.measures import PROTOCOLS
from sinklab.lab.reports import Printed, percent, save_figure, write_printed
from sinklab.lab.reports.drawing import MARKERS
from sinklab.lab.reports.style import LOOK, themed
from sinklab.lab.studies import Row, kept_record
from sinklab.lab.studies.benchmarks import tables as paper
from sinklab.lab.studies.benchmarks.study import TOKENS, EvalSettings, Plan
from sinklab.lab.studies.benchmarks.table1_contrasts import POINTS, Cell, cells_of, contrasts
from sinklab.lab.studies.benchmarks.tables import Benchmark, found_in, paired_drop, signed, titled

MEASURED = "measured"
PUBLISHED = "published"
STYLES = {"paper": "-", "held": (0, (6, 1.5)), "rule": "-.", "clean": (0, (3, 1, 1, 1))}
"""Lines by protocol."""


def table1_figure(numbers: pd.DataFrame) -> Axes:
    """Accuracy over the number of blocked keys, a panel per task; published numbers with dashes.

    Bars are ± one binomial standard error. A model and its published twin have one colour, in every
    panel. Returns the first panel.
    """
    tasks, names = [*dict.fromkeys(numbers["task"])], dict[str, int]()
    with themed():
        canvas = Figure(figsize=(4.2 * len(tasks), 2.8), layout="constrained")
        panels = canvas.subplots(1, len(tasks), squeeze=False)[0]
        for task, ax in zip(tasks, panels, strict=True):
            _draw_panel(ax, numbers[numbers["task"] == task], names)
            ax.set_title(titled(task), y=1.0)
        found = [ax.get_legend_handles_labels() for ax in panels]
        lines = {name: line for shown in found for line, name in zip(*shown, strict=True)}
        canvas.legend(lines.values(), lines.keys(), loc="outside upper left", ncols=2)
        canvas.set_figheight(2.8 + 0.1 * len(lines))
    return panels[0]


def _draw_panel(ax: Axes, numbers: pd.DataFrame, names: dict[str, int]) -> None:
    ks = sorted({int(k) for k in numbers["k"]})
    for (source, model), cells in numbers.groupby(["source", "model"], sort=False):
        label = model
        stands_for = paper.published_model(model) or model
        if source == PUBLISHED:
            label += " (published)"
            stands_for = model
        index = names.setdefault(stands_for, len(names))
        masked = [*cells[cells["k"] > 0].groupby(["control", "protocol"], sort=False).groups]
        # every curve begins at the unmasked score
        for control, protocol in masked or [("sinks", "paper")]:
            own = "k == 0 or control == @control and protocol == @protocol"
            shown = cells.query(own).sort_values("k")
            unusual = [part for part in (control, protocol) if part not in ("sinks", "paper")]
            style: Any = STYLES[protocol]
            if control != "sinks":
                style = ":"
            if source == PUBLISHED:
                style = "--"
            places = [ks.index(int(k)) + 0.03 * index for k in shown["k"]]
            error = 100 * shown["stderr"].fillna(0)
            how: dict[str, Any] = {"color": LOOK.lines[index % 7], "linestyle": style}
            how |= {"marker": MARKERS[index % 6], "label": ", ".join([label, *unusual])}
            ax.errorbar(places, 100 * shown["accuracy"], error, capsize=2.5, **how)
    ax.set_xticks(range(len(ks)), [{0: "none"}.get(k, str(k)) for k in ks])
    ax.set(xlabel="keys blocked per layer and head", ylabel="right, %")
    ax.set_ylim(bottom=-2)
    ax.grid(axis="y")


TITLE = "Accuracy with the most attended keys blocked (analysis paper, Table 1)"
DOSE_TITLE = "Which keys were blocked"
DOSES = {
    "of them sinks": "sinks",
    "attention held": "held",
    "attention removed": "removed",
    "heads matched": "matched",
}
"""Heading of the table of doses -> the number that stands below it."""
VERDICT = "more than 5 points lost"


def table1_numbers(benchmarks: Iterable[Benchmark]) -> pd.DataFrame:
    """One row per scored (task, model, protocol, control, k), and per published cell of these
    tasks.

    accuracy, stderr (binomial), samples; drop: accuracy with nothing blocked less this one, with
    the ends of its 95 % interval, paired by question; relative: drop over that with nothing
    blocked; verdict: "drops" (more than 5 points), "holds", "undecided", or "floor" if the unmasked
    accuracy is no more than 5 points, or chance and two standard errors (``floor``); no_answer:
    share of answers without the expected pattern; the other columns are those of `Dose`. Runs are
    compared that differ in masking alone. The protocol is "" if nothing is blocked.

    Raises:
        ValueError: when two folders hold the same cell.
    """
    cells = cells_of(benchmarks)
    rows = []
    for task in dict.fromkeys(cell.task for cell in cells):
        rows += [_measured(cell) for cell in cells if cell.task == task]
        rows += published_numbers(task)
    return pd.DataFrame(rows)


def _measured(cell: Cell) -> Row:
    protocol, control, k = cell.key
    score = cell.score
    drop = NO_DROP
    if k and cell.plain is not None:
        change = paired_drop(cell.plain.rights, cell.rights)
        drop = _drop(cell.plain.score["value"], *change, cell.plain.floor)
    row = {
        "task": cell.task,
        "model": cell.model,
        "source": MEASURED,
        "protocol": protocol,
        "control": control,
        "k": k,
        "accuracy": score["value"],
        **score[["stderr", "samples"]],
        **drop,
        "no_answer": score["no_answer"],
        **cell.dose.row(),
        **score[["metric", "filter"]],
        "run": str(cell.run.run.path),
    }
    if math.isnan(row["removed"]):
        row["removed"] = cell.sinks("removed")
    return row


def _drop(plain: float, drop: float, low: float, high: float, floor: float = POINTS) -> Row:
    ends = {"drop": drop, "drop_low": low, "drop_high": high}
    relative = drop / (plain or math.nan)
    return ends | {
        "relative": relative,
        "verdict": verdict(plain, low, high, floor),
        "floor": floor,
    }


def verdict(plain: float, low: float, high: float, floor: float = POINTS) -> str:
    """Verdict on a drop: "drops" if its interval lies beyond 5 points, "holds" if within them, else
    "undecided"; "floor" if the unmasked accuracy is no more than the floor, "–" without an
    interval.
    """
    if plain <= floor:
        return "floor"
    if math.isnan(low):
        return "–"
    if low > POINTS:
        return "drops"
    if high <= POINTS:
        return "holds"
    return "undecided"


NO_DROP = _drop(1, math.nan, math.nan, math.nan, math.nan)
"""Columns of a cell that is compared with none."""


def published_numbers(task: str) -> list[Row]:
    """The paper's cells of a task, as rows of `table1_numbers`; none for a task that it has not."""
    rows = []
    for model, cells in paper.TABLE1.get(paper.FORMS.get(task, task), {}).items():
        plain, error = cells[0]
        for k, (value, stderr) in zip(paper.KS, cells, strict=True):
            row = {"task": task, "model": model, "source": PUBLISHED, "protocol": ""}
            row |= {"control": "sinks", "k": k, "accuracy": value, "stderr": stderr, **NO_DROP}
            if k:
                drop = plain - value
                reach = Z * math.hypot(error, stderr)
                row |= {"protocol": "paper"} | _drop(plain, drop, drop - reach, drop + reach)
            rows.append(row)
    return rows


def table1_text(numbers: pd.DataFrame) -> pd.DataFrame:
    """The table as people read it: a row per model and control, the paper's below those measured, a
    column per number of keys and protocol. Doses are in `table1_doses`.

    Published rows of models that were measured stand first among the published ones.
    """
    if numbers.empty:
        return pd.DataFrame()
    headings = _headings(numbers)
    rows = []
    for task, of_task in numbers.groupby("task", sort=False):
        measured = of_task.loc[of_task["source"] == MEASURED, "model"]
        met = {*map(paper.published_model, measured)}
        groups = list(of_task.groupby(["source", "model", "control"], sort=False))
        groups.sort(key=lambda group: (group[0][0] != MEASURED, group[0][1] not in met))
        for (source, model, control), cells in groups:
            row = {"task": titled(task), "model": _named(model, control), "source": source}
            row |= dict.fromkeys(headings.values(), "–")
            by = {headings[cell["k"], cell["protocol"]]: cell for _, cell in cells.iterrows()}
            row |= {heading: _cell(cell) for heading, cell in by.items()}
            rows.append(row | {VERDICT: _lost(by)})
    return pd.DataFrame(rows)


def _named(model: str, control: str) -> str:
    if control == "sinks":
        return model
    return f"{model}, {paper.key_words(control, '')}"


def _headings(numbers: pd.DataFrame) -> dict[tuple[int, str], str]:
    """Column of each (k, protocol): the number alone in the paper's own table."""
    found = {*zip(numbers["k"], numbers["protocol"], strict=True)}
    is_paper = {protocol for _, protocol in found} <= {"", "paper"}
    headings = {}
    for k, own in sorted(found, key=lambda one: (one[0], ("", *PROTOCOLS).index(one[1]))):
        headings[k, own] = f"{k}, {own}"
        if k == 0:
            headings[k, own] = "none"
        elif is_paper:
            headings[k, own] = str(k)
    return headings


def _cell(cell: pd.Series) -> str:
    digits = {MEASURED: 3, PUBLISHED: 2}[cell["source"]]
    return f"{cell['accuracy']:.{digits}f} ± {cell['stderr']:.{digits}f}"


def table1_doses(numbers: pd.DataFrame) -> pd.DataFrame:
    """Doses of each measured cell, as people read them: keys, sinks among them, their attention."""
    if numbers.empty:
        return numbers
    headings = _headings(numbers)
    rows = []
    for _, cell in numbers[numbers["keys"].notna()].iterrows():
        row = {
            "task": titled(cell["task"]),
            "model": _named(cell["model"], cell["control"]),
            "masked": headings[cell["k"], cell["protocol"]],
            "keys a head": f"{cell['keys']:.2f}",
        }
        rows.append(row | {heading: percent(cell[name]) for heading, name in DOSES.items()})
    return pd.DataFrame(rows)


def _lost(by: dict[str, pd.Series]) -> str:
    """Numbers of blocked keys with more than 5 points lost, in words."""
    verdicts = {heading: cell["verdict"] for heading, cell in by.items()}
    if "floor" in verdicts.values():
        if any(cell["floor"] > POINTS for cell in by.values()):
            return "not above chance"
        return "not 5 points right"
    lost = [heading for heading, word in verdicts.items() if word == "drops"]
    unsure = [
        f"{name} ({signed(-by[name]['drop'])})"
        for name, word in verdicts.items()
        if word == "undecided"
    ]
    words = {"at": lost, "undecided at": unsure}
    parts = [f"{how} {', '.join(names)}" for how, names in words.items() if names]
    if not parts and {*verdicts.values()} == {"–"}:
        return "–"
    return "; ".join(parts) or "no"


def write_table1(
    folders: Iterable[str | Path], out: str | Path, formats: Iterable[str] = ("png",)
) -> Printed:
    """Read the run folders at or below `folders` and write table1.md, .tex, .csv and a figure into
    `out`.

    Raises:
        ValueError: for folders without a finished benchmark run, an unknown format, two runs of one
            cell.
    """
    found = found_in(folders)
    if not found.benchmarks:
        left = ", ".join(f"{path} is unfinished" for path in found.unfinished[:3])
        raise ValueError(
            "Table 1 is made from benchmark runs that came to their end, and there is "
            f"none{left and '; '}{left}; run "
            "sinklab table1 (it goes on where it stopped) or sinklab eval"
        )
    numbers = table1_numbers(found.benchmarks)
    notes = list(paper.TABLE1_NOTES)
    told = paper.spoken()
    measured = numbers[numbers["source"] == MEASURED]
    for _, cell in measured[~measured["verdict"].isin(["–", "floor"])].iterrows():
        notes += told("lost", cell)
    for (task, model), cells in measured.groupby(["task", "model"], sort=False):
        notes += told("lacking", task, model, cells)
    notes += [f"not finished, so left out: {path}" for path in found.unfinished]
    notes += contrasts(found.benchmarks)
    stem = Path(out) / "table1"
    doses = table1_doses(numbers)
    beside = {}
    if len(doses):
        beside[DOSE_TITLE] = doses
    printed = write_printed(stem, TITLE, table1_text(numbers), numbers, notes, beside)
    drawn = save_figure(partial(table1_figure, numbers), stem, formats)
    return replace(printed, paths=(*printed.paths, *drawn))


MODELS = {
    "Dream-7B": "Dream-org/Dream-v0-Instruct-7B",
    "LLaDA-8B": "GSAI-ML/LLaDA-8B-Instruct",
    "MMaDA-8B": "Gen-Verse/MMaDA-8B-MixCoT",
    "Llama-3.1-8B": "meta-llama/Llama-3.1-8B-Instruct",
}
"""Models of the table -> names on the Hub. The paper says «instruct» and no more; for MMaDA the
tuned one is taken.
"""
QUESTIONS = {"gsm8k": 1319, "humaneval": 164}
"""Documents of each benchmark."""
SETTINGS = EvalSettings(tasks=tuple(QUESTIONS))
"""Settings of every cell: blocks of 32, one token a step, temperature 0; `TOKENS` new ones (section
4.3).
"""
PLAN = Plan(ks=paper.KS)
WEIGHTS = ("*.safetensors", "*.bin", "*.pth")
NOT_RUN = (
    "not run by the authors of this package, who had no such weights: the rows are the paper's own"
)
"""A line that stands below the expected rows."""


def whose(models: Sequence[str]) -> dict[str, str]:
    """Names or folders of models -> the models of the table that they stand for.

    Raises:
        ValueError: for one that stands for none of them.
    """
    found = {}
    for name in models:
        meant = paper.published_model(name)
        if meant is None:
            raise ValueError(
                f"the paper's table has {', '.join(MODELS)}, got {name}; give folders that are "
                "called so, or leave out --paper"
            )
        found[name] = meant
    return found


def expected(models: Sequence[str], tasks: Sequence[str]) -> pd.DataFrame:
    """The published rows of these models of the table, as people read them.

    Args:
        models: as in `MODELS`.
        tasks: those of other tasks are left out; the paper has none.
    """
    rows = [row for task in tasks for row in published_numbers(task) if row["model"] in models]
    return table1_text(pd.DataFrame(rows)).drop(columns=["source", VERDICT], errors="ignore")


def cost(tasks: Sequence[str], ks: Sequence[int]) -> str:
    """Cost of the whole protocol for one model, in words: questions, steps, evaluations."""
    counted = {task: (QUESTIONS[task], TOKENS[task]) for task in tasks if task in paper.TABLE1}
    parts = [f"{n:,} questions of {task} × {steps} steps" for task, (n, steps) in counted.items()]
    evaluations = len(ks) * sum(map(math.prod, counted.values()))
    return (
        f"the paper's protocol: {' and '.join(parts)}, each with {len(ks)} numbers of keys: "
        f"{evaluations:,} steps a model"
    )


def deviations(settings: EvalSettings, plan: Plan) -> list[str]:
    """The settings that are not the paper's, as «name=value»; if the paper gives none, compared
    with this package's default.
    """
    # tasks, folders and permissions change no score of a task
    free = {"tasks", "data", "run_code", "chat", "paper"}
    own = dict(sorted(kept_record(settings).items()))
    found = []
    for given, usual in ((own, kept_record(SETTINGS)), (vars(plan), vars(PLAN))):
        names = [name for name in given if name not in free and given[name] != usual[name]]
        found += [f"{name}={given[name]}" for name in names]
    return found


def check_weights(models: Sequence[str]) -> None:
    """Refuse models without weights on this machine: nothing of this size is fetched unasked.

    Args:
        models: folders, or names on the Hub that were fetched before.

    Raises:
        ValueError: naming all that are missing.
    """
    missing = [name for name in models if not _has_weights(name)]
    if missing:
        raise ValueError(
            f"the weights of {', '.join(missing)} are not on this machine; fetch them (hf download "
            "NAME, 15 to 17 GB each), then give their names or folders with --model"
        )


def _has_weights(name: str) -> bool:
    folder = Path(name)
    if not folder.is_dir():
        import huggingface_hub as hub

        try:
            folder = Path(hub.snapshot_download(name, local_files_only=True))
        except (hub.errors.HFValidationError, hub.errors.LocalEntryNotFoundError):
            return False
    return any(any(folder.glob(pattern)) for pattern in WEIGHTS)
