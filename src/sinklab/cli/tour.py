"""`sinklab tour`: the whole river on the two models inside the package."""

from __future__ import annotations

import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from sinklab.cli.progress import working

MODELS = {"plain": "tiny", "sink": "tiny-sink"}


def tour(out: Path = Path("sinklab-tour"), quick: bool = False) -> None:
    """See attention sinks in a real diffusion language model, in under two minutes and without a download.

    Two small models come with this package, trained alike on public-domain English books, without and with one sink
    token. Each writes a few sentences while every attention call is watched; then its sinks are hidden and held-out
    text is scored. What comes out is one page, report.html.

    Try
        sinklab tour
        sinklab tour --quick --out first-look

    Args:
        out: folder for the two run folders and the report; it must be empty or absent.
        quick: one short sample and little held-out text, for a first look in seconds.
    """
    from sinklab.evaluation import StudySettings, study
    from sinklab.models import load
    from sinklab.records import open_run
    from sinklab.reports import report, summary

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
