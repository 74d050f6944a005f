import json
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from sink_toys import NOISY, copied, kv_model, train

import published_toys as toys
from refusals import refused
from sinklab.core.subject import DiffusionLM
from sinklab.lab.checkpoints import load, read_adapters, save_sink
from sinklab.lab.training import freeze, merge_lora
from tiny_diffusion import save_tiny, tiny_model
from tiny_llama import tiny_llama


def changed_of(model, before):
    """Names of the tensors that are no longer those of before."""
    return {name for name, one in model.state_dict().items() if not torch.equal(one, before[name])}


@pytest.mark.parametrize(
    "given, message",
    [(("snik",), "'snik'"), (("sink",), "'sink'"), (("lora", 0), "lora_rank .* 0")],
)
def test_what_cannot_be_trained_is_refused(given, message):
    refused(message, freeze, tiny_model(), *given)


def test_lora_without_peft_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    refused("peft", freeze, tiny_model(), "lora")


@pytest.mark.parametrize("sink", [0, 1])
def test_lora_learns_and_is_merged_into_a_plain_model(tmp_path, sink):
    pytest.importorskip("peft")
    refused("without a gate", freeze, tiny_model(gate="elementwise"), "lora")
    model = tiny_model(sink)
    before, logits = copied(model), model(NOISY).logits.detach()
    names = freeze(model, "lora", 2)
    assert torch.equal(model(NOISY).logits, logits)
    adapted = [f"model.layers.{i}.self_attn.{p}_proj" for i in range(2) for p in "qkvo"]
    expected = {f"{name}.lora_{half}.default.weight" for name in adapted for half in "AB"}
    own = {"sink_embeddings"} if sink else set()
    assert set(names) == expected | own
    assert {name for name, p in model.named_parameters() if p.requires_grad} == set(names)
    refused("has adapters already", freeze, model, "lora", 2)
    losses = train(model)
    assert losses[-1] < losses[0] - 0.05
    learned = model(NOISY).logits.detach()
    merge_lora(model)
    assert torch.allclose(model(NOISY).logits, learned, atol=1e-4)
    assert not torch.allclose(learned, logits, atol=1e-2)
    assert model.state_dict().keys() == before.keys()
    assert changed_of(model, before) == {f"{name}.weight" for name in adapted} | own
    assert all(parameter.requires_grad for parameter in model.parameters())
    model.save_pretrained(tmp_path)
    again = load(tmp_path).model
    assert isinstance(again, DiffusionLM)
    assert torch.equal(again(NOISY).logits, model(NOISY).logits)
    assert freeze(model, "lora", 3) == names
    assert torch.equal(again(NOISY).logits, model(NOISY).logits)


@pytest.mark.parametrize("kind", ["kv", "zero"])
def test_retrofit_teaches_the_sink_alone_and_its_file_brings_it_back(tmp_path, kind):
    save_tiny(tmp_path / "m", logit_shift=True)
    plain = load(tmp_path / "m")
    started = load(tmp_path / "m", sink_count=2, sink_kind=kind).model
    before = copied(started)
    names = freeze(started, "sink")
    assert names == [*started.config.sink.tensors]
    losses = train(started)
    assert losses[-1] < losses[0] - 0.01
    assert changed_of(started, before) == set(names)
    assert {name for name, p in started.named_parameters() if p.grad is not None} == set(names)
    file = save_sink(started, tmp_path / "sink.safetensors", name="toy")
    assert file.stat().st_size < 4096
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m", "sink.safetensors"]
    loaded = load(tmp_path / "m", sink=file)
    assert loaded.notes == (*plain.notes, f"sink attached: 2 {kind} of {file}")
    assert torch.equal(loaded.model(NOISY).logits, started(NOISY).logits)
    assert loaded.context == plain.context - (0 if kind == "kv" else 2)


def test_a_sink_file_says_what_it_is(tmp_path):
    def facts_of(model):
        return read_adapters(save_sink(model, tmp_path / "s", name="owner/toy"))[0]

    model = kv_model(2)
    facts = facts_of(model)
    assert (facts.base, facts.rank) == ("owner/toy", 0)
    assert facts.settings == {"sink_kind": "kv", "sink_count": 2, "sink_side": "front"}
    assert facts_of(tiny_model(1, sink_side="end")).settings["sink_side"] == "end"
    # of the weights below the sink, rounded
    same = [tiny_model(1), model.bfloat16()]
    assert {facts_of(one).base_sha256 for one in same} == {facts.base_sha256}
    assert facts_of(tiny_model(1, seed=1)).base_sha256 != facts.base_sha256


def test_other_weights_are_noted_and_other_shapes_refused(tmp_path):
    file = save_sink(kv_model(1), tmp_path / "s", name="toy")
    save_tiny(tmp_path / "same")
    save_tiny(tmp_path / "other", seed=1)
    assert len(load(tmp_path / "same", sink=file, dtype="bfloat16").notes) == 1
    notes = load(tmp_path / "other", sink=file).notes
    assert len(notes) == 2
    assert "the sink was trained on other weights of this shape (toy, SHA-256" in notes[1]
    folder, _ = toys.llada(tmp_path / "llada", n_layers=3)
    refused(r"sink_keys has shape \(2, .*expected \(3, ", load, folder, sink=file)
    save_tiny(tmp_path / "own", 1)
    assert load(tmp_path / "own", sink=file).model.config.sink_kind == "kv"
    tiny_llama().model.save_pretrained(tmp_path / "causal")
    refused("is an autoregressive model, and sink_kind", load, tmp_path / "causal", sink=file)


def test_what_is_no_sink_file_is_refused(tmp_path):
    refused("give it one with sink_kind", save_sink, tiny_model(), tmp_path / "s")
    refused(r"read from .*absent, which is", read_adapters, tmp_path / "absent")
    file, folder = save_sink(kv_model(1), tmp_path / "s"), save_tiny(tmp_path / "m")
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    record = json.loads(metadata["record"])
    sink = record["settings"]
    for change, kept, message in [
        ({"stranger": 2}, tensors, "adapters in .* are damaged.*stranger"),
        ({"settings": sink | {"sink_kind": "vk"}}, tensors, "'vk'"),
        ({"settings": {}}, tensors, "is damaged.*sink_keys is not asked for"),
        ({"rank": 2}, tensors, "holds adapters and not a sink alone"),
        ({}, {"sink_keys": tensors["sink_keys"]}, "is damaged.*sink_values is not in it"),
        (
            {"settings": sink | {"sink_count": 2}},
            tensors,
            r"not named.*sink_keys has shape \(2, 1, 2, 8\), expected \(2, 2, 2, 8",
        ),
    ]:
        changed = metadata | {"record": json.dumps(record | change)}
        save_file(kept, file, metadata=changed)
        refused(message, load, folder, sink=file)
    save_file(tensors, file, metadata={"format": "pt"})
    refused("holds no adapters and no sink", load, folder, sink=file)
    file.write_bytes(file.read_bytes()[:-9])
    refused("absent, cut short or damaged", load, folder, sink=file)
    model = tiny_model(1)
    pytest.importorskip("peft")
    freeze(model, "lora", 2)
    refused(r"merge_lora\(model\) first", save_sink, model, file)
