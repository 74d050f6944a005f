"""Results of the twins: a line a kind of model, the contrasts that may be drawn, and a figure."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sinklab.extras.backcopy.source import Source
from sinklab.lab.analysis.estimates import SEEDS, mean_over
from sinklab.lab.records.reading import Run
from sinklab.lab.reports import Axis, Chart, Line, Mark, Reader, figure
from sinklab.lab.reports.printed import save_figure, write_page
from sinklab.lab.reports.words import percent, statements
from sinklab.lab.studies.base import of_each

WEIGHT, NEAR = 0.3, 0.05
"""Weight above which the start token is a sink of a head, and how near to the best loss a twin must
come.
"""
KEYS = ["objective", "variant"]
CAUSAL, DIFFUSION = ("causal", "plain"), ("diffusion", "plain")
UNTRAINED = ("fresh", "permuted")
HALF = 0.5
"""Share of heads below which a control of equal mass says nothing."""
CONTRASTED = {"first": "weight on position 0", "strongest": "strongest column"}
TASKS = {"rows": "whole rows", "steps": "rows revealed step by step"}


def by_model(run: Run, state: str = "trained") -> pd.DataFrame:
    """A line a model of a state: its losses, and of its heads the largest ``first``, ``added``,
    ``strongest``, ``gu``.

    ``norm`` is that of the layer with the head that looks most at position 0, ``shared`` the mean
    of ``added``.
    """
    heads, models = (_in_state(run.table(name), state) for name in ("heads", "models"))
    groups = heads.sort_values("first", ascending=False, kind="stable").groupby(
        ["seed", *KEYS], sort=False
    )
    found = groups[["first", "added", "strongest", "gu"]].max().join(groups["norm"].first())
    found["shared"] = groups["added"].mean()
    models = models.assign(cost=models["hidden"] / models["loss"] - 1)
    return models.merge(found.reset_index(), on=["seed", *KEYS])


def _in_state(table: pd.DataFrame, state: str) -> pd.DataFrame:
    # runs of before there were controls say nothing of them
    return table[table.get("state", pd.Series("trained", table.index)) == state]


def summary(run: Run) -> pd.DataFrame:
    """Summary by objective and variant: seeds near the floor, seeds with a sink on position 0, and
    means with ranges.
    """
    lines = []
    named = {
        "over": "above the best loss",
        "first": "weight on position 0",
        "added": "on the added sink",
        "strongest": "strongest column",
        "cost": "cost of blocking position 0",
    }
    untrained = {state: _kinds(by_model(run, state)) for state in UNTRAINED}
    for kind, group in by_model(run).groupby(KEYS, sort=False):
        line: dict[str, Any] = dict(zip(KEYS, kind, strict=True))
        line["seeds"] = len(group)
        line["within 5 %"] = int((group["over"] <= NEAR).sum())
        line["with a sink"] = int((group["first"] > WEIGHT).sum())
        line |= {words: _spread(group[name]) for name, words in named.items()}
        line["value norm, position 0 / others"] = f"{group['norm'].mean():.2f}"
        for state, models in untrained.items():
            mean = math.nan
            if kind in models:
                mean = models[kind]["first"].mean()
            line[f"weight on position 0, {state}"] = percent(mean)
        lines.append(line)
    return pd.DataFrame(lines)


Kinds = dict[Any, pd.DataFrame]
"""Objective and variant to models by seed."""
Said = Callable[..., list[str]]
"""Maker of the statements of sentences.jinja."""


def _kinds(models: pd.DataFrame) -> Kinds:
    return {kind: group.set_index("seed") for kind, group in models.groupby(KEYS, sort=False)}


@of_each
def backcopy_sentences(run: Run) -> list[str]:
    """The precondition and the distance to the floor in each run, then each contrast with its
    interval or «inconclusive».
    """
    known: dict[str, Any] = {
        "near": NEAR,
        "weight": WEIGHT,
        "half": HALF,
        "contrasted": CONTRASTED,
        "tasks": TASKS,
    }
    told = statements("sinklab.extras.backcopy", [_spread], **known)
    kinds = _kinds(by_model(run))
    twins = {state: _kinds(by_model(run, state)) for state in UNTRAINED}
    plain = [kind for kind in kinds if kind[1] == "plain"]
    lines = told("precondition", kinds)
    for other in plain:
        for one in (CAUSAL, DIFFUSION):
            if one in kinds and other not in (CAUSAL, one):
                lines += _contrast(told, kinds, one, other, "first", twins)
    for kind, group in kinds.items():
        if kind in plain:
            continue
        if (kind[0], "plain") in kinds:
            for name in CONTRASTED:
                lines += _contrast(told, kinds, (kind[0], "plain"), kind, name, twins)
        if (group["added"] > 0).any():
            beyond = None
            if _is_able(group):
                # less an even share of a row's keys
                even = 1 / (Source().length + 1)
                beyond = mean_over(group["shared"].to_numpy() - even, fewest=SEEDS)
            lines += told("added", kind, group, beyond)
    if "masking" in run.tables:
        lines += _masking(told, run.table("masking"), kinds)
    return lines


def _is_able(group: pd.DataFrame) -> bool:
    """Whether there are seeds for a verdict, all of them near the best loss."""
    return len(group) >= SEEDS and bool((group["over"] <= NEAR).all())


def _refusal(kinds: Kinds, one: Any, other: Any) -> str | None:
    """Why these two kinds of model may not be contrasted; None if they may."""
    groups = {" ".join(kind): kinds[kind] for kind in (one, other)}
    far = [name for name, group in groups.items() if (group["over"] > NEAR).any()]
    if far:
        return (
            f"inconclusive, since {' and '.join(far)} did not come within 5 % of the best loss "
            "in every seed"
        )
    seeds = len(kinds[one].index.intersection(kinds[other].index))
    if seeds < SEEDS:
        return f"inconclusive with {seeds} seeds; {SEEDS} make a verdict"
    if CAUSAL in (one, other) and not (kinds[CAUSAL]["first"] > WEIGHT).all():
        return "inconclusive, since causal plain has no sink there in every seed"
    return None


def _gaps(kinds: Kinds, one: Any, other: Any, name: str) -> pd.Series:
    """A measure of the other kind less that of the one, of the seeds that have both."""
    return (kinds[other][name] - kinds[one][name]).dropna()


def _contrast(
    told: Said, kinds: Kinds, one: Any, other: Any, name: str, twins: dict[str, Kinds]
) -> list[str]:
    """A measure of the heads, paired over seeds, beside the same measure of untrained controls."""
    gaps = _gaps(kinds, one, other, name)
    found = mean_over(gaps.to_numpy(), fewest=SEEDS)
    apart = {
        state: _gaps(each, one, other, name)
        for state, each in twins.items()
        if {one, other} <= each.keys()
    }
    # no more than the controls show
    same = [
        mean_over((gaps - each).to_numpy(), fewest=SEEDS).above() is not found.above()
        for each in apart.values()
    ]
    is_shared = found.above() is not None and any(same)
    beside = {state: each.mean() for state, each in apart.items()}
    return told("contrast", name, one, other, _refusal(kinds, one, other), found, beside, is_shared)


def _masking(told: Said, table: pd.DataFrame, kinds: Kinds) -> list[str]:
    """Cost of blocking keys: causal less diffusion at equal count and at equal dose by protocol,
    and controls.
    """
    plain = table[table["variant"] == "plain"]
    lines = []
    if {CAUSAL, DIFFUSION} <= kinds.keys():
        refusal = _refusal(kinds, CAUSAL, DIFFUSION)
        for task, protocol in dict.fromkeys(zip(table["task"], table["protocol"], strict=True)):
            ones, others = (
                _costs(plain, objective, task, protocol) for objective in ("causal", "diffusion")
            )
            counts, equal = [], []
            for one, other in zip(ones, others, strict=True):
                dose, cost, _ = one[1, "sinks"]
                counts.append(cost - other[1, "sinks"][1])
                equal.append(at_equal_dose(_doses(one), _doses(other), dose))
            doses, gaps = (pd.Series(part) for part in zip(*equal, strict=True))
            found = [mean_over(values, fewest=SEEDS) for values in (counts, gaps)]
            lines += told("masking", task, protocol, refusal, *found, doses)
    for objective in sorted(plain["objective"].unique()):
        lines += _control(told, _costs(plain, objective, "rows", "clean"), objective, kinds)
    return lines


Costs = dict[tuple[int, str], tuple[float, float, float]]
"""Number of keys and control to the dose, its cost and the share of heads with a control."""


def _costs(table: pd.DataFrame, objective: str, task: str, protocol: str) -> list[Costs]:
    """Costs of a task under a protocol, one for each seed."""
    found = []
    here = table[(table["objective"] == objective) & (table["task"] == task)]
    for _, cells in here.groupby("seed"):
        clean = cells.loc[cells["k"] == 0, "loss"].iloc[0]
        masked = cells[(cells["k"] > 0) & (cells["protocol"] == protocol)]
        found.append(
            {
                (cell.k, cell.control): (cell.removed, cell.loss - clean, cell.matched)
                for cell in masked.itertuples()
            }
        )
    return found


def _doses(costs: Costs) -> list[tuple[float, float]]:
    return [(dose, cost) for (_, control), (dose, cost, _) in costs.items() if control == "sinks"]


def _control(told: Said, costs: list[Costs], objective: str, kinds: Kinds) -> list[str]:
    """The most attended key against keys that are no sinks and hold as much."""
    group = kinds[objective, "plain"]
    share = float(np.nanmean([cells[1, "equal_mass"][2] for cells in costs]))
    found = None
    if len(costs) >= SEEDS and _is_able(group):
        gaps = [cells[1, "matched"][1] - cells[1, "equal_mass"][1] for cells in costs]
        found = mean_over(gaps, fewest=SEEDS)
    near = (group["over"] <= NEAR).sum()
    return told("control", objective, share, len(costs), near, found)


def at_equal_dose(
    one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]], wanted: float
) -> tuple[float, float]:
    """The one's cost less the other's at a dose that both have, and that dose: the wanted one or
    the nearest to it.

    one, other: pairs of a dose (share of the attention that was removed) and its cost. Between
    doses costs are interpolated linearly, beyond them never: NaN if the two have no dose in common.
    """
    curves = [np.array(sorted(pairs)).T for pairs in (one, other)]
    low, high = max(curve[0, 0] for curve in curves), min(curve[0, -1] for curve in curves)
    if low > high:
        return math.nan, math.nan
    dose = float(np.clip(wanted, low, high))
    here, there = (float(np.interp(dose, *curve)) for curve in curves)
    return dose, here - there


def _spread(values: pd.Series) -> str:
    """Mean and range."""
    return f"{percent(values.mean())} ({percent(values.min())} … {percent(values.max())})"


@figure("backcopy", kind="backcopy", alone=True, prepared=True, size=(4.6, 3.6))
def backcopy_figure(one: Reader) -> Chart:
    """Weight on position 0 over the distance to the best loss: a mark a seed, a colour an
    objective.
    """
    models = by_model(one.run)
    variants, objectives = ([*models[name].unique()] for name in ("variant", "objective"))
    lines = []
    for (objective, variant), group in models.groupby(KEYS, sort=False):
        places = objectives.index(objective), variants.index(variant)
        over, first = 100 * group["over"], 100 * group["first"]
        lines.append(Line(over, first, f"{objective}, {variant}", "", "", *places, kind="dots"))
    y = Axis("weight on position 0, %, largest of a head", low=-3, high=103)
    marks = [Mark("y", 100 * WEIGHT), Mark("x", 100 * NEAR)]
    return Chart(Axis("loss above the best possible, %"), y, lines, marks)


@of_each
def draw_backcopy(run: Run, out: Path, options: object) -> list[Path]:
    """The table and sentences, backcopy.md, and the figure, backcopy.png, in each run folder."""
    page = write_page(run.path / "backcopy.md", summary(run), backcopy_sentences([run]))
    return [page, *save_figure(partial(backcopy_figure, run), run.path / "backcopy", ("png",))]
