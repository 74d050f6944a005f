"""Accuracy over masked sinks as a figure (analysis paper, Table 1)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from .published_scores import published_model
from .style import MARKERS, Theme, theme_named, themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLES = {"gsm8k": "GSM8K", "humaneval": "HumanEval"}
MEASURED, PUBLISHED = "measured", "published"


def table1_figure(numbers: pd.DataFrame, *, theme: str = "light") -> Figure:
    """Accuracy over the number of masked columns, a panel per task; measured with full lines, published faint.

    Bars are ± one binomial standard error.
    """
    from matplotlib.figure import Figure

    look = theme_named(theme)
    tasks = list(dict.fromkeys(numbers["task"]))
    names: dict[str, int] = {}
    entries: dict[str, Any] = {}
    with themed(look):
        figure = Figure(figsize=(4.2 * max(len(tasks), 1.3), 3.4), layout="constrained")
        for axes, task in zip(np.atleast_1d(figure.subplots(1, len(tasks))), tasks, strict=True):
            _panel(axes, numbers[numbers["task"] == task], look, names)
            axes.set_title(TITLES.get(task, task))
            handles, labels = axes.get_legend_handles_labels()
            entries |= dict(zip(labels, handles, strict=True))
        figure.legend(entries.values(), entries.keys(), loc="outside upper left", ncols=min(len(tasks) + 1, 3))
    return figure


def _panel(axes: Axes, numbers: pd.DataFrame, look: Theme, names: dict[str, int]) -> None:
    """`names`: a model and its published twin have one colour, in every panel."""
    ks = sorted({int(k) for k in numbers["k"]})
    for (source, model, control), cells in numbers.groupby(["source", "model", "control"], sort=False):
        stands_for = model if source == PUBLISHED else published_model(model) or model
        index = names.setdefault(stands_for, len(names))
        base = numbers[(numbers["source"] == source) & (numbers["model"] == model) & (numbers["k"] == 0)]
        # every control begins at the unmasked score
        shown = (cells if control == "sinks" else pd.concat([base, cells])).sort_values("k")
        places = [ks.index(int(k)) + 0.03 * index for k in shown["k"]]
        measured = source == MEASURED
        axes.errorbar(
            places, 100 * shown["accuracy"], 100 * shown["stderr"], color=look.runs[index % len(look.runs)],
            marker=MARKERS[index % len(MARKERS)], linestyle=("-" if control == "sinks" else ":") if measured else "--",
            alpha=1 if measured else 0.45, capsize=2, elinewidth=1, linewidth=1.8 if measured else 1,
            label=f"{model}{'' if measured else ' (published)'}{'' if control == 'sinks' else f', {control}'}",
        )  # fmt: skip
    axes.set_xticks(range(len(ks)), ["none" if k == 0 else str(k) for k in ks])
    axes.set(xlabel="columns masked per layer and head", ylabel="right, %", ylim=(-2, None))
    axes.grid(axis="y")
