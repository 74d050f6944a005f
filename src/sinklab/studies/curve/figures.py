"""Masking curves, runs of kind "curve": a figure, a table, and what they say in words."""

import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sinklab.analysis.doses import MATCHED
from sinklab.analysis.estimates import FEWEST
from sinklab.errors import one_of
from sinklab.records.storage import write_beside
from sinklab.registry import rules
from sinklab.reports.drawing import drawn_as, figure_of, line
from sinklab.reports.printed import save_figure, write_page
from sinklab.reports.style import legend_above, own_axes, theme_named, themed
from sinklab.reports.words import number, percent, statements
from sinklab.studies.base import labels_of
from sinklab.studies.curve.curves import DOSE, Curves, MaskingCurve, as_curves, contrasts, judged, unlike
from sinklab.studies.twins import no_twins

STYLES: dict[str, Any] = {"top": "-", "sinks": "-", "random": ":", "lowest": "--", "recent": "-."}
STYLES |= {"equal_mass": (0, (4, 1, 1, 1, 1, 1)), "matched": (0, (6, 1))}
WORDS: dict[str, str] = labels_of("curve")["hidden"]
SCALES = ("log", "linear")
AXES = ("count", "mass")


def masking_curve_figure(
    runs: Curves,
    axes: Axes | None = None,
    *,
    over: str = "count",
    relative: bool = False,
    scale: str = "log",
    change: str = "linear",
    theme: str = "light",
) -> Axes:
    """Change of the loss over the number of hidden keys, or the attention removed, with 95 % bands over rows of text.

    A colour for each model; a style for each control. A diffusion model's loss is its masked-token bound, an
    autoregressive one's that of the next token. `over`: count (keys per layer and head) or mass (percent of the
    attention that was really taken away). `relative`: in percent of the loss with nothing hidden. `scale`: of the axis
    of counts, log (linear below 1) or linear; `change`: of the vertical one, linear or log (linear below a thousandth
    of a nat, or of a percent). Raises ValueError for another axis, scale or theme, and for runs of another kind.
    """
    for name in (scale, change):
        one_of("the scale of a masking curve", name, SCALES)
    one_of("the axis of a masking curve", over, AXES)
    curves, look = as_curves(runs), theme_named(theme)
    with themed(look):
        own, axes = axes is None, own_axes(axes, 4.8, 3.2)
        for one, curve in zip(drawn_as(curves, look), curves, strict=True):
            for nth, control in enumerate(curve.controls):
                rows = curve.of(control)
                factor = 100 / rows["loss"].iloc[0] if relative else 1.0
                across = rows["k"]
                if over == "mass":
                    rows = rows.sort_values("removed", kind="stable")
                    across = 100 * rows["removed"]
                middle, low, high = (factor * rows[name] for name in ("delta", "delta_low", "delta_high"))
                axes.fill_between(across, low, high, color=one.colour, alpha=0.14, linewidth=0)
                line(axes, one, across, middle, style=STYLES.get(control, "-"), label=None if nth else curve.title)
        if over == "count":
            ks = sorted({int(k) for curve in curves for k in curve.rows["k"]})
            if scale == "log":
                axes.set_xscale("symlog", linthresh=1)
            axes.set_xticks(ks, [str(k) for k in ks])
        if change == "log":
            axes.set_yscale("symlog", linthresh=1e-3)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}".replace("-", "−"))
        axes.minorticks_off()
        unit = "% of the loss" if relative else "nats per token"
        across = "keys hidden per layer and head" if over == "count" else "attention removed, %"
        axes.set(xlabel=across, ylabel=f"change of loss, {unit}")
        axes.grid(axis="y")
        controls = dict.fromkeys(control for curve in curves for control in curve.controls)
        words = [(STYLES.get(control, "-"), WORDS.get(control, control)) for control in controls]
        legend_above(axes, 2, grow=own, extra=words)
    return axes


def masking_curve_table(runs: Curves) -> pd.DataFrame:
    """One row per (model, k, what was hidden): loss, its change with the 95 % interval, and the dose, for people.

    The dose: keys per head, the share of them that are sinks by the rule, the attention they held when chosen, what was
    really removed, and the share of heads that have a control of equal mass. Numbers are the table ``curve`` of a run.
    """
    rows = []
    for curve in as_curves(runs):
        for k, cells in curve.rows.groupby("k"):
            for cell in cells.to_dict("records"):
                row = {"model": curve.title, "k": k, "hidden": WORDS.get(cell["control"], cell["control"])}
                dose = {"keys": number(cell["columns"]), **{name: percent(cell[name]) for name in DOSE[1:]}}
                row |= {"loss": number(cell["loss"], 4), "change": _change(cell), "relative": _relative(cell), **dose}
                rows.append(row)
    return pd.DataFrame(rows)


def masking_curve_sentences(runs: Curves) -> list[str]:
    """What the curves say: of each model, then of diffusion models against autoregressive ones.

    Verdicts are corrected for the number of all of them together; what an untrained twin shows as well is marked.
    """
    curves = as_curves(runs)
    filters = (_signed, _points, _change, _relative, rules.parse, unlike, contrasts)
    told = statements("sinklab.studies.curve", filters, matched=MATCHED, fewest=FEWEST)
    watched = {curve.label: curve.run for curve in curves if curve.main is not None}
    return told("page", curves, judged(curves)) + no_twins(watched)


def write_masking_curves(
    runs: Curves, folder: str | Path, formats: Iterable[str] = ("png",), **look: Any
) -> list[Path]:
    """Write the pictures over count and over mass, the table (masking_curve.md, .csv with all numbers) and sentences.

    `look`: relative, scale, change and theme of `masking_curve_figure`.

    Raises ValueError for an unknown format or scale, and for runs of another kind.
    """
    curves, target = as_curves(runs), Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    numbers = pd.concat([curve.rows.assign(model=curve.title) for curve in curves], ignore_index=True)
    numbers = numbers[["model", *(name for name in numbers if name != "model")]]
    written = [target / "masking_curve.md", target / "masking_curve.csv"]
    write_page(written[0], masking_curve_table(curves), masking_curve_sentences(curves))
    write_beside(written[1], lambda path: numbers.to_csv(path, index=False))
    for over, stem in (("count", "masking_curve"), ("mass", "masking_curve_mass")):
        draw = partial(_drawn, curves, over=over, **look)
        written += save_figure(draw, target / stem, formats)
    return written


def _drawn(curves: list[MaskingCurve], **look: Any) -> Figure:
    return figure_of(masking_curve_figure(curves, **look))


def _change(cell: Any, name: str = "delta") -> str:
    if math.isnan(cell[f"{name}_low"]):
        return _signed(cell[name])
    return f"{_signed(cell[name])} ({_signed(cell[f'{name}_low'])} … {_signed(cell[f'{name}_high'])})"


def _relative(cell: Any) -> str:
    return f"{_signed(100 * cell['relative'], 1)} %"


def _points(share: float) -> str:
    return f"{_signed(100 * share, 2)} %"


def _signed(value: float, digits: int = 3) -> str:
    return "–" if np.isnan(value) else f"{value:+.{digits}f}".replace("-", "−")
