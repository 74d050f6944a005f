"""Masking curves, runs of kind "curve": a figure, a table, and their results in words."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from sinklab.core.errors import one_of
from sinklab.core.registry import rules
from sinklab.lab.analysis.doses import MATCHED
from sinklab.lab.analysis.estimates import FEWEST
from sinklab.lab.reports import Axis, Chart, Reader
from sinklab.lab.reports.drawing import drawn_as, figure
from sinklab.lab.reports.printed import save_figure, write_csv, write_page
from sinklab.lab.reports.words import number, percent, ranged, signed, statements
from sinklab.lab.studies.base import labels_of
from sinklab.lab.studies.curve import maps as maps  # registers its figure
from sinklab.lab.studies.curve.curves import (
    DOSE,
    Curves,
    MaskingCurve,
    as_curves,
    contrasts,
    judged,
    unlike,
)
from sinklab.lab.studies.twins import no_twins

STYLES: dict[str, Any] = {"top": "-", "sinks": "-", "random": ":", "lowest": "--", "recent": "-."}
STYLES |= {"equal_mass": (0, (4, 1, 1, 1, 1, 1)), "matched": (0, (6, 1))}
WORDS: dict[str, str] = labels_of("curve")["blocked"]
SCALES = ("log", "linear")
AXES = ("count", "mass")


@figure("masking_curve", kind="curve", prepared=True, size=(4.8, 3.2))
def masking_curve_figure(
    runs: list[Reader],
    *,
    over: str = "count",
    relative: bool = False,
    scale: str = "log",
    change: str = "linear",
) -> Chart:
    """Change of the loss over the number of blocked keys, or the attention removed, with 95 % bands
    over rows of text.

    A colour for each model; a style for each control. A diffusion model's loss is its masked-token
    bound, an autoregressive one's that of the next token. `over`: count (keys per layer and head)
    or mass (percent of the attention really removed). `relative`: in percent of the loss with
    nothing blocked. `scale`: of the axis of counts, log (linear below 1) or linear; `change`: of
    the vertical one, linear or log (linear below a thousandth of a nat, or of a percent). Raises
    ValueError for another axis, scale or theme, and for runs of another kind.
    """
    for name in (scale, change):
        one_of("the scale of a masking curve", name, SCALES)
    one_of("the axis of a masking curve", over, AXES)
    curves = as_curves([run if isinstance(run, MaskingCurve) else run.run for run in runs])
    column, to_axis = {"count": ("k", 1), "mass": ("removed", 100)}[over]
    lines = []
    for one, curve in zip(drawn_as(curves), curves, strict=True):
        for control in curve.controls:
            rows = curve.of(control).sort_values(column, kind="stable")
            factor = 1.0
            if relative:
                factor = 100 / rows["loss"].iloc[0]
            how = {
                "run": curve.title,
                "name": curve.title,
                "style": STYLES.get(control, "-"),
                "words": WORDS.get(control, control),
                "low": factor * rows["delta_low"],
                "high": factor * rows["delta_high"],
            }
            lines.append(one.line(to_axis * rows[column], factor * rows["delta"], **how))
    log = {"log": "symlog", "linear": "linear"}
    x = Axis("attention removed, %")
    if over == "count":
        x = Axis(
            "keys blocked per layer and head",
            scale=log[scale],
            ticks=sorted({int(k) for one in curves for k in one.rows["k"]}),
        )
    unit = "nats per token"
    if relative:
        unit = "% of the loss"
    return Chart(x, Axis(f"change of loss, {unit}", scale=log[change], linear=1e-3), lines)


def masking_curve_table(runs: Curves) -> pd.DataFrame:
    """One row per (model, k, control): loss, its change with the 95 % interval, and the dose, for
    people.

    The dose: keys per head, the share of them that are sinks by the rule, the attention they held
    when chosen, the share really removed, and the share of heads that have a control of equal mass.
    Numbers are the table ``curve`` of a run.
    """
    rows = []
    for curve in as_curves(runs):
        for k, cells in curve.rows.groupby("k"):
            for cell in cells.to_dict("records"):
                row = {
                    "model": curve.title,
                    "k": k,
                    "blocked": WORDS.get(cell["control"], cell["control"]),
                    "loss": number(cell["loss"], 4),
                    "change": _change(cell),
                    "relative": _relative(cell),
                    "keys": number(cell["keys"]),
                }
                rows.append(row | {name: percent(cell[name]) for name in DOSE[1:]})
    return pd.DataFrame(rows)


def masking_curve_sentences(runs: Curves) -> list[str]:
    """Sentences on the curves: on each model, then on diffusion models against autoregressive ones.

    Verdicts are corrected for the number of all of them together; results of the controls stand
    beside them.
    """
    curves = as_curves(runs)
    filters = (signed, _points, _change, _relative, rules.words, unlike, contrasts)
    told = statements("sinklab.lab.studies.curve", filters, matched=MATCHED, fewest=FEWEST)
    watched = {curve.label: curve.run for curve in curves if curve.main is not None}
    return told("page", curves, judged(curves)) + no_twins(watched)


def write_masking_curves(
    runs: Curves, folder: str | Path, formats: Iterable[str] = ("png",), **look: Any
) -> list[Path]:
    """Write the pictures over count and over mass, the table (masking_curve.md, .csv with all
    numbers) and sentences.

    `look`: relative, scale, change and theme of `masking_curve_figure`.

    Raises ValueError for an unknown format or scale, and for runs of another kind.
    """
    curves, target = as_curves(runs), Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    parts = {curve.title: curve.rows for curve in curves}
    numbers = pd.concat(parts, names=["model"]).reset_index("model")
    said = masking_curve_sentences(curves)
    written = [
        write_page(target / "masking_curve.md", masking_curve_table(curves), said),
        write_csv(target / "masking_curve.csv", numbers),
    ]
    for over, stem in (("count", "masking_curve"), ("mass", "masking_curve_mass")):
        draw = partial(masking_curve_figure, curves, over=over, **look)
        written += save_figure(draw, target / stem, formats)
    return written


def _change(cell: Any, name: str = "delta") -> str:
    return ranged(cell, name, signed)


def _relative(cell: Any) -> str:
    return f"{signed(100 * cell['relative'], 1)} %"


def _points(share: float) -> str:
    return f"{signed(100 * share, 2)} %"
