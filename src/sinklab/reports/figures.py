"""Figures over layers, tokens and hidden sinks: each takes a run or several and draws on matplotlib axes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from sinklab.records import Run
from sinklab.sinks import token_kind

from .study import ADDED, MASK, Study, as_studies, as_study
from .style import MARKERS, own_axes, printable, theme_named, themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Runs = Iterable[Run | Study] | Run | Study


def sink_share(runs: Runs, axes: Axes | None = None, *, theme: str = "light") -> Axes:
    """Share of attention per layer: on the added sink token (full line) and on the greatest text position (dashed)."""
    studies, look = _recorded(runs), theme_named(theme)
    with themed(look):
        axes = own_axes(axes, 4.6, 3.4)
        for index, study in enumerate(studies):
            colour, marker = look.runs[index % len(look.runs)], MARKERS[index % len(MARKERS)]
            layers = range(len(study.layers))
            if study.sink_count:
                added = [100 * facts.added_share for facts in study.layers]
                axes.plot(layers, added, color=colour, marker=marker, label=f"{study.label}: added sink")
            text = [100 * facts.text_share for facts in study.layers]
            axes.plot(
                layers, text, color=colour, marker=marker, markerfacecolor=look.surface, linestyle="--",
                label=f"{study.label}: greatest text position",
            )  # fmt: skip
        _over_layers(axes, "share of attention, %")
        axes.set_ylim(bottom=0)
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    return axes


def value_norms(run: Run | Study, axes: Axes | None = None, *, top: float | None = None, theme: str = "light") -> Axes:
    """Mean length of value vectors per layer: added sink, text positions that are sinks, all other text positions."""
    study, look = _recorded(run)[0], theme_named(theme)
    with themed(look):
        axes = own_axes(axes, 4.6, 3.0)
        layers = range(len(study.layers))
        rest = [facts.rest_norm for facts in study.layers]
        axes.plot(layers, rest, color=look.muted, marker="o", label="other text")
        sinks = [facts.sink_norm for facts in study.layers]
        axes.plot(layers, sinks, color=look.runs[0], marker="s", linestyle="--", label="text sinks")
        if study.sink_count:
            added = [facts.added_norm for facts in study.layers]
            axes.plot(layers, added, color=look.added, marker="D", label=ADDED)
        _over_layers(axes, "length of value vectors")
        axes.set_ylim(0, top)
        axes.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, columnspacing=1.2)
    return axes


def greatest_norm(study: Study) -> float:
    """The greatest value that ``value_norms`` draws, for a scale that runs share."""
    values = [[facts.added_norm, facts.sink_norm, facts.rest_norm] for facts in study.layers]
    return float(np.nanmax(values))


def sink_tokens(run: Run | Study, axes: Axes | None = None, *, top: int = 8, theme: str = "light") -> Axes:
    """The tokens that are sinks most often: bars for the frequency, a tick for the occupancy, enrichment as a number.

    Raises ValueError when the run kept no tokens or no attention.
    """
    study, look = as_study(run), theme_named(theme)
    found = study.sink_tokens
    if found is None:
        raise ValueError(f"This figure needs the table tokens and recorded attention: {study.run.path} lacks one.")
    count = min(top, int((found.events > 0).sum()))
    frequency, occupancy = 100 * found.frequency[:count], 100 * found.occupancy[:count]
    special = {MASK: "mask", ADDED: "sink"}
    colours = {"sink": look.added, "mask": look.states["masked"]}
    with themed(look):
        axes = own_axes(axes, 4.6, 0.9 + 0.3 * max(count, 2))
        rows = np.arange(count)
        kinds = [token_kind(label, special) for label in found.label[:count]]
        axes.barh(rows, frequency, color=[colours.get(kind, look.muted) for kind in kinds], height=0.66)
        axes.plot(occupancy, rows, linestyle="", marker="|", markersize=13, markeredgewidth=2.2, color=look.ink)
        ends = np.maximum(frequency, occupancy)
        room = max(ends, default=1.0)
        for row in rows:
            axes.text(
                float(ends[row] + 0.025 * room), float(row), f"{found.enrichment[row]:.1f}×", va="center", fontsize=8.5
            )
        axes.set_yticks(rows, [label if label in special else printable(label) for label in found.label[:count]])
        axes.tick_params(axis="y", length=0, labelcolor=look.ink)
        axes.set(xlabel="% of sink events (bar) and of positions (tick)", xlim=(0, 1.17 * room))
        axes.spines["left"].set_visible(False)
        axes.invert_yaxis()
        if not count:
            axes.text(0.5, 0.5, "no sink events", transform=axes.transAxes, ha="center", color=look.muted)
    return axes


def heldout_loss(runs: Runs, axes: Axes | None = None, *, theme: str = "light") -> Axes:
    """Change of held-out loss over the number of hidden columns: sinks (full line), random ones (dotted), ± one s.e.

    The differences are paired, so their errors are small beside those of the losses themselves. Raises ValueError when
    no run has the table heldout.
    """
    studies, look = as_studies(runs), theme_named(theme)
    scored = [(index, study, study.heldout) for index, study in enumerate(studies) if study.heldout is not None]
    if not scored:
        raise ValueError(f"This figure needs the table heldout: {studies[0].run.path} has none.")
    ks = sorted({int(k) for _, _, frame in scored for k in frame["k"]})
    with themed(look):
        axes = own_axes(axes, 4.6, 3.4)
        for index, study, frame in scored:
            colour, marker = look.runs[index % len(look.runs)], MARKERS[index % len(MARKERS)]
            for control, style, nudge in (("sinks", "-", 0.0), ("random", ":", 0.06)):
                rows = frame[frame["control"].isin(["none", control])].sort_values("k")
                if not (rows["control"] == control).any():
                    continue
                change, error = (rows[key].to_numpy(float) for key in ("delta", "delta_stderr"))
                places = [ks.index(int(k)) + nudge + 0.02 * index for k in rows["k"]]
                axes.errorbar(
                    places, change, np.nan_to_num(error), color=colour, marker=marker, linestyle=style,
                    markerfacecolor=colour if control == "sinks" else look.surface, capsize=2.5, elinewidth=1,
                    label=f"{study.label}: {'sinks' if control == 'sinks' else 'random columns'} hidden",
                )  # fmt: skip
        axes.set_xticks(range(len(ks)), [str(k) for k in ks])
        axes.set(xlabel="columns hidden per layer and head", ylabel="change of loss, nats per token")
        axes.grid(axis="y")
        axes.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2)
    return axes


def _recorded(runs: Runs) -> list[Study]:
    studies = as_studies(runs)
    recorded = [study for study in studies if study.layers]
    if not recorded:
        raise ValueError(f"This figure needs recorded attention: {studies[0].run.path} has none.")
    return recorded


def _over_layers(axes: Axes, label: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel="layer", ylabel=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y")
