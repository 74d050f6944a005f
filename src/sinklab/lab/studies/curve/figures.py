"""Masking curves and maps of heads, runs of kind "curve" and "ablate": figures, tables, and their
results in words.
"""

# R rows
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from sinklab.lab.records import Run
from sinklab.lab.reports import (
    finished,
    number,
    percent,
    ranged,
    save_figure,
    signed,
    write_csv,
    write_page,
)
from sinklab.lab.studies import (
    of_each,
)
from sinklab.lab.studies.curve import drawing
from sinklab.lab.studies.curve.study import DOSE
from sinklab.lab.studies.curve.verdicts import (
    TOLD,
    Curves,
    ablation_sentences,
    as_curves,
    masking_curve_sentences,
)


def masking_curve_table(runs: Curves) -> pd.DataFrame:
    """One row per (model, k, control): loss, its change with the 95 % interval, and the dose, for
    people.

    The dose: keys per head, the share of them that are sinks by the rule, the attention they held
    when chosen, the share really removed, and the share of heads that have a control of equal mass.
    Numbers are the table ``curve`` of a run.
    """
    rows = []
    for curve in as_curves(runs):
        for cell in curve.rows.sort_values("k", kind="stable").to_dict("records"):
            row = {
                "model": curve.title,
                "k": cell["k"],
                "blocked": drawing.WORDS.get(cell["control"], cell["control"]),
                "loss": number(cell["loss"], 4),
                "change": change(cell),
                "relative": in_percent(cell["relative"]),
                "keys": number(cell["keys"]),
            }
            rows.append(row | {name: percent(cell[name]) for name in DOSE[1:]})
    return pd.DataFrame(rows)


def draw_masking_curves(runs: list[Run], out: Path, options: Any) -> list[Path]:
    """masking_curve.md, .csv and the pictures, with the look of the options."""
    return write_masking_curves(runs, out, options.figures, change=options.change)


def write_masking_curves(
    runs: Curves,
    folder: str | Path,
    formats: Iterable[str] = ("png",),
    *,
    change: str = "linear",
) -> list[Path]:
    """Write the pictures over count and over mass, the table (masking_curve.md, .csv with all
    numbers) and sentences.

    `change`: see `drawing.masking_curve`.

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
        drawn = partial(drawing.masking_curve, curves, over=over, change=change)
        written += save_figure(drawn, target / stem, formats)
    return written


def change(cell: Any, name: str = "delta", digits: int = 3) -> str:
    """A change in a row, in nats per token, with its interval."""
    return ranged(cell, name, partial(signed, digits=digits))


def in_percent(share: float, digits: int = 1) -> str:
    """A change as a share, in percent."""
    return f"{signed(100 * share, digits)} %"


SHOWN = 20
"""Cells in the Markdown table; the CSV has all."""


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
    text["change of loss"] = cells.apply(change, axis=1, digits=4)
    text["verdict"] = cells["told"].map(TOLD).where(cells["keys"] != 0, "nothing to block")
    return pd.DataFrame(text).reset_index(drop=True)


@of_each
def draw_ablation(run: Run, out: Path, options: Any) -> list[Path]:
    """ablation.md, ablation.csv (all cells with all numbers) and the maps, in each run folder."""
    table = ablation_table(run)
    more = ""
    if len(table) > SHOWN:
        more = f"\n{len(table) - SHOWN} more in ablation.csv.\n"
    stem, held = run.path / "ablation", run.path / "ablation_held"
    return [
        write_page(stem.with_suffix(".md"), table.head(SHOWN), ablation_sentences([run]), more),
        write_csv(stem.with_suffix(".csv"), finished(run, "map")),
        *save_figure(partial(drawing.ablation, run), stem, options.figures),
        *save_figure(partial(drawing.ablation, run, show="held"), held, options.figures),
    ]
