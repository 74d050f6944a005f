"""What a comparison of caches shows: fidelity over the budget, with and without protected sinks, and what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from sinklab.records.reading import Run
from sinklab.records.storage import write_beside
from sinklab.reports.style import DPI, MARKERS, Theme, own_axes, theme_named, themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes


NAMES = {
    "nearest": "nearest columns",
    "aligned": "aligned with the block (Sparse-dLLM)",
    "received": "most attended",
    "random": "random columns",
    "window": "window, all recomputed",
}
"""Families of caches in words."""
WHOLE = {"dual": "dual cache", "prefix": "prefix cache"}


def draw_caches(run: Run, path: str | Path, *, theme: str = "light") -> Path:
    """Write a PNG of a run of kind "caches": divergence over the budget, and where it was measured, time and memory.

    Raises ValueError for a run of another kind.
    """
    from matplotlib.figure import Figure

    if run.info.kind != "caches":
        raise ValueError(f"a figure of caches needs a run of kind 'caches', but {run.path} holds {run.info.kind!r}")
    look, path = theme_named(theme), Path(path)
    has_costs = "costs" in run.tables
    with themed(look):
        figure: Any = Figure(figsize=(12.4 if has_costs else 7.4, 3.7), layout="constrained")
        axes = figure.subplots(1, 1 + has_costs, squeeze=False)[0]
        draw_fidelity(run.table("policies"), axes[0], theme=theme)
        axes[0].set_title(f"{run.info.model.get('name', '')}: distance from uncached decoding")
        if has_costs:
            draw_costs(run.table("policies"), run.table("costs"), axes[1], theme=theme)
        write_beside(path, lambda part: figure.savefig(part, format="png", dpi=DPI))
    return path


def draw_fidelity(policies: pd.DataFrame, axes: Axes | None = None, *, theme: str = "light") -> Axes:
    """Divergence from the uncached distribution over the share of columns kept; full lines protect sinks of now."""
    look = theme_named(theme)
    with themed(look):
        plot = own_axes(axes)
        families = [name for name in NAMES if bool(((policies["family"] == name) & (policies["keep"] < 1)).any())]
        for family in families:
            mine = policies[(policies["family"] == family) & (policies["keep"] < 1)]
            colour, marker = _drawn_as(family, look)
            for protected in (False, True):
                part = mine[mine["protect"] == ("now" if protected else "")].sort_values("keep")
                if not part.empty:
                    _curve(plot, part, colour, marker, NAMES[family], protected)
        whole = policies[policies["family"].isin(WHOLE)].drop_duplicates("family")
        for _, line in whole[whole["divergence"] > 0].iterrows():
            plot.axhline(line["divergence"], color=look.muted, linewidth=0.9, linestyle=":")
            name = WHOLE[line["family"]]
            plot.annotate(
                name, (1, line["divergence"]), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=7.5
            )
        _finished(plot, look)
    return plot


def draw_costs(policies: pd.DataFrame, costs: pd.DataFrame, axes: Axes | None = None, *, theme: str = "light") -> Axes:
    """Divergence over processor time at the longest canvas measured, a mark a policy; filled ones protect sinks."""
    from matplotlib.ticker import NullFormatter

    look = theme_named(theme)
    with themed(look):
        plot = own_axes(axes)
        longest = costs[costs["length"] == costs["length"].max()]
        keys = ["family", "keep", "sinks", "protect"]
        both = policies.merge(longest, on=keys)
        for line in both[both["divergence"] > 0].to_dict("records"):
            place = (line["ratio"], line["divergence"])
            if line["family"] in NAMES and line["keep"] < 1:
                colour, marker = _drawn_as(line["family"], look)
                fill = colour if line["protect"] == "now" else "none"
                plot.plot(*place, color=colour, marker=marker, markerfacecolor=fill)
            else:
                plot.plot(*place, color=look.muted, marker=".")
                plot.annotate(line["label"], place, (4, 2), textcoords="offset points", fontsize=7)
        plot.set_yscale("log")
        plot.yaxis.set_major_formatter("{x:g}")
        plot.yaxis.set_minor_formatter(NullFormatter())
        plot.grid(axis="y")
        plot.set_xlabel(f"processor time, uncached = 1 ({longest['length'].iloc[0]} columns)")
        plot.set_title("distance over time")
    return plot


def _drawn_as(family: str, look: Theme) -> tuple[str, str]:
    """Colour and marker, the same in every figure."""
    number = [*NAMES].index(family)
    return (*look.runs, look.muted)[number], MARKERS[number]


def _curve(plot: Axes, part: pd.DataFrame, colour: str, marker: str, name: str, protected: bool) -> None:
    plot.plot(
        part["keep"],
        part["divergence"],
        color=colour,
        marker=marker,
        label=name + (" + sinks" if protected else ""),
        linestyle="-" if protected else "--",
        markerfacecolor=colour if protected else "none",
    )
    plot.fill_between(part["keep"], part["divergence_low"], part["divergence_high"], color=colour, alpha=0.12, lw=0)


def _finished(plot: Axes, look: Theme) -> None:
    from matplotlib.ticker import NullFormatter, NullLocator, PercentFormatter

    plot.set_xscale("log", base=2)
    plot.set_yscale("log")
    plot.xaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    plot.xaxis.set_minor_locator(NullLocator())
    plot.yaxis.set_major_formatter("{x:g}")
    plot.yaxis.set_minor_formatter(NullFormatter())
    plot.grid(axis="y")
    plot.set_xlabel("columns kept outside the block (window: of all)")
    plot.set_ylabel("nats per masked token")
    plot.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0))
