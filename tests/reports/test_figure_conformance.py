"""Every registered figure passes the conformance suite of figures, and broken ones do not."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib import pyplot
from test_report_training import made

from conformance.runs import check_figure
from refusals import refused
from sinklab.lab.files import load_plugin
from sinklab.lab.records import open_run
from sinklab.lab.registry import figures
from sinklab.lab.reports import Curve, NotRecorded, draw_all, figure, figures_of

EXAMPLE = Path(__file__).parents[2] / "examples" / "add_a_figure.py"
KINDS = ("study", "training")


@pytest.fixture(scope="module")
def runs(make_shared, tmp_path_factory):
    """Two runs of every kind that reports read."""
    root, maps = tmp_path_factory.mktemp("runs"), {"step3-layer1-head2": np.full((24, 24), 1 / 24)}
    plain = make_shared("plain", maps=maps)
    studies = [plain, make_shared("sink", added=1, text_share=0.2, maps=maps)]
    return {"study": studies, "training": [made(root / "bare"), made(root / "one", added=1)]}


@pytest.fixture
def scratch(monkeypatch):
    """The registry of figures; what a test registers is gone after it."""
    monkeypatch.setattr(figures, "_classes", dict(figures._all()))
    return figures


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in figures if figures[name].kind in KINDS])
def test_every_figure_conforms(name, runs):
    check_figure(name, runs[figures[name].kind])


def test_a_figure_in_a_file_of_its_own_is_drawn_with_the_others(runs, scratch):
    assert len(EXAMPLE.read_text("utf-8").splitlines()) <= 60
    load_plugin(EXAMPLE)
    check_figure("sinks_and_norms", runs["study"])
    assert {*figures_of("study")} >= {"sinks_and_norms", "sink_share"}


def silent(runs, axes=None, *, look):
    """Draws a new picture on nothing."""
    return pyplot.figure()


def deaf(runs, axes=None, *, look):
    """Draws on axes of its own."""
    from sinklab.lab.reports.style import own_axes

    return own_axes(None)


def careless(runs, axes=None, *, look):
    """Draws whatever there is."""
    from sinklab.lab.reports.style import own_axes

    axes = own_axes(axes)
    axes.plot([0, 1], color=look.ink)
    return axes


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (silent, "leaves a figure open"),
        (deaf, "does not return the axes"),
        (careless, "recorded nothing"),
    ],
)
def test_a_broken_figure_is_named(draw, message, runs, scratch):
    figure("broken")(draw)
    with pytest.raises(AssertionError, match=message):
        check_figure("broken", runs["study"])
    pyplot.close("all")


def test_a_figure_is_declared_over_expressions(runs, scratch):
    @figure("twice", x="layer", y=("2 * sinks", Curve("missing")), label="twice")
    def twice(axes, look):
        """Twice the number of sinks."""
        axes.set_ylim(0, 9)

    axes = twice(runs["study"][0])
    (line,) = axes.lines
    assert (
        line.get_ydata().tolist() == [2, 2]
        and axes.get_ylim() == (0, 9)
        and axes.get_ylabel() == "twice"
    )

    @figure("absent", x="layer", y=("missing",), needs="something else")
    def absent(axes, look):
        """Nothing."""

    with pytest.raises(NotRecorded, match=r"else: .*plain has none"):
        absent(runs["study"])
    with pytest.raises(NotRecorded, match="NaN alone"):
        figure("nothing", x="layer", y=("missing",))(absent.draw)(runs["study"])
    refused("is defined twice", figure("absent", x="step", y=("missing",)), silent)


def test_runs_of_a_kind_without_a_page_have_figures(scratch, tmp_path):
    from sinklab.lab.records import RunWriter

    @figure("bars", kind="tally", x="counts", y=("number",))
    def bars(axes, look):
        """A table of the run over one of its columns."""

    with RunWriter(tmp_path / "tally", kind="tally", model={}, settings={}, seed=0) as run:
        run.table("counts", {"counts": [0, 1, 2], "number": [3, 1, 2]})
    drawn = draw_all(open_run(tmp_path / "tally"), tmp_path / "out", ("png",))
    assert [path.name for path in drawn.written] == ["bars.png"]
    with RunWriter(tmp_path / "scored", kind="benchmark", model={}, settings={}, seed=0):
        pass
    refused("is of kind 'benchmark'", draw_all, open_run(tmp_path / "scored"), tmp_path / "out")


@pytest.mark.parametrize(
    ("x", "y", "kind", "message"),
    [
        ("layer", "absorbd", "study", "By layer there is no 'absorbd'; did you mean 'absorbed'"),
        ("layers", "absorbed", "study", "The axis is 'layers'; did you mean 'layer'"),
        ("layer", "absorbed", "studie", r"of kind 'study'\.$"),
    ],
)
def test_a_misspelt_declaration_is_told(runs, scratch, x, y, kind, message):
    drawn = figure("misspelt", x=x, y=(y,), kind=kind, label="nothing")(lambda axes, look: None)
    refused(message, drawn, runs["study"])
