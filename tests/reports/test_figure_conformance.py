"""Every registered figure passes the conformance suite of figures, and broken ones do not."""

from pathlib import Path

import numpy as np
import pytest
from test_report_training import made

from conformance.runs import check_figure
from curves import costed
from refusals import refused
from sinklab.lab.files import load_plugin
from sinklab.lab.records import RunWriter, open_run
from sinklab.lab.registry import figures
from sinklab.lab.reports import draw_all, figure, figures_of, lines

EXAMPLE = Path(__file__).parents[2] / "examples" / "add_a_figure.py"
KINDS = ("study", "training")


@pytest.fixture(scope="module")
def runs(make_shared, tmp_path_factory):
    """Two runs of every kind that reports read."""
    root, maps = tmp_path_factory.mktemp("runs"), {"step3-layer1-head2": np.full((24, 24), 1 / 24)}
    plain = make_shared("plain", maps=maps)
    sink = make_shared("sink", added=1, text_share=0.2, maps=maps)
    studies = [*costed(plain), *costed(sink)]
    return {"study": studies, "training": [made(root / "bare"), made(root / "one", added=1)]}


@pytest.fixture
def scratch(monkeypatch):
    """The registry of figures; what a test registers is gone after it."""
    monkeypatch.setattr(figures, "_classes", dict(figures._all()))
    return figures


@pytest.mark.slow
@pytest.mark.parametrize("name", [*figures_of("study") | figures_of("training")])
def test_every_figure_conforms(name, runs):
    for kind in KINDS:
        if kind in figures[name].kind.split():
            check_figure(name, runs[kind])


@pytest.mark.slow
def test_a_figure_in_a_file_of_its_own_is_drawn_with_the_others(runs, scratch):
    assert len(EXAMPLE.read_text("utf-8").splitlines()) <= 60
    load_plugin(EXAMPLE)
    check_figure("sinks_and_norms", runs["study"])
    assert {*figures_of("study")} >= {"sinks_and_norms", "sink_share"}


def test_lines_are_expressions_over_the_facts(runs, scratch):
    @figure("twice")
    def twice(runs, ax):
        """Twice the number of sinks."""
        return lines(runs, ax, "layer", {"": "2 * sinks", "none": "missing"}, "twice")

    axes, numbers = twice.drawn(runs["study"][0])
    (line,) = axes.lines
    assert line.get_ydata().tolist() == [2, 2] and axes.get_ylabel() == "twice"
    assert list(numbers) == ["run", "line", "layer", "value", "low", "high"]
    refused("is defined twice", figure("twice"), lines)


def test_runs_of_a_kind_without_a_page_have_figures(scratch, tmp_path):
    @figure("bars", kind="tally")
    def bars(runs, ax):
        """A table of the run over one of its columns."""
        return lines(runs, ax, "counts", {"": "number"}, "number")

    with RunWriter(tmp_path / "tally", kind="tally", model={}, settings={}, seed=0) as run:
        run.table("counts", {"counts": [0, 1, 2], "number": [3, 1, 2]})
    written, _ = draw_all(open_run(tmp_path / "tally"), tmp_path / "out", ("png",))
    assert [path.name for path in written] == ["bars.png", "bars.csv"]
    with RunWriter(tmp_path / "scored", kind="benchmark", model={}, settings={}, seed=0):
        pass
    refused("is of kind 'benchmark'", draw_all, open_run(tmp_path / "scored"), tmp_path / "out")


@pytest.mark.parametrize(
    ("x", "column", "kind", "message"),
    [
        ("layer", "absorbd", "study", r"needs absorbd \(by layer there are .*absorbed"),
        ("layer", "absorbed", "studie", r"of kind 'study'; show runs"),
    ],
)
def test_a_misspelt_name_is_told(runs, scratch, x, column, kind, message):
    @figure("misspelt", kind=kind)
    def drawn(runs, ax):
        """Nothing."""
        return lines(runs, ax, x, {"": column}, "nothing")

    refused(message, drawn, runs["study"])
