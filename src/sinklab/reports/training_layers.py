"""Figures of training runs over layers, and of whole looks: where sinks come up, who holds them, what they carry."""

# L layers, T looks
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sinklab.records.reading import Run
from sinklab.reports.figures import over_layers
from sinklab.reports.style import colormap, from_zero, own_axes, theme_named, themed
from sinklab.reports.training import Training
from sinklab.reports.training_curves import Trainings, causal_end, drawn_as, entry, line, monitored, panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes


HOLDERS = {
    "main_added": "added sink",
    "main_first": "first token",
    "main_early": "tokens 2 to 4",
    "main_other": "later tokens",
    "main_none": "no sink",
}
"""columns of the monitor that add up to 1, from the bottom of the figure"""


def trained_share(runs: Trainings, axes: Axes | None = None, *, theme: str = "light") -> Axes:
    """Share of attention by layer at the last look: added sinks, dashed the greatest text token (as Fig. 3b, 3d)."""
    trainings = monitored(runs)
    with panel(trainings, axes, theme, "share of attention, %", "layer") as (plot, looks):
        for one in looks:
            table = one.run.last_layers
            if one.run.added:
                line(plot, one, table["layer"], 100 * table["sink_share"])
            line(plot, one, table["layer"], 100 * table["top_text_share"], dashed=True, named=not one.run.added)
        if any(run.added for run in trainings):
            entry(plot, "greatest text token")
        over_layers(plot, "")
        from_zero(plot)
    return plot


def trained_norms(runs: Trainings, axes: Axes | None = None, *, theme: str = "light") -> Axes:
    """Norm of values by layer at the last look over that of other text: added sinks, dashed text sinks (as Fig. 3a).

    Runs of other widths and layers of other scales share one axis so; 1 is like any other token.
    """
    trainings = monitored(runs)
    with panel(trainings, axes, theme, "norm of values / other text", "layer") as (plot, looks):
        for one in looks:
            table = one.run.last_layers
            if one.run.added:
                line(plot, one, table["layer"], table["value_added"] / table["value_other"])
            text = table["value_sink"] / table["value_other"]
            line(plot, one, table["layer"], text, dashed=True, named=not one.run.added)
        plot.axhline(1, color=plot.xaxis.label.get_color(), linestyle=":", linewidth=1)
        if any(run.added for run in trainings):
            entry(plot, "text sinks")
        over_layers(plot, "")
        from_zero(plot)
    return plot


def emergence_map(
    run: Run | Training, axes: Axes | None = None, *, theme: str = "light", top: float | None = None
) -> Axes:
    """Share of attention on the added sinks (without any: on the greatest text token) by step and layer, in percent.

    top: the share that has the strongest colour, for figures that are to compare.
    """
    from matplotlib.ticker import MaxNLocator

    (training,) = monitored(run)
    look = theme_named(theme)
    share_LT = 100 * training.by_layer("sink_share" if training.added else "top_text_share")
    with themed(look):
        plot = own_axes(axes, 4.6, 2.6)
        steps, layers = share_LT.columns.to_numpy(float), share_LT.index.to_numpy(float)
        values = share_LT.to_numpy()
        mesh = plot.pcolormesh(
            _edges(steps),
            _edges(layers),
            values,
            cmap=colormap(look),
            vmin=0,
            vmax=top or _top(values),
            rasterized=True,
        )
        plot.set(xlabel="step", ylabel="layer")
        plot.set_title("added sinks" if training.added else "greatest text token")
        plot.yaxis.set_major_locator(MaxNLocator(integer=True))
        figure: Any = plot.figure
        bar = figure.colorbar(mesh, ax=plot, pad=0.02)
        bar.set_label("share of attention, %")
        bar.outline.set_visible(False)
        causal_end(plot, drawn_as([training], look))
    return plot


def main_holders(run: Run | Training, axes: Axes | None = None, *, theme: str = "light") -> Axes:
    """Which keys hold the main sinks of all heads over steps, as shares that add up."""
    (training,) = monitored(run)
    look = theme_named(theme)
    table = training.looks
    colours = [look.added, look.states["committed"], look.runs[0], look.states["masked"], look.line]
    kept = [
        (name, colour) for name, colour in zip(HOLDERS, colours, strict=True) if training.added or name != "main_added"
    ]
    with themed(look):
        own, plot = axes is None, own_axes(axes, 4.6, 2.6)
        plot.stackplot(
            table["step"], [100 * table[name] for name, _ in kept], labels=[HOLDERS[name] for name, _ in kept],
            colors=[colour for _, colour in kept], edgecolor=look.surface, linewidth=0.5,
        )  # fmt: skip
        plot.set(
            xlabel="step", ylabel="heads, %", ylim=(0, 100), xlim=(table["step"].min(), max(table["step"].max(), 1))
        )
        causal_end(plot, drawn_as([training], look))
        plot.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, columnspacing=1.2)
        if own:
            figure: Any = plot.figure
            figure.set_figheight(figure.get_figheight() + 0.38)
    return plot


def _edges(middles: np.ndarray) -> np.ndarray:
    """Borders of cells around these middles."""
    if len(middles) == 1:
        return np.array([middles[0] - 0.5, middles[0] + 0.5])
    between = (middles[1:] + middles[:-1]) / 2
    return np.concatenate([[2 * middles[0] - between[0]], between, [2 * middles[-1] - between[-1]]])


def _top(values: np.ndarray) -> float:
    return max(float(np.nanmax(values)) if np.isfinite(values).any() else 0.0, 1e-3)
