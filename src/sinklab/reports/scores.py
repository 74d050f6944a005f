"""Figures of scores: how they are spread, what a threshold lets through, which tokens they are, what those carry."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sinklab.reports.drawing import NEW, drawn_as, figure
from sinklab.reports.maps import place_of
from sinklab.reports.samples import ADDED, MASK, STATES
from sinklab.reports.study import Study
from sinklab.reports.style import MARKERS, Theme, legend_of_dots, note, own_axes, printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_RASTERED = 1500


@figure("score_histogram", needs="attention", size=(4.6, 2.8), legend=2)
def score_histogram(runs: list[Study], axes: Axes = NEW, *, look: Theme) -> None:
    """How received attention is spread over tokens, layers, heads and steps (analysis paper, Fig. 3 and 9).

    Both axes are logarithmic; scores are multiples of an even share, and the line is the threshold of the sink rule.
    What lies below the lowest bin is counted in it.
    """
    # The line at the threshold and its label are always inside.
    low, high = 1.0, 16.0
    for index, one in enumerate(drawn_as(runs, look)):
        edges, shares = one.run.measured.scores
        full = np.flatnonzero(shares)
        low, high = min(low, edges[full[0]], edges[-1]), max(high, edges[full[-1] + 1])
        axes.stairs(
            100 * shares, edges, color=one.colour, linewidth=1.6,
            linestyle=("-", "--", ":", "-.")[index % 4], label=one.run.label,
        )  # fmt: skip
    threshold = runs[0].measured.threshold
    if low < threshold < high:
        axes.axvline(threshold, color=look.muted, linewidth=0.9)
        note(axes, "sinks →", (threshold, 1), ("data", "axes fraction"), (3, -2))
    axes.set(xscale="log", yscale="log", xlim=(low, high), xlabel="received attention", ylabel="% of tokens")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()


@figure("epsilon_curve", needs="attention", size=(4.6, 2.8), legend=1)
def epsilon_curve(runs: list[Study], axes: Axes = NEW, *, look: Theme) -> None:
    """Share of tokens that are no sinks over the threshold ε (analysis paper, Fig. 10).

    The lines mark ε = 3 and the 96 % stated for it.
    """
    lowest = 100.0
    for one in drawn_as(runs, look):
        curve = one.run.curve
        lowest = min(lowest, float(np.nanmin(100 * curve.filtered)))
        label = f"{one.run.label}: {100 * curve.at(3.0):.1f} % at 3"
        axes.plot(curve.epsilon, 100 * curve.filtered, color=one.colour, marker=one.marker, markevery=2, label=label)
    axes.axvline(3, color=look.muted, linewidth=0.8, linestyle=":")
    axes.axhline(96, color=look.muted, linewidth=0.8, linestyle=":")
    note(axes, "96 %", (1, 96), ("axes fraction", "data"), (0, -2), ha="right")
    axes.set(xlabel="ε", ylabel="tokens that are no sinks, %", ylim=(min(80.0, lowest - 1), 100.4))


@figure("value_norm_scatter", alone=True, needs=("attention", "value norms"), size=(4.6, 3.4))
def value_norm_scatter(run: Study, layer: int | None = None, axes: Axes = NEW, *, look: Theme) -> None:
    """Length of value vectors against received attention, a dot per token, layer and step (sink-token paper, Fig. 1).

    A random draw of at most 10,000 sink and 10,000 other text tokens (fixed seed), all layers or one of them; a text
    token counts as a sink where at least one head has a sink on it. Received attention is the mean over heads, in
    multiples of an even share. Horizontal lines are the means of the groups. Raises ValueError for an unknown layer.
    """
    from matplotlib.ticker import LogLocator

    drawn = run.measured.scatter
    if layer is not None:
        drawn = drawn[drawn["place"] == place_of(run, "layer", layer)]
    groups = (("other text", look.muted, "o", 5), ("text sinks", look.runs[0], "s", 9), (ADDED, look.added, "D", 9))
    for kind, (label, colour, marker, area) in enumerate(groups):
        rows = drawn[drawn["kind"] == kind]
        if not len(rows):
            continue
        axes.scatter(
            rows["score"].clip(lower=0.01), rows["norm"], s=area, marker=marker, color=colour, linewidths=0,
            alpha=0.35 if kind == 0 else 0.55, label=label, rasterized=len(rows) > _RASTERED,
        )  # fmt: skip
        axes.axhline(rows["norm"].mean(), color=colour, linewidth=1.2, linestyle="--" if kind else ":")
    axes.set(xscale="log", xlabel="received attention", ylabel="length of value vectors")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.minorticks_off()
    legend_of_dots(axes, 3)


@figure("output_norm_against_bound", alone=True, needs=("attention", "bounds"), size=(4.2, 3.8))
def output_norm_against_bound(run: Study, axes: Axes = NEW, *, look: Theme) -> None:
    """Length of a head's output against its no-op bound Σ a‖v‖ (sink-token paper, Eq. 20 to 22).

    A dot per recorded step, layer, head and state of the query (means over the queries; a random draw of at most 6,000
    with a fixed seed). No dot can lie above the line, where the two are equal.
    """
    drawn = run.measured.bounds
    top = float(drawn["bound"].max()) * 1.05
    axes.plot([0, top], [0, top], color=look.ink, linewidth=0.9, label="_equal")
    for code, state in enumerate(STATES):
        rows = drawn[drawn["state"] == code]
        if len(rows):
            axes.scatter(
                rows["bound"], rows["output"], s=7, marker=MARKERS[code], color=look.states[state], linewidths=0,
                alpha=0.5, label=state, rasterized=len(rows) > _RASTERED,
            )  # fmt: skip
    axes.set(xlabel="bound: Σ weight × length of value", ylabel="length of a head's output")
    axes.set(xlim=(0, top), ylim=(0, top))
    legend_of_dots(axes, 3, title="queries")


@figure("sink_tokens", alone=True, needs="tokens")
def sink_tokens(run: Study, axes: Axes | None = None, *, top: int = 8, look: Theme) -> Axes:
    """The tokens that are sinks most often (analysis paper, Table 2), with what occupancy alone would give.

    Bars for the frequency among sink events, a tick for the share of positions, enrichment (their ratio) as a number.
    """
    found = run.sink_tokens
    count = min(top, int((found.events > 0).sum()))
    frequency, occupancy = 100 * found.frequency[:count], 100 * found.occupancy[:count]
    colours = {ADDED: look.added, MASK: look.states["masked"]}
    axes = own_axes(axes, 4.6, 0.9 + 0.3 * max(count, 2))
    rows = np.arange(count)
    axes.barh(rows, frequency, color=[colours.get(label, look.muted) for label in found.label[:count]], height=0.66)
    axes.plot(occupancy, rows, linestyle="", marker="|", markersize=13, markeredgewidth=2.2, color=look.ink)
    ends = np.maximum(frequency, occupancy)
    room = max(ends, default=1.0)
    for row, end in enumerate(ends):
        axes.text(float(end + 0.025 * room), row, f"{found.enrichment[row]:.1f}×", va="center", fontsize=8.5)
    axes.set_yticks(rows, [label if label in colours else printable(label) for label in found.label[:count]])
    axes.tick_params(axis="y", length=0, labelcolor=look.ink)
    axes.set(xlabel="% of sink events (bar) and of positions (tick)", xlim=(0, 1.17 * room))
    axes.spines["left"].set_visible(False)
    axes.invert_yaxis()
    if not count:
        axes.text(0.5, 0.5, "no sink events", transform=axes.transAxes, ha="center", color=look.muted)
    return axes
