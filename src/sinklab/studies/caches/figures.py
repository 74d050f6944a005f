"""What a comparison of caches shows: fidelity over the budget, with and without protected sinks, and what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from sinklab.records.reading import Run
from sinklab.reports.printed import save_figure
from sinklab.reports.style import MARKERS, Theme, own_axes, theme_named, themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


NAMES = {
    "nearest": "nearest columns",
    "aligned": "aligned with the block (Sparse-dLLM)",
    "received": "most attended",
    "random": "random columns",
    "window": "window, all recomputed",
}
"""Families of caches in words."""
WHOLE = {"dual": "dual cache", "prefix": "prefix cache"}
KEYS = ["family", "keep", "sinks", "protect"]
COLUMNS = {
    "loss": ("loss", "{:.4f}"),
    "divergence": ("divergence", "{:.5f}"),
    "same first": ("same", "{:.1%}"),
    "texts agree": ("agreement", "{:.1%}"),
    "time": ("ratio", "{:.2f}"),
    "kB attended": ("kilobytes", "{:.0f}"),
}
"""Heading of the printed table -> column, and how its numbers are written."""
WHOSE = {"now": "", "first": "first ", "earlier": "earlier ", "random": "random columns as "}


def caches_figure(run: Run, *, theme: str = "light") -> Figure:
    """Divergence over the budget, and where it was measured, over time. Raises ValueError for a run of another kind."""
    from matplotlib.figure import Figure

    if run.info.kind != "caches":
        raise ValueError(f"a figure of caches needs a run of kind 'caches', but {run.path} holds {run.info.kind!r}")
    has_costs = "costs" in run.tables
    with themed(theme_named(theme)):
        figure = Figure(figsize=(12.4 if has_costs else 7.4, 3.7), layout="constrained")
        axes: Any = figure.subplots(1, 1 + has_costs, squeeze=False)[0]
        draw_fidelity(run.table("policies"), axes[0], theme=theme)
        axes[0].set_title(f"{run.info.model.get('name', '')}: distance from uncached decoding")
        if has_costs:
            draw_costs(run.table("policies"), run.table("costs"), axes[1], theme=theme)
    return figure


def draw_caches(run: Run, path: str | Path) -> Path:
    """Write `caches_figure` as a PNG file. Raises ValueError for a run of another kind."""
    return save_figure(lambda: caches_figure(run), Path(path).with_suffix(""), ("png",))[0]


def draw_fidelity(policies: pd.DataFrame, axes: Axes | None = None, *, theme: str = "light") -> Axes:
    """Divergence from the uncached distribution over the share of columns kept; full lines protect sinks of now."""
    from matplotlib.ticker import NullLocator, PercentFormatter

    look = theme_named(theme)
    with themed(look):
        plot = own_axes(axes)
        families = [name for name in NAMES if bool(((policies["family"] == name) & (policies["keep"] < 1)).any())]
        for family in families:
            colour, marker = _drawn_as(family, look)
            mine = policies[(policies["family"] == family) & (policies["keep"] < 1)].sort_values("keep")
            for whose, words, line, fill in (("", "", "--", "none"), ("now", " + sinks", "-", colour)):
                part = mine[mine["protect"] == whose]
                if not part.empty:
                    style = {"marker": marker, "linestyle": line, "markerfacecolor": fill}
                    plot.plot(part["keep"], part["divergence"], color=colour, label=NAMES[family] + words, **style)
                    ends = part["divergence_low"], part["divergence_high"]
                    plot.fill_between(part["keep"], *ends, color=colour, alpha=0.12, lw=0)
        whole = policies[policies["family"].isin(WHOLE)].drop_duplicates("family")
        for _, line in whole[whole["divergence"] > 0].iterrows():
            plot.axhline(line["divergence"], color=look.muted, linewidth=0.9, linestyle=":")
            name = WHOLE[line["family"]]
            plot.annotate(
                name, (1, line["divergence"]), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=7.5
            )
        plot.set_xscale("log", base=2)
        plot.xaxis.set_major_formatter(PercentFormatter(1, decimals=None))
        plot.xaxis.set_minor_locator(NullLocator())
        _log_divergence(plot)
        plot.set_xlabel("columns kept outside the block (window: of all)")
        plot.set_ylabel("nats per masked token")
        plot.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return plot


def draw_costs(policies: pd.DataFrame, costs: pd.DataFrame, axes: Axes | None = None, *, theme: str = "light") -> Axes:
    """Divergence over processor time at the longest canvas measured, a mark a policy; filled ones protect sinks."""
    look = theme_named(theme)
    with themed(look):
        plot = own_axes(axes)
        longest = costs[costs["length"] == costs["length"].max()]
        both = policies.merge(longest, on=KEYS)
        for line in both[both["divergence"] > 0].to_dict("records"):
            place = (line["ratio"], line["divergence"])
            if line["family"] in NAMES and line["keep"] < 1:
                colour, marker = _drawn_as(line["family"], look)
                fill = colour if line["protect"] == "now" else "none"
                plot.plot(*place, color=colour, marker=marker, markerfacecolor=fill)
            else:
                plot.plot(*place, color=look.muted, marker=".")
                plot.annotate(line["label"], place, (4, 2), textcoords="offset points", fontsize=7)
        _log_divergence(plot)
        plot.set_xlabel(f"processor time, uncached = 1 ({longest['length'].iloc[0]} columns)")
        plot.set_title("distance over time")
    return plot


def _drawn_as(family: str, look: Theme) -> tuple[str, str]:
    """Colour and marker, the same in every figure."""
    number = [*NAMES].index(family)
    return (*look.runs, look.muted)[number], MARKERS[number]


def _log_divergence(plot: Axes) -> None:
    from matplotlib.ticker import NullFormatter

    plot.set_yscale("log")
    plot.yaxis.set_major_formatter("{x:g}")
    plot.yaxis.set_minor_formatter(NullFormatter())
    plot.grid(axis="y")


def caches_sentences(run: Run) -> list[str]:
    """The table of caches, a line each, and what protection does to the divergence at each budget."""
    table = run.table("policies")
    if "costs" in run.tables:
        costs = run.table("costs")
        costs = costs[costs["length"] == costs["length"].max()].assign(kilobytes=costs["held_bytes"] / 1e3)
        # sparse attention is not timed, and has its line all the same
        table = table.merge(costs, on=KEYS, how="left")
    shown = {head: (name, form) for head, (name, form) in COLUMNS.items() if name in table}
    width = max(map(len, table["label"]))
    lines = ["  ".join([" " * width, *(head.rjust(11) for head in shown)])]
    for row in table.to_dict("records"):
        cells = ("–" if pd.isna(row[name]) else form.format(row[name]) for name, form in shown.values())
        lines.append("  ".join([row["label"].ljust(width), *(cell.rjust(11) for cell in cells)]))
    found = run.table("protection")
    return lines + [_verdict(row) for row in found[found["metric"] == "divergence"].to_dict("records")]


def _verdict(row: dict[Any, Any]) -> str:
    side = "neither nearer to nor farther from"
    side = "nearer to" if row["high"] < 0 else "farther from" if row["low"] > 0 else side
    return (
        f"{row['family']}, {row['keep']:.3g} kept: with protected {WHOSE[row['protect']]}sinks {side} uncached "
        f"decoding ({row['difference']:+.5f} nats, 95 % {row['low']:+.5f} to {row['high']:+.5f}, {row['rows']} rows)"
    )
