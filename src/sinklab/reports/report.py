"""From run folders to report.html: one page that explores them, with static figures and tables beside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from sinklab.records import Run, write_beside

from . import sentences as say
from .drawing import draw_all
from .explorer import payload
from .page import Beside, page
from .parts import parts, short
from .study import as_studies
from .tables import write_tables

# The rest of a page is its script, sentences and tables.
ARRAYS = 0.93


def report(
    runs: Iterable[Run] | Run,
    out: str | Path,
    *,
    figures: Sequence[str] = ("png", "svg"),
    tables: Sequence[str] = ("parquet", "csv", "md"),
    megabytes: float = 3.0,
) -> Path:
    """Write ``report.html`` (one file that loads nothing) into the folder ``out``; returns its path.

    Several runs are shown side by side in the order given. What a run did not get to write is left out and said so.
    ``figures`` and ``tables``: formats of the static ones in the folders of these names; empty writes none.
    ``megabytes``: how large the part of each run on the page may be. A larger page holds more samples, and more keys of
    every head; it says what it holds. Raises ValueError when there is no run, or one is not a study.
    """
    if not megabytes > 0:
        raise ValueError(f"megabytes says how large the part of each run may be, above 0: got {megabytes}.")
    studies = as_studies(runs)
    content, opening, below = payload(studies, int(ARRAYS * megabytes * 1e6)), short(studies), parts(studies)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    beside = Beside()
    if figures:
        drawn = draw_all(studies, folder / "figures", figures)
        beside = Beside(len(drawn.written), drawn.skipped)
    if tables:
        beside.tables = len(write_tables(studies, folder / "tables", tables))
    text = page(studies, content, opening, below, beside)
    target = folder / "report.html"
    write_beside(target, lambda part: part.write_bytes(text.encode("utf-8")))
    return target


def summary(runs: Iterable[Run] | Run) -> list[str]:
    """The findings that open the page, a sentence each. Raises ValueError without a run, or one that is no study."""
    return list(say.in_short(as_studies(runs)))
