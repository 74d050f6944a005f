"""The ablation map: keys blocked in one head, or one layer, at a time."""

import itertools
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from commands import cli
from refusals import refused
from sinklab.core.instrument import BlockKeys, SinkKeys, TopKeys
from sinklab.lab.analysis.doses import rank_correlation
from sinklab.lab.records import RunWriter, open_run
from sinklab.lab.reports.samples import NotRecorded
from sinklab.lab.scoring.heldout import edited_losses, heldout_rows
from sinklab.lab.studies.curve import (
    CurveSettings,
    masking_curve,
)
from sinklab.lab.studies.curve.drawing import ablation
from sinklab.lab.studies.curve.figures import ablation_table
from sinklab.lab.studies.curve.reading import ablation_map
from sinklab.lab.studies.curve.verdicts import ablation_sentences
from tiny_diffusion import save_tiny, tiny_loaded
from tiny_llama import tiny_llama

pytestmark = pytest.mark.usefixtures("heldout")


def settings(**changes):
    return CurveSettings(
        **{"by": "head", "rows": 4, "length": 16, "heldout": "held.txt", "batch": 3, **changes}
    )


@pytest.mark.parametrize(
    "changes", [{"by": "layer", "ks": (2,)}, {"sink_rule": "excess:epsilon=0.5", "ks": (3,)}]
)
def test_every_cell_is_what_an_edit_of_this_head_alone_costs(changes):
    """Each of the edits is scored by itself, all rows at once."""
    loaded, asked = tiny_llama(), settings(**changes, twin=False)
    run = open_run(masking_curve(loaded, "run", asked))
    table = run.table("ablation").set_index(["layer", "head", "row"]).sort_index()
    ids_RS = heldout_rows(loaded, "held.txt", rows=4, length=16).ids_RS
    heads = range(loaded.model.config.num_attention_heads)
    if asked.by == "layer":
        heads = [-1]
    cells = list(itertools.product(range(2), heads))
    assert len(table) == 4 * len(cells)
    for layer, head in cells:
        where = {"layers": [layer], "heads": None if head < 0 else [head]}
        keys = TopKeys(2) if asked.sink_rule is None else SinkKeys(asked.sink_rule, 3)
        edit = BlockKeys(keys, **where)
        clean, one = edited_losses(loaded, ids_RS, [[], [edit]])
        found = table.loc[layer, head]
        assert np.allclose(found["clean"], clean.losses_R, rtol=1e-5)
        assert np.allclose(found["loss"], one.losses_R, rtol=1e-5)
        for name, dose_R in one.doses_by_row().items():
            if name in found:
                assert np.allclose(found[name], dose_R, atol=1e-5, equal_nan=True)
    if asked.sink_rule is not None:
        assert 0 < table["keys"].mean() < 3


@pytest.mark.slow
def test_the_map_is_of_paired_means_and_names_what_was_hidden(capsys):
    model = str(save_tiny(Path("model")))
    read = "--rows 8 --length 16 --batch 4 --heldout held.txt"
    words = f"curve --by head --model {model} {read} --out out"
    assert cli(words) == 0
    printed = capsys.readouterr().out
    assert (
        "greatest cost of the most attended key, nats per token: layer " in printed
        and "attention that they held, mean and most: " in printed
    )
    run = open_run("out/model")
    rows, cells = run.table("ablation"), run.table("map")
    assert run.info.parts == [0, 1]
    assert len(cells) == 2 * 4
    means = rows.assign(delta=rows["loss"] - rows["clean"]).groupby(["layer", "head"]).mean()
    assert np.allclose(means[["delta", "held"]], cells[["delta", "held"]])
    assert (cells["delta_low"] <= cells["delta"]).all() and (
        cells["delta"] <= cells["delta_high"]
    ).all()
    assert (
        (cells["told"] == 0) | (np.sign(cells["delta_low"]) == np.sign(cells["delta_high"]))
    ).all()
    page = Path("out/model/ablation.md").read_text()
    assert page.startswith(
        "| layer | head | keys | sinks | held | removed | change of loss | verdict |"
    )
    assert "; inconclusive, 10 heads that differ needed." in page
    assert pd.read_csv("out/model/ablation.csv").shape == cells.shape
    assert Path("out/model/ablation.png").stat().st_size > 1000
    assert ablation(run).images and ablation(run, show="held").images
    assert cli(f"{words} --figures") == 0
    assert cli(f"{words} --ks 2") == 2
    assert (
        cli(words.replace("--out out", "--sink-rule excess:epsilon=3 --out ruled --figures")) == 0
    )
    assert (
        "at most 1 key that excess (epsilon = 3, scale = sum) calls sinks"
        in capsys.readouterr().out
    )


def made_up(folder, deltas, twin=None, **settings_):
    """Sentences of a run whose rows lose this, (R, C); the weight of a cell is its number. And of
    one with a twin.
    """
    known = {"by": "head", "ks": (1,), "sink_rule": None, **settings_}
    with RunWriter(folder, kind="ablate", model={"name": "toy"}, settings=known, seed=0) as run:
        for kind, values in (("", deltas), ("-permuted", twin)):
            if values is None:
                continue
            row, head = np.indices(values.shape).reshape(2, -1)
            frame = pd.DataFrame(
                {"row": row, "layer": 0, "head": head, "loss": 4 + values.ravel(), "clean": 4.0}
            )
            frame = frame.assign(
                keys=1.0, sinks=0.5, held=0.01 * (head + 1), removed=0.01 * (head + 1)
            )
            run.table(f"ablation{kind}", frame)
            run.table(f"map{kind}", ablation_map(frame))
        if twin is not None:
            run.table("twins", pd.DataFrame({"twin": ["permuted"], "made": [True], "why": [""]}))
    return ablation_sentences([open_run(folder)])


def test_what_a_control_shows_stands_beside_it():
    noise = np.random.default_rng(0).normal(0, 0.01, (12, 10))
    rising = 0.02 * np.arange(10) + noise
    said = made_up(Path("weak"), rising, 0.1 * rising)
    greatest = 0.1 * rising.mean(0).max()
    assert len(said) == 5 and f"(shuffled weights +{greatest:.4f})." in said[0], said
    assert said[4].endswith("they go together (shuffled weights 1.0)."), said
    falling = made_up(Path("other way"), rising, -rising)
    assert f"(shuffled weights −{rising.mean(0).max():.4f})" in falling[0]
    assert made_up(Path("alone"), rising)[5] == "No untrained control of toy was run."


def test_rows_say_what_the_cells_say():
    noise = np.random.default_rng(0).normal(0, 0.01, (12, 10))
    said = made_up(Path("rising"), 0.02 * np.arange(10) + noise)
    assert "layer 0, head 9: +0.1" in said[0] and "; costs." in said[0]
    assert said[2] in [f"toy: heads in which the loss rises, of 10: {count}." for count in (8, 9)]
    assert said[3] == "toy: heads in which the loss falls, of 10: 0."
    assert said[4].endswith("; they go together.")
    assert made_up(Path("falling"), -0.02 * np.arange(10) + noise)[4].endswith("they go apart.")
    nothing = made_up(Path("nothing"), noise)
    assert nothing[2].endswith(": 0.") and nothing[4].endswith("; inconclusive.")
    few = made_up(Path("few"), 0.02 * np.arange(10) + noise[:5])
    assert len(few) == 2 and "inconclusive in 5 rows, 8 needed" in few[0]
    flat = made_up(Path("flat"), np.full((8, 10), 0.1))
    assert flat[4].endswith("; inconclusive, 10 heads that differ needed.")
    assert "the 2 most attended keys" in made_up(Path("two"), noise, ks=(2,))[0]
    assert list(ablation_table(open_run("rising"))["head"][:2]) == ["9", "8"]
    assert set(ablation_table(open_run("nothing"))["verdict"]) == {"inconclusive"}
    assert np.isnan(rank_correlation(np.ones((8, 10)), noise[:8]).value)


def test_what_makes_no_sense_is_refused():
    loaded = tiny_loaded()
    refused("one of model, layer, head, but is 'heads'", settings, by="heads")
    refused("sink rule must be", settings, sink_rule="exces")
    refused("0 to 1, but no 5; leave it out", masking_curve, loaded, "a", settings(layers=(0, 5)))
    refused("k is 16 and a row has 16", masking_curve, loaded, "a", settings(ks=(16,)))
    refused("fit the context of tiny test", masking_curve, loaded, "a", settings(length=100))
    assert not Path("a").exists()
    with (
        pytest.raises(KeyboardInterrupt),
        RunWriter("cut", kind="ablate", model={}, settings={}, seed=0),
    ):
        raise KeyboardInterrupt
    with pytest.raises(NotRecorded, match=r"cut is not\."):
        ablation_sentences([open_run("cut")])
