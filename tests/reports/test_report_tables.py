import numpy as np
import pandas as pd
import pytest
from numpy.testing import assert_allclose

from refusals import refused
from sinklab.lab.analysis import mean_over
from sinklab.lab.records import Arrays, Contents, RunWriter, open_run
from sinklab.lab.reports import (
    TABLES,
    as_studies,
    compare,
    draw_all,
    table,
)
from sinklab.lab.reports.printed import markdown
from sinklab.lab.reports.tables import tables_of, write_tables


def test_tables_hold_the_numbers_of_the_study(make_study):
    study = as_studies(make_study(recorded_layers=[2, 5]))[0]
    tokens = table(study, "sink_tokens")
    assert tokens.iloc[0].to_dict() == {
        "label": "[MASK]",
        "events": 132,
        "occurrences": 285,
        "frequency": 1.0,
        "occupancy": pytest.approx(285 / 528),
        "enrichment": pytest.approx(528 / 285),
    }
    classes = table(study, "classes").set_index(["by", "label"])
    assert (
        classes.loc[("class", "mask"), "events"] == classes.loc[("age", "masked"), "events"] == 132
    )
    layers = table(study, "layers")
    assert layers["layer"].tolist() == [2, 5]
    assert layers["mobility"].tolist() == [1, 1]
    motion = table(study, "motion")
    assert motion[["layer", "head"]].drop_duplicates().to_numpy().tolist() == [
        [a, b] for a in (2, 5) for b in range(3)
    ]
    assert set(motion["word"]) == {"moving"}
    rules = table(study, "rules").set_index("rule")
    assert rules.loc["excess, sum, 3", "sinks_per_head"] == rules.loc["top 1", "agreement"] == 1
    curve = table(study, "curve").set_index("epsilon")
    assert curve.loc[3.0].to_dict() == {
        name: pytest.approx(23 / 24) for name in ("filtered", "layer_2", "layer_5")
    }
    measured = table(study, "measures").set_index("measure")
    # two samples are too few
    assert measured.loc["96 % filtered (above 96 %), %", "verdict"] == "inconclusive"
    assert measured.loc["samples", "value"] == 2
    assert measured["low"].isna().all()


@pytest.mark.slow
def test_tables_are_written_with_the_run_in_front(make_study, tmp_path):
    runs = [make_study("plain"), make_study("sink", added=1)]
    found = tables_of(as_studies(runs))
    written = write_tables(found, tmp_path / "tables")
    assert [path.name for path in written] == [f"{name}.csv" for name in TABLES["study"]]
    assert {*(tmp_path / "tables").iterdir()} == {*written}
    for name, path in zip(TABLES["study"], written, strict=True):
        whole = pd.read_csv(path)
        assert whole.columns[0] == "run" and whole["run"].unique().tolist() == ["plain", "sink"]
        assert len(whole) == sum(len(table(run, name)) for run in runs)


def test_what_a_run_lacks_makes_no_table(make_study):
    found = tables_of(as_studies(make_study(leave_out=("attention",))))
    assert [*found] == ["measures", "answers"]


def test_markdown_keeps_cells_apart():
    frame = pd.DataFrame(
        {
            "token": [" a|b", "\n", "x "],
            "value": [1 / 3, np.nan, 1e-9],
            "holds": [True, None, False],
        }
    )
    assert markdown(frame).splitlines() == [
        "| token | value | holds |",
        "| --- | --- | --- |",
        "| ␣a\\|b | 0.3333 | True |",
        "| ↵ | – | – |",
        "| x␣ | 1e-09 | False |",
    ]


def test_compare_sets_two_runs_side_by_side(make_study):
    sinks = {"added": 1, "share": 0.4, "text_share": 0.2}
    plain, sink = as_studies([make_study("plain"), make_study("sink", **sinks)])
    frame = compare(plain, sink)
    assert frame.columns.tolist() == ["measure", "plain", "sink", "difference", "low", "high"]
    # two prompts are too few for an interval
    assert frame[["low", "high"]].isna().all(axis=None)
    rows = frame.set_index("measure").drop(columns=["low", "high"])
    for name, numbers in {
        "attention on the greatest text position, %": [30, 20, -10],
        "attention on the added sink, %": [np.nan, 40, np.nan],
        "sinks per head and step": [1, 2, 1],
        "mobility of the main sink (0 static, 1 moving)": [1, 0, -1],
        "mobility of the greatest text sink (0 static, 1 moving)": [1, 1, 0],
        "value norm, added sink over other text": [np.nan, 0.125, np.nan],
        "overlap of sinks with those of the next step, %": [0, 100 / 3, 100 / 3],
    }.items():
        assert_allclose(rows.loc[name].tolist(), numbers, rtol=2e-3, atol=1e-9, err_msg=name)
    assert not rows.isna().all(axis=1).any()


@pytest.mark.slow
def test_a_difference_has_the_interval_of_its_prompts(make_study):
    def louder(sample, arrays):
        arrays["received"][:, :, :, 0] += 0.1 * sample

    runs = as_studies([make_study("a", samples=8), make_study("b", samples=8, change=louder)])
    shares_2S = [run.each("layer").groupby("sample")["text_share"].mean() for run in runs]
    expected = mean_over(100 * (shares_2S[1] - shares_2S[0]))
    rows = compare(*runs).set_index("measure")
    assert_allclose(
        rows.loc["attention on the greatest text position, %", ["difference", "low", "high"]],
        [expected.value, *expected.interval],
    )
    same = rows.loc["sinks per head and step"]
    assert same["low"] <= same["difference"] <= same["high"]
    # other prompts are no pairs
    assert compare(runs[0], make_study("c", samples=9))[["low", "high"]].isna().all(axis=None)


@pytest.mark.slow
def test_draw_all_says_what_it_skipped_and_why(make_study, tmp_path):
    runs = [
        make_study("plain"),
        make_study("no/sink", folder="b", added=1, leave_out=("tokens",)),
    ]
    names = ("sink_paths", "attention_map", "sink_tokens", "sink_share")
    written, skipped = draw_all(runs, tmp_path, formats=("png",), names=names)
    assert all(path.is_file() for path in written)
    assert [path.name for path in written] == [
        "sink_paths.png",
        "sink_paths.csv",
        "sink_tokens-plain.png",
        "sink_tokens-plain.csv",
        "sink_share.png",
        "sink_share.csv",
    ]
    assert set(skipped) == {
        "attention_map-plain",
        "attention_map-no-sink",
        "sink_tokens-no-sink",
    }
    assert "the table tokens" in skipped["sink_tokens-no-sink"]


@pytest.mark.slow
def test_the_same_run_gives_the_same_bytes(make_study, tmp_path):
    run = make_study(added=1)
    how = {"formats": ("png", "pdf", "svg"), "names": ("sink_share", "received_map")}
    first, second = (draw_all(run, tmp_path / name, **how)[0] for name in "ab")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


@pytest.mark.slow
def test_unknown_figures_and_formats_are_refused_before_drawing(make_study, tmp_path):
    run = make_study()
    for wrong, message in (
        (
            {"names": ("sink_pths",)},
            r"figure must be .*'sink_pths'; did you mean 'sink_paths'",
        ),
        (
            {"formats": ("pgn",)},
            r"format of a figure must be one of png, svg, pdf, but is 'pgn'; did you mean 'png'",
        ),
    ):
        refused(message, draw_all, run, tmp_path / "out", **wrong)
    assert not (tmp_path / "out").exists()


def test_a_damaged_run_is_no_reason_to_skip(make_study, tmp_path):
    run = make_study()
    with RunWriter(
        tmp_path / "bad", kind="study", model=run.info.model, settings={}, seed=3, samples=1
    ) as bad:
        arrays = run.arrays("attention", sample=0)
        arrays["positions"] = arrays["positions"][:, None]
        dims = run.dims("attention", sample=0) | {"positions": ("step", "one")}
        bad.write(0, {0: Contents({}, {"attention": Arrays(arrays, dims)})})
    refused(
        "'positions' has axes",
        draw_all,
        open_run(tmp_path / "bad"),
        tmp_path / "out",
        names=("sink_share",),
    )
