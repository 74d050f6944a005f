"""The conformance suite of figures."""

from __future__ import annotations

import inspect
import io
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure as Canvas

from sinklab.records.reading import Run, open_run
from sinklab.records.writing import RunWriter
from sinklab.registry import figures
from sinklab.reports.drawing import Figure, draw_all, figure_of, save
from sinklab.reports.runs import as_shown
from sinklab.reports.samples import NotRecorded
from sinklab.reports.style import theme_named, themed
from sinklab.testing.values import refusal


def check_figure(name: str, runs: Sequence[Run]) -> None:
    """Hold a registered figure to what reports rely on.

    It says what it shows; it is drawn of one run and of several, in both themes, which differ; the same runs give the
    same bytes, and pyplot's list of open figures stays as it is; given axes are drawn on; `draw_all` writes it; of a
    run that recorded nothing, NotRecorded names the run.

    Args:
        name: of the figure in :data:`sinklab.registry.figures`.
        runs: two or more, of the kind that the figure draws, which recorded what it needs.

    Raises:
        AssertionError: for the first of these that does not hold.
    """
    figure: Figure = figures[name]
    assert figure.name == name and (figure.__doc__ or "").strip(), f"{name} has no docstring to say what it shows"
    assert len(runs) > 1, "a figure is tried with one run and with several; give at least two"
    readers = as_shown(list(runs), figure.kind)
    light, dark = (_bytes(figure, readers, theme) for theme in ("light", "dark"))
    assert light != dark, f"{name} looks alike in both themes; take colours from look"
    if not figure.alone:
        figure(runs[0])
    if "axes" in inspect.signature(figure).parameters:
        axes = Canvas().subplots()
        assert figure(readers, axes=axes) is axes, f"{name} does not return the axes that it was given"
        drawn = axes.lines + axes.patches + axes.images + list(axes.collections) + axes.texts
        assert drawn, f"{name} draws nothing on the axes that it was given"
    with tempfile.TemporaryDirectory() as folder:
        written = draw_all(readers[:1] if figure.alone else readers, folder, ("svg",), names=[name])
        assert written.written, f"draw_all skips {name}: {written.skipped}"
        assert written.written[0].read_bytes() == light, f"{name} differs from one time to the next"
        bare = Path(folder, "bare")
        with RunWriter(bare, kind=figure.kind, model={}, settings={}, seed=0):
            pass
        said = refusal(NotRecorded, figure, open_run(bare))
        assert said, f"{name} draws a run that recorded nothing; raise NotRecorded"
        assert str(bare) in said, f"{name} does not name the run that lacks something: {said}"


def _bytes(figure: Figure, readers: list[Any], theme: str) -> bytes:
    from matplotlib import pyplot

    before, written = pyplot.get_fignums(), io.BytesIO()
    with themed(theme_named(theme)):
        save(figure_of(figure(readers, theme=theme)), "svg", written)
    assert pyplot.get_fignums() == before, f"{figure.name} leaves a figure open in pyplot; draw on own_axes"
    return written.getvalue()
