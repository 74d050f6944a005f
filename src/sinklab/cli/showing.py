"""`sinklab report` and `sinklab compare`: run folders to a page, figures and tables."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.markup import escape

from sinklab.cli.progress import working

if TYPE_CHECKING:
    import pandas as pd


MODELS = {"plain": "tiny", "sink": "tiny-sink"}


def tour(out: Path = Path("sinklab-tour"), quick: bool = False) -> None:
    """See attention sinks in a real diffusion language model, in under two minutes and without a download.

    Two small models come with this package, trained alike on public-domain English books, without and with one sink
    token. Each writes a few sentences while attention is recorded; then its sinks are hidden and held-out text is
    scored. The result is one page, report.html.

    Try
        sinklab tour
        sinklab tour --quick --out first-look

    Args:
        out: folder for the two run folders and the report; it must be empty or absent.
        quick: one short sample and little held-out text, for a first look in seconds.
    """
    from sinklab.checkpoints.loading import load
    from sinklab.records.reading import open_run
    from sinklab.reports.build import report, summary
    from sinklab.studies.trace.study import StudySettings, study

    console = Console()
    started = time.perf_counter()
    if out.exists() and any(out.iterdir()):
        raise ValueError(f"the tour writes into an empty folder, but {out} holds files; pass --out with another name")
    settings = StudySettings(truncate=True)
    if quick:
        settings = StudySettings(
            prompts=settings.prompts[:1], new_tokens=24, block_length=None, heldout_rows=6, ks=(0, 5)
        )
    runs = []
    with working() as say:
        for label, name in MODELS.items():
            say(f"loading {name!r} ({label})")
            runs.append(open_run(study(load(name), out / label, settings, progress=say)))
        say("drawing the report")
        page = report(runs, out / "report")
    for label, run in zip(MODELS, runs, strict=True):
        written = run.table("generations").query("sample == 0 and masked_sinks == 0").iloc[0]
        console.print(f"\n[bold]{label}[/bold] wrote: [dim]{escape(written.prompt)}[/dim]{escape(written.completion)}")
    console.print("\n[bold]In short[/bold]")
    for sentence in summary(runs):
        console.print(f"• {escape(sentence)}")
    console.print(f"\ntook {time.perf_counter() - started:.0f} s; open [bold]{page}[/bold] in a browser")


FIGURES = ("png", "svg")
TABLES = ("parquet", "csv", "md")


def report(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    out: Path = Path("runs/report"),
    figures: tuple[str, ...] = FIGURES,
    tables: tuple[str, ...] = TABLES,
    sink_rule: str | None = None,
) -> None:
    """Turn run folders into one page, report.html, with figures and tables beside it.

    Several runs are shown side by side, e.g. without and with a sink token. Runs of `sinklab trace` give a page to
    explore; runs of `sinklab train` give training curves: losses, when sinks emerge, which tokens they are.

    Try
        sinklab report runs/plain runs/sink --out runs/report
        sinklab report runs/house --figures pdf --tables csv
        sinklab report runs/house --figures --tables
        sinklab report runs/laptop-scratch runs/laptop-scratch-sink --out runs/curves
        sinklab report runs/house --sink-rule excess:epsilon=6

    Args:
        runs: run folders of `sinklab trace`, or of `sinklab train`; one kind at a time.
        out: folder for the page, its figures and its tables.
        figures: formats of the static figures beside the page, of png, svg and pdf; none after a bare --figures.
        tables: formats of the tables beside the page, of parquet, csv and md; none after a bare --tables.
        sink_rule: what counts as a sink in runs of `sinklab trace`, NAME:field=value; excess:epsilon=3 when left out.
    """
    from sinklab.records.reading import open_run
    from sinklab.registry import rules
    from sinklab.reports.build import report as build

    if not runs:
        raise ValueError("report needs at least one run folder; make one with `sinklab trace` or `sinklab train`")
    rule = None if sink_rule is None else rules.parse(sink_rule)
    print(f"report: {build([open_run(run) for run in runs], out, rule=rule, figures=figures, tables=tables)}")


def compare(
    a: Annotated[Path, tyro.conf.Positional],
    b: Annotated[Path, tyro.conf.Positional],
    out: Path = Path("runs/compare"),
) -> None:
    """Compare two runs side by side: a table of numbers on the terminal, and one page that shows both.

    Try
        sinklab compare runs/plain runs/sink
        sinklab compare runs/mask/plain runs/mask/masked --out runs/mask/report

    Args:
        a: folder of the first run.
        b: folder of the second run; differences are second minus first.
        out: folder for the page, its figures and its tables.
    """
    from sinklab.records.reading import open_run
    from sinklab.reports.build import report as build
    from sinklab.reports.comparison import compare as compared

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
