"""Content of figures, as arrays, and how it is drawn: one preparation for files, page and the
numbers below charts.
"""

# R rows, C columns
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedFormatter, FixedLocator, MaxNLocator

from sinklab.lab.reports.style import MARKERS, Theme, colormap, legend_above
from sinklab.lab.reports.words import number

RASTERED = 1500
FLOOR = 0.5
"""lower end of a logarithmic colour scale: half an even share"""
FEW = 3
"""lines that each have an entry of the legend; of more, runs and kinds of line have one each"""


@dataclass(frozen=True)
class Axis:
    """One axis: its quantity and its ends."""

    label: str = ""
    """with the unit"""
    unit: str = ""
    """behind its numbers, such as ×"""
    scale: str = "linear"
    """linear, log, or symlog, which is linear below ``linear``"""
    linear: float = 1
    low: float | None = None
    high: float | None = None
    """its ends; None: the ends of the lines"""
    whole: bool = False
    """whole numbers alone"""
    names: Sequence[str] = ()
    """labels at 0, 1, 2, …: places at even distances"""
    below: str = ""
    """meaning of values below 0"""
    ticks: Sequence[float] = ()
    """places of the numbers; none: chosen"""

    def said(self, value: float) -> str:
        """A number of this axis."""
        if self.names:
            return self.names[int(value)]
        text = f"{value:g}"
        if self.unit == "×" and 0 < value < 1:
            text = f"1/{1 / value:g}"
        return f"{text}{self.unit}".replace("-", "−")


@dataclass(frozen=True)
class Line:
    """Numbers of one run over the horizontal axis."""

    x: Any
    y: Any
    run: str = ""
    """label of the run"""
    name: str = ""
    """text of its entry in the legend; runs that differ in their seed alone share one"""
    words: str = ""
    """quantity of the run that the line shows"""
    colour: int = 0
    marker: int = 0
    style: Any = "-"
    """kind of line; all but full lines have hollow markers"""
    low: Any = None
    high: Any = None
    """ends of the 95 % intervals, NaN for a point without one; None without any"""
    kind: str = "line"
    """line, bars (intervals as bars), steps (``x`` has the borders), path (holds its place), dots
    or faint"""

    def entry(self, name: str) -> str:
        """Its words, behind a name if there is one; without words the name, or its run."""
        if name and self.words:
            return f"{name}: {self.words}"
        return self.words or name or self.run


@dataclass(frozen=True)
class Mark:
    """A thin line at a place of the axis "x" or "y", with words."""

    axis: str
    at: float
    words: str = ""


@dataclass(frozen=True)
class Chart:
    """Lines over one axis."""

    x: Axis
    y: Axis
    lines: Sequence[Line]
    marks: Sequence[Mark] = ()
    title: str = ""
    words: str = ""
    """content of a panel, in a sentence of the caption"""

    @property
    def entries(self) -> list[str]:
        """Name of each line: its words alone if all lines are of one run."""
        several = len({line.run for line in self.lines}) > 1
        return [line.entry(line.run * several) for line in self.lines]

    @property
    def legend(self) -> tuple[list[str], list[tuple[Any, str]]]:
        """The entry of each line, "" for one that has its entry already; and kinds of line, as
        (style, words).
        """
        # a faint line goes with another
        named = [(line.name or line.run) * (line.kind != "faint") for line in self.lines]
        several = len({*named} - {""}) > 1
        shared = several and len(self.lines) > FEW
        texts: list[str] = []
        for text, line in zip(named, self.lines, strict=True):
            if text and line.words and not shared:
                text = line.entry(text * several)
            texts.append(text * (text not in texts))
        if not shared:
            return texts, []
        kinds = dict.fromkeys((line.style, line.words) for line in self.lines if line.words)
        return texts, list(kinds)

    @property
    def has_intervals(self) -> bool:
        """Whether some line has any."""
        return any(line.low is not None and np.isfinite(line.low).any() for line in self.lines)

    def numbers(self) -> pd.DataFrame:
        """The numbers as text: a row for each place on the horizontal axis, a column for each
        line.
        """
        columns = {}
        for entry, line in zip(self.entries, self.lines, strict=True):
            y = np.asarray(line.y, dtype=float)
            ends = np.full((2, len(y)), np.nan)
            if line.low is not None:
                ends[:] = line.low, line.high
            cells = [_cell(*cell) for cell in zip(y, *ends, strict=True)]
            columns[entry] = pd.Series(cells, np.asarray(line.x)[: len(y)])
        frame = pd.DataFrame(columns).sort_index().fillna("")
        return frame.set_axis(
            pd.Index([self.x.said(value) for value in frame.index], name=self.x.label)
        )


def _cell(value: float, low: float, high: float) -> str:
    if math.isnan(value):
        return ""
    if math.isnan(low):
        return number(value)
    return f"{number(value)} ({number(low)} … {number(high)})"


@dataclass(frozen=True)
class Map:
    """Numbers by row and column, as colours."""

    values_RC: np.ndarray
    """NaN is left blank"""
    scale: str
    """meaning of the colours, with the unit"""
    rows: Axis
    columns: Axis
    """their names are those of all rows and columns"""
    log: bool = False
    """a logarithmic scale from 0.5, for multiples of an even share"""
    both: bool = False
    """values below 0 have colours of their own"""
    added: int = 0
    """columns of added sinks, the first ones: drawn wide, apart"""
    marks: Sequence[Mark] = field(default=())
    """borders between rows ("y") or columns ("x")"""
    unsure_RC: np.ndarray | None = None
    """cells with a dot"""
    title: str = ""
    words: str = ""
    """content of a panel, in a sentence of the caption"""

    @property
    def top(self) -> float:
        """The greatest value drawn."""
        return float(np.fmax.reduce(np.abs(self.values_RC), axis=None, initial=1e-9))


def draw(
    axes: Axes, shown: Chart | Map, look: Theme, *, top: float | None = None, alone: bool = True
) -> Any:
    """Draw it on axes. ``top``: end of the (colour) scale; ``alone``: its legend or colour bar
    stands at these axes.

    Returns the image that a colour bar is made of; None for a chart.
    """
    if isinstance(shown, Map):
        image = _draw_map(axes, shown, look, top or shown.top)
        if alone:
            colour_bar(image, axes, shown)
        return image
    _draw_chart(axes, shown, look)
    if top is not None:
        axes.set_ylim(top=top)
    return None


def _draw_chart(axes: Axes, chart: Chart, look: Theme) -> None:
    for line, label in zip(chart.lines, chart.legend[0], strict=True):
        _draw_line(axes, line, look, label)
    for mark in chart.marks:
        _draw_mark(axes, mark, color=look.muted, linestyle=":", linewidth=0.9)
        how: dict[str, Any] = {"va": "top", "fontsize": 7.5, "color": look.muted}
        if mark.axis == "x":
            how |= {"xy": (mark.at, 0.99), "xycoords": ("data", "axes fraction")}
            how |= {"xytext": (3, 0), "ha": "left"}
        else:
            how |= {"xy": (1.0, mark.at), "xycoords": ("axes fraction", "data")}
            how |= {"xytext": (0, -2), "ha": "right"}
        axes.annotate(mark.words, textcoords="offset points", **how)
    axes.set(xlabel=chart.x.label, ylabel=chart.y.label)
    # matplotlib measures the axis to look for a power of ten above it, which would lift the title
    axes.set_title(chart.title, y=None if chart.y.high is None else 1.0)
    axes.grid(axis="y")
    for name, one in (("x", chart.x), ("y", chart.y)):
        _set_up(axes, name, one)
    if chart.y.low is not None and chart.y.high is None:
        low, high = axes.get_ylim()
        # no marker is cut
        axes.set_ylim(low, high + 0.04 * (high - low))
    axes.minorticks_off()


def _draw_mark(axes: Axes, mark: Mark, **how: Any) -> None:
    if mark.axis == "x":
        axes.axvline(mark.at, **how)
    else:
        axes.axhline(mark.at, **how)


def _set_up(axes: Axes, name: str, one: Axis) -> None:
    axis: Any = getattr(axes, f"{name}axis")
    if one.names:
        axis.set_ticks(range(len(one.names)), one.names)
    elif one.scale != "linear":
        how: dict[str, float] = {"base": 10}
        if one.scale == "symlog":
            how = {"linthresh": one.linear}
        elif one.unit:
            how = {"base": 2}
        getattr(axes, f"set_{name}scale")(one.scale, **how)
    elif one.whole:
        axis.set_major_locator(MaxNLocator(integer=True))
    if one.ticks:
        axis.set_ticks(one.ticks)
    if one.scale != "linear" or one.unit:
        axis.set_major_formatter(lambda value, _: one.said(value))
    getattr(axes, f"set_{name}lim")(one.low, one.high)
    if one.below:
        least, most = getattr(axes, f"get_{name}lim")()
        ticks = [tick for tick in axis.get_ticklocs() if 0 < tick <= most]
        axis.set_ticks([0.6 * least, *ticks], [one.below, *(f"{tick:g}" for tick in ticks)])
        axes.axhline(0.25 * least, color=axes.spines["left"].get_edgecolor(), linewidth=0.8)


def _draw_line(axes: Axes, line: Line, look: Theme, label: str) -> None:
    colour = look.lines[line.colour % len(look.lines)]
    x, y = np.asarray(line.x), np.asarray(line.y, dtype=float)
    how: dict[str, Any] = {"color": colour, "linestyle": line.style, "label": label or "_repeat"}
    if line.kind == "steps":
        axes.stairs(y, x, linewidth=1.6, **how)
        return
    if line.kind == "faint":
        axes.plot(x, y, linewidth=0.8, alpha=0.4, color=colour)
        return
    if line.low is not None:
        low, high = np.asarray([line.low, line.high], dtype=float)
        if line.kind == "bars":
            axes.errorbar(
                x, y, [y - low, high - y], fmt="none", ecolor=colour, elinewidth=1, capsize=2.5
            )
        else:
            axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
    if line.kind == "dots":
        # many dots are drawn as pixels
        how |= {"linestyle": "", "rasterized": len(x) > RASTERED}
        if len(x) > 100:
            how["alpha"] = 0.5
    how |= {"marker": MARKERS[line.marker % len(MARKERS)], "markersize": 4}
    if line.kind == "line":
        how["markevery"] = max(1, len(x) // 16)
    elif line.kind == "path":
        how |= {"markersize": 3, "drawstyle": "steps-mid"}
    if line.style == "-":
        how |= {"linewidth": 1.7, "markerfacecolor": colour}
    else:
        how |= {"linewidth": 1.3, "markerfacecolor": axes.get_facecolor()}
    axes.plot(x, y, **how)


def _draw_map(axes: Axes, shown: Map, look: Theme, top: float) -> Any:
    drawn, added = shown.values_RC, shown.added
    rows, columns = drawn.shape
    length = columns - added
    how: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest"}
    how |= {"cmap": colormap(look), "norm": Normalize(0, top)}
    if shown.both:
        ends = [look.runs[0], look.surface, look.runs[1]]
        how["cmap"] = LinearSegmentedColormap.from_list("both", ends)
        how["norm"] = Normalize(-top, top)
    if shown.log:
        how["norm"] = LogNorm(FLOOR, max(top, 4 * FLOOR))
        drawn = np.clip(drawn, FLOOR, None)
    # some room keeps the strip of the added sink apart from the text
    width = 0.05 * length * added
    image = axes.imshow(drawn[:, added:], extent=(0, length, rows, 0), **how)
    if added:
        axes.imshow(drawn[:, :added], extent=(-1.4 * width, -0.4 * width, rows, 0), **how)
    axes.set(xlim=(-1.4 * width, length), ylim=(rows, 0))
    axes.set_title(shown.title, y=1.0)
    axes.set(xlabel=shown.columns.label, ylabel=shown.rows.label)
    for axis, names, most in (
        (axes.xaxis, shown.columns.names, 7),
        (axes.yaxis, shown.rows.names, 8),
    ):
        ticks = [int(at) for at in MaxNLocator(most, integer=True).tick_values(0, len(names) - 0.6)]
        lead = [-0.9 * width] * (added > 0 and axis is axes.xaxis)
        ticks = [at for at in ticks if len(lead) <= at < len(names)]
        axis.set_major_locator(FixedLocator([*lead, *(at + 0.5 for at in ticks)]))
        axis.set_major_formatter(FixedFormatter(["sink"] * len(lead) + [names[at] for at in ticks]))
    for mark in shown.marks:
        _draw_mark(axes, mark, color=look.muted, linewidth=0.6, alpha=0.8)
    if shown.unsure_RC is not None:
        row, column = np.nonzero(shown.unsure_RC)
        axes.plot(column + 0.5, row + 0.5, ".", color=look.muted, markersize=3)
    axes.spines[["left", "bottom"]].set_visible(False)
    # axes with neither marks nor labels are not laid out
    axes.tick_params(length=0, left=False, bottom=False)
    return image


def colour_bar(image: Any, axes: Any, shown: Map) -> None:
    """The bar of a map, or of a grid of maps, with the meaning of its colours."""
    bar = image.figure.colorbar(image, ax=axes, pad=0.02, aspect=28)
    bar.outline.set_visible(False)
    if shown.log:
        bar.set_ticks([2.0**power for power in range(-1, 12) if 2**power <= image.norm.vmax])
        bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        bar.ax.minorticks_off()
    bar.set_label(shown.scale)


def draw_panels(
    shown: Sequence[Chart | Map],
    look: Theme,
    *,
    columns: int,
    size: tuple[float, float] = (2.3, 1.45),
    top: float | None = None,
    share: str = "xy",
    title: str = "",
) -> Canvas:
    """A grid of them on a new figure; all maps of one scale share its end, and one bar; charts
    share a legend.

    size: inches of a panel. share: "x" and "y", axes that have the same ends, and labels at the
        edge alone; "own": each panel has its legend. title: of the whole.
    """
    columns = min(columns, len(shown))
    rows = -(-len(shown) // columns)
    plain = matplotlib.rcParams["axes.labelsize"]
    canvas = Canvas(figsize=(size[0] * columns, size[1] * rows + 0.6), layout="constrained")
    grid: Any = canvas.subplots(
        rows, columns, squeeze=False, sharex="x" in share, sharey="y" in share
    )
    maps = [one for one in shown if isinstance(one, Map)]
    alike = len(maps) == len(shown) and len({one.scale for one in maps}) == 1
    if alike and not top:
        top = max(one.top for one in maps)
    for place, (axes, one) in enumerate(zip(grid.flat, shown, strict=False)):
        end = top
        if maps and not isinstance(one, Map):
            # beside maps it is the end of their colours
            end = None
        image = draw(axes, one, look, top=end, alone=not alike)
        axes.tick_params(labelbottom="x" not in share or place >= len(shown) - columns)
        for name, said in (("x", canvas.supxlabel), ("y", canvas.supylabel)):
            if name in share:
                said(getattr(axes, f"get_{name}label")(), fontsize=plain, color=look.muted)
                axes.set(**{f"{name}label": ""})
    for axes in grid.flat[len(shown) :]:
        axes.remove()
    used = grid.flat[: len(shown)]
    if alike:
        # beside its corners is beside the grid: the layout measures the bar for each panel that is
        # named
        colour_bar(image, used[np.unique([0, columns - 1, len(used) - 1])], maps[0])
    if "own" not in share:
        _legend_of_all(canvas, used, shown, look)
    else:
        how: dict[str, Any] = {
            "fontsize": "x-small",
            "frameon": True,
            "framealpha": 0.8,
            "edgecolor": "none",
        }
        for axes in used:
            if len(axes.get_legend_handles_labels()[0]) > 1:
                axes.legend(loc="best", **how)
    if title:
        canvas.suptitle(title, x=0.01, ha="left", fontsize=10)
    return canvas


def _legend_of_all(canvas: Canvas, grid: Any, shown: Sequence[Chart | Map], look: Theme) -> None:
    lines = {
        entry: one
        for axes in grid
        for one, entry in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    kinds = {kind: None for one in shown if isinstance(one, Chart) for kind in one.legend[1]}
    lines |= {words: Line2D([], [], color=look.muted, linestyle=style) for style, words in kinds}
    if len(lines) > 1:
        longest = max(map(len, lines))
        canvas.set_figwidth(max(canvas.get_figwidth(), 0.5 + 0.066 * longest))
        beside = max(1, min(len(lines), int(11 * canvas.get_figwidth() / (6 + longest))))
        canvas.legend(lines.values(), lines.keys(), loc="outside upper left", ncols=beside)
        canvas.set_figheight(canvas.get_figheight() + 0.19 * -(-len(lines) // beside))


def draw_alone(
    axes: Axes, shown: Chart | Map, look: Theme, *, grow: bool, top: float | None = None
) -> None:
    """Draw it with its legend above, for which a figure of its own (``grow``) grows."""
    draw(axes, shown, look, top=top)
    if isinstance(shown, Chart) and any(shown.legend[0]):
        legend_above(axes, grow=grow, extra=shown.legend[1])
