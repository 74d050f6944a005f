"""The reasoning battery in pictures: accuracy over the number of hidden columns, and over what that takes away."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.records.reading import Run
from sinklab.reports.drawing import Look, drawn_as, write_figure
from sinklab.reports.samples import NotRecorded
from sinklab.reports.style import Theme, theme_named, themed
from sinklab.studies.battery.study import ALL
from sinklab.studies.battery.tables import CONTROLS, Series, as_series, battery_scores

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LINES: dict[str, Any] = {"sinks": "-", "clean_pass": "--", "random": ":", "random_clean_pass": "-."}


def battery_by_skill(
    runs: Iterable[Run] | Run,
    *,
    controls: Sequence[str] = ("sinks", "random"),
    labels: Sequence[str] | None = None,
    levels: Sequence[int] = (0,),
    theme: str = "light",
) -> Figure:
    """Accuracy over the number of hidden columns, a panel per skill and one for all of them.

    A colour is a model under a condition, a kind of line what was hidden; bars are Wilson intervals. Where the
    questions of some levels are too short for so many columns, the curve is of the others: it ends there.

    Args:
        runs: of the battery; every condition is a curve.
        controls: what was hidden, names of `CONTROLS`.
        labels: names of the curves in place of the folders'.
        levels: one row of panels each; 0 is over all levels.
        theme: light or dark.

    Raises:
        NotRecorded: for runs that are none of the battery.
    """
    from matplotlib.figure import Figure

    series, look = _labelled(runs, labels), theme_named(theme)
    skills = [name for name in dict.fromkeys(series[0].accuracy["skill"]) if name != ALL]
    panels = [(level, skill) for level in levels for skill in (*skills, ALL)]
    width = len(skills) + 1 if len(levels) > 1 else -(-(len(skills) + 1) // 2)
    height = -(-len(panels) // width)
    with themed(look):
        figure = Figure(figsize=(2.05 * width + 0.5, 1.75 * height + 0.7), layout="constrained")
        grid: Any = figure.subplots(height, width, sharex=True, sharey=True, squeeze=False)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)
        for axes, (level, skill) in zip(grid.flat, panels, strict=False):
            _panel(axes, drawn_as(series, look), controls, skill, level)
            axes.set_title(f"{skill if skill != ALL else 'all skills'}{f', level {level}' if level else ''}")
        for axes in grid[:, 0]:
            axes.set_ylabel("right, %")
        # the lowest panel of each column, which may have an empty place below
        for axes in grid.flat[max(0, len(panels) - width) : len(panels)]:
            axes.tick_params(labelbottom=True)
            axes.set_xlabel("hidden columns")
        _legend(figure, series, controls, look)
    return figure


def battery_by_removed(
    runs: Iterable[Run] | Run, *, labels: Sequence[str] | None = None, theme: str = "light"
) -> Figure:
    """Accuracy, as a share of that with nothing hidden, over the share of attention that was taken away.

    A text of few columns loses more with each: this is the scale on which models of different canvases compare. Over
    all skills and levels; a point per number of hidden columns.

    Raises:
        NotRecorded: for runs that are none of the battery, and where nothing was hidden or right.
    """
    from matplotlib.figure import Figure

    series, look = _labelled(runs, labels), theme_named(theme)
    whole = list({id(one.run): one.run for one in series}.values())
    names, scores = [one.label for one in as_series(whole)], battery_scores(whole)
    scores = scores[(scores["skill"] == ALL) & scores["removed"].notna() & (scores["clean"] > 0)]
    if scores.empty:
        raise NotRecorded(
            f"This figure needs right answers and hidden columns, and {series[0].run.path} has none of one or the "
            "other. Score a model that is able, with ks above 0."
        )
    controls = [name for name in CONTROLS if name in set(scores["control"])]
    with themed(look):
        figure = Figure(figsize=(5.2, 3.4), layout="constrained")
        axes: Any = figure.subplots()
        for (name, one), control in itertools.product(zip(names, drawn_as(series, look), strict=True), controls):
            rows = scores[(scores["series"] == name) & (scores["control"] == control)].sort_values("k")
            if not rows.empty:
                across, up = [0, *(100 * rows["removed"])], [100, *(100 * rows["share"] / rows["clean"])]
                style = {"color": one.colour, "marker": one.marker, "linestyle": LINES[control]}
                axes.plot(across, up, linewidth=1.2, **style)
        axes.set(xlabel="share of attention taken away, %", ylabel="right, % of those with nothing hidden")
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=-3)
        axes.grid(axis="y")
        _legend(figure, series, controls, look)
    return figure


def write_battery_figures(runs: Sequence[Run], folder: str | Path) -> list[Path]:
    """The figures as PNG files, with every control that was run; none where nothing was hidden. Returns their paths."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    there = [control for control in CONTROLS if any(control in one.controls for one in as_series(runs))]
    if not there:
        return []
    drawn = {"battery_by_skill": battery_by_skill(runs, controls=there)}
    # a model that has nothing right has nothing to lose
    with suppress(NotRecorded):
        drawn["battery_by_removed"] = battery_by_removed(runs)
    look = theme_named("light")
    return [path for name, figure in drawn.items() for path in write_figure(figure, target / name, ("png",), look)]


def _labelled(runs: Iterable[Run] | Run, labels: Sequence[str] | None) -> list[Series]:
    series = as_series(runs)
    if labels is None:
        return series
    if len(labels) != len(series):
        raise ValueError(f"labels name every curve, but there are {len(labels)} for {len(series)}; give as many")
    return [replace(one, label=label) for one, label in zip(series, labels, strict=True)]


def _panel(axes: Axes, drawn: Sequence[Look], controls: Sequence[str], skill: str, level: int) -> None:
    every = sorted({int(k) for one in drawn for k in one.run.accuracy["k"]})
    for one in drawn:
        for control in (name for name in controls if name in one.run.controls):
            curve = one.run.curve(control, skill, level)
            # the part that is over the same problems
            curve = curve[curve["n"] == curve["n"].max()]
            # numbers such as 0, 1, 2, 5, 10 stand at even distances
            across = [every.index(int(k)) for k in curve["k"]]
            share = 100 * curve["share"]
            style = {"color": one.colour, "marker": one.marker, "linestyle": LINES[control]}
            error = [share - 100 * curve["low"], 100 * curve["high"] - share]
            axes.errorbar(across, share, yerr=error, markersize=3.2, linewidth=1.3, elinewidth=0.6, **style)
    axes.set_xticks(range(len(every)), list(map(str, every)))
    axes.set_ylim(-4, 104)
    axes.grid(axis="y")


def _legend(figure: Figure, series: Sequence[Series], controls: Sequence[str], look: Theme) -> None:
    from matplotlib.lines import Line2D

    drawn = drawn_as(list(series), look)
    entries = [Line2D([], [], color=one.colour, marker=one.marker, label=one.run.label) for one in drawn]
    kinds = [name for name in controls if any(name in one.controls for one in series)]
    entries += [Line2D([], [], color=look.muted, linestyle=LINES[name], label=CONTROLS[name]) for name in kinds]
    figure.legend(handles=entries, loc="outside upper left", ncols=3)
    figure.set_figheight(figure.get_figheight() + 0.19 * -(-len(entries) // 3))
