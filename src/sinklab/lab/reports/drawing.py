"""Figures: registered functions that draw runs of one kind, declared over a table of facts or by
hand.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from pathlib import Path
from typing import Any, BinaryIO

import matplotlib
import numpy as np
import pandas as pd
from matplotlib.figure import Figure as Canvas

from sinklab.core.errors import near, one_of
from sinklab.lab.analysis.estimates import mean_over
from sinklab.lab.files import counted
from sinklab.lab.records.storage import write_beside, write_text
from sinklab.lab.registry import figures
from sinklab.lab.reports import style
from sinklab.lab.reports.charts import Axis, Chart, Line, Map, Mark, draw_alone, draw_panels
from sinklab.lab.reports.runs import Runs, as_shown
from sinklab.lab.reports.samples import NotRecorded, Reader
from sinklab.lab.reports.style import Theme
from sinklab.lab.reports.words import statements

FORMATS = ("png", "svg", "pdf")
AXES = ("layer", "step")
NEEDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "attention": (lambda run: run.layers, "recorded attention"),
    "heldout": (lambda run: run.heldout is not None, "the table heldout"),
    "tokens": (lambda run: run.sink_tokens is not None, "the table tokens and recorded attention"),
    "monitor": (
        lambda run: len(run.facts),
        "a sink monitor, and {path} has none. Train with --monitor-every.",
    ),
    "history": (lambda run: run.history is not None, "a history, and {path} has none."),
    "bounds": (
        lambda run: len(run.measured.bounds),
        "output norms and bounds, and {path} recorded none. Trace with the statistics "
        "output_norm and noop_bound.",
    ),
}
"""name of a need of figures -> whether a run has it, and what a run without it lacks, behind "This
figure needs"
"""


@dataclass(frozen=True)
class Curve:
    """One curve of a declared figure, for every run."""

    of: str
    """column of the table of facts, or an expression over columns: ``100 * text_share``"""
    words: str = ""
    """its quantity, behind the name of the run"""
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
    colour: int
    """place among the colours of lines of a theme"""
    marker: int
    name: str
    """in the legend; runs that differ in their seed alone share one"""

    def line(self, x: Any, y: Any, **how: Any) -> Line:
        """A line of this run; ``how``: other fields of `Line`."""
        own = {
            "run": self.run.label,
            "name": self.name,
            "colour": self.colour,
            "marker": self.marker,
        }
        return Line(x, y, **(own | how))


@dataclass(eq=False, kw_only=True)
class Figure:
    """A figure by its name: call it with runs, and with axes to draw on; ``theme`` is light or
    dark.

    Returns the axes, or the figure if it has several panels. Raises NotRecorded when no run
    recorded the data it needs, ValueError for runs of another kind, an unknown theme, and options
    that do not fit.
    """

    name: str
    """unique; of the files, and in the registry"""
    draw: Callable[..., Any]
    kind: str = "study"
    """of the runs it draws: "study", "training", or any other kind of run folder"""
    alone: bool = False
    """shows one run; of several each gets a file, and their maps share a scale"""
    x: str = ""
    """"layer", "step", or a table of the run that has a column of that name"""
    y: Sequence[Any] = ()
    """each a `Curve`, or a column"""
    label: str = ""
    """of the vertical axis"""
    needs: Any = ""
    """keys of NEEDS (several as a list, or apart by spaces), or of a declared figure a key or words
    for "This figure needs …"; runs without it are left out
    """
    ends: tuple[float | None, float | None] = (0, None)
    """of the vertical axis; None: the ends of the numbers"""
    least: float = 0
    """the vertical axis reaches at least this"""
    marks: Sequence[Mark] = ()
    """lines at places of the axes"""
    prepared: bool = False
    """the function returns its content, a `Chart` or a `Map`, with ``columns`` a list of them; True
    of a declared figure
    """
    columns: int = 0
    """panels beside each other"""
    share: str = "xy"
    """axes that panels share; "own": each has its legend"""
    size: tuple[float, float] = (4.6, 2.8)
    """inches of a prepared or declared figure, of each panel if there are several"""

    def __post_init__(self) -> None:
        update_wrapper(self, self.draw)
        if not isinstance(self.needs, str):
            self.needs = " ".join(self.needs)
        self.y = tuple(Curve(one) if isinstance(one, str) else one for one in self.y)
        self._content: Any = self.draw
        if self.y:
            self.prepared, self._content = True, self._declared
        given = inspect.signature(self._content).parameters.values()
        first = [one for one in given if one.kind is not one.KEYWORD_ONLY]
        named = [one for one in given if one.kind is one.KEYWORD_ONLY and one.name != "look"]
        if self.prepared and not self.columns:
            first.append(first[0].replace(name="axes", default=None, annotation=Any))
        of_all = {"top": None, "theme": "light"}
        named += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=of_all[name])
            for name in of_all
        ]
        self.__signature__ = inspect.Signature([*first, *named])

    @property
    def words(self) -> str:
        """What it shows: its docstring without the sentences for callers."""
        said = re.split(r"\n(?:Args|Raises):", inspect.cleandoc(self.__doc__ or ""))[0]
        parts = re.split(r"(?<=\.) (?=[A-Z(])", " ".join(said.split()))
        return " ".join(one for one in parts if "`" not in one and "Raises" not in one)

    def __call__(
        self, runs: Any, *options: Any, theme: str = "light", top: float | None = None, **named: Any
    ) -> Any:
        """Draw the runs, or the first of several if the figure shows one. ``top``: the end of the
        (colour) scale of a prepared figure.
        """
        look = style.theme_named(theme)
        bound = self.__signature__.bind(runs, *options, **named)
        with style.themed(look):
            if not self.prepared:
                bound.arguments[next(iter(bound.arguments))] = self._readers(runs)
                return self.draw(*bound.args, **bound.kwargs, look=look)
            given = bound.arguments.pop("axes", None)
            shown = self.prepare(*bound.args, **bound.kwargs)
            if self.columns:
                how: dict[str, Any] = {
                    "columns": self.columns,
                    "size": self.size,
                    "share": self.share,
                }
                return draw_panels(shown, look, top=top, **how)
            axes = style.own_axes(given, *self.size)
            draw_alone(axes, shown, look, grow=given is None, top=top)
            if self.y:
                self.draw(axes, look)
        return axes

    def prepare(self, runs: Any, *options: Any, **named: Any) -> Any:
        """Content of a declared or prepared figure: a `Chart` or `Map`, or a list of them."""
        return self._content(self._readers(runs), *options, **named)

    def panels(self, runs: Any) -> list[Chart | Map]:
        """The prepared content, also of a single panel as a list."""
        shown = self.prepare(runs)
        if self.columns:
            return list(shown)
        return [shown]

    def top_of(self, readers: list[Any]) -> float | None:
        """The end of the colour scale that these runs share; None without maps."""
        tops = []
        for reader in readers if self.prepared else ():
            with suppress(NotRecorded):
                tops += [one.top for one in self.panels(reader) if isinstance(one, Map)]
        return max(tops, default=None)

    def _readers(self, runs: Any) -> Any:
        """The runs that have the data the figure needs; the first of them if it shows one."""
        readers = as_shown(runs, self.kind)
        if self.alone:
            readers = readers[:1]
        if not self.y:
            for name in self.needs.split():
                readers = having(readers, name)
        return readers[0] if self.alone else readers

    def _declared(self, runs: Any) -> Chart:
        """The declared curves, as a chart."""
        try:
            kept = having(runs, self.needs or "attention", self._has)
        except NotRecorded as error:
            misspelt = _misspelt(runs[0].over(self.x), self.x, self.y)
            raise NotRecorded(f"{error}{misspelt}") from None
        lines = [
            line
            for one in drawn_as(kept)
            for line in _lines(one, self.x, self.y, several=len(kept) > 1)
        ]
        low, high = self.ends
        if all(np.nanmax(line.y) < self.least for line in lines):
            high = self.least
        x = Axis(self.x, whole=self.x == "layer")
        marks = (*self.marks, *warm_starts(kept, self.x))
        return Chart(x, Axis(self.label, low=low, high=high), lines, marks)

    def _has(self, run: Any) -> bool:
        """Whether a run has numbers for the curves that are required, or else for one."""
        table = run.over(self.x)
        required = [curve for curve in self.y if curve.required] or self.y
        return any(np.isfinite(_values(table, curve)).any() for curve in required)


def figure(name: str, **declared: Any) -> Callable[[Callable[..., Any]], Figure]:
    """A decorator that registers a figure; the docstring of the function is the caption.

    With ``y``, the figure is declared: for every run the curves ``y`` of its facts over ``x``. The
    function gets the axes and the theme when they are drawn, and may add to them or set their
    limits; its body may be the docstring alone. With ``prepared``, it takes the readers (``alone``:
    one) and its own options, and returns a `Chart` or a `Map`. Else it draws by hand: it takes the
    readers, its options, axes or None, and ``look``, a Theme, and returns the axes or the figure.

    The columns are those of ``as_studies(run)[0].over("layer")``: a study's are described at
    `sinklab.lab.reports.measured.Measured.by_layer`, a training run's are those of its monitor.

    Args:
        name: unique; of the files, and in the registry.
        declared: other fields of `Figure`.
    """

    def made(function: Callable[..., Any]) -> Figure:
        found = Figure(name=name, draw=function, **declared)
        figures.register(name)(found)
        return found

    return made


def figures_of(kind: str) -> dict[str, Figure]:
    """Every registered figure of runs of this kind, by name."""
    return {name: figures[name] for name in figures if figures[name].kind == kind}


def having(readers: list[Any], needs: str, has: Callable[[Any], object] | None = None) -> list[Any]:
    """Runs that recorded the data a figure needs, by NEEDS or by ``has``. NotRecorded if there is
    none.
    """
    met, lacking = NEEDS.get(needs, (bool, needs))
    found = [run for run in readers if (has or met)(run)]
    if not found:
        if has is not None and needs in NEEDS and met(readers[0]):
            lacking = "numbers for its curves, and {path} has NaN alone: no sink, perhaps."
        if "{path}" not in lacking:
            lacking += ": {path} has none."
        raise NotRecorded(f"This figure needs {lacking.format(path=readers[0].run.path)}")
    return found


def _misspelt(table: pd.DataFrame, x: str, curves: Sequence[Curve]) -> str:
    """Names near an axis or a column that is not there: a name that seems not to be recorded may be
    misspelt.
    """
    if table.empty:
        hint = near(x, AXES)
        return f" The axis is {x!r}; {hint}" if hint and x not in AXES else ""
    asked = {name for curve in curves for name in re.findall(r"[A-Za-z_]\w*", curve.of)} - {
        *table.columns
    }
    hints = {name: near(name, table.columns) for name in sorted(asked)}
    return "".join(f" By {x} there is no {name!r}; {hint}" for name, hint in hints.items() if hint)


def _values(table: pd.DataFrame, curve: Curve) -> np.ndarray:
    """The numbers of a curve; none if a column is missing."""
    columns = re.findall(r"[A-Za-z_]\w*", curve.of)
    if not set(columns) <= set(table.columns):
        return np.zeros(0)
    # of those alone: pandas hands all columns that it is given to the expression
    return np.asarray(table[columns].eval(curve.of), dtype=float)


def _lines(one: Look, x: str, curves: Sequence[Curve], several: bool) -> list[Line]:
    """The curves of a run, with intervals over its samples; runs have colours, or the curves if
    there is one run.
    """
    table, each, found = one.run.over(x), one.run.each(x), []
    for nth, curve in enumerate(curves):
        values = _values(table, curve)
        if (curve.added and not one.run.sink_count) or not np.isfinite(values).any():
            continue
        low, high = intervals(_values(each, curve), each.get(x), table[x])
        how = {"words": curve.words, "style": curve.style, "low": low, "high": high}
        if not several:
            # of one run, the curves have colours
            how |= {"colour": nth, "marker": nth}
        found.append(one.line(table[x].to_numpy(), values, **how))
    return found


def intervals(values: np.ndarray, at: Any, places: Any) -> tuple[Any, Any]:
    """Ends of the 95 % intervals over samples at each place; None for both if there are too few
    samples.

    values: one a sample and place. at: the place of each.
    """
    if not len(values):
        return None, None
    at = np.asarray(at)
    low, high = np.array([mean_over(values[at == place]).interval for place in places]).T
    if not np.isfinite(low).any():
        return None, None
    return low, high


def warm_starts(readers: list[Any], x: str) -> list[Mark]:
    """Marks at the ends of causal warm starts."""
    if x != "step":
        return []
    steps = sorted({run.causal_steps for run in readers} - {0})
    return [Mark("x", step, "diffusion from here") for step in steps]


def drawn_as(readers: list[Any]) -> list[Look]:
    """A colour for each run, and the same for runs that differ in their seed alone."""
    colours = len(style.THEMES["light"].lines)
    kinds = list(dict.fromkeys(run.repeats for run in readers))
    found: list[Look] = []
    for run in readers:
        before = [one for one in found if one.run.repeats == run.repeats]
        kind = kinds.index(run.repeats)
        count = sum(one.repeats == run.repeats for one in readers)
        name = run.label if count == 1 else f"{run.repeats}, {count} runs"
        # with more kinds than colours, the markers tell
        found.append(Look(run, kind % colours, kind + len(before) + kind // colours, name))
    return found


@dataclass
class Drawn:
    """Result of ``draw_all``."""

    written: list[Path] = field(default_factory=list)
    """files, in the order drawn"""
    skipped: dict[str, str] = field(default_factory=dict)
    """name of a figure, and of the run if there are several -> reason that it was not drawn"""


def draw_all(
    runs: Runs,
    folder: str | Path,
    formats: Iterable[str] = ("png", "svg"),
    *,
    themes: Iterable[str] = ("light",),
    names: Iterable[str] | None = None,
    paper: str = "",
) -> Drawn:
    """Draw every registered figure that the runs, all of one kind, recorded enough for, into
    ``folder``.

    Files are called after the figure, and after the run if it shows one of several:
    ``sink_paths-tiny.png``; those of the dark theme end in ``-dark``. Several runs share the
    figures that can show them together, and the colour scale of those that cannot. The same run
    gives the same files byte for byte. A figure that cannot be drawn is skipped, and the reason is
    told. Raises ValueError for unknown formats, themes, names or papers.

    paper: the venue of the figures, one of `style.PAPERS`, which sets widths and sizes of letters;
        each figure then has its caption beside it, NAME.txt, and the models in its name.
    """
    readers, target = as_shown(runs, any_kind=True), Path(folder)
    known = figures_of(readers[0].run.info.kind)
    if not known:
        # refused by name, with where to look
        as_shown(readers)
    formats = tuple(formats)
    names = tuple(known if names is None else names)
    looks = [style.theme_named(theme) for theme in themes]
    for there, wanted, what in (
        (FORMATS, formats, "format of a figure"),
        (known, names, "figure"),
        (style.PAPERS, [paper] * bool(paper), "paper"),
    ):
        for name in wanted:
            one_of(what, name, there)
    target.mkdir(parents=True, exist_ok=True)
    drawn = Drawn()
    tails = file_names(readers, always=bool(paper))
    for name in counted("drawing", names, len(names)):
        one, top = known[name], None
        subjects = [("".join(tails) * bool(paper), readers)]
        if one.alone:
            subjects = [(tail, [run]) for tail, run in zip(tails, readers, strict=True)]
        if len(subjects) > 1:
            top = one.top_of(readers)
        for tail, shown in subjects:
            try:
                for look in looks:
                    stem = target / f"{name}{tail}{look.tail}"
                    with style.for_paper(paper):
                        canvas = style.sized(figure_of(one(shown, theme=look.name, top=top)), paper)
                        drawn.written += write_figure(canvas, stem, formats, look)
                if paper:
                    drawn.written.append(target / f"{name}{tail}.txt")
                    write_text(drawn.written[-1], caption(one, shown) + "\n")
            except NotRecorded as error:
                drawn.skipped[name + tail] = str(error)
    return drawn


def caption(drawn: Figure, readers: list[Any]) -> str:
    """The caption of a figure: its content and its runs, with their samples, seeds and settings."""
    panels: list[Chart | Map] = []
    if drawn.prepared:
        panels = drawn.panels(readers)
    has_intervals = any(isinstance(one, Chart) and one.has_intervals for one in panels)
    words = " ".join([drawn.words, *(one.words for one in panels if one.words)])
    told = statements("sinklab.lab.reports", (), file="captions.jinja")
    return " ".join(told("caption", words=words, runs=readers, has_intervals=has_intervals))


def file_names(readers: list[Reader], *, always: bool = False) -> list[str]:
    """Endings of the file names of each run: nothing if there is one run, but for ``always``."""
    if len(readers) == 1 and not always:
        return [""]
    plain = [re.sub(r"[^A-Za-z0-9._]+", "-", run.label).strip("-.") or "run" for run in readers]
    return [
        f"-{name}" if plain.count(name) == 1 else f"-{name}-{index + 1}"
        for index, name in enumerate(plain)
    ]


def figure_of(drawn: Any) -> Canvas:
    """The figure of axes, or the figure itself."""
    return drawn if isinstance(drawn, Canvas) else drawn.figure


def save(canvas: Canvas, form: str, target: Path | BinaryIO) -> None:
    """Write a figure; the same figure gives the same bytes."""
    # No dates and no random ids.
    metadata = {
        "svg": {"Date": None, "Creator": None},
        "png": {"Software": None},
        "pdf": {"CreationDate": None},
    }[form]
    with matplotlib.rc_context({"svg.hashsalt": "sinklab"}):
        layout = canvas.get_layout_engine()
        if layout is not None:
            # Laid out once for all formats: savefig would draw twice for each.
            layout.execute(canvas)
            canvas.set_layout_engine(None)
        canvas.savefig(target, format=form, dpi=style.DPI, metadata=metadata)


def write_figure(canvas: Canvas, stem: Path, formats: Iterable[str], look: Theme) -> list[Path]:
    """Write it as STEM.png, …; the paths."""
    paths = []
    with style.themed(look):
        for form in formats:
            paths.append(stem.with_name(f"{stem.name}.{form}"))
            write_beside(paths[-1], partial(save, canvas, form))
    return paths
