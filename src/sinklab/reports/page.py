"""What stands on a page, as data; page.jinja makes markup of it."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sinklab.records.reading import Run
from sinklab.reports.drawing import figure_of, save
from sinklab.reports.samples import NotRecorded
from sinklab.reports.style import theme_named, themed


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
    cards: Sequence[Card]
    title: str
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
    return Picture(addresses[0], addresses[1], words)
