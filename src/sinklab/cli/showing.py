"""`sinklab report` and `sinklab compare`: run folders to a page, figures and tables."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    import pandas as pd

FIGURES = ("png", "svg")
TABLES = ("parquet", "csv", "md")


def report(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    out: Path = Path("runs/report"),
    figures: tuple[str, ...] = FIGURES,
    tables: tuple[str, ...] = TABLES,
) -> None:
    """Turn run folders into one page, report.html, with figures and tables beside it.

    Several runs are shown side by side, e.g. without and with a sink token. Runs of `sinklab trace` give a page to
    explore; runs of `sinklab train` give their curves: losses, when sinks emerge, who holds them.

    Try
        sinklab report runs/plain runs/sink --out runs/report
        sinklab report runs/house --figures pdf --tables csv
        sinklab report runs/house --figures --tables
        sinklab report runs/laptop-scratch runs/laptop-scratch-sink --out runs/curves

    Args:
        runs: folders that `sinklab trace` wrote, or `sinklab train`; one kind at a time.
        out: folder for the page, its figures and its tables.
        figures: formats of the static figures beside the page, of png, svg and pdf; none after a bare --figures.
        tables: formats of the tables beside the page, of parquet, csv and md; none after a bare --tables.
    """
    from sinklab.records import open_run
    from sinklab.reports import report as build

    if not runs:
        raise ValueError("report needs at least one run folder; make one with `sinklab trace` or `sinklab train`")
    print(f"report: {build([open_run(run) for run in runs], out, figures=figures, tables=tables)}")


def compare(
    a: Annotated[Path, tyro.conf.Positional],
    b: Annotated[Path, tyro.conf.Positional],
    out: Path = Path("runs/compare"),
) -> None:
    """Set two runs side by side: a table of numbers on the terminal, and one page that shows both.

    Try
        sinklab compare runs/plain runs/sink
        sinklab compare runs/mask/plain runs/mask/masked --out runs/mask/report

    Args:
        a: folder of the first run.
        b: folder of the second run; the difference is the second less the first.
        out: folder for the page, its figures and its tables.
    """
    from sinklab.records import open_run
    from sinklab.reports import compare as compared
    from sinklab.reports import report as build

    runs = [open_run(run) for run in (a, b)]
    print("\n".join(_lines(compared(*runs))))
    print(f"report: {build(runs, out)}")


def _lines(table: pd.DataFrame) -> list[str]:
    """A table as lines of text, columns aligned."""
    cells = [[str(name) for name in table.columns]]
    cells += [[_cell(value) for value in row] for row in table.itertuples(index=False)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    # the first column is words, the others are numbers
    aligned = [[row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in cells]
    return ["  ".join(row) for row in aligned]


def _cell(value: object) -> str:
    if value is None or value != value:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
