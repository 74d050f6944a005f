"""Studies on runs of seconds: the promises of each, controls that read what the model read, and
workers that share one.
"""

from dataclasses import replace

import pytest

from conformance.runs import check_study
from sinklab.lab.checkpoints.controls import UNTRAINED
from sinklab.lab.records import open_run
from sinklab.lab.studies.curve import (
    Curve,
    CurveSettings,
)
from tiny_diffusion import tiny_loaded

pytestmark = pytest.mark.usefixtures("heldout")

LOSSES = CurveSettings(
    ks=(1,), controls=("sinks", "random"), rows=3, length=16, batch=2, heldout="held.txt"
)
MAP = CurveSettings(by="head", rows=4, length=16, batch=3, heldout="held.txt", twin=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("study", "make", "settings"),
    [
        (Curve(), lambda: tiny_loaded(1), replace(MAP, ks=(2,))),
        (
            Curve(),
            tiny_loaded,
            replace(
                MAP, by="layer", sink_rule="excess:epsilon=1", removals=("zero_value",), twin=True
            ),
        ),
    ],
)
def test_a_study_conforms(study, make, settings):
    check_study(study, make(), settings)


@pytest.mark.parametrize(
    ("study", "settings"),
    [
        (Curve(), replace(MAP, by="layer")),
        pytest.param(Curve(), LOSSES, marks=pytest.mark.slow),
    ],
)
def test_controls_are_measured_as_in_a_run_of_their_own(study, settings):
    loaded, said = tiny_loaded(1), []
    run = open_run(study(loaded, "run", replace(settings, twin=True), progress=said.append))
    assert sum("reads the same canvases" in line for line in said) == 2
    assert run.table("twins")["made"].tolist() == [True, True]
    for kind, make in UNTRAINED.items():
        alone = open_run(study(make(loaded, 0), kind, replace(settings, twin=False)))
        assert "twins" not in alone.tables
        for name in alone.tables:
            assert alone.table(name).equals(run.table(f"{name}-{kind}")), name
        (rows, *_) = study.resolved(settings)[0].row_tables
        assert not alone.table(rows).equals(run.table(rows))


def test_a_finished_run_gets_its_controls_where_they_are_asked_for():
    settings = replace(MAP, by="layer")
    Curve()(tiny_loaded(), "late", settings)
    Curve()(tiny_loaded(), "late", replace(settings, twin=True), resume=True)
    at_once = open_run(Curve()(tiny_loaded(), "at once", replace(settings, twin=True)))
    assert open_run("late").table("map-permuted").equals(at_once.table("map-permuted"))


def test_a_worker_takes_what_the_others_have_not_done(monkeypatch):
    settings = replace(MAP, by="layer")
    alone = open_run(Curve()(tiny_loaded(), "alone", settings))
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    shared = open_run(Curve()(tiny_loaded(), "run", settings))
    assert shared.table("ablation").equals(alone.table("ablation"))
