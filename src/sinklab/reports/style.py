"""One look for every figure, light and dark. Colours are from Okabe and Ito's set, apart also without colour vision."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from sinklab.errors import one_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap


DPI = 170
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


def asset(name: str) -> str:
    """The text of a file that is packaged with the reports."""
    return resources.files("sinklab.reports").joinpath(name).read_text("utf-8")


THEMES = {name: Theme(name, **colours) for name, colours in tomllib.loads(asset("themes.toml")).items()}


def theme_named(name: str) -> Theme:
    """The theme ``name``, ValueError listing the known ones otherwise."""
    one_of("the theme of a figure", name, THEMES)
    return THEMES[name]


@lru_cache(maxsize=1)
def _style_file() -> dict[str, Any]:
    from matplotlib import rc_params_from_file

    with resources.as_file(resources.files("sinklab.reports").joinpath("figures.mplstyle")) as path:
        found: Any = rc_params_from_file(path, use_default_template=False)
        return dict(found)


@contextmanager
def themed(theme: Theme) -> Iterator[None]:
    """matplotlib settings of ``theme`` inside the block; drawing and saving both belong inside."""
    import matplotlib

    settings: Any = {
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), theme.surface),
        **dict.fromkeys(("text.color", "axes.titlecolor", "legend.labelcolor"), theme.ink),
        **dict.fromkeys(("axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), theme.muted),
        **dict.fromkeys(("axes.edgecolor", "grid.color", "xtick.color", "ytick.color"), theme.line),
    }
    with matplotlib.rc_context(_style_file() | settings):
        yield


def colormap(theme: Theme) -> Colormap:
    """Colours for amounts: the surface for nothing."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list(f"sinklab-{theme.name}", theme.scale)


def own_axes(axes: Axes | None, width: float = 4.6, height: float = 3.0) -> Axes:
    """``axes``, or new ones on a figure of their own (inches), without pyplot's global state."""
    if axes is not None:
        return axes
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained").subplots()


def legend_above(axes: Axes, columns: int = 1, *, grow: bool, extra: Sequence[tuple[str, str]] = ()) -> None:
    """A legend over the plot, left; with ``grow`` the figure gets taller by its lines and the plot keeps its height.

    columns: 0 takes two, or one where an entry is long.
    extra: more entries, as (line style, words), in the colour of labels.
    """
    from matplotlib.lines import Line2D

    handles, names = axes.get_legend_handles_labels()
    columns = columns or (1 if any(len(name) > 24 for name in names) else 2)
    muted = axes.xaxis.label.get_color()
    styles: Any = [style for style, _ in extra]
    handles += [Line2D([], [], color=muted, linestyle=style, linewidth=1.2) for style in styles]
    names += [words for _, words in extra]
    axes.legend(handles, names, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, ncols=columns)
    if grow:
        figure: Any = axes.figure
        figure.set_figheight(figure.get_figheight() + 0.19 * -(-len(names) // columns))


def legend_of_dots(axes: Axes, columns: int, title: str | None = None) -> None:
    """A legend over a plot of dots: all of one size, none see-through."""
    legend = axes.legend(
        title=title, alignment="left", ncols=columns, loc="lower left", bbox_to_anchor=(-0.1, 1), borderaxespad=0.2,
        handletextpad=0.1, columnspacing=1,
    )  # fmt: skip
    for handle in legend.legend_handles:
        handle.set(sizes=[30], alpha=1)  # type: ignore[union-attr]


def note(axes: Axes, words: str, at: tuple[float, float], coords: Any, offset: tuple[int, int], **how: Any) -> None:
    """Small words in the colour of labels, hanging from a place."""
    style: Any = {"va": "top", "fontsize": 8, "color": axes.xaxis.label.get_color()} | how
    axes.annotate(words, at, xycoords=coords, xytext=offset, textcoords="offset points", **style)


def whole_numbers(axis: Any) -> None:
    """Ticks at whole numbers alone."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(integer=True))


def from_zero(axes: Axes, floor: float = 1e-9) -> None:
    """The vertical axis from 0 to a little over the greatest value drawn, so that no marker is cut."""
    import numpy as np

    drawn = [np.asarray(line.get_ydata(), dtype=float) for line in axes.lines]
    greatest = max((float(values[np.isfinite(values)].max(initial=0.0)) for values in drawn), default=0.0)
    axes.set_ylim(0, 1.06 * max(greatest, floor))


def printable(text: str, most: int = 14) -> str:
    """``text`` in quotes on one line, white space visible, code points in place of letters the font does not have."""
    shown = text.replace("\r", "").replace("\n", "↵").replace("\t", "⇥").replace(" ", "␣").replace("Ċ", "↵")
    shown = "".join(letter if ord(letter) in _font() else f"\\u{ord(letter):04x}" for letter in shown)
    return f"“{shown if len(shown) <= most else shown[: most - 1] + '…'}”"


@lru_cache(maxsize=1)
def _font() -> frozenset[int]:
    from matplotlib.font_manager import findfont, get_font

    return frozenset(get_font(findfont("DejaVu Sans")).get_charmap())
