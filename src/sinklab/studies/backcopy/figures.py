"""What the twins say: a line a kind of model, the contrasts that may be drawn, and a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from sinklab.analysis.estimates import FEWEST, mean_over
from sinklab.records.reading import Run
from sinklab.records.storage import write_beside
from sinklab.reports.printed import save_figure
from sinklab.reports.style import MARKERS, theme_named, themed
from sinklab.reports.tables import markdown
from sinklab.reports.words import percent

WEIGHT, NEAR = 0.3, 0.05
"""What makes the start token a sink of a head, and how near to the best loss a twin must come."""
KEYS = ["objective", "variant"]


def by_model(run: Run) -> pd.DataFrame:
    """A line a model: its losses, and of its heads the largest ``first``, ``added``, ``strongest`` and ``gu``.

    ``norm`` is that of the layer whose head looks most at position 0.
    """
    heads = run.table("heads").sort_values("first", ascending=False, kind="stable")
    groups = heads.groupby(["seed", *KEYS], sort=False)
    found = groups[["first", "added", "strongest", "gu"]].max().join(groups["norm"].first())
    models = run.table("models")
    models["cost"] = models["hidden"] / models["loss"] - 1
    return models.merge(found.reset_index(), on=["seed", *KEYS])


def summary(run: Run) -> pd.DataFrame:
    """By objective and variant: seeds near the floor, seeds with a sink on position 0, and means with ranges."""
    lines = []
    for (objective, variant), group in by_model(run).groupby(KEYS, sort=False):
        line: dict[str, Any] = {"objective": objective, "variant": variant, "seeds": len(group)}
        line["within 5 %"] = int((group["over"] <= NEAR).sum())
        line["with a sink"] = int((group["first"] > WEIGHT).sum())
        named = {"over": "above the best loss", "first": "weight on position 0", "added": "on the added sink"}
        named |= {"strongest": "strongest column", "cost": "cost of hiding position 0"}
        line |= {words: _spread(group[name]) for name, words in named.items()}
        line["value norm, position 0 / others"] = f"{group['norm'].mean():.2f}"
        lines.append(line)
    return pd.DataFrame(lines)


def backcopy_sentences(run: Run) -> list[str]:
    """The precondition and the distance to the floor, then each contrast with its interval or «cannot tell»."""
    models = by_model(run)
    kinds = {kind: group.set_index("seed") for kind, group in models.groupby(KEYS, sort=False)}
    lines = []
    for (objective, variant), group in kinds.items():
        near, first = (group["over"] <= NEAR).sum(), group["first"]
        lines.append(
            f"{objective}, {variant}: within 5 % of the best loss in {near} of {len(group)} seeds (above it by "
            f"{_spread(group['over'])}); a head gives position 0 more than 30 % in {(first > WEIGHT).sum()} of "
            f"{len(group)} ({_spread(first)})"
        )
    first_kind = ("causal", "plain")
    if first_kind in kinds:
        others = [kind for kind in kinds if kind[1] == "plain" and kind != first_kind]
        lines += [_contrast(kinds, first_kind, kind) for kind in others]
    lines += [
        _contrast(kinds, (kind[0], "plain"), kind)
        for kind in kinds
        if (kind[0], "plain") in kinds and kind[1] != "plain"
    ]
    return lines


def _contrast(kinds: dict[Any, pd.DataFrame], one: Any, other: Any) -> str:
    """The largest weight on position 0 of a head, paired over seeds."""
    both = [kinds[kind].loc[kinds[one].index.intersection(kinds[other].index)] for kind in (one, other)]
    seeds, words = len(both[0]), f"weight on position 0, {' '.join(other)} against {' '.join(one)}"
    far = [" ".join(kind) for kind, group in zip((one, other), both, strict=True) if (group["over"] > NEAR).any()]
    if far:
        return f"{words}: cannot tell, since {' and '.join(far)} did not come within 5 % of the best loss in every seed"
    if seeds < FEWEST:
        return f"{words}: cannot tell from {seeds} seeds; {FEWEST} make a verdict"
    if one[0] == "causal" and not (both[0]["first"] > WEIGHT).all():
        return f"{words}: cannot tell, since {' '.join(one)} has no sink there in every seed"
    found = mean_over(both[1]["first"].to_numpy() - both[0]["first"].to_numpy())
    verdict = {True: "more", False: "less", None: "cannot tell"}[found.above()]
    interval = f"{100 * found.value:+.1f} points, 95 % {100 * found.low:+.1f} to {100 * found.high:+.1f}, {seeds} seeds"
    return f"{words}: {verdict} ({interval})"


def at_equal_dose(
    one: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]], wanted: float
) -> tuple[float, float]:
    """The one's cost less the other's at a dose that both have, and that dose: the wanted one or the nearest to it.

    one, other: pairs of a dose (share of the attention that was removed) and its cost. Between doses costs are
        interpolated linearly, beyond them never: NaN where the two have no dose in common.
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


def backcopy_figure(run: Run, *, theme: str = "light") -> Figure:
    """Weight on position 0 over the distance to the best loss: a mark a seed, a colour an objective."""
    look, models = theme_named(theme), by_model(run)
    variants, objectives = [*dict.fromkeys(models["variant"])], [*dict.fromkeys(models["objective"])]
    with themed(look):
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        plot: Any = figure.subplots()
        for (objective, variant), group in models.groupby(KEYS, sort=False):
            marker, colour = MARKERS[variants.index(variant)], look.runs[objectives.index(objective)]
            label = f"{objective}, {variant}"
            plot.plot(100 * group["over"], 100 * group["first"], linestyle="", marker=marker, color=colour, label=label)
        plot.axhline(100 * WEIGHT, color=look.muted, linewidth=0.9, linestyle=":")
        plot.axvline(100 * NEAR, color=look.muted, linewidth=0.9, linestyle=":")
        plot.set(xlabel="loss above the best possible, %", ylabel="weight on position 0, %, largest of a head")
        plot.set_ylim(-3, 103)
        plot.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


def draw_backcopy(run: Run) -> list[Path]:
    """Write the table and sentences, backcopy.md, and the figure, backcopy.png, into the run folder."""
    page, stem = run.path / "backcopy.md", run.path / "backcopy"
    text = markdown(summary(run)) + "\n" + "".join(f"- {line}\n" for line in backcopy_sentences(run))
    write_beside(page, lambda path: path.write_text(text, encoding="utf-8"))
    return [page, *save_figure(lambda: backcopy_figure(run), stem, ("png",))]
