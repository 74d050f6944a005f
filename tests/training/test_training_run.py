import json
import math
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ran import interrupted, weights_of

import sinklab
from refusals import refused
from sinklab.lab.checkpoints import materialize
from sinklab.lab.records import lost_files, open_run
from sinklab.lab.training import checks, settings_of, train
from sinklab.lab.training.text import load_tokenizer, prepare
from tiny_diffusion import TEXT, save_tiny, tiny_tokenizer
from tiny_training import repeated_text, tiny_settings


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    corpus = repeated_text(tmp_path_factory.mktemp("corpus"))
    return tiny_settings(corpus, length=32, steps=12, save_every=4)


def test_a_run_learns_and_leaves_a_model_and_a_record(settings, capsys):
    longer = replace(
        settings,
        tokenizer="270",
        steps=24,
        time_sampler="iid",
    )
    said = []
    folder = train(
        replace(longer, save_every=12, batch=8, heldout_rows=20, length=16),
        progress=said.append,
    )
    assert said[:3] == [
        f"reading {settings.corpus}",
        "training a tokenizer of 270 entries",
        "packing the text into rows",
    ]
    assert said[3].startswith("training ")
    steps = [text for text in said if text.startswith("step ")]
    assert steps[0].startswith("step 1 of 24, loss ")
    assert "held out" in steps[-1]
    assert capsys.readouterr().out == "", "the Trainer's own dicts are not printed"
    assert folder == Path("run/model")
    record = open_run("run")
    assert (record.info.kind, record.info.status, record.info.seed) == ("training", "complete", 0)
    assert record.info.settings["tokenizer"] == "270"
    data_sha256 = record.info.model["data_sha256"]
    assert len(data_sha256) == 64
    assert record.info.model == {
        "name": "run",
        "data_sha256": data_sha256,
        "family": "diffusion",
        "sink_kind": "none",
        "sink_count": 0,
        "sink_side": "front",
        "gate": "none",
        "attention": "full",
    }
    history = record.table("history")
    losses = history.dropna(subset="loss")
    assert losses["step"].tolist() == list(range(1, 25))
    assert (losses["tokens"] == losses["step"] * 8 * 16).all()
    assert (losses["grad_norm"] > 0).all()
    assert losses["lr"].max() == pytest.approx(1e-2)
    assert losses["lr"].iloc[-1] == pytest.approx(1e-3, rel=0.05)
    measured = history.dropna(subset="heldout_loss")
    assert measured["step"].tolist() == [12, 24]
    assert losses["loss"].iloc[0] == pytest.approx(math.log(270), abs=1.5)
    assert measured["heldout_loss"].iloc[-1] < measured["heldout_loss"].iloc[0] < math.log(270)
    final = record.table("heldout").iloc[0]
    rows = record.table("heldout_rows")
    assert rows["row"].tolist() == list(range(len(rows)))
    assert rows["loss"].mean() == pytest.approx(final["loss"], rel=1e-6)
    assert final["tokens"] == 16 * len(rows)
    assert final["loss"] == pytest.approx(measured["heldout_loss"].iloc[-1], rel=1e-6)
    assert final["bits_per_byte"] == pytest.approx(
        final["loss"] * final["tokens"] / math.log(2) / final["bytes"]
    )

    loaded = sinklab.load(folder)
    assert loaded.family == "diffusion"
    assert loaded.model.config.mask_token_id == loaded.tokenizer.mask_token_id
    assert loaded.model.num_parameters() == final["parameters"]
    written = loaded.model.generate(torch.tensor([[3, 4]]), max_new_tokens=3)
    assert loaded.tokenizer.mask_token_id not in written


def files_of(folder):
    return {path: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def test_a_complete_run_and_one_of_other_settings_or_text_are_left_alone(settings):
    corpus = Path("corpus")
    corpus.mkdir()
    (corpus / "text.txt").write_text(TEXT * 60)
    here = replace(settings, corpus=str(corpus))
    interrupted(here, 5)
    (corpus / "text.txt").write_text(TEXT.upper() * 60)
    kept = files_of("run")
    refused("keeps its data, but the corpus", train, here)
    changed = replace(here, batch=8, lr=0.1, log_every=3)
    refused(r"batch: 4 → 8, lr: 0.01 → 0.1", train, changed)
    assert files_of("run") == kept

    (corpus / "text.txt").write_text(TEXT * 60)
    train(here)
    (corpus / "text.txt").write_text("Quite another corpus.\n" * 200)
    shutil.rmtree("run/checkpoints")
    kept = files_of("run")
    said = []
    assert train(here, progress=said.append) == Path("run/model")
    assert said == ["the run in run is complete; nothing is left to do"]
    assert files_of("run") == kept
    (corpus / "text.txt").write_text(TEXT * 60)
    shutil.rmtree("run/model")
    train(here, progress=said.append)
    assert "made again, because they are lost or damaged: model/config.json" in " ".join(said)
    assert sinklab.load("run/model") and lost_files(Path("run"), open_run("run").info) == set()
    Path("run/run.json").write_text("{")
    refused(r"run.json is damaged", train, here)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"hidden_size": 34, "heads": 4}, r"hidden size \(34\) is not a multiple"),
        ({"hidden_size": 34, "heads": 2}, "even rotary dimension"),
        ({"time_sampler": "low_discrepency"}, "did you mean 'low_discrepancy'"),
        ({"sink_kind": "token"}, "sink_kind and sink_count must agree"),
        ({"length": 100_000}, "do not fill one row of 100000"),
        ({"corpus": "nowhere"}, "nowhere does not exist"),
        (
            {"objective": "autoregressive", "gate": "elementwise"},
            "trains a plain decoder, without sink or gate .* leave out gate",
        ),
        (
            {"train_only": "sink", "sink_kind": "token", "sink_count": 1},
            "there must be one: give init_from",
        ),
        (
            {"train_only": "sink", "init_from": "tiny"},
            "needs a model with a sink",
        ),
        (
            {"micro_batch": 3},
            "batch must be a multiple of micro_batch × processes, but 4 is no multiple of 3 × 1",
        ),
        ({"kv_heads": 3}, r"kv_heads must divide heads \(2\), but is 3"),
        (
            {"init_from": "tiny", "tokenizer": None, "length": 513, "heldout_rows": 1},
            r"rows must fit the model's context of \d+ tokens",
        ),
        ({"init_from": "nowhere"}, "no model can be loaded from 'nowhere'"),
        (
            {"pairs": "corrected", "corpus": "arithmetic", "monitor_every": 1},
            "measures rows without padding",
        ),
        (
            {"row_start": True, "streaming": True},
            "row_start begins packed rows of plain text; leave it out with a stream or pairs",
        ),
    ],
)
def test_bad_settings_are_refused_before_a_folder_is_taken(settings, change, message):
    refused(message, lambda: train(replace(settings, **change)))
    assert not Path("run").exists()


def test_a_corpus_with_one_row_is_refused(settings):
    Path("short.txt").write_text(TEXT)
    one_row = replace(
        settings,
        corpus="short.txt",
        length=len(tiny_tokenizer()(TEXT)["input_ids"]),
    )
    refused("only one row, so nothing", train, one_row)


def test_a_tokenizer_must_exist_and_is_given_a_mask(settings):
    save_tiny("maskless")
    for path in Path("maskless").glob("*token*"):
        content = json.loads(path.read_text())
        content.pop("mask_token", None)
        path.write_text(json.dumps(content))
    words = load_tokenizer("maskless")
    assert words.mask_token_id is None
    # as Llama's tokenizer, which the published 472M run has
    trained = sinklab.load(train(replace(settings, steps=1, tokenizer="maskless")))
    assert trained.model.config.mask_token_id == trained.tokenizer.mask_token_id
    assert trained.tokenizer.mask_token == "<|mask|>"
    assert trained.model.config.vocab_size == len(trained.tokenizer) >= len(words)
    refused(
        r"loaded from '.*nowhere'",
        train,
        replace(settings, tokenizer="nowhere", out="other"),
    )


def test_a_held_out_corpus_of_its_own_is_packed_alike(settings):
    Path("held.txt").write_text("The boats. " * 60)
    apart = prepare(replace(settings, heldout="held.txt"))
    inside = prepare(settings)
    assert apart.tokenizer.decode(apart.heldout.ids_RS[0].tolist()).startswith("The boats. The")
    assert torch.equal(
        apart.training.ids_RS, torch.cat([inside.training.ids_RS, inside.heldout.ids_RS])
    )
    assert 0 < len(inside.heldout) <= len(apart.training.ids_RS) // 20 + 1
    assert apart.sha256 != inside.sha256


def on(flags, monkeypatch):
    """A machine without GPU whose processor lists these flags."""
    Path("cpuinfo").write_text(f"processor: 0\nflags: fpu avx2 {flags}\n")
    monkeypatch.setattr(materialize, "CPU_FLAGS", Path("cpuinfo"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_type_that_suits_the_machine_is_said_and_belongs_to_the_run(settings, monkeypatch):
    here, said = replace(settings, steps=3, bf16=None), []
    on("", monkeypatch)
    interrupted(here, 2)
    assert open_run("run").info.settings["bf16"] is False
    # it goes on elsewhere as it began
    on("avx512_bf16", monkeypatch)
    refused("bf16: False → True", train, replace(here, bf16=True))
    train(here, progress=said.append)
    assert any(
        text.startswith("training ") and text.endswith(", computing in float32") for text in said
    )
    assert open_run("run").info.settings["bf16"] is False
    said.clear()
    train(replace(here, out="new"), progress=said.append)
    assert any(
        text.startswith("training ") and text.endswith(", computing in bfloat16") for text in said
    )
    assert settings_of("new") == replace(here, bf16=True, out="new")
    assert all(value.dtype == torch.float32 for value in weights_of("new").values())
    monkeypatch.setattr(checks, "gather_object", lambda found: [*found, True])
    refused("--no-bf16", train, replace(here, bf16=False, out="mixed"))


def test_files_have_the_mode_that_their_user_wants(settings):
    before = os.umask(0o027)
    try:
        train(replace(settings, steps=2))
    finally:
        os.umask(before)
    modes = {
        path.name: path.stat().st_mode & 0o777
        for path in Path("run").rglob("*")
        if path.is_file() and "checkpoints" not in path.parts
    }
    assert {
        "model.safetensors",
        "weights.sha256",
        "history.parquet",
    } <= modes.keys()
    assert set(modes.values()) == {0o640}, modes
