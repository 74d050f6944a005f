"""Figures of training runs over steps: each takes a run or several and draws on matplotlib axes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from sinklab.records.reading import Run
from sinklab.reports.samples import NotRecorded
from sinklab.reports.style import MARKERS, Theme, from_zero, legend_above, own_axes, theme_named, themed
from sinklab.reports.training import Training, as_trainings

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Trainings = Iterable[Run | Training] | Run | Training

# Seven runs are told apart; the first four are those of every other figure.
MORE = {"light": ("#B07D00", "#4D5562", "#2E9BD6"), "dark": ("#E8C547", "#C9CED8", "#B39DFF")}
WARM_UP = 0.05
"""part of the run whose training loss does not set the scale"""


@dataclass(frozen=True)
class Look:
    """How one run is drawn."""

    run: Training
    colour: str
    marker: str
    name: str | None
    """entry in the legend; None for a repeat of a run that has one"""


def drawn_as(trainings: list[Training], look: Theme) -> list[Look]:
    """A colour for each run, and the same for runs that differ in their seed alone: these have one legend entry."""
    colours, kinds = look.runs + MORE[look.name], list(dict.fromkeys(run.repeats for run in trainings))
    found: list[Look] = []
    for run in trainings:
        before = [one for one in found if one.run.repeats == run.repeats]
        kind, count = kinds.index(run.repeats), sum(one.repeats == run.repeats for one in trainings)
        name = run.label if count == 1 else f"{run.repeats}, {count} runs"
        # with more kinds than colours, the markers tell
        marker = MARKERS[(kind + len(before) + kind // len(colours)) % len(MARKERS)]
        found.append(Look(run, colours[kind % len(colours)], marker, None if before else name))
    return found


def training_loss(runs: Trainings, axes: Axes | None = None, *, theme: str = "light") -> Axes:
    """Held-out loss over steps (full line) and training loss (faint), nats per token.

    A dotted line stands where a causal warm start ends. Raises NotRecorded without a history.
    """
    trainings = having(runs, "history", lambda run: run.history is not None)
    with panel(trainings, axes, theme, "loss, nats per token") as (plot, looks):
        lows, highs = [], []
        for one in looks:
            history = _table(one.run.history)
            losses, held = (history.dropna(subset=[name]) for name in ("loss", "heldout_loss"))
            plot.plot(losses["step"], losses["loss"], color=one.colour, linewidth=0.8, alpha=0.4)
            line(plot, one, held["step"], held["heldout_loss"])
            late = losses["loss"][losses["step"] > WARM_UP * history["step"].max()]
            seen = np.concatenate([late, held["heldout_loss"]]) if len(late) else losses["loss"].to_numpy()
            if np.isfinite(seen).any():
                lows.append(float(np.nanmin(seen)))
                highs.append(float(np.nanquantile(seen, 0.98)))
        if lows:
            room = 0.05 * (max(highs) - min(lows)) + 1e-3
            plot.set_ylim(min(lows) - room, max(highs) + room)
        causal_end(plot, looks)
    return plot


def sink_emergence(runs: Trainings, axes: Axes | None = None, *, theme: str = "light") -> Axes:
    """Share of attention over steps: of the added sinks (full line), of the greatest text token of a head (dashed).

    Raises NotRecorded without a sink monitor.
    """
    trainings = monitored(runs)
    with panel(trainings, axes, theme, "share of attention, %") as (plot, looks):
        for one in looks:
            table = one.run.looks
            if one.run.added:
                line(plot, one, table["step"], 100 * table["sink_share"])
            line(plot, one, table["step"], 100 * table["top_text_share"], dashed=True, named=not one.run.added)
        if any(run.added for run in trainings):
            entry(plot, "greatest text token")
        from_zero(plot)
        causal_end(plot, looks)
    return plot


def sinks_over_training(runs: Trainings, axes: Axes | None = None, *, theme: str = "light") -> Axes:
    """Sinks of a head over steps: all (full line), and those among the text where added ones make these differ."""
    with panel(monitored(runs), axes, theme, "sinks per head") as (plot, looks):
        _whole_and_text(plot, looks, "sinks", "text_sinks")
        from_zero(plot)
    return plot


def mobility_over_training(runs: Trainings, axes: Axes | None = None, *, theme: str = "light") -> Axes:
    """How much main sinks move between the levels of a look, 0 static to 1; dashed: among the text alone."""
    with panel(monitored(runs), axes, theme, "mobility of main sinks") as (plot, looks):
        _whole_and_text(plot, looks, "mobility", "text_mobility")
        plot.set_ylim(-0.02, 1.02)
    return plot


def _whole_and_text(plot: Axes, looks: list[Look], whole: str, text: str) -> None:
    """A measure over steps, and dashed the same among the text alone where added sinks make it differ."""
    for one in looks:
        table = one.run.looks
        line(plot, one, table["step"], table[whole])
        if one.run.added:
            line(plot, one, table["step"], table[text], dashed=True, named=False)
    if any(one.run.added for one in looks):
        entry(plot, "in the text")
    causal_end(plot, looks)


def massive_activations(runs: Trainings, axes: Axes | None = None, *, theme: str = "light") -> Axes:
    """Greatest |x| of the residual stream in any layer over steps: in the text, dashed at the added sinks."""
    trainings = monitored(runs)
    with panel(trainings, axes, theme, "greatest |x|") as (plot, looks):
        for one in looks:
            table = one.run.looks
            line(plot, one, table["step"], np.fmax(table["activation_first"], table["activation_other"]))
            if one.run.added and table["activation_added"].notna().any():
                line(plot, one, table["step"], table["activation_added"], dashed=True, named=False)
        if any(run.added for run in trainings):
            entry(plot, "at the added sink")
        from_zero(plot)
        causal_end(plot, looks)
    return plot


def optimization(runs: Trainings, *, theme: str = "light") -> Figure:
    """Learning rate, gradient norm and tokens per second over steps, those of them that were logged.

    Raises NotRecorded without a history.
    """
    from matplotlib.figure import Figure

    trainings = having(runs, "history", lambda run: run.history is not None)
    panels = {"lr": "learning rate", "grad_norm": "gradient norm", "tokens_per_second": "tokens per second"}
    tables = [_table(run.history) for run in trainings]
    known = [name for name in panels if any(name in table and table[name].notna().any() for table in tables)]
    if not known:
        raise NotRecorded(f"This figure needs a learning rate in the history, and {trainings[0].run.path} logged none.")
    look = theme_named(theme)
    with themed(look):
        figure = Figure(figsize=(4.6, 0.6 + 1.35 * len(known)), layout="constrained")
        looks = drawn_as(trainings, look)
        for axes, name in zip(np.atleast_1d(figure.subplots(len(known), 1, sharex=True)), known, strict=True):
            for one, history in zip(looks, tables, strict=True):
                if name in history:
                    rows = history.dropna(subset=[name])
                    axes.plot(rows["step"], rows[name], color=one.colour, linewidth=1.1, label=one.name)
            axes.set_ylabel(panels[name])
            axes.grid(axis="y")
            from_zero(axes)
        axes.set_xlabel("step")
        handles, names = axes.get_legend_handles_labels()
        figure.legend(handles, names, loc="outside upper left", ncols=2)
        figure.set_figheight(figure.get_figheight() + 0.19 * -(-len(names) // 2))
    return figure


@contextmanager
def panel(
    trainings: list[Training], axes: Axes | None, theme: str, label: str, across: str = "step"
) -> Iterator[tuple[Axes, list[Look]]]:
    """Axes in the look of ``theme``, with a legend above what is drawn inside the block."""
    look = theme_named(theme)
    with themed(look):
        own, plot = axes is None, own_axes(axes, 4.6, 2.8)
        yield plot, drawn_as(trainings, look)
        plot.set(xlabel=across, ylabel=label)
        plot.grid(axis="y")
        legend_above(plot, 2, grow=own)


def line(plot: Axes, one: Look, across: Any, values: Any, *, dashed: bool = False, named: bool = True) -> None:
    """One curve of a run; hollow markers and dashes for the second curve of a kind."""
    across, values = np.asarray(across), np.asarray(values, dtype=float)
    surface = plot.get_facecolor()
    plot.plot(
        across, values, color=one.colour, marker=one.marker, markersize=3.5, markevery=max(1, len(across) // 12),
        linestyle="--" if dashed else "-", linewidth=1.2 if dashed else 1.7,
        markerfacecolor=surface if dashed else one.colour, label=one.name if named else None,
    )  # fmt: skip


def entry(plot: Axes, words: str) -> None:
    """An entry in the legend that says what dashes are."""
    plot.plot([], [], color=plot.xaxis.label.get_color(), linestyle="--", linewidth=1.2, label=words)


def causal_end(plot: Axes, looks: list[Look]) -> None:
    """A dotted line where a causal warm start ends."""
    for step in sorted({one.run.causal_steps for one in looks} - {0}):
        plot.axvline(step, color=plot.xaxis.label.get_color(), linestyle=":", linewidth=1)
        plot.annotate(
            "diffusion from here", (step, 0.99), xycoords=("data", "axes fraction"), xytext=(3, 0),
            textcoords="offset points", va="top", fontsize=7.5, color=plot.xaxis.label.get_color(),
        )  # fmt: skip


def monitored(runs: Trainings) -> list[Training]:
    return having(runs, "sink monitor", lambda run: not run.looks.empty)


def having(runs: Trainings, what: str, has: Callable[[Training], bool]) -> list[Training]:
    """Those of the runs that recorded it. NotRecorded when there is none."""
    trainings = as_trainings(runs)
    found = [run for run in trainings if has(run)]
    if not found:
        hint = " Train with --monitor-every." if what == "sink monitor" else ""
        raise NotRecorded(f"This figure needs a {what}, and {trainings[0].run.path} has none.{hint}")
    return found


def _table(frame: pd.DataFrame | None) -> pd.DataFrame:
    assert frame is not None
    return frame
