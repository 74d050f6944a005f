"""From run folders to report.html: one page, with static figures and tables beside it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template

from sinklab.records.storage import write_beside
from sinklab.reports.drawing import Drawn, draw_all
from sinklab.reports.page import Share, judged, parts_of, words_of
from sinklab.reports.payload import data_block, payload, script, script_hash
from sinklab.reports.runs import Runs, as_shown
from sinklab.reports.sentences import in_short, told
from sinklab.reports.study import Study
from sinklab.reports.style import asset
from sinklab.reports.tables import write_tables
from sinklab.sinks.rules import Rule

# The rest of a page is its script, sentences and tables.
ARRAYS = 0.93
MOST = 12
"""samples whose texts are shown; more stand behind a line"""


def report(
    runs: Runs,
    out: str | Path,
    *,
    rule: Rule | None = None,
    figures: Sequence[str] = ("png", "svg"),
    tables: Sequence[str] = ("parquet", "csv", "md"),
    megabytes: float = 3.0,
) -> Path:
    """Write ``report.html`` (one file that loads nothing) into the folder ``out``; returns its path.

    Studies make a page that explores what they recorded, training runs one of curves: what was learned, and how sinks
    came up. Several runs of one kind are shown side by side in the order given. What a run did not get to write is left
    out and said so.

    Args:
        runs: run folders that were opened, of one kind.
        out: folder, made where it is not there.
        rule: what counts as a sink in studies; None for `sinklab.sinks.rules.DEFAULT`.
        figures: formats of the static ones in the folder of this name; empty writes none.
        tables: the same for tables.
        megabytes: how large the part of each study on the page may be. A larger page holds more samples, and more keys
            of every head; it says what it holds.

    Raises:
        ValueError: when there is no run, for runs of another kind, and for studies and training runs together.
    """
    if not megabytes > 0:
        raise ValueError(f"megabytes says how large the part of each run may be, above 0: got {megabytes}.")
    readers = as_shown(runs, rule=rule)
    # What reads the runs comes first: damaged ones leave no folder behind.
    content = _content(readers, int(ARRAYS * megabytes * 1e6))
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    drawn = draw_all(readers, folder / "figures", figures) if figures else Drawn()
    written = write_tables(readers, folder / "tables", tables) if tables else []
    text = _template().render(content, drawn=len(drawn.written), skipped=drawn.skipped, written=len(written)).lstrip()
    target = folder / "report.html"
    write_beside(target, lambda part: part.write_bytes(text.encode("utf-8")))
    return target


def summary(runs: Runs, *, rule: Rule | None = None) -> list[str]:
    """The findings that open the page, a sentence each. Raises ValueError like ``report``."""
    return in_short(as_shown(runs, rule=rule))


def _content(runs: list[Any], budget: int) -> dict[str, Any]:
    """What page.jinja shows but for what lies beside it; ``budget``: characters of the arrays of each study."""
    is_study = isinstance(runs[0], Study)
    words = words_of("page", "study" if is_study else "training")
    names = " and ".join(run.label for run in runs) if len(runs) < 3 else f"{len(runs)} runs"
    data = payload(runs, budget) if is_study else {"runs": []}
    explored = [run for run in data["runs"] if run["samples"]]
    return {
        "title": words["title"],
        "lead": words["lead"].replace("{names}", names),
        "sentences": in_short(runs),
        "verdicts": judged(runs) if is_study else [],
        "parts": parts_of(runs),
        "status": [line for run in runs for name in ("status", "edited") for line in told(name, run)],
        "version": runs[0].run.info.versions.get("sinklab", ""),
        "allowed": f"'sha256-{script_hash()}'" if is_study else "'none'",
        "explored": bool(explored),
        "shown": " ".join((f"{run['label']}: " if len(runs) > 1 else "") + run["shown"] for run in explored),
        "script": f"{data_block(data)}\n<script>{script()}</script>" if is_study else "",
    }


@lru_cache(maxsize=1)
def _template() -> Template:
    pages = Environment(
        loader=FunctionLoader(asset), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=True
    )
    pages.filters["shown"] = _shown
    pages.tests["share"] = lambda cell: isinstance(cell, Share)
    pages.globals |= {"most": MOST, "style": asset("style.css"), "explorer": asset("explorer.html")}
    return pages.get_template("page.jinja")


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) if not any(isinstance(item, str) for item in value) else " · ".join(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000 else str(value)
