"""The reasoning battery in tables, sentences and figures: the cost of blocking sinks, by skill,
model and decoding.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from sinklab.core.probing import DOSE_COLUMNS, Dose
from sinklab.lab.analysis import mean_over
from sinklab.lab.analysis.doses import MATCHED, no_phenomenon
from sinklab.lab.records import Run, of_twin, write_beside
from sinklab.lab.reports import (
    Axis,
    Chart,
    NotRecorded,
    Reader,
    drawn_as,
    figure,
    save_figure,
    statements,
)
from sinklab.lab.reports.drawing import Look
from sinklab.lab.reports.tables import WRITERS
from sinklab.lab.studies import hidden_words, no_twins, shown_by, twins_of
from sinklab.lab.studies.battery.study import ALL, BESIDE
from sinklab.lab.studies.battery.study import CONTROLS as NAMED

GATE = 0.9
"""Share of right answers with nothing blocked, above which a drop can be seen."""
CONTROLS = {name: f"{hidden_words(*how)}, protocol {how[1]}" for name, how in NAMED.items()}


@dataclass(frozen=True, eq=False)
class Series(Reader):
    """One model under one condition: a curve, which shares its colour with none."""

    condition: str
    twin: str = ""
    """Source of the numbers: the run's own model if empty, or this control on the same
    problems.
    """

    @property
    def accuracy(self) -> pd.DataFrame:
        """Rows of this curve in the table ``accuracy``."""
        return self.rows("accuracy")

    def rows(self, name: str) -> pd.DataFrame:
        """Rows of this curve in a table of the run, with the series in front."""
        table = self.run.table(of_twin(name, self.twin))
        own = table[table["condition"] == self.condition].drop(columns="condition")
        own.insert(0, "series", self.label)
        return own

    def curve(self, control: str, skill: str = ALL, level: int = 0) -> pd.DataFrame:
        """Rows over k, k = 0 first."""
        cell = "skill == @skill and level == @level"
        table = self.accuracy.query(f"{cell} and (control == 'none' or control == @control)")
        return table.sort_values("k")

    @property
    def controls(self) -> list[str]:
        """Controls that were run, in the order of `CONTROLS`."""
        there = set(self.accuracy["control"])
        return [name for name in CONTROLS if name in there]


Runs = Iterable[Run | Series] | Run


def as_series(runs: Runs, labels: Sequence[str] | None = None) -> list[Series]:
    """The curves of some runs, labelled by the folder's name, and by the condition if a run has
    several.

    Raises:
        NotRecorded: for a run that is none of the battery, or is not finished.
        ValueError: for other than one label a curve, if some are given.
    """
    given: list[Any] = [runs]
    if not isinstance(runs, Run):
        given = [*runs]
    found = []
    for run in given:
        if isinstance(run, Series):
            found.append(run)
            continue
        if run.info.kind != "battery" or "accuracy" not in run.tables:
            raise NotRecorded(
                f"This needs finished runs of the reasoning battery: {run.path} is of kind "
                f"{run.info.kind!r} or not finished."
            )
        conditions = run.table("accuracy")["condition"].unique()
        for condition in conditions:
            label = run.path.name
            if len(conditions) > 1:
                label += f", {condition}"
            found.append(Series(run, label, label, condition))
    if labels is None:
        return found
    if len(labels) != len(found):
        raise ValueError(
            f"labels name every curve, but there are {len(labels)} for {len(found)}; give as many"
        )
    return [
        replace(one, label=label, repeats=label) for one, label in zip(found, labels, strict=True)
    ]


def battery_gate(runs: Runs) -> pd.DataFrame:
    """Share of right answers at the easiest level with nothing blocked, by skill, and whether it
    passes `GATE`.
    """
    table = pd.concat([one.accuracy for one in as_series(runs)], ignore_index=True)
    table = table.query("control == 'none' and skill != @ALL and level > 0")
    easiest = table["level"] == table.groupby("series")["level"].transform("min")
    table = table.loc[easiest, ["series", "skill", "level", "n", "share", "low", "high"]]
    return table.assign(holds=table["share"] > GATE).reset_index(drop=True)


def battery_scores(runs: Runs, *, by_level: bool = False) -> pd.DataFrame:
    """The accuracy of every curve with its differences to nothing blocked (`delta`) and to its
    control (`beyond`), and the dose: the columns of `Dose`, and the share of the keys that was
    blocked (`of_keys`).

    Args:
        runs: of the battery.
        by_level: a row per level; otherwise over all levels.
    """
    series = as_series(runs)
    table = pd.concat([one.accuracy for one in series], ignore_index=True)
    table = table[(table["level"] > 0) == by_level]
    keys = ["series", "control", "k", "skill", "level"]
    if not by_level:
        table = table.drop(columns=keys.pop())
    parts = [one.rows("removed") for one in series if "removed" in one.run.tables]
    names = [*DOSE_COLUMNS, "of_keys"]
    if not parts:
        return table.assign(**dict.fromkeys(names, math.nan)).reset_index(drop=True)
    # over all skills too
    removed = pd.concat(parts, ignore_index=True)
    removed = pd.concat([removed, removed.assign(skill=ALL)], ignore_index=True)
    removed = removed.rename(columns={"share": "removed", "mass": "held"})
    removed = removed.reindex(columns=[*keys, *names, "chosen"]).astype(
        dict.fromkeys([*names, "chosen"], float)
    )
    means = removed.groupby(keys, as_index=False).mean()
    doses = means.assign(sinks=means["sinks"] / means["chosen"]).drop(columns="chosen")
    return table.merge(doses, on=keys, how="left")


def battery_contrasts(runs: Runs) -> pd.DataFrame:
    """Whether blocking costs one curve more than another: the drops of each against those of the
    first one, its reference.

    Compared are the problems of those skills and levels in which both have more than `GATE` right
    with nothing blocked. ``difference`` is the drop of the series less that of the reference
    (negative: it loses more), with a 95 % interval over problems; none with fewer than 8.
    ``verdict``: which loses more, or why that cannot be told: both need heavy sinks
    (`no_phenomenon`).

    Args:
        runs: of the battery, on the same problems.
    """
    reference, *series = as_series(runs)
    others = _right(reference)
    rows = []
    for one in series:
        mine = _right(one)
        able = _able(mine).intersection(_able(others))
        for control, k in sorted(set(mine) & set(others) - {("none", 0)}):
            drops = [table[control, k] - table["none", 0] for table in (mine, others)]
            both = pd.concat(drops, axis=1, keys=["one", "other"]).dropna()
            both = both[both.index.droplevel("question").isin(able)]
            if both.empty:
                continue
            apart = mean_over(both["one"] - both["other"])
            low, high = apart.interval
            told = {True: "it loses less", False: "it loses more", None: "inconclusive"}
            verdict = told[apart.above()]
            why = _no_sinks(one) or _no_sinks(reference)
            if why:
                verdict = f"inconclusive: {why}"
            row = {"series": one.label, "reference": reference.label, "control": control, "k": k}
            row |= {"cells": both.index.droplevel("question").nunique(), "n": len(both)}
            row |= {"drop": both["one"].mean(), "reference_drop": both["other"].mean()}
            row |= {"difference": apart.value, "low": low, "high": high, "verdict": verdict}
            rows.append(row)
    return pd.DataFrame(rows)


def _no_sinks(one: Series) -> str:
    """Reason why there is no phenomenon to remove; empty if there is one."""
    if "phenomenon" not in one.run.tables:
        return no_phenomenon(one.label, math.nan, math.nan)
    return no_phenomenon(one.label, *one.rows("phenomenon")[["gu_rate", "share"]].mean())


def _right(one: Series) -> pd.DataFrame:
    """Right (1) or wrong (0): a row per (skill, level, question), a column per (control, k)."""
    wide = one.rows("answers").pivot(
        index=["skill", "level", "question"], columns=["control", "k"], values="right"
    )
    return wide.astype(float)


def _able(right: pd.DataFrame) -> pd.Index:
    share = right["none", 0].groupby(level=["skill", "level"]).mean()
    return share[share > GATE].index


def battery_sentences(runs: Iterable[Run] | Run) -> list[str]:
    """Sentences on the runs, a line per curve: the gate, accuracy over the number of blocked keys,
    and the cells left out.
    """
    if isinstance(runs, Run):
        runs = [runs]
    runs = list(runs)
    told = statements("sinklab.lab.studies.battery", (), least=GATE, matched=MATCHED)
    gate = battery_gate(runs)
    lines = []
    for one in as_series(runs):
        lines += told("gate", one.label, gate[gate["series"] == one.label])
        for control in one.controls:
            lines += told("curve", one.label, CONTROLS[control], *_curve(one, control))
    for run in runs:
        if "skipped" in run.tables:
            asked = len(run.parts("answers"))
            lines += told("skipped", run.path.name, len(run.table("skipped")), asked)
    return lines + no_twins({run.path.name: run for run in runs})


def _curve(one: Series, control: str) -> tuple[Any, ...]:
    """Arguments of `curve` in sentences.jinja: up to the greatest k that all questions are long
    enough for.
    """
    curve = one.curve(control)
    curve = curve[(curve["n"] == curve["n"].iloc[0]).to_numpy()]
    most = curve.iloc[-1]
    twins = {
        kind: replace(one, twin=kind).curve(control).set_index("k").loc[most["k"]]
        for kind in twins_of(one.run)
    }
    marks = {}
    for name in ("delta", "beyond"):
        texts = dict.fromkeys(twins, "")
        for kind, row in twins.items():
            if pd.notna(row[name]):
                texts[kind] = f"{100 * row[name]:+.1f}"
        marks[name] = shown_by(texts)
    scores = battery_scores([one]).query("control == @control and k == @most.k and skill == @ALL")
    dose = pd.Series({"matched": math.nan, "keys": math.nan})
    if len(scores):
        dose = scores.iloc[0]
    words = ""
    if pd.notna(dose["keys"]):
        words = str(Dose.from_row(dose))
    beside = ""
    if control in BESIDE and "equal_mass" in BESIDE[control][0]:
        beside = "equal_mass"
    return curve, marks, beside, dose, words


def write_battery_tables(runs: Sequence[Run], folder: str | Path) -> list[Path]:
    """Gate, scores (by skill, and by level) and contrasts as CSV and Markdown files. Returns their
    paths.
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    tables = {
        "gate": battery_gate(runs),
        "scores": battery_scores(runs),
        "levels": battery_scores(runs, by_level=True),
        "contrasts": battery_contrasts(runs),
    }
    written = []
    for (name, table), form in itertools.product(tables.items(), ("csv", "md")):
        if not table.empty:
            written.append(target / f"battery_{name}.{form}")
            write_beside(written[-1], partial(WRITERS[form], table))
    return written


LINES: dict[str, Any] = {
    name: (0, (1 + place % 4, 1, 1 + place // 4, 2)) for place, name in enumerate(CONTROLS)
}
LINES |= {"sinks": "-", "clean_pass": "--", "random": ":", "random_clean_pass": "-."}


def draw_battery(runs: Sequence[Run], out: Path, options: object) -> list[Path]:
    """Tables and figures of all models, in OUT/report."""
    return [
        *write_battery_tables(runs, out / "report"),
        *write_battery_figures(runs, out / "report"),
    ]


@figure("battery_by_skill", kind="battery", prepared=True, columns=4, size=(2.05, 1.75))
def battery_by_skill(
    runs: Any,
    *,
    controls: Sequence[str] = (),
    labels: Sequence[str] | None = None,
    levels: Sequence[int] = (0,),
) -> list[Chart]:
    """Accuracy over the number of blocked keys, a panel per skill and one for all of them.

    A colour is a model under a condition, a kind of line a choice of blocked keys; bars are Wilson
    intervals. A curve ends at the greatest k that the questions of all its levels are long enough
    for.

    Args:
        runs: of the battery; every condition is a curve.
        controls: choices of blocked keys, names of `CONTROLS`; all that were run, when left out.
        labels: names of the curves in place of the folders'.
        levels: a panel for each skill at each of these; 0 is over all levels.

    Raises:
        NotRecorded: for runs that are none of the battery, and if nothing was blocked.
    """
    series = _series(runs, labels)
    wanted = [
        name
        for name in CONTROLS
        if (not controls or name in controls) and any(name in one.controls for one in series)
    ]
    if not wanted:
        raise NotRecorded(
            f"This figure needs blocked keys, and {series[0].run.path} has none. Score with ks "
            "above 0."
        )
    every = sorted({int(k) for one in series for k in one.accuracy["k"]})
    words = {control: _dosed(series, control) for control in wanted}
    charts = []
    skills = [name for name in dict.fromkeys(series[0].accuracy["skill"]) if name != ALL]
    for level, skill in itertools.product(levels, (*skills, ALL)):
        lines = []
        for one, control in _curves(series, wanted):
            curve = one.run.curve(control, skill, level)
            # the part that is over the same problems
            curve = curve[curve["n"] == curve["n"].max()]
            ends = {name: 100 * curve[name] for name in ("low", "high")}
            how = {"kind": "bars", "style": LINES[control], "words": words[control], **ends}
            # numbers such as 0, 1, 2, 5, 10 stand at even distances
            across = [every.index(int(k)) for k in curve["k"]]
            lines.append(one.line(across, 100 * curve["share"], **how))
        title = {ALL: "all skills"}.get(skill, skill)
        if level:
            title += f", level {level}"
        x = Axis("keys blocked per head", names=[*map(str, every)])
        charts.append(Chart(x, Axis("right, %", low=-4, high=104), lines, title=title))
    return charts


@figure("battery_by_removed", kind="battery", prepared=True, size=(5.2, 3.4))
def battery_by_removed(runs: Any, *, labels: Sequence[str] | None = None) -> Chart:
    """Accuracy, as a share of that with nothing blocked, over the share of attention removed.

    A text of few keys loses more with each: this is the scale on which models of different canvases
    compare. Over all skills and levels; a point per number of blocked keys.

    Raises:
        NotRecorded: for runs that are none of the battery, and if nothing was blocked or right.
    """
    series = _series(runs, labels)
    scores = battery_scores(series)
    scores = scores[(scores["skill"] == ALL) & scores["removed"].notna() & (scores["clean"] > 0)]
    if scores.empty:
        raise NotRecorded(
            f"This figure needs right answers and blocked keys, and {series[0].run.path} has none "
            "of one or the other. Score a model that is able, with ks above 0."
        )
    lines = []
    for one, control in _curves(
        series, [name for name in CONTROLS if name in set(scores["control"])]
    ):
        rows = scores[
            (scores["series"] == one.run.label) & (scores["control"] == control)
        ].sort_values("k")
        if not rows.empty:
            across = [0, *(100 * rows["removed"])]
            up = [100, *(100 * rows["share"] / rows["clean"])]
            lines.append(one.line(across, up, style=LINES[control], words=_dosed(series, control)))
    x = Axis("share of attention taken away, %", low=0)
    return Chart(x, Axis("right, % of those with nothing blocked", low=-3), lines)


def _series(runs: Sequence[Any], labels: Sequence[str] | None) -> list[Series]:
    return as_series([one if isinstance(one, Series) else one.run for one in runs], labels)


def write_battery_figures(runs: Sequence[Run], folder: str | Path) -> list[Path]:
    """The figures as PNG files, with every control that was run; none if nothing was blocked.
    Returns their paths.
    """
    written = []
    for name, draw in (
        ("battery_by_skill", battery_by_skill),
        ("battery_by_removed", battery_by_removed),
    ):
        # a model that has nothing right has nothing to lose
        with suppress(NotRecorded):
            written += save_figure(partial(draw, runs), Path(folder) / name)
    return written


def _curves(series: list[Series], controls: Sequence[str]) -> list[tuple[Look, str]]:
    """Every model under a condition with all of its controls."""
    return [
        (one, control)
        for one in drawn_as(series)
        for control in controls
        if control in one.run.controls
    ]


def _dosed(series: Sequence[Series], control: str) -> str:
    """Name of a control, with the range over models of its dose at the most keys."""
    scores = battery_scores(series)
    rows = scores[(scores["control"] == control) & (scores["skill"] == ALL)]
    most = rows["k"].max()
    parts = []
    for name, words in (("sinks", "sinks"), ("removed", "of attention removed")):
        values = 100 * rows.loc[rows["k"] == most, name].dropna()
        if len(values):
            ends = dict.fromkeys((f"{values.min():.3g}", f"{values.max():.3g}"))
            parts.append(f"{' to '.join(ends)} % {words}")
    if not parts:
        return CONTROLS[control]
    return f"{CONTROLS[control]} ({', '.join(parts)} at {most})"
