"""Figures as SVG in a page: text stays text, ids are unique, colours follow the theme."""

import io
import re
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import pandas as pd
from markupsafe import escape

from sinklab.lab.registry import figures as registered
from sinklab.lab.reports.drawing import Canvas, canvas_of, save
from sinklab.lab.reports.samples import NotRecorded
from sinklab.lab.reports.style import THEMES

DIGITS = re.compile(r"(\.\d\d)\d+")
"""decimals of a length: hundredths of a point are enough"""
UNUSED = re.compile(
    r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->"
    r'| xmlns[:\w]*="[^"]*"|font-family: [^;]*; |\n *',
    re.DOTALL,
)
"""parts that a page does not need: a style sheet would apply to all of it, and letters are those of
the page
"""


def svg_of(canvas: Canvas) -> str:
    """Return a figure as an ``<svg>`` element."""
    written = io.BytesIO()
    save(canvas, "svg", written)
    text = written.getvalue().decode("utf-8")
    text = UNUSED.sub("", text[text.index("<svg") :])
    # groups are numbered in every figure alike, and nothing refers to them
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    return re.sub("<[^>]*>", _for_page, text)


@dataclass(frozen=True)
class Picture:
    """A figure at one place of a page; a template writes it as SVG."""

    figure: str
    """name of the figure"""
    svg: str
    """the figure, by `svg_of`"""
    words: str
    """description, for readers who do not see it"""
    place: str
    """name of its place, unique on the page: begins its ids"""
    numbers: pd.DataFrame = field(default_factory=pd.DataFrame)
    """the numbers it shows"""

    def __html__(self) -> str:
        own = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{self.place}-", self.svg)
        head = f'<svg class="figure" role="img" aria-label="{escape(self.words)}"'
        return own.replace("<svg", head, 1)


def _for_page(tag: re.Match[str]) -> str:
    """A tag with short numbers and with the colours of both themes."""
    text = DIGITS.sub(r"\1", tag[0])
    for light, dark in _colours():
        text = text.replace(light, f"light-dark({light}, {dark})")
    return text


@lru_cache(maxsize=1)
def _colours() -> list[tuple[str, str]]:
    """Colours of the light theme, each with its counterpart in the dark one."""
    light, dark = THEMES["light"], THEMES["dark"]
    pairs = dict(zip(light.states.values(), dark.states.values(), strict=True))
    pairs |= dict(zip(light.lines, dark.lines, strict=True))
    for name in ("surface", "ink", "muted", "line", "added"):
        pairs[getattr(light, name)] = getattr(dark, name)
    return [(one.lower(), other) for one, other in pairs.items()]


def picture(name: str, runs: Any, words: str, place: str, **options: Any) -> list[Picture]:
    """A figure of the runs as SVG; none if they did not record enough for it.

    Args:
        name: of the figure.
        runs: the runs, or one.
        words: description of the figure.
        place: name of its place, unique on the page.
        options: of the figure.
    """
    with suppress(NotRecorded):
        axes, numbers = registered[name].drawn(runs, **options)
        return [Picture(name, svg_of(canvas_of(axes)), words, place, numbers)]
    return []
