"""The conformance suites of studies and figures, which write run folders and draw them."""

import dataclasses
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure as Canvas

from conformance.values import refusal
from sinklab.lab.checkpoints.loading import Loaded
from sinklab.lab.records import Run, RunWriter, open_run
from sinklab.lab.registry import figures
from sinklab.lab.reports.drawing import Figure, draw_all
from sinklab.lab.reports.runs import as_shown
from sinklab.lab.reports.samples import NotRecorded
from sinklab.lab.studies.base import Study


def check_study(study: Study, loaded: Loaded, settings: Any = None) -> None:
    """Hold a study to the promises of its command and its run folders, with a model and settings
    that are soon done.

    Its settings are a frozen dataclass; it writes tables or arrays; a run of which a file is
    damaged goes on to the same result. (Kills are those of tests/studies/test_every_write.py.)

    Args:
        study: an instance of a registered class.
        loaded: a small model.
        settings: small ones; the defaults when left out.

    Raises:
        AssertionError: for the first of these that does not hold.
    """
    kind: Any = getattr(study, "Settings", None)
    frozen = dataclasses.is_dataclass(kind) and getattr(kind, "__dataclass_params__").frozen  # noqa: B009
    assert frozen, (
        f"{study!r} has no Settings, a frozen dataclass in its class; pass an instance of the study"
    )
    with tempfile.TemporaryDirectory() as temporary:
        whole = open_run(study(loaded, Path(temporary, "whole"), settings))
        assert whole.tables or whole.array_files, (
            f"{study!r} writes no table and no array: nothing can be read of it"
        )
        lost = shutil.copytree(whole.path, Path(temporary, "lost"))
        files = [*whole.info.files]
        for file in dict.fromkeys((files[0], files[-1])):
            (lost / file).write_bytes(b"lost")
            again = open_run(study(loaded, lost, settings))
            _check_same(again, whole, f"with a damaged {file}")


def _check_same(run: Run, whole: Run, when: str) -> None:
    message = f"{when}, a resumed run differs from one that was not interrupted"
    assert run.info.status == "complete" and [*run.info.files] == [*whole.info.files], message
    # files of the same bytes need not be read
    files = whole.info.files
    if all((run.path / file).read_bytes() == (whole.path / file).read_bytes() for file in files):
        return
    for name in whole.tables:
        assert run.table(name).equals(whole.table(name)), f"{message}: table {name}"
    for name in whole.array_files:
        for sample in whole.samples or (None,):
            for key, array in whole.arrays(name, sample).items():
                np.testing.assert_array_equal(run.array(name, key, sample), array, message)


def check_figure(name: str, runs: Sequence[Run]) -> None:
    """Hold a registered figure to the contract of reports.

    It has a description; it is drawn of one run and of several, on axes that it is given; it gives
    its numbers; the same runs give the same numbers, and pyplot's list of open figures stays as it
    is; `draw_all` writes it; of a run that recorded nothing, NotRecorded names the run.

    Args:
        name: of the figure in :data:`sinklab.lab.registry.figures`.
        runs: two or more, of the kind that the figure draws, which recorded the data that it needs.

    Raises:
        AssertionError: for the first of these that does not hold.
    """
    from matplotlib import pyplot

    figure: Figure = figures[name]
    assert figure.name == name and figure.words, f"{name} has no docstring to say what it shows"
    assert len(runs) > 1, "a figure is tried with one run and with several; give at least two"
    readers, before = as_shown(list(runs)), pyplot.get_fignums()
    shown = readers[:1] if figure.alone else readers
    axes = Canvas().subplots()
    drawn, numbers = figure.drawn(readers, axes)
    assert drawn is axes
    parts = axes.lines + axes.patches + axes.images + list(axes.collections) + axes.texts
    assert parts, f"{name} draws nothing on the axes that it was given"
    assert len(numbers), f"{name} gives no numbers; return the table that it draws"
    figure(readers[0])
    assert pyplot.get_fignums() == before, f"{name} leaves a figure open in pyplot; draw on ax"
    with tempfile.TemporaryDirectory() as folder:
        written, skipped = draw_all(shown, Path(folder, "a"), ("svg",), names=[name])
        assert written, f"draw_all skips {name}: {skipped}"
        again = numbers.to_csv(index=False)
        assert written[1].read_text("utf-8") == again, f"{name} differs from one time to the next"
        bare = Path(folder, "bare")
        with RunWriter(bare, kind=shown[0].run.info.kind, model={}, settings={}, seed=0):
            pass
        said = refusal(NotRecorded, figure, open_run(bare))
        assert said, f"{name} draws a run that recorded nothing; raise NotRecorded"
        assert str(bare) in said, f"{name} does not name the run that lacks something: {said}"
