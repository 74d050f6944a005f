"""`curve`, `table1` and `onetoken` from the command line, on tiny models."""

from pathlib import Path

import pytest

from commands import cli
from refusals import refused
from sinklab.lab.cli.command import conduct, folder_names
from sinklab.lab.cli.reports import OneToken, Table1
from sinklab.lab.records import RunWriter, open_run
from sinklab.lab.studies.curve import Curve, CurveSettings
from tiny_diffusion import TEXT, save_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(save_tiny(tmp_path_factory.mktemp("models") / "plain"))


def curve(*models, figures=(), **changes):
    """A small one, which goes on with what is in `out`."""
    Path("held.txt").write_text(TEXT * 10)
    fields = {"ks": (0, 2), "rows": 3, "length": 20, "heldout": "held.txt", "twin": False}
    settings = CurveSettings(**{**fields, **changes}, figures=figures)
    print("\n".join(conduct(Curve(), models, Path("out"), settings)))


@pytest.mark.slow
def test_a_curve_is_scored_once(model, capsys, monkeypatch):
    curve(model, model)
    printed = capsys.readouterr()
    first, *_, last = printed.out.splitlines()
    assert first == "run folders: out/plain, out/plain-2"
    assert last == "drawn: out/masking_curve.md, out/masking_curve.csv"
    assert "plain (plain) (DLM): cost of the 2 most attended keys: +" in printed.out
    first = open_run("out/plain")
    assert first.info.kind == "curve"
    assert first.table("curve")["k"].tolist() == [0, 2, 2, 2, 2]
    # what is there is taken as it is
    monkeypatch.setattr("sinklab.lab.studies.curve.arms.rows_of", None)
    curve(model)
    assert "out/plain is there" in capsys.readouterr().err
    refused("out/plain holds another run", curve, model, rows=2)


def test_an_unfinished_curve_goes_on_unless_it_is_another(model, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("sinklab.lab.studies.curve.arms.cost_table", fail)
        with pytest.raises(KeyboardInterrupt):
            curve(model, controls=("sinks",))
    assert [*open_run("out/plain").info.files] == ["curve_rows-0000.parquet"]
    refused("out/plain holds another run: its settings\\['controls'\\]", curve, model)
    curve(model, controls=("sinks",), figures=("svg",))
    assert open_run("out/plain").info.status == "complete"
    assert Path("out/masking_curve.svg").stat().st_size > 1000


def test_what_makes_no_sense_is_refused():
    refused("curve needs at least one model", curve)
    refused("needs at least one model", Table1((), Path("out")).run)
    refused("onetoken needs a folder of", OneToken().run)
    refused(r"but nowhere is not a folder", OneToken((Path("nowhere"),)).run)


def test_folders_are_named_after_models():
    given = ("tiny", "runs/causal/model", "/models/LLaDA-8B/", "org/Dream", "other/tiny", "model")
    assert folder_names(given) == ["tiny", "causal", "LLaDA-8B", "Dream", "tiny-2", "model"]
    again = ("a/battery/model", "b/battery/model", "c/battery", "battery-2")
    assert folder_names(again) == ["battery", "battery-2", "battery-2-2", "battery-2-2-2"]


def test_onetoken_prints_all_five_tables(capsys):
    settings = {"tasks": ["arc_easy"], "mask_sinks": None, "init_from": None}
    with RunWriter(
        "runs/a", kind="training", model={"family": "diffusion"}, settings=settings, seed=0
    ):
        pass
    assert cli("onetoken runs --out out") == 0
    printed = capsys.readouterr().out
    for number in range(1, 6):
        assert f"One Token Is Enough, Table {number}: " in printed
    assert printed.count("Published: arXiv 2601.19657") == 1
    assert "sinklab train laptop-scratch --variant …" in printed
    assert Path("out/onetoken-5.tex").is_file()
