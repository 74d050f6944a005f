"""Figures of scores: how they are spread, what a threshold lets through, which tokens they are, what those carry."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sinklab.records.reading import Run
from sinklab.reports.figures import recorded
from sinklab.reports.paths import Runs
from sinklab.reports.samples import STATES, NotRecorded
from sinklab.reports.study import ADDED, MASK, Study, as_study
from sinklab.reports.style import MARKERS, legend_above, own_axes, printable, theme_named, themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_RASTERED = 1500


def score_histogram(runs: Runs, axes: Axes | None = None, *, theme: str = "light") -> Axes:
    """How received attention is spread over tokens, layers, heads and steps (analysis paper, Fig. 3 and 9).

    Both axes are logarithmic; scores are multiples of an even share, and the line is the threshold of the sink rule.
    What lies below the lowest bin is counted in it. Raises NotRecorded without attention.
    """
    studies, look = recorded(runs), theme_named(theme)
    with themed(look):
        own, axes = axes is None, own_axes(axes, 4.6, 2.8)
        # The line at the threshold and its label are always inside.
        low, high = 1.0, 16.0
        for index, study in enumerate(studies):
            histogram = study.histogram
            assert histogram is not None
            counts = histogram.counts.astype(float)
            counts[0] += histogram.below
            counts[-1] += histogram.above
            full = np.flatnonzero(counts)
            low = min(low, histogram.edges[full[0]], histogram.edges[-1])
            high = max(high, histogram.edges[full[-1] + 1])
            axes.stairs(
                100 * counts / counts.sum(), histogram.edges, color=look.runs[index % len(look.runs)], linewidth=1.6,
                linestyle=("-", "--", ":", "-.")[index % 4], label=study.label,
            )  # fmt: skip
        axes.axvline(4, color=look.muted, linewidth=0.9)
        axes.annotate(
            "sinks →", (4, 1), xycoords=("data", "axes fraction"), xytext=(3, -2), textcoords="offset points", va="top",
            fontsize=8, color=look.muted,
        )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlim=(low, high), xlabel="received attention", ylabel="% of tokens")
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
        legend_above(axes, 2, grow=own)
    return axes


def epsilon_curve(runs: Runs, axes: Axes | None = None, *, theme: str = "light") -> Axes:
    """Share of tokens that are no sinks over the threshold ε (analysis paper, Fig. 10).

    The lines mark ε = 3 and the 96 % stated for it. Raises NotRecorded without attention.
    """
    studies, look = recorded(runs), theme_named(theme)
    with themed(look):
        own, axes = axes is None, own_axes(axes, 4.6, 2.8)
        lowest = 100.0
        for index, study in enumerate(studies):
            assert study.curve is not None
            filtered = 100 * study.curve.filtered
            lowest = min(lowest, float(np.nanmin(filtered)))
            axes.plot(
                study.curve.epsilon, filtered, color=look.runs[index % len(look.runs)],
                marker=MARKERS[index % len(MARKERS)], markevery=2,
                label=f"{study.label}: {100 * study.curve.at(3.0):.1f} % at 3",
            )  # fmt: skip
        axes.axvline(3, color=look.muted, linewidth=0.8, linestyle=":")
        axes.axhline(96, color=look.muted, linewidth=0.8, linestyle=":")
        axes.annotate(
            "96 %", (1, 96), xycoords=("axes fraction", "data"), xytext=(0, -2), textcoords="offset points", ha="right",
            va="top", fontsize=8, color=look.muted,
        )  # fmt: skip
        axes.set(xlabel="ε", ylabel="tokens that are no sinks, %", ylim=(min(80.0, lowest - 1), 100.4))
        legend_above(axes, grow=own)
    return axes


def value_norm_scatter(
    run: Run | Study, layer: int | None = None, axes: Axes | None = None, *, theme: str = "light"
) -> Axes:
    """Length of value vectors against received attention, a dot per token, layer and step (sink-token paper, Fig. 1).

    A random draw of at most 10,000 sink and 10,000 other text tokens (fixed seed), all layers or one of them; a text
    token counts as a sink where at least one head has a sink on it. Received attention is the mean over heads, in
    multiples of an even share. Horizontal lines are the means of the groups. Raises NotRecorded when value norms were
    not recorded, or for an unknown layer.
    """
    from matplotlib.ticker import LogLocator

    from sinklab.reports.maps import place_of

    study, look = recorded(run)[0], theme_named(theme)
    place = None if layer is None else place_of(study, "layer", layer)
    drawn = study.measured.scatter
    if not len(drawn):
        raise NotRecorded(
            f"This figure needs value norms, and {study.run.path} recorded none. Trace with the statistic value_norm."
        )
    groups = (("other text", look.muted, "o", 5), ("text sinks", look.runs[0], "s", 9), (ADDED, look.added, "D", 9))
    with themed(look):
        axes = own_axes(axes, 4.6, 3.4)
        for kind, (label, colour, marker, area) in enumerate(groups):
            rows = drawn[drawn["kind"] == kind]
            rows = rows if place is None else rows[rows["place"] == place]
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
        legend = axes.legend(
            ncols=3, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, handletextpad=0.1, columnspacing=1
        )
        for handle in legend.legend_handles:
            handle.set(sizes=[28], alpha=1)  # type: ignore[union-attr]
    return axes


def output_norm_against_bound(run: Run | Study, axes: Axes | None = None, *, theme: str = "light") -> Axes:
    """Length of a head's output against its no-op bound Σ a‖v‖ (sink-token paper, Eq. 20 to 22).

    A dot per recorded step, layer, head and state of the query (means over the queries; a random draw of at most 6,000
    with a fixed seed). No dot can lie above the line, where the two are equal. Raises ValueError when either was not
    recorded.
    """
    study, look = recorded(run)[0], theme_named(theme)
    drawn = study.measured.bounds
    if not len(drawn):
        raise NotRecorded(
            f"This figure needs output norms and their bounds, and {study.run.path} recorded none. Trace with the "
            "statistics output_norm and noop_bound."
        )
    with themed(look):
        axes = own_axes(axes, 4.2, 3.8)
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
        legend = axes.legend(
            title="queries",
            alignment="left",
            ncols=3,
            loc="lower left",
            bbox_to_anchor=(-0.1, 1),
            borderaxespad=0.2,
            handletextpad=0.1,
            columnspacing=1,
        )
        for handle in legend.legend_handles:
            handle.set(sizes=[28], alpha=1)  # type: ignore[union-attr]
    return axes


def sink_tokens(run: Run | Study, axes: Axes | None = None, *, top: int = 8, theme: str = "light") -> Axes:
    """The tokens that are sinks most often (analysis paper, Table 2), with what occupancy alone would give.

    Bars for the frequency among sink events, a tick for the share of positions, enrichment (their ratio) as a number.
    Raises ValueError when the run kept no tokens or no attention.
    """
    study, look = as_study(run), theme_named(theme)
    found = study.sink_tokens
    if found is None:
        raise NotRecorded(f"This figure needs the table tokens and recorded attention: {study.run.path} lacks one.")
    count = min(top, int((found.events > 0).sum()))
    frequency, occupancy = 100 * found.frequency[:count], 100 * found.occupancy[:count]
    colours = {ADDED: look.added, MASK: look.states["masked"]}
    with themed(look):
        axes = own_axes(axes, 4.6, 0.9 + 0.3 * max(count, 2))
        rows = np.arange(count)
        axes.barh(rows, frequency, color=[colours.get(label, look.muted) for label in found.label[:count]], height=0.66)
        axes.plot(occupancy, rows, linestyle="", marker="|", markersize=13, markeredgewidth=2.2, color=look.ink)
        ends = np.maximum(frequency, occupancy)
        room = max(ends, default=1.0)
        for row in rows:
            axes.text(
                float(ends[row] + 0.025 * room), float(row), f"{found.enrichment[row]:.1f}×", va="center", fontsize=8.5
            )
        axes.set_yticks(rows, [label if label in colours else printable(label) for label in found.label[:count]])
        axes.tick_params(axis="y", length=0, labelcolor=look.ink)
        axes.set(xlabel="% of sink events (bar) and of positions (tick)", xlim=(0, 1.17 * room))
        axes.spines["left"].set_visible(False)
        axes.invert_yaxis()
        if not count:
            axes.text(0.5, 0.5, "no sink events", transform=axes.transAxes, ha="center", color=look.muted)
    return axes
