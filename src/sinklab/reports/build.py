"""From run folders to report.html: one page that explores them, with static figures and tables beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from sinklab.records.reading import Run
from sinklab.records.storage import write_beside
from sinklab.reports import sentences as say
from sinklab.reports.drawing import draw_all
from sinklab.reports.explorer import payload
from sinklab.reports.page import Beside, page
from sinklab.reports.sections import parts, short
from sinklab.reports.study import Study
from sinklab.reports.tables import write_tables
from sinklab.reports.training import as_shown
from sinklab.reports.training_page import training_page
from sinklab.reports.training_sentences import in_short

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

    Studies make a page that explores what they recorded, training runs one of curves: what was learned, and how sinks
    came up. Several runs of one kind are shown side by side in the order given. What a run did not get to write is left
    out and said so.
    ``figures`` and ``tables``: formats of the static ones in the folders of these names; empty writes none.
    ``megabytes``: how large the part of each study on the page may be. A larger page holds more samples, and more keys
    of every head; it says what it holds. Raises ValueError when there is no run, for runs of another kind, and for
    studies and training runs together.
    """
    if not megabytes > 0:
        raise ValueError(f"megabytes says how large the part of each run may be, above 0: got {megabytes}.")
    studies, trainings = as_shown(runs)
    # What reads the runs comes first: damaged ones leave no folder behind.
    build = training_page(trainings) if trainings else _explorer(studies, megabytes)
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    beside = Beside()
    if figures:
        drawn = draw_all(studies or trainings, folder / "figures", figures)
        beside = Beside(len(drawn.written), drawn.skipped)
    if tables:
        beside.tables = len(write_tables(studies or trainings, folder / "tables", tables))
    text = build(beside)
    target = folder / "report.html"
    write_beside(target, lambda part: part.write_bytes(text.encode("utf-8")))
    return target


def summary(runs: Iterable[Run] | Run) -> list[str]:
    """The findings that open the page, a sentence each. Raises ValueError like ``report``."""
    studies, trainings = as_shown(runs)
    return in_short(trainings) if trainings else list(say.in_short(studies))


def _explorer(studies: list[Study], megabytes: float) -> Callable[[Beside], str]:
    """The page of studies, but for what lies beside it."""
    content = payload(studies, int(ARRAYS * megabytes * 1e6))
    return partial(page, studies, content, short(studies), parts(studies))
