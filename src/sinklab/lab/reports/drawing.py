"""Shared parts of figures: the registered function, lines and heat maps of a table, files.

A figure draws with matplotlib on axes that it is given and returns its numbers as a table, so that
the file, the page and the numbers beside them are of one computation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial, update_wrapper
from itertools import cycle
from pathlib import Path
from typing import Any, BinaryIO

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.figure import Figure as Canvas
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import LogLocator

from sinklab.core.errors import one_of
from sinklab.lab.records.storage import write_beside
from sinklab.lab.registry import figures
from sinklab.lab.reports.runs import Runs, as_shown
from sinklab.lab.reports.samples import NotRecorded
from sinklab.lab.reports.style import DPI, LOOK, themed

FORMATS = ("png", "svg", "pdf")
STYLES: tuple[Any, ...] = ("-", "--", ":", "-.")
THIN: dict[str, Any] = {"color": LOOK.muted, "linestyle": ":", "linewidth": 0.9}
"""look of a line that marks a place"""
FLOOR = 0.5
"""lower end of a logarithmic colour scale: half an even share"""
NEEDS = {
    "layers": "recorded attention",
    "cost": "a run of `sinklab curve` of the same model beside the trace",
    "history": "a history of losses",
    "monitor": "a sink monitor (train with --monitor-every)",
    "": "numbers for its lines",
}
"""attribute of a reader that a figure needs -> in words"""


@dataclass(eq=False)
class Figure:
    """A figure by its name: call it with runs, and with axes to draw on; it returns the axes.

    Raises NotRecorded when no run recorded the data it needs, ValueError for runs of another kind
    and for options that do not fit.
    """

    name: str
    draw: Callable[..., pd.DataFrame]
    kind: str = "study"
    """of the runs that it draws: "study", "training" or any other; several apart by spaces"""
    needs: str = ""
    """what a run must have, of `NEEDS`; others are left out"""
    alone: bool = False
    """shows one run; of several each gets a file"""
    size: tuple[float, float] = (4.6, 2.8)
    """inches"""

    def __post_init__(self) -> None:
        update_wrapper(self, self.draw)

    @property
    def words(self) -> str:
        """The caption: the docstring, up to what is for callers."""
        return " ".join(str(self.__doc__).partition("Args:")[0].split())

    def __call__(self, runs: Any, ax: Axes | None = None, **options: Any) -> Axes:
        """Draw the runs, or the first of several if the figure shows one."""
        return self.drawn(runs, ax, **options)[0]

    def drawn(self, runs: Any, ax: Axes | None = None, **options: Any) -> tuple[Axes, pd.DataFrame]:
        """The axes, and the numbers that they show."""
        readers = as_shown(runs, any_kind=True)
        kinds = self.kind.split()
        if readers[0].run.info.kind not in kinds:
            as_shown(readers, kinds[0])
        able = [run for run in readers if _has(run, self.needs)]
        if not able:
            raise lacking(readers[0].run.path, NEEDS[self.needs])
        with themed():
            axes = ax or own_axes(*self.size)
            numbers = self.draw(able[0] if self.alone else able, axes, **options)
            finish(axes, grow=ax is None)
        return axes, numbers


def _has(run: Any, name: str) -> bool:
    """Whether an attribute has anything in it; always for no name."""
    found = getattr(run, name, None) if name else name
    return found is not None and (not name or len(found) > 0)


def lacking(path: Path, needs: str) -> NotRecorded:
    """The error that no run has what a figure needs, in words; path: of the first run."""
    return NotRecorded(f"This figure needs {needs}, and {path} has none.")


def figure(name: str, **about: Any) -> Callable[[Callable[..., pd.DataFrame]], Figure]:
    """A decorator that registers a figure; the docstring of the function is the caption.

    The function takes the readers of runs (``alone``: one), axes, and its options; it draws on the
    axes and returns the numbers it drew. `lines` does both for columns of the facts, which are
    those of ``as_studies(run)[0].over("layer")``, `draw_lines` and `draw_map` draw a table.

    Args:
        name: unique; of the files, and in the registry.
        about: kind, needs, alone and size of the `Figure`.
    """
    return lambda function: figures.register(name)(Figure(name, function, **about))


def figures_of(kind: str) -> dict[str, Figure]:
    """Every registered figure of runs of this kind, by name."""
    return {name: figures[name] for name in figures if kind in figures[name].kind.split()}


def draw_lines(
    ax: Axes,
    frame: pd.DataFrame,
    alike: Mapping[str, str] | None = None,
    *,
    styles: Mapping[str, Any] | None = None,
    bars: bool = False,
    **how: Any,
) -> None:
    """Draw a table with the columns run, line, horizontal axis, value, low, high.

    Runs have colours, and lines styles; of a single run, lines have colours too. ``alike``: runs
    -> a name that those of one colour share. ``bars``: intervals are bars.
    """
    alike = alike or {}
    kinds = [*dict.fromkeys(alike.get(run, run) for run in frame["run"])]
    names, several = [*dict.fromkeys(frame["line"])], frame["run"].nunique() > 1
    styles = styles or dict(zip(names, cycle(STYLES), strict=False))
    said = set()
    for (run, name), rows in frame.groupby(["run", "line"], sort=False):
        x, y, low, high = (rows.iloc[:, place].to_numpy() for place in range(2, 6))
        label, nth = name or run, names.index(name)
        if several:
            label = alike.get(run, run)
            nth = kinds.index(label)
        colour = LOOK.lines[nth % len(LOOK.lines)]
        look: dict[str, Any] = {"color": colour, "linestyle": styles.get(name, "-")}
        look |= {"marker": "o", "markersize": 3, "markevery": max(1, len(x) // 16)}
        ax.plot(x, y, label="_again" if label in said else label, **(look | how))
        said.add(label)
        if bars:
            ends = [y - low, high - y]
            ax.errorbar(x, y, ends, fmt="none", ecolor=colour, elinewidth=1, capsize=2.5)
        elif np.isfinite(low).any():
            ax.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
    if several and any(names):
        for name in names:
            ax.plot([], [], color=LOOK.muted, linestyle=styles.get(name, "-"), label=name)


def mark_place(ax: Axes, at: float, words: str) -> None:
    """A thin line at a place of the horizontal axis, with words."""
    ax.axvline(at, **THIN)
    how: dict[str, Any] = {"va": "top", "fontsize": 7.5, "color": LOOK.muted}
    ax.text(at, 0.99, f" {words}", transform=ax.get_xaxis_transform(), **how)


def draw_map(ax: Axes, table: pd.DataFrame, label: str, *, log: bool = False) -> pd.DataFrame:
    """A heat map of a table, whose index and columns are the axes; NaN is left blank, and numbers
    below 0 have colours of their own.

    Args:
        ax: where to draw.
        table: numbers. Columns below 0 are added sinks: drawn wide, left of the others.
        label: meaning of the colours, with the unit.
        log: a logarithmic scale from 0.5, for multiples of an even share.

    Returns:
        The table as rows: index, column, value.
    """
    values_RC = table.to_numpy(float)
    added = len([name for name in table if isinstance(name, int | np.integer) and name < 0])
    top = float(np.fmax.reduce(np.abs(values_RC), axis=None, initial=1e-9))
    norm: Normalize = Normalize(0, top)
    colours, on_bar = LOOK.scale, {}
    if (values_RC < 0).any():
        norm, colours = Normalize(-top, top), [LOOK.lines[0], LOOK.surface, LOOK.lines[1]]
    if log:
        norm = LogNorm(FLOOR, max(top, 4 * FLOOR))
        values_RC = np.clip(values_RC, FLOOR, None)
        on_bar = {"ticks": LogLocator(2), "format": "%g×"}
    rows, length = values_RC.shape[0], values_RC.shape[1] - added
    how: dict[str, Any] = {"aspect": "auto", "interpolation": "nearest", "norm": norm}
    how["cmap"] = LinearSegmentedColormap.from_list("amounts", colours)
    image = ax.imshow(values_RC[:, added:], extent=(0, length, rows, 0), **how)
    # some room keeps the strip of the added sinks apart from the text
    width = 0.05 * length * added
    if added:
        ax.imshow(values_RC[:, :added], extent=(-1.4 * width, -0.4 * width, rows, 0), **how)
    ax.set(xlim=(-1.4 * width, length), ylim=(rows, 0))
    ax.set(xlabel=table.columns.name, ylabel=table.index.name)
    for axis, names in ((ax.xaxis, [*table.columns][added:]), (ax.yaxis, [*table.index])):
        places = range(0, len(names), -(-len(names) // 8))
        axis.set_ticks([place + 0.5 for place in places], [str(names[place]) for place in places])
    if added:
        at = [-0.9 * width, *ax.get_xticks()]
        ax.set_xticks(at, ["sink", *(one.get_text() for one in ax.get_xticklabels())])
    ax.spines[["left", "bottom"]].set_visible(False)
    ax.tick_params(length=0)
    bar = canvas_of(ax).colorbar(image, ax=ax, pad=0.02, aspect=28, label=label, **on_bar)
    bar.outline.set_visible(False)
    bar.minorticks_off()
    return table.stack().rename("value").reset_index()


def own_axes(width: float = 4.6, height: float = 2.8) -> Axes:
    """New axes on a figure of their own (inches), without pyplot's global state."""
    # letters are a little wider in a file than when measured: some room keeps them inside
    layout = ConstrainedLayoutEngine(w_pad=0.09)
    return Canvas(figsize=(width, height), layout=layout).subplots()


def canvas_of(axes: Axes) -> Any:
    """The figure of axes."""
    return axes.get_figure(root=True)


def finish(ax: Axes, *, grow: bool) -> None:
    """Grid, and a legend over the plot, for which a figure of its own (``grow``) gets taller."""
    if not ax.images:
        ax.grid(axis="y")
        ax.minorticks_off()
    names = ax.get_legend_handles_labels()[1]
    if not names:
        return
    canvas = canvas_of(ax)
    # an entry has a line and letters of some 0.07 inches
    columns = 2 if canvas.get_figwidth() > 2 * (0.5 + 0.07 * max(map(len, names))) else 1
    ax.legend(loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, ncols=columns)
    if grow:
        canvas.set_figheight(canvas.get_figheight() + 0.19 * -(-len(names) // columns))


def draw_all(
    runs: Runs,
    folder: str | Path,
    formats: Iterable[str] = ("png", "svg"),
    *,
    names: Iterable[str] | None = None,
) -> tuple[list[Path], dict[str, str]]:
    """Draw every registered figure that the runs, all of one kind, recorded enough for, into
    ``folder``, each with its numbers beside it, NAME.csv.

    Files are called after the figure, and after the run if it shows one of several:
    ``sink_paths-tiny.png``. The same run gives the same files byte for byte. Raises ValueError for
    unknown formats or names.

    Returns:
        The files, in the order drawn; and the figures that could not be drawn, by name, with the
        reason.
    """
    readers, target = as_shown(runs, any_kind=True), Path(folder)
    known = figures_of(readers[0].run.info.kind)
    if not known:
        # refused by name, with where to look
        as_shown(readers)
    formats = tuple(formats)
    names = tuple(known if names is None else names)
    for name in names:
        one_of("figure", name, known)
    written: list[Path] = []
    skipped: dict[str, str] = {}
    for name in names:
        subjects = {"": readers}
        if known[name].alone and len(readers) > 1:
            subjects = {f"-{_file_name(run.label)}": [run] for run in readers}
        for tail, shown in subjects.items():
            try:
                axes, numbers = known[name].drawn(shown)
            except NotRecorded as error:
                skipped[name + tail] = str(error)
            else:
                written += write_figure(axes, target / f"{name}{tail}", formats, numbers)
    return written, skipped


def _file_name(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", label).strip("-.") or "run"


def save(canvas: Canvas, form: str, target: Path | BinaryIO) -> None:
    """Write a figure; the same figure gives the same bytes."""
    # No dates and no random ids.
    metadata = {
        "svg": {"Date": None, "Creator": None},
        "png": {"Software": None},
        "pdf": {"CreationDate": None},
    }[form]
    with themed(), matplotlib.rc_context({"svg.hashsalt": "sinklab"}):
        layout = canvas.get_layout_engine()
        if layout is not None:
            # Laid out once for all formats: savefig would draw twice for each.
            layout.execute(canvas)
            canvas.set_layout_engine(None)
        canvas.savefig(target, format=form, dpi=DPI, metadata=metadata)


def write_figure(
    axes: Axes, stem: Path, formats: Iterable[str], numbers: pd.DataFrame | None = None
) -> list[Path]:
    """Write it as STEM.png, …, in a folder that is made, and its numbers as STEM.csv; the paths."""
    paths = []
    for form in formats:
        one_of("format of a figure", form, FORMATS)
        stem.parent.mkdir(parents=True, exist_ok=True)
        paths.append(stem.with_name(f"{stem.name}.{form}"))
        write_beside(paths[-1], partial(save, canvas_of(axes), form))
    if numbers is not None:
        paths.append(write_csv(stem.with_name(f"{stem.name}.csv"), numbers))
    return paths


def write_csv(path: Path, numbers: pd.DataFrame) -> Path:
    """Write a table with all its numbers. Returns its path."""
    write_beside(path, lambda part: numbers.to_csv(part, index=False))
    return path
