"""What a comparison of caches shows: fidelity over the budget, with and without protected sinks, and what it costs."""

from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, NullLocator, PercentFormatter

from sinklab.records.reading import Run
from sinklab.reports.drawing import Look, line
from sinklab.reports.printed import save_figure
from sinklab.reports.runs import as_shown
from sinklab.reports.style import MARKERS, Theme, theme_named, themed
from sinklab.reports.words import statements
from sinklab.studies.base import labels_of

NAMES, WHOLE, WHOSE, COLUMNS = (labels_of("caches")[name] for name in ("families", "whole", "whose", "columns"))
KEYS = ["family", "keep", "sinks", "protect"]


def caches_figure(run: Run, *, theme: str = "light") -> Figure:
    """Divergence over the budget, and where it was measured, over time. Raises ValueError for a run of another kind."""
    as_shown(run, "caches")
    look, policies, has_costs = theme_named(theme), run.table("policies"), "costs" in run.tables
    with themed(look):
        figure = Figure(figsize=(12.4 if has_costs else 7.4, 3.7), layout="constrained")
        axes: Any = figure.subplots(1, 1 + has_costs, squeeze=False)[0]
        _draw_fidelity(axes[0], policies, look)
        axes[0].set_title(f"{run.info.model.get('name', '')}: distance from uncached decoding")
        if has_costs:
            _draw_costs(axes[1], policies, _at_longest(run), look)
    return figure


def draw_caches(runs: list[Run], out: Path, options: object) -> list[Path]:
    """Write `caches_figure` as caches.png into each run. Raises ValueError for a run of another kind."""
    return [path for run in runs for path in save_figure(partial(caches_figure, run), run.path / "caches")]


def _at_longest(run: Run) -> pd.DataFrame:
    """The costs at the longest canvas measured."""
    costs = run.table("costs")
    return costs[costs["length"] == costs["length"].max()]


def _draw_fidelity(plot: Axes, policies: pd.DataFrame, look: Theme) -> None:
    """Divergence from the uncached distribution over the share of columns kept; full lines protect sinks of now."""
    for family in NAMES:
        one = _drawn_as(family, look)
        mine = policies[(policies["family"] == family) & (policies["keep"] < 1)].sort_values("keep")
        for whose, words, style in (("", "", "--"), ("now", " + sinks", "-")):
            part = mine[mine["protect"] == whose]
            if not part.empty:
                line(plot, one, part["keep"], part["divergence"], style=style, label=NAMES[family] + words)
                ends = part["divergence_low"], part["divergence_high"]
                plot.fill_between(part["keep"], *ends, color=one.colour, alpha=0.12, lw=0)
    whole = policies[policies["family"].isin(WHOLE) & (policies["divergence"] > 0)].drop_duplicates("family")
    for family, level in zip(whole["family"], whole["divergence"], strict=True):
        plot.axhline(level, color=look.muted, linewidth=0.9, linestyle=":")
        at: Any = {"xy": (1, level), "xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom"}
        plot.annotate(WHOLE[family], **at, fontsize=7.5)
    plot.set_xscale("log", base=2)
    plot.xaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    plot.xaxis.set_minor_locator(NullLocator())
    _log_divergence(plot)
    plot.set(xlabel="columns kept outside the block (window: of all)", ylabel="nats per masked token")
    plot.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_costs(plot: Axes, policies: pd.DataFrame, costs: pd.DataFrame, look: Theme) -> None:
    """Divergence over processor time, a mark a policy; filled ones protect sinks."""
    both = policies.merge(costs, on=KEYS)
    for row in both[both["divergence"] > 0].to_dict("records"):
        place = (row["ratio"], row["divergence"])
        if row["family"] in NAMES and row["keep"] < 1:
            across, up = ([value] for value in place)
            line(plot, _drawn_as(row["family"], look), across, up, style="-" if row["protect"] == "now" else "--")
        else:
            plot.plot(*place, color=look.muted, marker=".")
            plot.annotate(row["label"], place, (4, 2), textcoords="offset points", fontsize=7)
    _log_divergence(plot)
    plot.set_xlabel(f"processor time, uncached = 1 ({costs['length'].iloc[0]} columns)")
    plot.set_title("distance over time")


def _drawn_as(family: str, look: Theme) -> Look:
    """Colour and marker, the same in every figure."""
    number = [*NAMES].index(family)
    return Look(None, (*look.runs, look.muted)[number], MARKERS[number], NAMES[family])


def _log_divergence(plot: Axes) -> None:
    plot.set_yscale("log")
    plot.yaxis.set_major_formatter("{x:g}")
    plot.yaxis.set_minor_formatter(NullFormatter())
    plot.grid(axis="y")


def caches_sentences(runs: list[Run]) -> list[str]:
    """The table of caches of each run, a line each, and what protection does to the divergence at each budget."""
    return [line for run in runs for line in _sentences(run)]


def _sentences(run: Run) -> list[str]:
    table = run.table("policies")
    if "costs" in run.tables:
        # sparse attention is not timed, and has its line all the same
        table = table.merge(_at_longest(run), on=KEYS, how="left")
        table["kilobytes"] = table["held_bytes"] / 1e3
    shown = {head: (name, form) for head, (name, form) in COLUMNS.items() if name in table}
    width = max(map(len, table["label"]))
    lines = ["  ".join([" " * width, *(head.rjust(11) for head in shown)])]
    for row in table.to_dict("records"):
        cells = ("–" if pd.isna(row[name]) else form.format(row[name]) for name, form in shown.values())
        lines.append("  ".join([row["label"].ljust(width), *(cell.rjust(11) for cell in cells)]))
    found, told = run.table("protection"), statements("sinklab.studies.caches", (), whose=WHOSE)
    return lines + told("protection", found[found["metric"] == "divergence"].to_dict("records"))
