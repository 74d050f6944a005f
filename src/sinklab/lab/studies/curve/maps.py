"""Results of an ablation map: two maps side by side, a table of the cells, and sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from sinklab.core.registry import rules
from sinklab.core.sinks.rules import DEFAULT
from sinklab.lab.analysis.doses import FEWEST_CELLS, rank_correlation
from sinklab.lab.analysis.estimates import FEWEST, Estimate
from sinklab.lab.records.info import of_twin
from sinklab.lab.records.reading import Run
from sinklab.lab.reports import Axis, Map, figure
from sinklab.lab.reports.printed import save_figure, write_csv, write_page
from sinklab.lab.reports.samples import Reader, finished
from sinklab.lab.reports.words import number, percent, ranged, signed, statements
from sinklab.lab.studies.scored import wide
from sinklab.lab.studies.twins import no_twins, shown_by, twins_of

CELL = ["layer", "head"]
SHOWN = 20
"""Cells in the Markdown table; the CSV has all."""
TOLD = {1: "costs", -1: "helps", 0: "cannot tell"}


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


def _change(cell: pd.Series) -> str:
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
    text["change of loss"] = cells.apply(_change, axis=1)
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
