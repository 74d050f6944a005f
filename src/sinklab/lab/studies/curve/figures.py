"""Masking curves and maps of heads, runs of kind "curve" and "ablate": figures, tables, and their
results in words.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from sinklab.core.errors import one_of
from sinklab.core.registry import rules
from sinklab.core.sinks.rules import DEFAULT
from sinklab.lab.analysis.doses import FEWEST_CELLS, MATCHED, rank_correlation
from sinklab.lab.analysis.estimates import FEWEST, Estimate
from sinklab.lab.records.info import of_twin
from sinklab.lab.records.reading import Run
from sinklab.lab.reports import Axis, Chart, Map, Reader
from sinklab.lab.reports.drawing import drawn_as, figure
from sinklab.lab.reports.printed import save_figure, write_csv, write_page
from sinklab.lab.reports.samples import finished
from sinklab.lab.reports.words import number, percent, ranged, signed, statements
from sinklab.lab.studies.base import labels_of
from sinklab.lab.studies.curve.curves import (
    DOSE,
    Curves,
    MaskingCurve,
    as_curves,
    contrasts,
    judged,
    unlike,
)
from sinklab.lab.studies.scored import no_twins, shown_by, twins_of, wide

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


def _statements() -> Callable[..., list[str]]:
    filters = (signed, _points, _change, _relative, _of_cell, rules.words, unlike, contrasts)
    known: dict[str, Any] = {
        "matched": MATCHED,
        "fewest": FEWEST,
        "fewest_cells": FEWEST_CELLS,
        "default_rule": rules.words(DEFAULT),
    }
    return statements("sinklab.lab.studies.curve", filters, **known)


def masking_curve_sentences(runs: Curves) -> list[str]:
    """Sentences on the curves: on each model, then on diffusion models against autoregressive ones.

    Verdicts are corrected for the number of all of them together; results of the controls stand
    beside them.
    """
    curves = as_curves(runs)
    told = _statements()
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


CELL = ["layer", "head"]
SHOWN = 20
"""Cells in the Markdown table; the CSV has all."""
TOLD = {1: "costs", -1: "helps", 0: "cannot tell"}


def ablation_sentences(runs: Iterable[Run]) -> list[str]:
    """Sentences on each run: how many cells cost something and which most, and whether weight and
    cost go together.
    """
    told = _statements()
    return [sentence for run in runs for sentence in _of_one(run, told)]


def _of_one(run: Run, told: Callable[..., list[str]]) -> list[str]:
    cells = finished(run, "map")
    kinds = twins_of(run)
    settings = run.info.settings
    name = run.info.model["name"]
    changes = {kind: _furthest(run.table(of_twin("map", kind))) for kind in kinds}
    most = shown_by({kind: _signed(change) for kind, change in changes.items()})
    said = told("ablation", name, settings, cells, _clean(cells), most)
    if cells["rows"].iloc[0] < FEWEST:
        return said
    found = _correlation(run)
    others = {kind: _correlation(run, kind).value for kind in kinds}
    texts = {kind: number(value, 2).strip("–") for kind, value in others.items()}
    return [
        *said,
        *told("together", settings["by"], found, shown_by(texts)),
        *no_twins({name: run}),
    ]


def _clean(cells: pd.DataFrame) -> float:
    return float(cells["loss"].mean() - cells["delta"].mean())


def _furthest(cells: pd.DataFrame) -> float:
    """The greatest change of a cell, in nats per token."""
    return float(cells.loc[cells["delta"].abs().idxmax(), "delta"])


def _correlation(run: Run, twin: str = "") -> Estimate:
    rows = run.table(of_twin("ablation", twin))
    rows = rows.assign(delta=rows["loss"] - rows["clean"])
    held_RC, delta_RC = (wide(rows, CELL, name).to_numpy() for name in ("held", "delta"))
    return rank_correlation(held_RC, delta_RC)


def _signed(change: float) -> str:
    return signed(change, 4)


def _of_cell(cell: pd.Series) -> str:
    return ranged(cell, "delta", _signed)


def ablation_table(run: Run) -> pd.DataFrame:
    """The cells by falling size of the change, as text for people; the numbers are the table
    ``map``.
    """
    cells = finished(run, "map")
    cells = cells.reindex(cells["delta"].abs().sort_values(ascending=False, kind="stable").index)
    text = {"layer": cells["layer"].map("{:.0f}".format)}
    text["head"] = cells["head"].map("{:.0f}".format).replace("-1", "all")
    text["keys"] = cells["keys"].map(partial(number, significant=2))
    text |= {name: cells[name].map(percent) for name in ("sinks", "held", "removed")}
    text["change of loss"] = cells.apply(_of_cell, axis=1)
    text["verdict"] = cells["told"].map(TOLD).where(cells["keys"] != 0, "nothing to block")
    return pd.DataFrame(text).reset_index(drop=True)


@figure("ablation", kind="ablate", alone=True, prepared=True, columns=2, share="y", size=(3.6, 2.6))
def ablation_figure(one: Reader) -> list[Map]:
    """Layer × head: the share of attention on the blocked keys, and the cost of blocking them.

    A dot marks a cell with an inconclusive change.
    """
    cells = finished(one.run, "map")
    share_LH, delta_LH, told_LH = (
        cells.pivot(index="layer", columns="head", values=name).to_numpy()
        for name in ("held", "delta", "told")
    )
    layers, heads = (
        Axis(name, names=[*map(str, dict.fromkeys(cells[name]))]) for name in ("layer", "head")
    )
    heads = replace(heads, names=[{"-1": "all"}.get(name, name) for name in heads.names])
    dotted = replace(heads, label="head (a dot: cannot be told from no change)")
    costs = Map(
        delta_LH,
        "change of loss, nats per token",
        layers,
        dotted,
        both=True,
        unsure_RC=told_LH == 0,
    )
    return [Map(100 * share_LH, "attention on the blocked keys, %", layers, heads), costs]


def draw_ablation(runs: Iterable[Run], formats: Iterable[str]) -> list[Path]:
    """ablation.md, ablation.csv (all cells with all numbers) and the maps, in each run folder."""
    written = []
    for run in runs:
        table = ablation_table(run)
        more = ""
        if len(table) > SHOWN:
            more = f"\n{len(table) - SHOWN} more in ablation.csv.\n"
        stem = run.path / "ablation"
        said = ablation_sentences([run])
        written += [
            write_page(stem.with_suffix(".md"), table.head(SHOWN), said, more),
            write_csv(stem.with_suffix(".csv"), finished(run, "map")),
            *save_figure(partial(ablation_figure, run), stem, formats),
        ]
    return written
