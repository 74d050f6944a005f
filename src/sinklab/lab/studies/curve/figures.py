"""Costs of blocked keys over their number and over layers and heads: figures, table, files."""

import math
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from sinklab.core.errors import one_of
from sinklab.lab.reports import (
    NotRecorded,
    Reader,
    as_shown,
    draw_lines,
    draw_map,
    figure,
    finished,
    number,
    percent,
    signed,
    write_csv,
    write_figure,
    write_page,
)
from sinklab.lab.reports.figures import BLOCKED
from sinklab.lab.scoring.arms import DOSE
from sinklab.lab.studies.curve.verdicts import by_degree, cost_sentences, is_map, title_of

STYLES: dict[str, Any] = {"top": "-", "sinks": "-", "random": ":"}
STYLES |= {"equal_mass": (0, (4, 1, 1, 1, 1, 1)), "matched": (0, (6, 1))}
AXES = {
    "count": ("k", "keys blocked per layer and head"),
    "mass": ("removed", "attention removed, %"),
}
SHOWN = 20
"""Cells of a map in the Markdown table; the CSV has all."""


@figure("masking_curve", kind="curve", size=(4.8, 3.2))
def masking_curve(runs: list[Reader], ax: Axes, *, over: str = "count") -> pd.DataFrame:
    """Change of the loss over the number of blocked keys, or the attention removed, with 95 % bands
    over rows of text.

    A colour for each model; a style for each control. A diffusion model's loss is its masked-token
    bound, an autoregressive one's that of the next token.

    Args:
        runs: the runs.
        ax: where to draw.
        over: count (keys per layer and head) or mass (percent of the attention really removed).
    """
    one_of("the axis of a masking curve", over, AXES)
    column, label = AXES[over]
    parts, ks = [], set[int]()
    for run in runs:
        if is_map(run.run) or (over == "count" and by_degree(run.run)):
            continue
        table = finished(run.run, "curve")
        ks |= {int(k) for k in table["k"]}
        for control in dict.fromkeys(table["control"]):
            rows = table[table["control"].isin(["none", control])]
            about: dict[str, Any] = {"run": title_of(run), "line": BLOCKED.get(control, control)}
            rows = rows.sort_values(column, kind="stable").assign(**about, value=rows["mean"])
            if control != "none":
                parts.append(rows[["run", "line", column, "value", "low", "high"]])
    if not parts:
        raise NotRecorded("This figure needs a curve in which keys of all heads were blocked.")
    frame = pd.concat(parts, ignore_index=True)
    if over == "mass":
        frame[column] *= 100
    draw_lines(ax, frame, styles={BLOCKED.get(name, name): STYLES[name] for name in STYLES})
    ax.set(xlabel=label, ylabel="change of loss, nats per token")
    if over == "count":
        ax.set_xscale("symlog", linthresh=1)
        ax.set_xticks(sorted(ks), map(str, sorted(ks)))
    return frame


@figure("ablation", kind="curve", alone=True, size=(4.6, 3.2))
def ablation(run: Reader, ax: Axes) -> pd.DataFrame:
    """Layer × head: the cost of blocking the keys of a cell, in nats per token. A dot marks an
    inconclusive change.

    Args:
        run: the run.
        ax: where to draw.
    """
    if not is_map(run.run):
        raise NotRecorded("This figure needs a curve by layer or head.")
    table = finished(run.run, "curve")
    cells = table[table["layer"] >= 0]
    # of several arms the first
    cells = cells.drop_duplicates(["layer", "head"]).set_index(["layer", "head"])
    values, verdicts = cells["mean"].unstack(), cells["verdict"].unstack()
    names = ["all" if head == -1 else str(head) for head in values]
    values = values.set_axis(pd.Index(names, name="head"), axis=1)
    frame = draw_map(ax, values, "change of loss, nats per token")
    for row, column in zip(*(verdicts == "inconclusive").to_numpy().nonzero(), strict=True):
        ax.plot(column + 0.5, row + 0.5, ".k", markersize=3, alpha=0.5)
    return frame


def cost_rows(runs: Any) -> pd.DataFrame:
    """A line per model and arm for people: loss, its change with the 95 % interval, and the dose;
    the cells of a map by falling size of the change. Numbers are the table ``curve`` of a run.

    The dose: keys per head, the share of them that are sinks by the rule, the attention they held
    when chosen, the share really removed, and the share of heads that have a control of equal mass.
    """
    rows = []
    for one in as_shown(runs, "curve"):
        table = finished(one.run, "curve").sort_values("k", kind="stable")
        if is_map(one.run):
            order = table["mean"].abs().sort_values(ascending=False, kind="stable")
            table = table.loc[order.index].head(SHOWN)
        for cell in table.to_dict("records"):
            row = {"model": title_of(one), "k": cell["k"]}
            row["blocked"] = BLOCKED.get(cell["control"], cell["control"])
            if cell["layer"] >= 0:
                head = f", head {cell['head']}" if cell["head"] >= 0 else ""
                row["blocked"] += f", layer {cell['layer']}{head}"
            if "beta" in cell:
                row["weight left"] = percent(cell["beta"])
            row |= {"loss": number(cell["loss"], 4), "change": signed(cell["mean"], 3)}
            if not math.isnan(cell["low"]):
                row["change"] += f" (95 % {signed(cell['low'], 3)} … {signed(cell['high'], 3)})"
            row |= {"relative": f"{signed(100 * cell['relative'], 1)} %"}
            row |= {"keys": number(cell["keys"])}
            rows.append(row | {name: percent(cell[name]) for name in DOSE[1:]})
    return pd.DataFrame(rows)


def write_costs(runs: Any, folder: str | Path, formats: Any = ("png",)) -> list[Path]:
    """Write the table and sentences (masking_curve.md), all numbers (masking_curve.csv), pictures
    of curves over count and over mass, and of each map.

    Raises ValueError for an unknown format, and for runs of another kind.
    """
    shown: list[Reader] = as_shown(runs, "curve")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    tables = {title_of(one): finished(one.run, "curve") for one in shown}
    numbers = pd.concat(tables, names=["model"]).reset_index("model")
    written = [
        write_page(target / "masking_curve.md", cost_rows(shown), cost_sentences(shown)),
        write_csv(target / "masking_curve.csv", numbers),
    ]
    curves = [one for one in shown if not is_map(one.run)]
    stems = {"count": "masking_curve", "mass": "masking_curve_mass"}
    if all(by_degree(one.run) for one in curves):
        del stems["count"]
    if not formats:
        return written
    if curves:
        for over, stem in stems.items():
            drawn = masking_curve(shown, over=over)
            written += write_figure(drawn, target / stem, formats)
    for one in shown:
        if is_map(one.run):
            place = target / f"ablation-{one.run.path.name}"
            written += write_figure(ablation(one), place, formats)
    return written
