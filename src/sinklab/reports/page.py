"""The page: what stands on it as data; the markup is in page.jinja, which escapes everything that comes from a run."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined, Template

from sinklab.records.reading import Run
from sinklab.reports.drawing import figure_of, save
from sinklab.reports.explorer import data_block, script, script_hash
from sinklab.reports.samples import NotRecorded
from sinklab.reports.sentences import about_state
from sinklab.reports.style import asset, theme_named, themed

MOST = 12
"""samples whose texts are shown; more stand behind a line"""


@dataclass(frozen=True)
class Share:
    """A cell with a share as a bar behind the text."""

    text: str
    of: float

    @property
    def percent(self) -> str:
        """The length of the bar."""
        return f"{100 * min(max(self.of, 0), 1):.1f}"


@dataclass(frozen=True)
class Table:
    """A table; one with a summary stands behind that line."""

    head: Sequence[Any]
    rows: Sequence[Sequence[Any]]
    summary: str = ""


@dataclass(frozen=True)
class Picture:
    """A figure as addresses that hold it whole, in both themes."""

    light: str
    dark: str
    words: str
    """what stands in its place where it is not seen"""


@dataclass(frozen=True)
class Card:
    """One finding: its pictures, or a chart that the script draws, its sentences, and its numbers."""

    title: str
    anchor: str = ""
    how: str = ""
    sentences: Sequence[str] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    chart: bool = False
    is_narrow: bool = False
    shows: str = ""
    """ "texts": the samples; "run": what was run; or nothing of them"""
    samples: Sequence[Any] | None = None
    run: Run | None = None


@dataclass(frozen=True)
class Part:
    """A part of the page below the findings."""

    anchor: str
    title: str
    cards: Sequence[Card]
    how: str = ""
    sentences: Sequence[str] = ()


@dataclass(frozen=True)
class Beside:
    """What lies beside the page: numbers of files, and figures that could not be drawn with the reason."""

    figures: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    tables: int = 0


def picture(draw: Callable[..., Any], words: str) -> Picture | None:
    """What ``draw(theme=…)`` draws; None where the runs did not record enough for it."""
    import matplotlib

    addresses = []
    for theme in ("light", "dark"):
        written = io.BytesIO()
        # Letters stay letters: a tenth of the size of their outlines.
        with themed(theme_named(theme)), matplotlib.rc_context({"svg.fonttype": "none"}):
            try:
                save(figure_of(draw(theme=theme)), "svg", written)
            except NotRecorded:
                return None
        addresses.append(f"data:image/svg+xml;base64,{base64.b64encode(written.getvalue()).decode('ascii')}")
    return Picture(*addresses, words)


@lru_cache(maxsize=1)
def _template() -> Template:
    pages = Environment(
        loader=FunctionLoader(asset), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=True
    )
    pages.filters["shown"] = _shown
    pages.tests["share"] = lambda cell: isinstance(cell, Share)
    return pages.get_template("page.jinja")


def page(runs: Sequence[Any], beside: Beside, *, content: dict[str, Any] | None = None, **parts: Any) -> str:
    """The whole document.

    Args:
        runs: readers of the runs that are shown.
        beside: what lies beside it.
        content: what the explorer's script draws; None for a page without script.
        parts: title, lead, sentences, verdicts (name and answer, whether it holds, sentence) and parts.
    """
    explored = [run for run in (content or {"runs": []})["runs"] if run["samples"]]
    allowed = "'none'" if content is None else f"'sha256-{script_hash()}'"
    text = _template().render(
        **parts,
        beside=beside,
        most=MOST,
        status=[line for run in runs for line in about_state(run)],
        version=runs[0].run.info.versions.get("sinklab", ""),
        allowed=allowed,
        style=asset("style.css"),
        explored=bool(explored),
        explorer=asset("explorer.html"),
        shown=" ".join((f"{run['label']}: " if len(runs) > 1 else "") + run["shown"] for run in explored),
        script="" if content is None else f"{data_block(content)}\n<script>{script()}</script>",
    )
    return text.lstrip()


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) if not any(isinstance(item, str) for item in value) else " · ".join(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) and value >= 10_000 else str(value)
