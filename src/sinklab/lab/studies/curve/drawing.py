"""The figures of runs of kind "curve" and "ablate"."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from sinklab.core.errors import one_of
from sinklab.lab.reports.drawing import draw_lines, draw_map, figure
from sinklab.lab.reports.runs import finished
from sinklab.lab.reports.samples import Reader
from sinklab.lab.studies import labels_of

WORDS: dict[str, str] = labels_of("curve")["blocked"]
"""Name of an arm -> the keys that it blocks, in words."""
STYLES: dict[str, Any] = {"top": "-", "sinks": "-", "random": ":"}
STYLES |= {"equal_mass": (0, (4, 1, 1, 1, 1, 1)), "matched": (0, (6, 1))}
SCALES = ("linear", "log")
AXES = {
    "count": ("k", "keys blocked per layer and head"),
    "mass": ("removed", "attention removed, %"),
}


@figure("masking_curve", kind="curve", size=(4.8, 3.2))
def masking_curve(
    runs: list[Reader], ax: Axes, *, over: str = "count", change: str = "linear"
) -> pd.DataFrame:
    """Change of the loss over the number of blocked keys, or the attention removed, with 95 % bands
    over rows of text.

    A colour for each model; a style for each control. A diffusion model's loss is its masked-token
    bound, an autoregressive one's that of the next token.

    Args:
        runs: the runs.
        ax: where to draw.
        over: count (keys per layer and head) or mass (percent of the attention really removed).
        change: scale of the vertical axis, linear or log (linear below a thousandth of a nat).
    """
    one_of("the scale of a masking curve", change, SCALES)
    one_of("the axis of a masking curve", over, AXES)
    column, label = AXES[over]
    parts, ks = [], set[int]()
    for run in runs:
        table = run.table("curve")
        if table is None:
            table = finished(run.run, "curve")
        ks |= {int(k) for k in table["k"]}
        family = "DLM" if run.run.info.model.get("family") == "diffusion" else "AR"
        for control in dict.fromkeys(table["control"]):
            rows = table[table["control"].isin(["none", control])]
            rows = rows.sort_values(column, kind="stable")
            about: dict[str, Any] = {"run": f"{run.label} ({family})"}
            about |= {"line": WORDS.get(control, control), column: rows[column]}
            about |= {"value": rows["delta"], "low": rows["delta_low"], "high": rows["delta_high"]}
            if control != "none":
                parts.append(pd.DataFrame(about))
    frame = pd.concat(parts, ignore_index=True)
    if over == "mass":
        frame[column] *= 100
    draw_lines(ax, frame, styles={WORDS.get(name, name): STYLES[name] for name in STYLES})
    ax.set(xlabel=label, ylabel="change of loss, nats per token")
    if over == "count":
        ax.set_xscale("symlog", linthresh=1)
        ax.set_xticks(sorted(ks), map(str, sorted(ks)))
    if change == "log":
        ax.set_yscale("symlog", linthresh=1e-3)
    return frame


@figure("ablation", kind="ablate", alone=True, size=(4.6, 3.2))
def ablation(run: Reader, ax: Axes, *, show: str = "delta") -> pd.DataFrame:
    """Layer × head: the cost of blocking the keys of a cell, in nats per token. A dot marks an
    inconclusive change.

    Args:
        run: the run.
        ax: where to draw.
        show: delta, the cost, or held, the share of attention on the blocked keys.
    """
    cells = finished(run.run, "map")
    table, told = (
        cells.pivot(index="layer", columns="head", values=name) for name in (show, "told")
    )
    names = pd.Index(["all" if head == -1 else str(head) for head in table], name="head")
    if show == "held":
        return draw_map(ax, 100 * table.set_axis(names, axis=1), "attention on these keys, %")
    label = "change of loss, nats per token"
    frame = draw_map(ax, table.set_axis(names, axis=1), label)
    for row, column in zip(*(told.to_numpy() == 0).nonzero(), strict=True):
        ax.plot(column + 0.5, row + 0.5, ".k", markersize=3, alpha=0.5)
    return frame
