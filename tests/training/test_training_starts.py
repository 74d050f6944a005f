"""What a run can start from and leave: causal models, retrofits, adapters, pairs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ran import losses_of, weights_of

import sinklab
from refusals import refused
from sinklab.core.subject import DiffusionLM, DiffusionLMConfig
from sinklab.lab.checkpoints import read_adapters
from sinklab.lab.records import open_run
from sinklab.lab.training import train
from sinklab.lab.training.model import freeze, merge_lora
from sinklab.lab.training.text import prepare
from tiny_diffusion import save_tiny, tiny_backbone, tiny_tokenizer
from tiny_training import tiny_settings


@pytest.fixture(scope="module")
def settings(corpus):
    return tiny_settings(corpus, heads=4, steps=4, save_every=4, heldout_rows=6)


@pytest.fixture(scope="module")
def causal(settings, tmp_path_factory):
    out = tmp_path_factory.mktemp("causal") / "run"
    return train(
        replace(
            settings,
            objective="autoregressive",
            backbone="qwen2",
            kv_heads=2,
            steps=12,
            out=str(out),
        )
    )


def noting(note, monkeypatch):
    """Have every forward tell what it is given."""
    forward = DiffusionLM.forward

    def told(*given, **named):
        note(*given, **named)
        return forward(*given, **named)

    monkeypatch.setattr(DiffusionLM, "forward", told)


def test_an_autoregressive_run_leaves_a_plain_causal_model(settings, causal):
    record = open_run(causal.parent)
    assert record.info.model["family"] == "autoregressive"
    losses = losses_of(causal.parent)
    assert losses[-1] < losses[0] - 0.5
    assert json.loads((causal / "config.json").read_text())["architectures"] == ["Qwen2ForCausalLM"]
    loaded = sinklab.load(causal)
    assert loaded.family == "autoregressive"
    assert loaded.model.config.num_key_value_heads == 2
    assert loaded.tokenizer.mask_token is not None
    held = prepare(settings).heldout.ids_RS.long()
    with torch.no_grad():
        logits = loaded.model(held).logits
    rows = torch.nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), held[:, 1:], reduction="none"
    ).mean(dim=1)
    table = record.table("heldout_rows")
    assert table["loss"].tolist() == pytest.approx(rows.tolist(), rel=1e-5)
    assert table["tokens"].tolist() == [15] * 6
    assert record.table("heldout")["loss"].iloc[0] == pytest.approx(rows.mean().item(), rel=1e-5)


@pytest.mark.slow
def test_a_causal_model_becomes_a_diffusion_model_with_each_variant(settings, causal):
    variants = {
        "sink": {"sink_kind": "token", "sink_count": 1},
        "gate": {"gate": "elementwise", "logit_shift": True},
    }
    started = weights_of(causal)
    for name, change in variants.items():
        # a step with a learning rate of almost nothing: what is saved is what it started from
        here = replace(
            settings,
            tokenizer=None,
            init_from=str(causal),
            steps=1,
            lr=1e-12,
            out=name,
            **change,
        )
        folder = train(replace(here, hidden_size=77))
        saved = weights_of(folder)
        assert saved.keys() >= started.keys()
        assert all(torch.allclose(saved[key], started[key], atol=1e-6) for key in started)
        assert name != "gate" or torch.all(saved["gates.0.bias"].sub(4).abs() < 1e-6), "it is open"
        source = open_run(name).info.model["init_from"]
        assert source["name"] == str(causal)
        assert len(source["sha256"]) == 64
        loaded = sinklab.load(folder)
        assert loaded.model.config.logit_shift is bool(change.get("logit_shift"))


def test_a_run_goes_on_with_the_variant_of_its_model_or_says_so(settings):
    source = save_tiny("source", 2, gate="elementwise")
    here = replace(settings, init_from=str(source), steps=1)
    refused(r"'token', .*--sink-kind token", train, here)
    refused(r"gate='elementwise' .*--gate", train, replace(here, sink_kind="token", sink_count=2))
    same = replace(here, sink_kind="token", sink_count=2, gate="elementwise")
    train(same)
    # a bias of 4 would open a gate that has learned when to close
    assert sinklab.load("run/model").model.config.gate_bias is None
    assert sinklab.load("run/model").model.config.sink_count == 2
    opened = save_tiny("opened", 2, gate="elementwise", gate_bias=4.0)
    train(replace(same, init_from=str(opened), out="more"))
    assert sinklab.load("more/model").model.config.gate_bias == 4


@pytest.mark.slow
def test_a_retrofit_trains_the_sink_alone_and_leaves_its_file(settings):
    source = save_tiny("source")
    here = replace(
        settings,
        tokenizer=None,
        init_from=str(source),
        train_only="sink",
        sink_kind="kv",
        sink_count=1,
    )
    here = replace(here, batch=32, lr=0.3, save_every=100, log_every=100)
    folder = train(replace(here, steps=20))
    before, after = weights_of(source), weights_of(folder)
    assert all(torch.equal(before[name], after[name]) for name in before)
    new = after.keys() - before.keys()
    assert new == {"sink_keys", "sink_values"}
    start = train(replace(here, out="start", steps=1, lr=1e-12))
    assert all(not torch.allclose(after[name], weights_of(start)[name], atol=1e-4) for name in new)
    losses, table = (open_run(name).table("heldout")["loss"].iloc[0] for name in ("run", "start"))
    assert losses < table, "the sink learned something"
    facts, _ = read_adapters(Path("run/sink.safetensors"))
    assert (facts.settings["sink_kind"], facts.base) == ("kv", str(source))
    attached = sinklab.load(source, sink=Path("run/sink.safetensors")).model
    ids = prepare(settings).heldout.ids_RS.long()
    with torch.no_grad():
        assert torch.equal(attached(ids).logits, sinklab.load(folder).model(ids).logits)


@pytest.mark.parametrize("tied", [True, False])
def test_freezing_makes_no_number_coarser(tied):
    """What decides the type of the states is float32, a tied head included; what is finer than that
    stays so.
    """
    pytest.importorskip("peft")
    for kind, expected in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        model = DiffusionLM(
            DiffusionLMConfig(tiny_backbone(tie_word_embeddings=tied), mask_token_id=2)
        ).to(kind)
        freeze(model, "all")
        assert {weight.dtype for weight in model.parameters()} == {kind}
        trained = {id(model.get_parameter(name)) for name in freeze(model, "lora", 2)}
        assert model.model.embed_tokens.weight.dtype == model.model.norm.weight.dtype == expected
        assert model.lm_head.weight.dtype == (expected if tied else kind)
        assert {weight.dtype for weight in model.parameters() if id(weight) in trained} == {
            expected
        }
        merge_lora(model)
        assert model.model.layers[0].self_attn.q_proj.weight.dtype == expected


@pytest.mark.parametrize("style", ["published", "corrected"])
def test_questions_and_answers_are_trained_on_in_passes(settings, style, monkeypatch):
    lines = [f"{n} and {n + 1}?||<<{n}+{n + 1}={2 * n + 1}>> #### {2 * n + 1}" for n in range(12)]
    Path("pairs.txt").write_text("\n".join(lines))
    seen = []

    def note(model, input_ids, attention_mask=None, labels=None, label_weights=None, **_):
        if model.training and labels is not None:
            seen.append((input_ids, attention_mask, labels, label_weights))

    noting(note, monkeypatch)
    here = replace(
        settings,
        corpus="pairs.txt",
        pairs=style,
        length=64,
        steps=8,
        heldout_rows=2,
    )
    said = []
    train(replace(here, batch=6), progress=said.append)
    assert "12 questions in rows" in said
    # 24 rows, one in twenty of them held out: two passes over 23 in steps of 6
    assert len(seen) == len(losses_of("run")) == 8
    text = prepare(replace(here, batch=6))
    final = open_run("run").table("heldout").iloc[0]
    asked_RS = text.heldout.maskable_RS
    assert asked_RS is not None
    assert final["tokens"] == int(asked_RS.sum()), (
        "neither questions nor padding that has no loss count"
    )
    answers = [
        row[asked].tolist() for row, asked in zip(text.heldout.ids_RS, asked_RS, strict=True)
    ]
    written = "".join(text.tokenizer.decode(ids, skip_special_tokens=True) for ids in answers)
    assert final["bytes"] == len(written.encode())
    pad = tiny_tokenizer().pad_token_id if style == "corrected" else tiny_tokenizer().eos_token_id
    asked = torch.cat([labels[labels != -100] for _, _, labels, _ in seen])
    assert bool((asked == pad).any()) is (style == "published"), (
        "loss on padding as published, none as corrected"
    )
    assert all((mask is None) is (style == "published") for _, mask, _, _ in seen)
    for noisy, _, labels, weights in seen:
        prompt = noisy[:, :3]
        assert not (prompt == tiny_tokenizer().mask_token_id).any(), "the question is never masked"
        assert (labels[:, :3] == -100).all()
        assert (weights > 0).all()


def test_a_tokenizer_and_a_model_that_do_not_belong_together_are_refused(settings):
    source = save_tiny("source")
    larger = tiny_tokenizer().__class__.from_pretrained(settings.tokenizer)
    larger.add_tokens(["one", "two"])
    larger.save_pretrained("larger")
    here = replace(settings, init_from=str(source))
    refused(r"281 \('two'\) .* 280 rows", train, replace(here, tokenizer="larger"))
    other = tiny_tokenizer().__class__.from_pretrained(settings.tokenizer)
    other.mask_token = "<|pad|>"
    other.save_pretrained("other")
    refused(r"\[MASK\] must be one id, but", train, replace(here, tokenizer="other"))
