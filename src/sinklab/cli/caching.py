"""`sinklab caches`: does protecting sinks help a block cache at equal budget?"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from sinklab.cli.command import Reading
from sinklab.cli.progress import working
from sinklab.studies.caches.settings import CacheSettings
from sinklab.studies.processes import refuse_taken

if TYPE_CHECKING:
    from sinklab.records.reading import Run


@dataclasses.dataclass(frozen=True)
class Asked(CacheSettings):
    """The settings as the command line takes them."""

    def __post_init__(self) -> None:
        """Nothing is checked while arguments are parsed: `caches` does it, and says what is wrong in one line."""


QUICK = Asked(keep=(0.5, 0.25), rows=8, batch=8, prompt_tokens=64, new_tokens=32, texts=4, repeats=2)
"""A minute or so on the packaged models; the study's own settings are CacheSettings()."""


def caches(
    model: str = "tiny",
    out: Path = Path("runs/caches"),
    resume: bool = False,
    reading: tyro.conf.OmitArgPrefixes[Reading] = Reading(),  # noqa: B008 (a frozen record)
    settings: tyro.conf.OmitArgPrefixes[Asked] = QUICK,
) -> None:
    """Compare block caches, with and without protected sinks, at equal budgets.

    Text the model has not seen is revealed block by block, and every cache is asked for the tokens still masked: how
    far are its probabilities from those computed without a cache? Also written: whole texts, time and memory. Prints a
    line per cache and a verdict per budget; writes a run folder and a figure.

    Try
        sinklab caches
        sinklab caches --model tiny-sink --keep 0.25 0.1 --sinks 8 --out runs/caches-sink
        sinklab caches --rows 32 --batch 16 --prompt-tokens 160 --new-tokens 64 --sparse --out runs/caches-long

    Args:
        model: "tiny" or "tiny-sink" (inside the package), a folder, or a name on the Hub.
        out: folder to write; it must be empty or absent, but for --resume.
        resume: go on with an interrupted run where it stopped; with the same settings.
        reading: how the weights are read.
        settings: what to compare.
    """
    from sinklab.cli.watching import loaded_here, run_settings
    from sinklab.records.reading import open_run
    from sinklab.studies.caches.figures import draw_caches
    from sinklab.studies.caches.run import cache_fidelity

    checked = run_settings(CacheSettings, settings)
    if not resume:
        refuse_taken(out)
    with working() as progress:
        folder = cache_fidelity(loaded_here(model, reading), out, checked, progress=progress, resume=resume)
    run = open_run(folder)
    for line in lines(run):
        print(line)
    print(f"run folder: {folder}; figure: {draw_caches(run, folder / 'caches.png')}")


def lines(run: Run) -> list[str]:
    """The table of policies and the verdicts, as lines of text."""
    table = run.table("policies")
    costs = run.table("costs") if "costs" in run.tables else None
    if costs is not None:
        longest = costs[costs["length"] == costs["length"].max()]
        # sparse attention is not timed, and has its line all the same
        table = table.merge(longest, on=["family", "keep", "sinks", "protect"], how="left")
    width = max(map(len, table["label"]))
    heads = ["loss", "divergence", "same first", "texts agree", *(["time", "kB attended"] if costs is not None else [])]
    found = ["  ".join([" " * width, *(head.rjust(11) for head in heads)])]
    for row in table.to_dict("records"):
        cells = [f"{row['loss']:.4f}", f"{row['divergence']:.5f}", f"{row['same']:.1%}", f"{row['agreement']:.1%}"]
        cells += [f"{row['ratio']:.2f}", f"{row['held_bytes'] / 1e3:.0f}"] if costs is not None else []
        cells = ["–" if cell.startswith("nan") else cell for cell in cells]
        found.append("  ".join([row["label"].ljust(width), *(cell.rjust(11) for cell in cells)]))
    return found + verdicts(run)


def verdicts(run: Run) -> list[str]:
    """What protection does to the divergence at each budget, in words."""
    table = run.table("protection")
    found = []
    for row in table[table["metric"] == "divergence"].to_dict("records"):
        side = (
            "nearer to"
            if row["high"] < 0
            else "farther from"
            if row["low"] > 0
            else "neither nearer to nor farther from"
        )
        whose = {"now": "", "first": "first ", "earlier": "earlier ", "random": "random columns as "}[row["protect"]]
        found.append(
            f"{row['family']}, {row['keep']:.3g} kept: with protected {whose}sinks {side} uncached decoding "
            f"({row['difference']:+.5f} nats, 95 % {row['low']:+.5f} to {row['high']:+.5f}, {row['rows']} rows)"
        )
    return found
