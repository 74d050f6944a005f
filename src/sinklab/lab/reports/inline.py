"""Figures as SVG in a page: text stays text, ids are unique, colours follow the theme."""

import io
import re
from contextlib import suppress
from functools import lru_cache
from typing import Any

from markupsafe import Markup, escape

from sinklab.lab.registry import figures as registered
from sinklab.lab.reports.drawing import canvas_of, save
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


def svg_of(name: str, runs: Any, **options: Any) -> str:
    """A figure of the runs as an ``<svg>`` element; empty if they did not record enough for it."""
    written = io.BytesIO()
    with suppress(NotRecorded):
        save(canvas_of(registered[name](runs, **options)), "svg", written)
    text = written.getvalue().decode("utf-8")
    text = UNUSED.sub("", text[max(text.find("<svg"), 0) :])
    # groups are numbered in every figure alike, and nothing refers to them
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    return re.sub("<[^>]*>", _for_page, text)


def placed(svg: str, place: str, words: str) -> Markup:
    """A figure at one place of a page, whose name begins its ids; ``words`` describe it to readers
    who do not see it.
    """
    own = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{place}-", svg)
    head = f'<svg class="figure" role="img" aria-label="{escape(words)}"'
    return Markup(own.replace("<svg", head, 1))


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
