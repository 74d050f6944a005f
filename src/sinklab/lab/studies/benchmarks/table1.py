"""The analysis paper's Table 1: accuracy over blocked keys by protocol, with doses, beside
published; which losses are sure; keys against others of equal mass, and one model against another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd

from sinklab.core.instrument.edits.dose import DOSE_COLUMNS
from sinklab.lab.analysis.differences import INCONCLUSIVE, effects
from sinklab.lab.analysis.doses import MATCHED, Doses, common_mass, no_phenomenon
from sinklab.lab.analysis.estimates import Z
from sinklab.lab.measures import PROTOCOLS
from sinklab.lab.reports import Printed, checked, percent, write_printed
from sinklab.lab.reports.runs import labels
from sinklab.lab.studies import Row
from sinklab.lab.studies.benchmarks import tables as paper
from sinklab.lab.studies.benchmarks.tables import Benchmark, found_in, key_words, signed, titled

POINTS = 0.05
"""Least loss that counts as the summary's «> 5 % performance drop», as a difference of two
accuracies.
"""
KEY = ["protocol", "control", "k"]
PLAIN = ("", "sinks", 0)
"""Cell with nothing blocked."""
MEASURED = "measured"
PUBLISHED = "published"
TITLE = "Accuracy with the most attended keys blocked (analysis paper, Table 1)"
CELLS_TITLE = "What each cell lost, and which keys were blocked"
CONTRASTS_TITLE = "Keys against others of equal mass, and models against each other"
DOSES = {
    "of them sinks": "sinks",
    "attention held": "held",
    "attention removed": "removed",
    "heads matched": "matched",
}
"""Heading of the table of doses -> the number that stands below it."""
VERDICT = "more than 5 points lost"
NO_DROP: Row = dict.fromkeys(("drop", "drop_low", "drop_high", "relative"), math.nan)
NO_DROP |= {"verdict": "–", "floor": math.nan}
"""Columns of a cell that is compared with none."""


def read_cells(benchmarks: Iterable[Benchmark]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Scored tasks of runs, a row each, and their answers, a row each: ``right`` by question.

    A cell is named by task, model, protocol, control and k. The protocol is "" if nothing is
    blocked; of likelihoods it is that of a clean pass, but for "rule". The paper's tasks come
    first, models as they come, sinks before their controls.

    Raises:
        ValueError: if two runs are the same cell.
    """
    listed = list(benchmarks)
    firsts = {one.alike: one.run for one in reversed(listed)}
    alike = [*dict.fromkeys(one.alike for one in listed)]
    names = dict(zip(alike, labels([firsts[each] for each in alike]), strict=True))
    first = {"sinks": "", "matched": " "}
    listed.sort(
        key=lambda one: (alike.index(one.alike), first.get(one.control, one.control), one.k)
    )
    tasks = [task for one in listed for task in one.tasks]
    cells: dict[Any, Row] = {}
    answers = []
    # those of the paper first
    for task, one in product(dict.fromkeys([*paper.TITLES, *tasks]), listed):
        if task not in one.tasks:
            continue
        cell, right = _cell(one, task)
        about = {"task": task, "model": names[one.alike]} | {name: cell[name] for name in KEY}
        before = cells.setdefault(tuple(about.values()), about | cell)
        if before["run"] != cell["run"]:
            raise ValueError(
                f"{before['run']} and {cell['run']} both hold {task} of {about['model']}, "
                f"(protocol, control, k) {tuple(about.values())[2:]}; read one of them"
            )
        answers.append(right.assign(**about))
    return pd.DataFrame([*cells.values()]), pd.concat(answers, ignore_index=True)


def _cell(one: Benchmark, task: str) -> tuple[Row, pd.DataFrame]:
    """A scored task, and its answers."""
    score = one.score(task)
    assert score is not None
    columns = {"task", "filter", "doc_id", "right", "metrics"}
    samples = checked(one.run, "samples", columns, what="a benchmark")
    samples = samples[(samples["task"] == task) & (samples["filter"] == score["filter"])]
    choices = samples.get("logprobs", pd.Series([], dtype=object)).map(len)
    right = [
        json.loads(metrics).get(score["metric"], first)
        for metrics, first in zip(samples["metrics"], samples["right"], strict=True)
    ]
    protocol, control = "", "sinks"
    if one.k:
        control = one.control
        protocol = str(one.run.info.settings.get("protocol") or "paper")
        if protocol != "rule" and choices.any():
            protocol = "clean"
    # guessing gets one in the number of choices right, and no text
    chance = (1 / choices[choices > 1]).sum() / max(len(choices), 1)
    floor = POINTS
    if chance:
        floor = max(POINTS, chance + 2 * score["stderr"])
    sinks, dose = one.rows("sinks", task), one.rows("doses", task)
    cell = {
        "protocol": protocol,
        "control": control,
        "k": one.k,
        "accuracy": score["value"],
        **score[["stderr", "samples", "no_answer"]],
        **{name: float(dose[name].iloc[0]) if name in dose else math.nan for name in DOSE_COLUMNS},
        **score[["metric", "filter"]],
        "run": str(one.run.path),
        "floor": floor,
        "is_diffusion": one.is_diffusion,
        "is_likelihood": bool(choices.any()),
        **{name: float(sinks.get(name, pd.Series()).mean()) for name in ("gu_rate", "share")},
    }
    return cell, pd.DataFrame({"doc_id": samples["doc_id"].to_numpy(), "right": right})


def table1_numbers(cells: pd.DataFrame, answers: pd.DataFrame) -> pd.DataFrame:
    """One row per cell of `read_cells`, and per published cell of these tasks.

    accuracy, stderr (binomial), samples; drop: accuracy with nothing blocked less this one, with
    the ends of its 95 % interval, paired by question; relative: drop over that with nothing
    blocked; verdict: "drops" (more than 5 points), "holds", "undecided" (corrected for all cells of
    the model and task), or "floor" if the unmasked accuracy is no more than 5 points, or chance and
    two standard errors (``floor``); no_answer: share of answers without the expected pattern; the
    other columns are those of `Dose`. Runs are compared that differ in masking alone.
    """
    rows = []
    for task, of_task in cells.groupby("task", sort=False):
        for model, mine in of_task.groupby("model", sort=False):
            drops = _drops(mine, answers[(answers["task"] == task) & (answers["model"] == model)])
            for _, cell in mine.iterrows():
                row = cell[["task", "model"]].to_dict() | {"source": MEASURED}
                row |= cell[[*KEY, "accuracy", "stderr", "samples"]].to_dict()
                row |= drops.get(tuple(cell[KEY]), NO_DROP)
                rows.append(row | cell["no_answer":"run"].to_dict())
        rows += published_numbers(str(task))
    return pd.DataFrame(rows)


def _drops(cells: pd.DataFrame, answers: pd.DataFrame) -> dict[Any, Row]:
    """Drops of the cells of one model on one task, by key."""
    plain = cells[cells["k"] == 0]
    known = set(answers["right"].dropna()) <= {0.0, 1.0}
    if plain.empty or len(cells) == 1 or not known:
        return {}
    how: dict[str, Any] = {"threshold": -POINTS, "words": ("holds", "drops")}
    lines = effects(answers, "right", arm=KEY, unit="doc_id", base=PLAIN, design="binary", **how)
    accuracy, floor = plain[["accuracy", "floor"]].iloc[0]
    drops = {}
    for _, line in lines.iterrows():
        word = line["verdict"].replace("inconclusive", "undecided")
        if accuracy <= floor:
            word = "floor"
        elif math.isnan(line["low"]):
            word = "–"
        drop = {"drop": -line["mean"], "drop_low": -line["high"], "drop_high": -line["low"]}
        drop |= {"relative": -line["mean"] / (accuracy or math.nan)}
        drops[tuple(line[KEY])] = drop | {"verdict": word, "floor": floor}
    return drops


def published_numbers(task: str) -> list[Row]:
    """The paper's cells of a task, as rows of `table1_numbers`; none for a task that it has not."""
    rows = []
    for model, cells in paper.TABLE1.get(paper.FORMS.get(task, task), {}).items():
        plain, error = cells[0]
        for k, (value, stderr) in zip(paper.KS, cells, strict=True):
            row = {"task": task, "model": model, "source": PUBLISHED, "protocol": ""}
            row |= {"control": "sinks", "k": k, "accuracy": value, "stderr": stderr, **NO_DROP}
            if k:
                drop, reach = plain - value, Z * math.hypot(error, stderr)
                low, high = drop - reach, drop + reach
                word = "undecided"
                if low > POINTS:
                    word = "drops"
                elif high <= POINTS:
                    word = "holds"
                row |= {"protocol": "paper", "drop": drop, "drop_low": low, "drop_high": high}
                row |= {"relative": drop / plain, "verdict": word, "floor": POINTS}
            rows.append(row)
    return rows


def table1_text(numbers: pd.DataFrame) -> pd.DataFrame:
    """The table as people read it: a row per model and control, the paper's below those measured, a
    column per number of keys and protocol. Doses are in `table1_doses`.

    Published rows of models that were measured stand first among the published ones.
    """
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
            digits = {MEASURED: 3, PUBLISHED: 2}[source]
            row |= {
                heading: f"{cell['accuracy']:.{digits}f} ± {cell['stderr']:.{digits}f}"
                for heading, cell in by.items()
            }
            rows.append(row | {VERDICT: _lost(by)})
    return pd.DataFrame(rows)


def _named(model: str, control: str) -> str:
    if control == "sinks":
        return model
    return f"{model}, {key_words(control, '')}"


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


def cells_text(numbers: pd.DataFrame) -> pd.DataFrame:
    """Each masked cell as people read it: points lost, and the dose: keys, sinks among them, their
    attention.
    """
    headings = _headings(numbers)
    rows = []
    for _, cell in numbers[(numbers["source"] == MEASURED) & (numbers["k"] > 0)].iterrows():
        row = {
            "task": titled(cell["task"]),
            "model": _named(cell["model"], cell["control"]),
            "masked": headings[cell["k"], cell["protocol"]],
            "points": points(-cell["drop"], -cell["drop_high"], -cell["drop_low"]),
            "of the accuracy": percent(-cell["relative"]),
            "questions": str(int(cell["samples"])),
            "verdict": cell["verdict"],
            "no answer": percent(cell["no_answer"]),
            "keys a head": f"{cell['keys']:.2f}",
        }
        rows.append(row | {heading: percent(cell[name]) for heading, name in DOSES.items()})
    return pd.DataFrame(rows)


def points(mean: float, low: float, high: float) -> str:
    """A difference of shares in percentage points, with its interval if it has one."""
    if math.isnan(mean):
        return "–"
    if math.isnan(low):
        return f"{signed(mean)}, too few questions for an interval"
    return f"{signed(mean)} ({signed(low)} … {signed(high)})"


def contrasts(cells: pd.DataFrame, answers: pd.DataFrame) -> pd.DataFrame:
    """Points that keys cost beyond others of equal mass, in the same heads; and that they cost a
    diffusion model more than an autoregressive one, by one protocol, at equal keys and at equal
    removed attention.

    Differences are paired by question, but at equal attention; verdicts on a task are corrected
    together.
    """
    rows: list[Row] = []
    for task, mine in cells.groupby("task", sort=False):
        known = mine.set_index(["model", *KEY])
        right = answers[answers["task"] == task].pivot_table("right", "doc_id", known.index.names)
        plain = {key[0]: known.loc[key] for key in known.index if key[1:] == PLAIN}
        # right with nothing blocked less right in a cell
        costs = {key: right[key[0], *PLAIN] - right[key] for key in known.index if key[0] in plain}
        wide = pd.DataFrame(costs).rename_axis(columns=known.index.names)
        both = product(costs, repeat=2)
        pairs = [(one, other) for one, other in both if _is_contrast(one, other, plain)]
        if not pairs:
            continue
        long = wide.stack(known.index.names, future_stack=True).rename("cost").reset_index()
        words = ("more", "less")
        lines = effects(
            long, "cost", arm=known.index.names, unit="doc_id", pairs=pairs, words=words
        )
        about = {"task": titled(str(task))}
        for (one, other), (_, line) in zip(pairs, lines.iterrows(), strict=True):
            reason = _too_few(one, other, plain, known)
            rows.append(
                about
                | {"points of": f"{one[0]}, {key_words(one[2], one[1])}"}
                | {"less": f"{other[0]}, {key_words(other[2], other[1])}"}
                | {"masked": f"{one[3]}, {one[1]}", "cost": points(*line[["mean", "low", "high"]])}
                | {"verdict": reason or line["verdict"]}
            )
        protocols = {(one[0], other[0], one[1]): None for one, other in pairs if one[0] != other[0]}
        for first, second, protocol in protocols:
            some = [_doses(known, wide, (model, protocol, "sinks")) for model in (first, second)]
            mass = common_mass(*some)
            line = pd.Series(
                {**dict.fromkeys(("mean", "low", "high"), math.nan), "verdict": INCONCLUSIVE}
            )
            if not math.isnan(mass):
                at_mass = {
                    model: one.at(mass) for model, one in zip((first, second), some, strict=True)
                }
                by_row = pd.DataFrame(
                    {"arm": model, "sample": row, "value": cost}
                    for model, cost_R in at_mass.items()
                    for row, cost in enumerate(cost_R)
                )
                line = effects(by_row, apart=[(first, second)], words=words).iloc[0]
            reason = _too_few((first,), (second,), plain, known)
            rows.append(
                about
                | {"points of": first, "less": second}
                | {"masked": f"{percent(mass)} of the attention, {protocol}"}
                | {"cost": points(*line[["mean", "low", "high"]])}
                | {"verdict": reason or line["verdict"]}
            )
    return pd.DataFrame(rows)


def _is_contrast(one: Any, other: Any, plain: dict[str, pd.Series]) -> bool:
    """Whether two cells, (model, protocol, control, k), are to be held against each other."""
    if one[0] == other[0]:
        return one[2] == "matched" and other[1:] == (one[1], "equal_mass", one[3])
    families = [plain[cell[0]]["is_diffusion"] for cell in (one, other)]
    return families == [True, False] and one[1:] == other[1:] and one[2:] > ("sinks", 0)


def _too_few(one: Any, other: Any, plain: dict[str, pd.Series], cells: pd.DataFrame) -> str:
    """Reason why nothing can be concluded of two cells: too few heads have a control, a model has
    no such sinks, or no score to lose; empty if it can.
    """
    if one[0] == other[0] and not cells.loc[one, "matched"] >= MATCHED:
        return f"inconclusive, {percent(cells.loc[one, 'matched'])} of heads have such others"
    for model in dict.fromkeys((one[0], other[0])):
        cell = plain[model]
        if one[0] != other[0]:
            why = no_phenomenon(model, cell["gu_rate"], cell["share"])
            if why:
                return why
        if cell["accuracy"] <= cell["floor"]:
            right = f"{model} gets {cell['accuracy']:.3f} with nothing blocked"
            return f"inconclusive, {right}, at most {cell['floor']:.3f}"
    return ""


def _doses(cells: pd.DataFrame, costs: pd.DataFrame, of: tuple[str, str, str]) -> Doses:
    """Attention removed and cost of each number of keys; numbers without a known share removed are
    left out.
    """
    removed = cells.loc[[key for key in costs if key[:3] == of], "removed"].dropna()
    return Doses(removed.to_numpy(float), costs[[*removed.index]].dropna().to_numpy(float))


def write_table1(folders: Iterable[str | Path], out: str | Path) -> Printed:
    """Read the run folders at or below `folders` and write table1.md, .tex and .csv into `out`.

    Raises:
        ValueError: for folders without a finished benchmark run, and two runs of one cell.
    """
    found = found_in(folders)
    if not found.benchmarks:
        left = ", ".join(f"{path} is unfinished" for path in found.unfinished[:3])
        raise ValueError(
            "Table 1 is made from benchmark runs that came to their end, and there is "
            f"none{left and '; '}{left}; run "
            "sinklab table1 (it goes on where it stopped) or sinklab eval"
        )
    cells, answers = read_cells(found.benchmarks)
    numbers = table1_numbers(cells, answers)
    left_out = [f"not finished, so left out: {path}" for path in found.unfinished]
    beside = {CELLS_TITLE: cells_text(numbers), CONTRASTS_TITLE: contrasts(cells, answers)}
    beside = {title: table for title, table in beside.items() if len(table)}
    notes = [*paper.TABLE1_NOTES, *left_out]
    text = table1_text(numbers)
    return write_printed(Path(out) / "table1", TITLE, text, numbers, notes, beside)
