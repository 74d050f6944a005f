"""What a figure is: a registered function that draws runs of one kind, declared over a table of facts or by hand."""

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any, BinaryIO

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from sinklab.errors import near, unknown
from sinklab.records.storage import write_beside
from sinklab.registry import figures
from sinklab.reports import style
from sinklab.reports.runs import Runs, as_shown
from sinklab.reports.samples import NotRecorded, Reader
from sinklab.reports.style import Theme
from sinklab.reports.words import words_of

NEW: Any = None
"""axes that are made for a figure, of its ``size``, before it draws"""
FORMATS = ("png", "svg", "pdf")
AXES = ("layer", "step")
NEEDS: dict[str, Callable[[Any], Any]] = {
    "attention": lambda run: run.layers,
    "heldout": lambda run: run.heldout is not None,
    "tokens": lambda run: run.sink_tokens,
    "monitor": lambda run: len(run.facts),
    "history": lambda run: run.history is not None,
    "value norms": lambda run: len(run.measured.scatter),
    "bounds": lambda run: len(run.measured.bounds),
}
"""what figures need -> whether a run has it; cards.toml says how its absence is told"""


@dataclass(frozen=True)
class Curve:
    """One curve of a declared figure, for every run."""

    of: str
    """column of the table of facts, or an expression over columns: ``100 * text_share``"""
    words: str = ""
    """what it shows, behind the name of the run"""
    style: str = "-"
    """kind of line; all but full lines have hollow markers"""
    added: bool = False
    """drawn for runs with an added sink alone"""
    required: bool = False
    """a run without numbers for it is left out"""


@dataclass(frozen=True)
class Look:
    """How one run is drawn."""

    run: Any
    colour: str
    marker: str
    name: str | None
    """entry in the legend; None for a repeat of a run that has one"""


@dataclass(eq=False, kw_only=True)
class Figure:
    """A figure by its name: call it with runs, and with axes to draw on; ``theme`` is light or dark.

    Returns the axes, or the figure where it has several panels. Raises NotRecorded when no run recorded what it needs,
    ValueError for runs of another kind, an unknown theme, and options that do not fit.
    """

    name: str
    """unique; of the files, and in the registry"""
    draw: Callable[..., Any]
    kind: str = "study"
    """of the runs it draws: "study", "training", or any other kind of run folder"""
    alone: bool = False
    """shows one run; of several each gets a file"""
    x: str = ""
    """"layer", "step", or a table of the run that has a column of that name"""
    y: Sequence[Any] = ()
    """each a `Curve`, or a column"""
    label: str = ""
    """of the vertical axis"""
    needs: str | Sequence[str] = ()
    """keys of NEEDS, or of a declared figure a key or words for "This figure needs …"; runs without it are left out"""
    least: float = 1e-9
    """the vertical axis reaches at least this"""
    size: tuple[float, float] | None = None
    """inches of the axes that are made where none are given; None: the function gets None and makes its own"""
    legend: int | None = None
    """columns of the legend above, which makes a figure of its own taller; 0: as many as fit"""

    def __post_init__(self) -> None:
        update_wrapper(self, self.draw)
        draw = self.draw
        if self.y:
            self.y = tuple(Curve(one) if isinstance(one, str) else one for one in self.y)
            self.size, self.legend = self.size or (4.6, 2.8), self.legend or 0
            draw = self._curves
        given = [one for one in inspect.signature(draw).parameters.values() if one.name != "look"]
        theme = inspect.Parameter("theme", inspect.Parameter.KEYWORD_ONLY, default="light", annotation="str")
        self.__signature__ = inspect.Signature([*given, theme])

    def __call__(self, runs: Any, *options: Any, theme: str = "light", **named: Any) -> Any:
        """Draw the runs, or of several the first where the figure shows one."""
        look, readers = style.theme_named(theme), as_shown(runs, self.kind)
        readers = readers[:1] if self.alone else readers
        needs = [self.needs] if isinstance(self.needs, str) else self.needs
        for name in () if self.y else needs:
            readers = having(readers, name)
        bound = self.__signature__.bind(readers[0] if self.alone else readers, *options, **named)
        given = bound.arguments.get("axes")
        with style.themed(look):
            if self.size:
                bound.arguments["axes"] = style.own_axes(given, *self.size)
            plot: Any = bound.arguments.get("axes")
            drawn = (self._curves if self.y else self.draw)(*bound.args, **bound.kwargs, look=look)
            if self.legend is not None:
                style.legend_above(plot, self.legend, grow=given is None, extra=drawn if self.y else ())
        return plot if self.y or drawn is None else drawn

    def _curves(self, readers: list[Any], axes: Axes = NEW, *, look: Theme) -> Sequence[tuple[str, str]]:
        """Draw what is declared; entries of the legend that explain dashes are returned."""
        needs = self.needs if isinstance(self.needs, str) else "attention"
        try:
            kept = having(readers, needs, lambda run: _has(run.over(self.x), self.y))
        except NotRecorded as error:
            raise NotRecorded(f"{error}{_misspelt(readers[0].over(self.x), self.x, self.y)}") from None
        extra = _draw_curves(axes, drawn_as(kept, look), self.x, self.y)
        axes.set(xlabel=self.x, ylabel=self.label)
        self.draw(axes, look)
        if axes.get_autoscaley_on():
            style.from_zero(axes, self.least)
        finish(axes, kept, self.x)
        return extra


def figure(name: str, **declared: Any) -> Callable[[Callable[..., Any]], Figure]:
    """A decorator that registers a figure; the docstring of the function says what is seen.

    With ``y``, the figure is declared: for every run the curves ``y`` of its facts over ``x``. The function gets the
    axes and the theme when they are drawn, and may add to them or set their limits; its body may be the docstring
    alone. Without ``y``, it draws by hand: it takes the readers (``alone``: one), its own options, axes or None, and
    ``look``, a Theme; it returns the axes or the figure, or nothing where it drew on the axes that it got (``size``).

    The columns are those of ``as_studies(run)[0].over("layer")``: a study's are described at
    `sinklab.reports.measured.Measured.by_layer`, a training run's are those of its monitor.

    Args:
        name: unique; of the files, and in the registry.
        declared: fields of `Figure`: kind, alone, x, y, label, needs, least, size, legend.
    """

    def made(function: Callable[..., Any]) -> Figure:
        found = Figure(name=name, draw=function, **declared)
        figures.register(name)(found)  # type: ignore[type-var]
        return found

    return made


def figures_of(kind: str) -> dict[str, Figure]:
    """Every registered figure of runs of this kind, by name."""
    return {name: figures[name] for name in figures if figures[name].kind == kind}


def having(readers: list[Any], needs: str, has: Callable[[Any], object] | None = None) -> list[Any]:
    """Those of the runs that recorded what a figure needs, by NEEDS or by ``has``. NotRecorded when there is none."""
    found = [run for run in readers if (has or NEEDS[needs])(run)]
    if not found:
        said = words_of("needs", needs) or f"{needs}: {{path}} has none."
        raise NotRecorded(f"This figure needs {said.format(path=readers[0].run.path)}")
    return found


def _has(table: pd.DataFrame, curves: Sequence[Curve]) -> bool:
    """Whether there are numbers for the curves that are required, or else for one."""
    required = [curve for curve in curves if curve.required] or curves
    return any(len(values := _values(table, curve)) and np.isfinite(values).any() for curve in required)


def _misspelt(table: pd.DataFrame, x: str, curves: Sequence[Curve]) -> str:
    """The names near an axis or a column that is not there: what seems not to be recorded may be misspelt."""
    if table.empty:
        hint = "" if x in AXES else near(x, AXES)
        return f" The axis is {x!r}; {hint}" if hint else ""
    asked = {name for curve in curves for name in re.findall(r"[A-Za-z_]\w*", curve.of)} - {*table.columns}
    hints = {name: near(name, table.columns) for name in sorted(asked)}
    return "".join(f" By {x} there is no {name!r}; {hint}" for name, hint in hints.items() if hint)


def _values(table: pd.DataFrame, curve: Curve) -> np.ndarray:
    """The numbers of a curve; none where a column is missing."""
    columns = re.findall(r"[A-Za-z_]\w*", curve.of)
    if not set(columns) <= set(table.columns):
        return np.zeros(0)
    return np.asarray(table.eval(curve.of), dtype=float)


def _draw_curves(plot: Axes, looks: list[Look], x: str, curves: Sequence[Curve]) -> list[tuple[str, str]]:
    """Draw them; of more than four, dashes are explained once: these (line style, words) are returned."""
    drawn = []
    for one in looks:
        table = one.run.over(x)
        mine = [(curve, _values(table, curve)) for curve in curves if one.run.sink_count or not curve.added]
        drawn += [(one, table[x], curve, values) for curve, values in mine if len(values)]
    shared = len(drawn) > 4
    seen: set[str] = set()
    for one, across, curve, values in drawn:
        name: str | None = f"{one.name}: {curve.words}" if curve.words and one.name else one.name
        if shared:
            name = one.name if one.run.label not in seen else None
            seen.add(one.run.label)
        line(plot, one, across, values, style=curve.style, label=name)
    shown = {curve for _, _, curve, _ in drawn if curve.words}
    return [(curve.style, curve.words) for curve in curves if curve in shown] if shared else []


def line(plot: Axes, one: Look, across: Any, values: Any, *, style: str = "-", label: str | None = None) -> None:
    """One curve of a run; hollow markers where the line is not full."""
    plot.plot(
        np.asarray(across), values, color=one.colour, marker=one.marker, markersize=4, linestyle=style,
        markevery=max(1, len(across) // 16), linewidth=1.7 if style == "-" else 1.3,
        markerfacecolor=one.colour if style == "-" else plot.get_facecolor(), label=label,
    )  # fmt: skip


def finish(plot: Axes, readers: list[Any], x: str) -> None:
    """A grid, whole numbers of layers, and the end of a causal warm start over steps."""
    plot.grid(axis="y")
    if x == "layer":
        style.whole_numbers(plot.xaxis)
    for step in sorted({run.causal_steps for run in readers} - {0}) if x == "step" else ():
        muted = plot.xaxis.label.get_color()
        plot.axvline(step, color=muted, linestyle=":", linewidth=1)
        style.note(plot, "diffusion from here", (step, 0.99), ("data", "axes fraction"), (3, 0), fontsize=7.5)


def drawn_as(readers: list[Any], look: Theme) -> list[Look]:
    """A colour for each run, and the same for runs that differ in their seed alone: these have one legend entry."""
    colours, kinds = look.runs + look.more, list(dict.fromkeys(run.repeats for run in readers))
    found: list[Look] = []
    for run in readers:
        before = [one for one in found if one.run.repeats == run.repeats]
        kind, count = kinds.index(run.repeats), sum(one.repeats == run.repeats for one in readers)
        name = run.label if count == 1 else f"{run.repeats}, {count} runs"
        # with more kinds than colours, the markers tell
        marker = style.MARKERS[(kind + len(before) + kind // len(colours)) % len(style.MARKERS)]
        found.append(Look(run, colours[kind % len(colours)], marker, None if before else name))
    return found


@dataclass
class Drawn:
    """What ``draw_all`` did."""

    written: list[Path] = field(default_factory=list)
    """files, in the order drawn"""
    skipped: dict[str, str] = field(default_factory=dict)
    """name of a figure, and of the run where there are several -> why it was not drawn"""


def draw_all(
    runs: Runs,
    folder: str | Path,
    formats: Iterable[str] = ("png", "svg"),
    *,
    themes: Iterable[str] = ("light",),
    names: Iterable[str] | None = None,
) -> Drawn:
    """Draw every registered figure that the runs, all of one kind, recorded enough for, into ``folder``.

    Files are called after the figure, and after the run where it shows one of several: ``sink_path-tiny.png``; those of
    the dark theme end in ``-dark``. Several runs share the figures that can show them together. The same run gives the
    same files byte for byte. What cannot be drawn is skipped and told why. Raises ValueError for unknown formats,
    themes or names.
    """
    readers, target = as_shown(runs, any_kind=True), Path(folder)
    known = figures_of(readers[0].run.info.kind)
    if not known:
        # refused by name, with where to look
        as_shown(readers)
    formats, names = tuple(formats), tuple(known if names is None else names)
    looks = [style.theme_named(theme) for theme in themes]
    for there, wanted, what in ((FORMATS, formats, "formats"), (known, names, "names")):
        for name in wanted:
            if name not in there:
                raise unknown(f"{what[:-1]} of a figure", name, there)
    target.mkdir(parents=True, exist_ok=True)
    drawn = Drawn()
    for name in names:
        alone = known[name].alone
        for tail, subject in zip(file_names(readers), readers, strict=True) if alone else [("", readers)]:
            try:
                for look in looks:
                    canvas = figure_of(known[name](subject, theme=look.name))
                    dark = "" if look.name == "light" else f"-{look.name}"
                    drawn.written += write_figure(canvas, target / f"{name}{tail}{dark}", formats, look)
            except NotRecorded as error:
                drawn.skipped[name + tail] = str(error)
    return drawn


def file_names(readers: list[Reader]) -> list[str]:
    """What the names of the files of each run end in: nothing when there is one run."""
    if len(readers) == 1:
        return [""]
    plain = [re.sub(r"[^A-Za-z0-9._]+", "-", run.label).strip("-.") or "run" for run in readers]
    return [f"-{name}" if plain.count(name) == 1 else f"-{name}-{index + 1}" for index, name in enumerate(plain)]


def figure_of(drawn: Any) -> Canvas:
    """The figure of axes, or the figure itself."""
    return drawn if isinstance(drawn, Canvas) else drawn.figure


def save(canvas: Canvas, form: str, target: Path | BinaryIO) -> None:
    """Write a figure; the same figure gives the same bytes."""
    # No dates and no random ids.
    metadata = {"svg": {"Date": None, "Creator": None}, "png": {"Software": None}, "pdf": {"CreationDate": None}}[form]
    with matplotlib.rc_context({"svg.hashsalt": "sinklab"}):
        if canvas.get_layout_engine():
            # Laid out once for all formats: savefig would draw twice for each.
            canvas.draw_without_rendering()
            canvas.set_layout_engine("none")
        canvas.savefig(target, format=form, dpi=style.DPI, metadata=metadata)


def write_figure(canvas: Canvas, stem: Path, formats: Iterable[str], look: Theme) -> list[Path]:
    """Write it as STEM.png, …; the paths."""
    paths = []
    with style.themed(look):
        for form in formats:
            paths.append(stem.with_name(f"{stem.name}.{form}"))
            write_beside(paths[-1], partial(save, canvas, form))
    return paths
