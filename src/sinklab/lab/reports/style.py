"""One look for every figure. Colours are from Okabe and Ito's set, apart also without colour
vision; the dark ones are for the page.
"""

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

import matplotlib
from matplotlib import rc_params_from_file
from matplotlib.font_manager import findfont, get_font

DPI = 170
SIGNS = str.maketrans({"\r": "", "\n": "↵", "Ċ": "↵", "\t": "⇥", " ": "␣"})
"""white space -> the sign that it is shown as"""


@dataclass(frozen=True)
class Theme:
    """Colours of one appearance, those of themes.toml; the same values stand in style.css."""

    surface: str
    ink: str
    muted: str
    line: str
    lines: list[str]
    """a colour for each run: seven are told apart"""
    added: str
    """the added sink token"""
    states: dict[str, str]
    """prompt, masked, committed"""
    scale: list[str]
    """from nothing to much, lightness falling (light) or rising (dark) evenly"""


def asset(name: str) -> str:
    """The text of a file that is packaged with the reports."""
    return resources.files("sinklab.lab.reports").joinpath(name).read_text("utf-8")


_COLOURS = tomllib.loads(asset("themes.toml"))
THEMES = {
    name: Theme(**{use: both[place] for use, both in _COLOURS.items()})
    for place, name in enumerate(("light", "dark"))
}
LOOK = THEMES["light"]
"""colours of figures; a page has the dark ones beside them"""


@lru_cache(maxsize=1)
def _style_file() -> dict[str, Any]:
    with resources.as_file(
        resources.files("sinklab.lab.reports").joinpath("figures.mplstyle")
    ) as path:
        found: Any = rc_params_from_file(path, use_default_template=False)
        return dict(found)


@contextmanager
def themed() -> Iterator[None]:
    """matplotlib's settings inside the block; drawing and saving both belong inside."""
    settings: Any = {
        **_style_file(),
        **dict.fromkeys(("text.color", "axes.titlecolor", "legend.labelcolor"), LOOK.ink),
        **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), LOOK.muted),
        **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), LOOK.line),
    }
    with matplotlib.rc_context(settings):
        yield


def printable(text: str, most: int = 14) -> str:
    """``text`` in quotes on one line, white space visible, code points in place of letters the font
    does not have.
    """
    shown = ""
    for letter in text.translate(SIGNS):
        if ord(letter) in _font():
            shown += letter
        else:
            shown += f"\\u{ord(letter):04x}"
    return f"“{shown if len(shown) <= most else shown[: most - 1] + '…'}”"


@lru_cache(maxsize=1)
def _font() -> frozenset[int]:
    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())
