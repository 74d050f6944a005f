"""One look for every figure, light and dark. Colours are from Okabe and Ito's set, apart also
without colour vision.
"""

import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

import matplotlib
from matplotlib import rc_params_from_file
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.lines import Line2D

from sinklab.core.errors import one_of

DPI = 170
PAPERS = {
    "neurips": (5.5, 2.7, 8),
    "icml": (6.75, 3.25, 8),
    "acl": (6.3, 3.03, 8),
    "thesis": (6.0, 4.4, 10),
}
"""venue of figures -> inches of the text and of a column, points of letters"""
_letters = ContextVar("letters", default=1.0)
ROOM = 0.09
"""inches beside a plot"""
SIGNS = str.maketrans({"\r": "", "\n": "↵", "Ċ": "↵", "\t": "⇥", " ": "␣"})
"""white space -> the sign that it is shown as"""
MARKERS = ("o", "s", "D", "^", "v", "P")


@dataclass(frozen=True)
class Theme:
    """Colours of one appearance, those of themes.toml; the same values stand in style.css."""

    name: str
    surface: str
    ink: str
    muted: str
    line: str
    runs: list[str]
    """one colour per run"""
    more: list[str]
    """further ones: seven runs are told apart"""
    added: str
    """the added sink token"""
    states: dict[str, str]
    """prompt, masked, committed"""
    scale: list[str]
    """from nothing to much, lightness falling (light) or rising (dark) evenly"""

    @property
    def tail(self) -> str:
        """The end of the names of its files."""
        return "" if self.name == "light" else f"-{self.name}"

    @property
    def lines(self) -> list[str]:
        """All colours that tell lines apart."""
        return self.runs + self.more


def asset(name: str) -> str:
    """The text of a file that is packaged with the reports."""
    return resources.files("sinklab.lab.reports").joinpath(name).read_text("utf-8")


_COLOURS = tomllib.loads(asset("themes.toml"))
THEMES = {
    name: Theme(name, **{use: both[place] for use, both in _COLOURS.items()})
    for place, name in enumerate(("light", "dark"))
}


def theme_named(name: str) -> Theme:
    """The theme ``name``, ValueError listing the known ones otherwise."""
    one_of("the theme of a figure", name, THEMES)
    return THEMES[name]


@lru_cache(maxsize=1)
def _style_file() -> dict[str, Any]:
    with resources.as_file(
        resources.files("sinklab.lab.reports").joinpath("figures.mplstyle")
    ) as path:
        found: Any = rc_params_from_file(path, use_default_template=False)
        return dict(found)


@contextmanager
def themed(theme: Theme) -> Iterator[None]:
    """matplotlib settings of ``theme`` inside the block; drawing and saving both belong inside."""
    settings: Any = {
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), theme.surface),
        **dict.fromkeys(("text.color", "axes.titlecolor", "legend.labelcolor"), theme.ink),
        **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), theme.muted),
        **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), theme.line),
    }
    look = _style_file()
    letters = [name for name in look if name.endswith(("fontsize", "labelsize", "titlesize"))]
    settings |= {name: _letters.get() * look[name] for name in letters}
    with matplotlib.rc_context(look | settings):
        yield


@contextmanager
def for_paper(paper: str) -> Iterator[None]:
    """Letters as large as those of PAPERS inside the block; "" leaves them."""
    token = _letters.set(PAPERS[paper][2] / 9 if paper else 1.0)
    try:
        yield
    finally:
        _letters.reset(token)


def sized(figure: Figure, paper: str) -> Figure:
    """A figure as wide as the text of a paper, or as its column if it is narrow; its height goes
    with it.
    """
    if paper:
        width, height = figure.get_size_inches()
        wide = PAPERS[paper][int(width <= 5)]
        figure.set_size_inches(wide, height * wide / width)
    return figure


def colormap(theme: Theme) -> Colormap:
    """Colours for amounts: the surface for nothing."""
    return LinearSegmentedColormap.from_list(f"sinklab-{theme.name}", theme.scale)


def own_axes(axes: Axes | None, width: float = 4.6, height: float = 3.0) -> Axes:
    """``axes``, or new ones on a figure of their own (inches), without pyplot's global state."""
    if axes is not None:
        return axes
    # letters are a little wider in a file than when measured: some room keeps them inside
    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=ROOM)).subplots()


def legend_above(
    axes: Axes, columns: int = 0, *, grow: bool, extra: Sequence[tuple[str, str]] = ()
) -> None:
    """A legend over the plot, left; with ``grow`` the figure gets taller by its lines and the plot
    keeps its height.

    columns: 0 takes two, or one if an entry is long.
    extra: more entries, as (line style, words), in the colour of labels.
    """
    handles, names = axes.get_legend_handles_labels()
    columns = columns or (1 if any(len(name) > 20 for name in names) else 2)
    muted = axes.xaxis.label.get_color()
    styles: Any = [style for style, _ in extra]
    handles += [Line2D([], [], color=muted, linestyle=style, linewidth=1.2) for style in styles]
    names += [words for _, words in extra]
    axes.legend(
        handles, names, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, ncols=columns
    )
    if grow:
        figure: Any = axes.figure
        figure.set_figheight(figure.get_figheight() + 0.19 * -(-len(names) // columns))


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
