"""Curves and maps of the cost of blocked keys: what runs write, and what is said of them."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from curves import curve, curve_rows, planted, write_curve
from refusals import refused
from sinklab.core.instrument import BlockKeys, SinkKeys, TopKeys
from sinklab.lab.checkpoints.controls import UNTRAINED
from sinklab.lab.records import RunWriter, open_run
from sinklab.lab.reports.samples import NotRecorded
from sinklab.lab.scoring.arms import arm_losses, heldout_rows
from sinklab.lab.studies.curve import Curve, CurveSettings, masking_curve
from sinklab.lab.studies.curve.figures import ablation, cost_rows, write_costs
from sinklab.lab.studies.curve.figures import masking_curve as drawn_curve
from sinklab.lab.studies.curve.verdicts import cost_sentences, cost_verdicts
from tiny_diffusion import tiny_loaded
from tiny_llama import tiny_llama

pytestmark = pytest.mark.usefixtures("heldout")

TEXT = {"rows": 4, "length": 16, "batch": 3, "heldout": "held.txt", "twin": False}
CURVE, MAP = CurveSettings(**TEXT), CurveSettings(by="head", **TEXT)


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda: tiny_loaded(1), tiny_llama])
def test_a_run_folder_says_it_all(make):
    loaded, said = make(), []
    edit = "window_attention:radius=4"
    settings = replace(CURVE, ks=(3, 1), samples=2, edits=(edit,))
    run = open_run(masking_curve(loaded, "run", settings, progress=said.append))
    assert run.info.settings["ks"] == [0, 1, 3] and run.info.parts == [0, 1]
    assert said == [f"rows {rows} of 4 under 10 arms" for rows in ("1 to 3", "4 to 4")]
    table = run.table("curve")
    arms = ["top", "random", "equal_mass", "matched"]
    assert table["control"].tolist() == ["none", *arms, *arms, edit]
    cells = table.set_index(["k", "control"])
    assert cells.loc[(3, "top"), "keys"] == pytest.approx(3)
    assert cells.loc[(0, edit), "removed"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"by": "layer", "ks": (2,)}, {"sink_rule": "excess:epsilon=0.5", "ks": (3,)}]
)
def test_every_cell_of_a_map_is_what_an_edit_of_this_head_alone_costs(changes):
    loaded, asked = tiny_llama(), replace(MAP, **changes)
    run = open_run(masking_curve(loaded, "run", asked))
    table = run.table("curve_rows").set_index(["layer", "head", "row"]).sort_index()
    texts = heldout_rows(loaded, "held.txt", rows=4, length=16).ids_RS.tolist()
    assert len(table) == 4 * (1 + 2 * (1 if asked.by == "layer" else 4))
    for layer, head in {place[:2] for place in table.index} - {(-1, -1)}:
        keys = TopKeys(2) if asked.sink_rule is None else SinkKeys(asked.sink_rule, 3)
        edit = BlockKeys(keys, layers=(layer,), heads=None if head < 0 else (head,))
        for one in arm_losses(loaded, {"one": [edit]}, texts):
            found = table.loc[layer, head, one.text]
            assert found["loss"] == pytest.approx(one.loss, rel=1e-5)
            for name in ("keys", "held", "removed"):
                assert found[name] == pytest.approx(one.about[name], abs=1e-5, nan_ok=True)


@pytest.mark.slow
def test_a_rule_that_no_key_passes_is_a_dose_of_zero_and_said_to_be_one():
    settings = replace(CURVE, ks=(1,), rows=8, sink_rule="excess:epsilon=15")
    run = open_run(masking_curve(tiny_loaded(), "run", settings))
    table = run.table("curve").set_index("control")
    assert [*table.index] == ["none", "sinks", "random", "equal_mass", "matched"]
    assert table.loc["sinks"][["keys", "held", "removed", "mean"]].tolist() == [0, 0, 0, 0]
    assert table["matched"].isna().all()
    assert cost_verdicts(run)["verdict"].tolist()[0] == "inconclusive"


@pytest.mark.slow
def test_controls_are_measured_as_in_a_run_of_their_own():
    loaded, settings = tiny_loaded(1), replace(MAP, by="layer")
    run = open_run(Curve()(loaded, "run", replace(settings, twin=True)))
    assert run.table("twins")["made"].tolist() == [True, True]
    for kind, make in UNTRAINED.items():
        alone = open_run(Curve()(make(loaded, 0), kind, settings))
        assert "twins" not in alone.tables
        for name in alone.tables:
            assert alone.table(name).equals(run.table(f"{name}-{kind}")), name
            assert not alone.table(name).equals(run.table(name))


@pytest.mark.slow
def test_keys_that_keep_a_part_of_their_weight_are_a_curve_over_the_mass_removed(tmp_path):
    loaded, asked = tiny_loaded(1), replace(CURVE, rows=8, beta=(0.5, 0, 1), controls=("sinks",))
    run = open_run(masking_curve(loaded, "run", asked))
    table = run.table("curve")
    assert table["beta"].tolist() == [1, 0, 0.5] and run.info.settings["ks"] == [0, 1]
    whole = open_run(masking_curve(loaded, "whole", replace(asked, beta=(), ks=(1,))))
    same = ["k", "control", "loss", "mean", "low", "held", "removed"]
    pd.testing.assert_frame_equal(table[same][:2], whole.table("curve")[same])
    assert 0 < table["removed"][2] < table["removed"][1]
    axes = drawn_curve(run, over="mass")
    assert axes.lines[0].get_xdata() == pytest.approx(100 * table["removed"][[0, 2, 1]])
    assert [" 50.0" in one for one in cost_verdicts(run)["measure"]] == [True, False]
    assert [*cost_rows(run)["weight left"]] == [f"{n}\u00a0%" for n in (100.0, 0.0, 50.0)]
    assert [path.name for path in write_costs(run, tmp_path)][2:] == ["masking_curve_mass.png"]


@pytest.mark.slow
def test_a_screen_leaves_its_first_heads_to_be_blocked(monkeypatch):
    monkeypatch.setattr("sinklab.lab.studies.curve.arms.FIRST", 3)
    loaded, screened = tiny_llama(), replace(MAP, screen=True)
    run = open_run(masking_curve(loaded, "run", screened))
    every = open_run(masking_curve(loaded, "every", MAP)).table("curve")
    ranked, place = run.table("screen"), ["layer", "head"]
    assert len(ranked) == len(every) - 1 and ranked["screen"].is_monotonic_decreasing
    found = run.table("curve")[1:].sort_values(place)
    assert found[place].to_numpy().tolist() == sorted(ranked[place][:3].to_numpy().tolist())
    merged = found.merge(every, on=place)
    assert merged["loss_x"].to_numpy() == pytest.approx(merged["loss_y"].to_numpy())
    assert "which can miss the costliest: 3 of 8" in cost_sentences(run)[1]


def test_what_makes_no_sense_is_refused():
    refused("leave out the others", CurveSettings, beta=(0.5,), ks=(1, 2))
    refused("some below 1", CurveSettings, beta=(1,))
    refused("choose by='head'", CurveSettings, screen=True)
    refused("'randm'; did you mean 'random'", CurveSettings, controls=("randm",))
    refused("but is 'heads'", CurveSettings, by="heads")
    loaded = tiny_loaded(1)
    for message, settings in (
        ("63 positions, got 65", {"ks": (1,), "length": 65}),
        # 20 tokens and an added sink
        ("21 keys of a row, but k is 11", {"ks": (11,), "length": 20}),
        ("keys of a row, but k is 21", {"ks": (21,), "length": 20, "controls": ("sinks",)}),
        ("0 to 1, but no 5; leave it out", {"by": "head", "layers": (0, 5), "length": 20}),
    ):
        refused(message, masking_curve, loaded, "a", CurveSettings(**settings))
    unfit = tiny_loaded(mask_token_id=None)
    refused("has mask_token_id None", masking_curve, unfit, "a", CurveSettings(length=20))
    assert not Path("a").exists()


@pytest.mark.slow
def test_a_curve_as_figure_table_and_words(tmp_path):
    runs = [curve(tmp_path / "tiny"), curve(tmp_path / "llama", "autoregressive", 0.002)]
    axes = drawn_curve(runs)
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["tiny (DLM)", "llama (AR)", "most attended keys", "random keys"]
    line = cost_rows(runs).set_index(["model", "k", "blocked"]).sort_index().loc["tiny (DLM)", 5]
    assert line.loc["most attended keys", "change"].startswith("+0.500 (95 % +0.4")
    told = cost_verdicts(runs)
    assert told["value"].tolist()[1:3] == ["+12.5\u00a0%", "+11.3\u00a0%"]
    more = ["costs", "costs", "costs more"]
    assert told["verdict"].tolist() == [*more, "inconclusive", "inconclusive", *["costs more"] * 3]
    assert ["llama" in one for one in told["measure"]] == [False] * 6 + [True] * 2
    said = cost_sentences(runs)
    assert said[1].startswith("tiny (DLM): cost of the 5 most attended keys: +12.5")
    assert said[1].endswith("; costs.") and said[-1].startswith("No untrained control of tiny and")
    names = ["masking_curve.md", "masking_curve.csv", "masking_curve.png", "masking_curve_mass.png"]
    assert [path.name for path in write_costs(runs, tmp_path / "out")] == names


@pytest.mark.slow
def test_models_are_contrasted_where_both_have_the_phenomenon_and_a_dose_in_common(tmp_path):
    tiny = curve(tmp_path / "tiny")

    def against(name, **how):
        told = cost_verdicts([tiny, curve(tmp_path / name, "autoregressive", 0.4, **how)])
        return told.loc[told["measure"].str.contains("less that of"), "verdict"].tolist()

    # four times as much a key, of which each takes four times as much
    assert against("alike", mass=0.08) == ["costs less", "inconclusive"]
    assert "no share of it" in against("heavy", mass=0.15)[1]
    (none,) = against("none", strong=0.0)
    assert none.startswith("no comparison: in 0.0\u00a0%")
    (ruled,) = against("ruled", controls=("sinks",), sink_rule="excess")
    assert "not the same keys" in ruled


def test_keys_of_equal_mass_need_half_of_the_heads_and_a_curve_without_sinks_says_nothing(tmp_path):
    controls = ("sinks", "equal_mass", "matched")
    ruled = cost_verdicts(curve(tmp_path / "a", controls=controls, sink_rule="excess"))
    assert "excess (epsilon = 3, scale = sum)" in ruled["measure"][2]
    assert ruled["verdict"][2] == "costs more"
    few = cost_verdicts(curve(tmp_path / "b", controls=("top", *controls[1:]), matched=0.4))
    assert few["verdict"][2].startswith("inconclusive, at most 40.0")
    assert cost_verdicts(curve(tmp_path / "c", controls=("random",))).empty


@pytest.mark.slow
def test_what_controls_show_stands_beside_every_finding(tmp_path):
    controls = ("top", "random", "equal_mass", "matched")
    runs = [
        write_curve(
            tmp_path / name,
            planted(factor * 0.1, controls),
            family,
            {"-permuted": planted(factor * 0.02, controls)},
        )
        for name, family, factor in (("a", "diffusion", 1), ("b", "autoregressive", 3))
    ]
    told = cost_verdicts(runs)
    # the costs at equal mass lie between doses that the control was not asked for
    assert ["shuffled weights " in one for one in told["controls"]] == [True] * 9 + [False]
    assert told["controls"][1] == "shuffled weights +2.5\u00a0%"
    assert not any("No untrained control" in line for line in cost_sentences(runs))


def a_map(folder, deltas_RC, twin_RC=None):
    """A map whose cells cost this in the rows."""
    clean = {(0, "none"): np.full(len(deltas_RC), 4.0)}

    def rows(costs_RC):
        cells = {(1, "top", 0, head): 4 + cost_R for head, cost_R in enumerate(costs_RC.T)}
        return curve_rows(clean | cells)

    twins = None if twin_RC is None else {"-permuted": rows(twin_RC)}
    return write_curve(folder, rows(deltas_RC), twins=twins, by="head")


@pytest.mark.slow
def test_a_map_says_what_its_cells_say(tmp_path):
    noise = np.random.default_rng(0).normal(0, 0.01, (12, 10))
    rising = 0.02 * np.arange(10) + noise
    run = a_map(tmp_path / "rising", rising, 0.1 * rising)
    said = cost_sentences(run)
    assert "most attended key, nats per token: layer 0, head 9: +0.1" in said[0]
    assert f"(shuffled weights +{0.1 * rising.mean(0).max():.4f}); costs." in said[0]
    assert said[2].endswith(("of 10: 8.", "of 10: 9.")) and said[3].endswith("of 10: 0.")
    assert cost_rows(run)["blocked"][0] == "most attended keys, layer 0, head 9"
    few = cost_sentences(a_map(tmp_path / "few", rising[:5]))
    assert "inconclusive in 5 rows, 8 needed" in few[0]
    table = a_map(tmp_path / "nothing", noise).table("curve")
    assert {*table["verdict"][1:]} == {"inconclusive"}
    assert ablation(run).images
    assert write_costs(run, tmp_path / "out")[2].name == "ablation-rising.png"
    with pytest.raises(NotRecorded, match="by layer or head"):
        ablation(curve(tmp_path / "curve"))
    with pytest.raises(NotRecorded, match="all heads"):
        drawn_curve(run)


def test_a_map_with_controls_counts_its_own_keys_alone(tmp_path):
    spread_R, costs = 0.01 * np.linspace(-1, 1, 10), {"top": 0.3, "random": 0.5}
    cells = {(0, "none"): 4 + spread_R}
    for k, (name, cost), layer in itertools.product((1, 2), costs.items(), range(3)):
        cells[k, name, layer, -1] = 4 + cost * k + spread_R * (1 + layer)
    said = cost_sentences(write_curve(tmp_path / "map", curve_rows(cells), by="layer", ks=[1, 2]))
    greatest = [line for line in said if "greatest cost" in line]
    assert "+0.3000" in greatest[0] and "+0.6000" in greatest[1]
    assert sum("costs, of 3: 3." in line for line in said) == 2


def test_keys_of_some_layers_are_called_so_and_compared_with_their_like(tmp_path):
    one, other = curve(tmp_path / "a"), curve(tmp_path / "b", "autoregressive")
    some = write_curve(tmp_path / "c", planted(0.1, ("top",)), layers=[0, 2])
    assert "the most attended key in layers 0, 2 alone" in cost_sentences(some)[0]
    assert any("not the same keys" in line for line in cost_sentences([some, other]))
    assert not any("not the same keys" in line for line in cost_sentences([one, other]))


def test_what_is_no_finished_curve_is_refused_by_name(tmp_path):
    with RunWriter(tmp_path / "cut", kind="curve", model={}, settings={}, seed=0):
        pass
    with pytest.raises(NotRecorded, match=r"cut is not\."):
        cost_sentences(open_run(tmp_path / "cut"))
    with RunWriter(tmp_path / "b", kind="benchmark", model={}, settings={}, seed=0):
        pass
    refused("'curve': .* kind 'benchmark'", cost_verdicts, open_run(tmp_path / "b"))
