"""Results of an ablation map: two maps side by side, a table of the cells, and sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sinklab.core.registry import rules
from sinklab.core.sinks.rules import DEFAULT
from sinklab.lab.analysis.doses import FEWEST_CELLS, rank_correlation
from sinklab.lab.analysis.estimates import FEWEST, Estimate
from sinklab.lab.records.info import of_twin
from sinklab.lab.records.reading import Run
from sinklab.lab.records.storage import write_beside
from sinklab.lab.reports.charts import Axis, Map
from sinklab.lab.reports.drawing import figure
from sinklab.lab.reports.printed import save_figure, write_page
from sinklab.lab.reports.samples import NotRecorded, Reader
from sinklab.lab.reports.words import number, percent, statements
from sinklab.lab.studies.scored import wide
from sinklab.lab.studies.twins import no_twins, shown_by, twins_of

CELL = ["layer", "head"]
SHOWN = 20
"""Cells in the Markdown table; the CSV has all."""
TOLD = {1: "costs", -1: "helps", 0: "cannot tell"}


def cells_of(run: Run) -> pd.DataFrame:
    """The table ``map``. Raises NotRecorded for a run that did not come to its end."""
    if "map" not in run.tables:
        raise NotRecorded(
            f"This needs an ablation that is finished: {run.path} is not. Resume it with --resume."
        )
    return run.table("map")


def ablation_sentences(runs: Iterable[Run]) -> list[str]:
    """Sentences on each run: how many cells cost something and which most, and whether weight and
    cost go together.
    """
    known: dict[str, Any] = {
        "fewest": FEWEST,
        "fewest_cells": FEWEST_CELLS,
        "rule": rules.words(DEFAULT),
    }
    told = statements(
        "sinklab.lab.studies.curve", (_change, rules.words), file="maps.jinja", **known
    )
    return [sentence for run in runs for sentence in _of_one(run, told)]


def _of_one(run: Run, told: Callable[..., list[str]]) -> list[str]:
    cells, kinds = cells_of(run), twins_of(run)
    settings, name = run.info.settings, run.info.model["name"]
    changes = {kind: _furthest(run.table(of_twin("map", kind))) for kind in kinds}
    most = shown_by({kind: f"{change:+.4f}".replace("-", "−") for kind, change in changes.items()})
    said = told("ablation", name, settings, cells, _clean(cells), most)
    if cells["rows"].iloc[0] < FEWEST:
        return said
    found = _correlation(run)
    others = {kind: _correlation(run, kind).value for kind in kinds}
    texts = {kind: "" if np.isnan(value) else number(value, 2) for kind, value in others.items()}
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


def _change(cell: pd.Series) -> str:
    parts = [
        f"{cell[name]:+.4f}".replace("-", "−") for name in ("delta", "delta_low", "delta_high")
    ]
    return parts[0] if np.isnan(cell["delta_low"]) else f"{parts[0]} ({parts[1]} … {parts[2]})"


def ablation_table(run: Run) -> pd.DataFrame:
    """The cells by falling size of the change, as text for people; the numbers are the table
    ``map``.
    """
    cells = cells_of(run)
    cells = cells.reindex(cells["delta"].abs().sort_values(ascending=False, kind="stable").index)
    text = {"layer": cells["layer"].map("{:.0f}".format)}
    text["head"] = cells["head"].map(lambda head: "all" if head < 0 else f"{head:.0f}")
    text["keys"] = cells["keys"].map(lambda keys: number(keys, 2))
    text |= {name: cells[name].map(percent) for name in ("sinks", "held", "removed")}
    text["change of loss"] = cells.apply(_change, axis=1)
    text["verdict"] = cells["told"].map(TOLD).where(cells["keys"] != 0, "nothing to block")
    return pd.DataFrame(text).reset_index(drop=True)


@figure("ablation", kind="ablate", alone=True, prepared=True, columns=2, share="y", size=(3.6, 2.6))
def ablation_figure(one: Reader) -> list[Map]:
    """Layer × head: the share of attention on the blocked keys, and the cost of blocking them.

    A dot marks a cell with an inconclusive change.
    """
    cells = cells_of(one.run)
    share_LH, delta_LH, told_LH = (
        cells.pivot(index="layer", columns="head", values=name).to_numpy()
        for name in ("held", "delta", "told")
    )
    layers, heads = (
        Axis(name, names=[*map(str, dict.fromkeys(cells[name]))]) for name in ("layer", "head")
    )
    heads = replace(heads, names=["all" if name == "-1" else name for name in heads.names])
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
    return [path for run in runs for path in _written(run, formats)]


def _written(run: Run, formats: Iterable[str]) -> list[Path]:
    table = ablation_table(run)
    more = f"\n{len(table) - SHOWN} more in ablation.csv.\n" if len(table) > SHOWN else ""
    numbers = run.path / "ablation.csv"
    page = write_page(run.path / "ablation.md", table.head(SHOWN), ablation_sentences([run]), more)
    write_beside(numbers, lambda path: cells_of(run).to_csv(path, index=False))
    return [
        page,
        numbers,
        *save_figure(lambda: ablation_figure(run), run.path / "ablation", formats),
    ]
