"""How strong a model's sinks are: the protocol of Gu et al. on tiny models, and on a real one
(smollm2).
"""

import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import sinklab
from commands import cli, out_of
from refusals import refused
from shared_data import shared
from sinklab.lab.records import open_run
from sinklab.lab.reports.words import percent
from sinklab.lab.studies.strength import Strength, StrengthSettings
from sinklab.lab.studies.strength.figures import (
    published,
    strength_figure,
    strength_sentences,
    strength_table,
)
from sinklab.lab.studies.strength.run import masked, natural_rows, sequences, summary, text_ids
from tiny_diffusion import TEXT, save_tiny, tiny_loaded
from tiny_llama import tiny_llama

SMALL = {"rows": 9, "length": 12, "batch": 3, "texts": "held.txt"}


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.chdir(tmp_path)
    Path("held.txt").write_text(TEXT * 20)


def settings(**changes):
    return StrengthSettings(**{**SMALL, **changes})


def test_the_weights_are_those_of_the_attention_maps():
    """Each head's map by transformers' eager attention: column means over the queries that may see
    the key.
    """
    loaded, asked = (
        tiny_llama(),
        settings(inputs=("natural", "random"), starts=("start",), twin=False),
    )
    run = open_run(Strength()(loaded, "run", asked))
    table = run.table("strength").set_index(["input", "row", "layer", "head"]).sort_index()
    loaded.model.set_attn_implementation("eager")
    sinks = {}
    for name in asked.inputs:
        ids_RT = torch.cat([torch.full((9, 1), 7), sequences(loaded, asked, name)[:, :-1]], 1)
        with torch.no_grad():
            maps_RLHQK = torch.stack(loaded.model(ids_RT, output_attentions=True).attentions, 1)
        first_RLH, share_RLHK = maps_RLHQK[..., 0].mean(-1), maps_RLHQK.mean(-2)
        found = table.loc[name]
        assert np.allclose(found["first"], first_RLH.ravel(), atol=1e-5)
        assert np.allclose(found["strongest"], share_RLHK.amax(-1).ravel(), atol=1e-5)
        assert (found["at"] == share_RLHK.argmax(-1).ravel().numpy()).all()
        places_RN = torch.tensor(found["at"].to_numpy()).view(9, -1)
        assert found["token_id"].tolist() == ids_RT.gather(1, places_RN).ravel().tolist()
        sinks[name] = first_RLH
    lines = run.table("summary").set_index("input")
    for name, first_RLH in sinks.items():
        line = lines.loc[name]
        assert line["sink"] == pytest.approx(float((first_RLH.mean(0) > 0.3).float().mean()))
        by_text_R = (first_RLH > 0.3).float().mean((1, 2))
        assert line["sink_by_text"] == pytest.approx(float(by_text_R.mean()))
        assert 0 <= line["low"] <= line["sink_by_text"] <= line["high"] <= 1


def test_epsilon_alone_decides_what_is_strong():
    asked = settings(inputs=("natural",), starts=("raw",), twin=False)
    run = open_run(Strength()(tiny_llama(), "run", asked))
    tables = run.table("strength"), run.table("activations")
    shares = [summary(*tables, epsilon).loc[0, "sink"] for epsilon in (0.05, 0.3, 0.9)]
    assert shares[1] == run.table("summary").loc[0, "sink"]
    assert 1 == shares[0] > shares[1] >= shares[2] == 0


def test_random_tokens_are_text_and_a_repeated_one_differs_by_row():
    loaded, asked = tiny_llama(), settings(rows=40)
    random, repeat = (sequences(loaded, asked, name) for name in ("random", "repeat"))
    known = text_ids(loaded)
    assert random.shape == repeat.shape == (40, 12)
    assert np.isin(random, known).all() and not set(known) & set(loaded.tokenizer.all_special_ids)
    assert (repeat == repeat[:, :1]).all() and len(repeat[:, 0].unique()) > 20
    assert not torch.equal(random, sequences(loaded, settings(rows=40, seed=1), "random"))


def test_natural_rows_are_consecutive_and_end_with_their_document():
    documents = [TEXT, TEXT[::-1] * 3]
    Path("two.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    loaded = tiny_llama()
    ids = [loaded.tokenizer(text, add_special_tokens=False)["input_ids"] for text in documents]
    rows = natural_rows(loaded, settings(texts="two.jsonl", rows=1000))
    assert len(rows) == sum(len(one) // 12 for one in ids)
    first = len(ids[0]) // 12
    assert rows[:first].ravel().tolist() == ids[0][: first * 12]
    assert natural_rows(loaded, settings(texts="two.jsonl", document=1))[0].tolist() == ids[1][:12]
    refused("number 2 on", natural_rows, loaded, settings(texts="two.jsonl", document=2))


def test_masks_are_nested_and_spare_the_start_token():
    loaded = tiny_loaded()
    ids_RT = sequences(loaded, settings(length=40), "random")
    few, many = (
        masked(loaded, ids_RT, ratio, True, 0) == loaded.model.config.mask_token_id
        for ratio in (0.15, 0.9)
    )
    assert (few.sum(1) == round(0.15 * 39)).all() and (many.sum(1) == round(0.9 * 39)).all()
    assert (few <= many).all() and not many[:, 0].any()
    assert masked(loaded, ids_RT, 0.0, True, 0) is ids_RT


def test_a_diffusion_model_is_read_at_every_ratio_and_added_sinks_are_places():
    loaded = tiny_loaded(1)
    asked = settings(ratios=(0, 0.5), starts=("raw",), epsilon=0.05, twin=False)
    run = open_run(Strength()(loaded, "run", asked))
    summary = run.table("summary")
    assert summary[["input", "ratio"]].to_numpy().tolist() == [
        [name, ratio] for name in ("natural", "random", "repeat") for ratio in (0, 0.5)
    ]
    places = run.table("strength")
    assert places["at"].min() == -1 and (places.loc[places["at"] == -1, "token_id"] == -1).all()
    classes = run.table("classes")
    assert (
        "sink" in set(classes["class"])
        and (classes.groupby(["input", "ratio"])["share"].sum().round(6) == 1).all()
    )
    assert "masked" in strength_table(run)


@pytest.mark.slow
def test_the_page_holds_both_readings_and_the_published_numbers_and_loads_nothing(capsys):
    model = save_tiny(Path("model"), 1)
    words = f"strength {model} --rows 9 --length 12 --texts held.txt --ratios 0 0.5 --out out"
    printed = out_of(words, capsys)
    assert "natural text (9 sequences): the first token is strong (over 0.3) in" in printed
    page = Path("out/strength.md").read_text()
    assert "LLaMA3-8B | 99.0 %" in page and "2410.10781" in page
    assert len(pd.read_csv("out/strength.csv")) == len(open_run("out").table("summary")) == 6
    assert Path("out/strength.png").stat().st_size > 1000
    assert len(strength_figure(open_run("out"), theme="dark").axes) == 4
    assert {"initialised", "permuted"} <= set(open_run("out").table("twins")["twin"])
    assert published()["repeat"].max() > 60
    assert cli(f"{words} --resume --figures") == 0
    page = Path("out/strength.html").read_text("utf-8")
    assert "script-src 'none'" in page and "default-src 'none'" in page and "<script" not in page
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#)""", page)
    assert page.count("<svg") == 1
    summary = open_run("out").table("summary")
    cells = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", page)
    assert cells.count("natural") == 3, "two kinds of sequence, and the heading of published ones"
    for line in summary.to_dict("records"):
        by_text = percent(line["sink_by_text"])
        assert any(cell.startswith(f"{by_text} (") for cell in cells)
        assert percent(line["sink"]) in cells and percent(line["strongest"]) in cells
    for line in published().to_dict("records"):
        assert (
            line["name"] in cells
            and line["source"] in cells
            and f"{line['natural']:.1f} %" in cells
        )
    own = cells.index("this run")
    natural = summary[(summary["input"] == "natural") & (summary["ratio"] == 0)]["sink"].iloc[0]
    assert cells[own - 3] == percent(natural)


def test_what_a_model_cannot_do_is_refused():
    refused("context", Strength(), tiny_llama(), "run", settings(length=65))
    refused("start token", Strength(), tiny_loaded(), "run", settings(starts=("start",)))
    refused("epsilon", settings, epsilon=1.0)


def test_a_loaded_model_answers():
    lm = sinklab.load(save_tiny(Path("model")))
    run = lm.strength("held.txt", rows=3, length=12, ratios=(0.5,), twin=False)
    assert run.table("summary")["rows"].tolist() == [3, 3, 3]
    assert "50.0\u00a0% masked (3 sequences)" in strength_sentences([run])[0]
    refused("epsilon", lm.strength, epsilom=0.2)


def test_the_page_on_masked_models_says_what_the_study_measured():
    """The table of docs/masked_models.md, columns 2 to 4, is that of
    studies/smollm2_diffusion/points.
    """
    root = Path(__file__).parents[2]
    page = (root / "docs" / "masked_models.md").read_text("utf-8").replace("**", "")
    head = "| masked | SmolLM2, causal |"
    rows = page[page.index(head) :].splitlines()[2:6]
    cells = {
        row.split("|")[1].strip(): [cell.strip() for cell in row.split("|")[2:5]] for row in rows
    }
    for place, name in enumerate(("parent", "lifted", "iii-0-500")):
        points = json.loads(
            (root / "studies" / "smollm2_diffusion" / "points" / f"{name}.json").read_text()
        )
        for ratio, one in points["strength"].items():
            share, strong = (100 * np.mean(one[key]) for key in ("strongest_share", "strong_heads"))
            assert (
                cells[f"{float(ratio):.0%}".replace("%", " %")][place]
                == f"{share:.1f} % ({strong:.1f} %)"
            )


def books():
    return shared("data/books_pd/valid.jsonl.gz")


@pytest.mark.slow
@pytest.mark.smollm2
def test_smollm2_has_the_sink_of_models_with_rotary_positions():
    """One repeated token without a start token leaves nothing to choose: 0, as Gu et al. have it
    for such models.

    With 100 rows of each, which take minutes on one thread: natural 77.4, by sequence 73.0, random
    81.1, repeat 0.
    """
    pytest.importorskip("gguf")
    from tiny_gguf import smollm2

    lm, text = sinklab.load(smollm2()), str(books())
    natural = (
        lm.strength(text, inputs=("natural",), starts=("raw",), rows=20, twin=False)
        .table("summary")
        .loc[0]
    )
    assert natural["rows"] == 20
    assert 100 * natural["sink"] == pytest.approx(75.2, abs=3)
    assert 100 * natural["sink_by_text"] == pytest.approx(70.1, abs=3)
    others = lm.strength(inputs=("random", "repeat"), starts=("raw",), rows=6, twin=False).table(
        "summary"
    )
    random, repeat = others["sink"]
    assert 100 * random == pytest.approx(81.5, abs=5)
    assert repeat == 0 and others.loc[1, "sink_by_text"] == 0
