import re
from pathlib import Path

import pytest
import torch
import transformers
from causal_toys import save_causal
from transformers import LlamaForCausalLM

import published_toys as toys
from refusals import refused
from sinklab.lab.checkpoints import describe, from_causal, materialize
from sinklab.lab.checkpoints.loading import load
from sinklab.lab.checkpoints.published import PACKAGED
from sinklab.lab.scoring.prompts import encode
from tiny_diffusion import save_tiny, tiny_model, tiny_tokenizer


@pytest.mark.parametrize(
    "name, message",
    [
        (
            "tiny-snik",
            r"no model can be loaded from 'tiny-snik'.*did you mean 'tiny-sink' or 'tiny' or "
            r"'tiny-ca",
        ),
        ("tny", r"no model can be loaded from 'tny'.*did you mean 'tiny'\?"),
        (
            "./no/such/folder",
            r"from './no/such/folder'.*'tiny', 'tiny-sink', 'tiny-causal', a folder",
        ),
        (
            "gpt2",
            r"from 'gpt2'; use 'tiny'.*HF_HUB_OFFLINE",
        ),
        ("a b", r"from 'a b': it is no folder and no name on the Hub"),
    ],
)
def test_an_unknown_name_is_refused_with_the_near_ones(name, message):
    refused(f"(?s){message}", load, name)


def test_absent_weights_are_refused(tmp_path):
    (save_tiny(tmp_path) / "model.safetensors").unlink()
    refused(r"weights of .* cannot be read", load, tmp_path)


def test_a_damaged_or_absent_config_is_refused(tmp_path):
    refused("no readable config.json", load, tmp_path)
    for text, message in [
        ("{", "config.json is damaged"),
        ("[]", "holds a list"),
        ("{}", "is a None model"),
    ]:
        (save_tiny(tmp_path) / "config.json").write_text(text)
        refused(message, load, tmp_path)


def test_a_model_without_a_tokenizer_takes_ids(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert loaded.tokenizer is None
    assert loaded.special.mask == model.config.mask_token_id
    refused(r"put its tokenizer\.json", loaded.needed_tokenizer)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert load(tmp_path).needed_tokenizer().mask_token_id == model.config.mask_token_id
    Path("tokenizer.json").write_text("{}")
    refused("no tokenizer that can be read", load, tmp_path)


def test_an_architecture_that_comes_as_code_is_refused_and_not_run(tmp_path):
    ran = toys.poison(save_tiny(tmp_path))
    toys.edit(tmp_path, model_type="newcomer", architectures=["X"])
    refused(r"'newcomer' model \(X\).*--plugin", load, tmp_path)
    assert not ran.exists()


@pytest.mark.parametrize("name", PACKAGED)
def test_a_packaged_model_loads_and_writes(name):
    loaded = load(name)
    causal = name == "tiny-causal"
    assert loaded.family == ("autoregressive" if causal else "diffusion")
    assert isinstance(loaded.model, LlamaForCausalLM) == causal
    assert getattr(loaded.model.config, "sink_count", 0) == (name == "tiny-sink")
    ids = torch.tensor([encode(loaded, "It was a dark and").ids])
    assert ids[0, 0] == loaded.special.bos == loaded.tokenizer.bos_token_id == 4096, (
        "rows began with it"
    )
    written = loaded.model.generate(ids, max_new_tokens=6)
    assert loaded.tokenizer.mask_token_id not in written
    assert torch.equal(written[:, : ids.shape[1]], ids)


ASKED = {
    "attn_implementation": {"": "evil/kernel", "backbone": "evil/kernel"},
    "_attn_implementation": "evil/kernel",
    "_attn_implementation_internal": "flash_attention_2",
    "_attn_implementation_autoset": True,
    "experts_implementation": "evil/kernel",
    "_experts_implementation_internal": "evil/kernel",
    "output_attentions": True,
}


@pytest.fixture
def built(monkeypatch):
    """Every model that load or describe builds; an attention that would be fetched is an error."""

    def refuse(implementation, *args, **settings):
        raise AssertionError(f"{implementation} would be imported")

    monkeypatch.setattr(transformers.modeling_utils, "lazy_import_flash_attention", refuse)
    models, build = [], materialize.empty_model

    def watched(*args):
        models.append(build(*args))
        return models[-1]

    monkeypatch.setattr(materialize, "empty_model", watched)
    return models


@pytest.mark.parametrize("where", ["nested", "causal", "start", "llada"])
def test_the_attention_is_not_the_checkpoints_to_choose(tmp_path, built, where):
    asked = ASKED
    if where == "llada":
        toys.llada(tmp_path)
    elif where in ("causal", "start"):
        save_causal(tmp_path, tokenizer=tiny_tokenizer())
    else:
        save_tiny(tmp_path, 1)
    if where == "nested":
        asked = {"backbone": toys.config_of(tmp_path)["backbone"] | asked}
    toys.edit(tmp_path, **asked)
    model = (from_causal if where == "start" else load)(tmp_path).model
    describe(tmp_path)
    assert len(built) == 2
    for one in (model, *built):
        assert one.config._attn_implementation == one.model.config._attn_implementation == "sdpa"
        assert not one.config.output_attentions
        assert one.config._experts_implementation != "evil/kernel"
    ids = torch.arange(3, 12)[None]
    assert model(ids).attentions is None
    model.save_pretrained("again")
    assert "kernel" not in Path("again/config.json").read_text()


def of_kind(folder, kind):
    if kind in ("llama", "own"):
        save_causal(folder, tokenizer=tiny_tokenizer()) if kind == "llama" else save_tiny(folder)
        return folder
    return {"llada": toys.llada, "dream": toys.dream, "smdm": toys.smdm}[kind](folder)[0]


@pytest.mark.parametrize(
    "kind, fields",
    [
        ("llama", {"rms_norm_eps": "x"}),
        ("llama", {"hidden_act": "nothing"}),
        ("llama", {"architectures": 3, "model_type": "llama", "vocab_size": None}),
        ("llada", {"eos_token_id": "a"}),
        ("llada", {"d_model": 33}),
        ("dream", {"rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]}}),
        ("smdm", {"n_head": 0}),
        ("own", {"mask_token_id": "3"}),
        ("own", {"backbone": {"model_type": "llama", "hidden_size": 33}}),
    ],
    ids=str,
)
def test_a_field_that_cannot_be_is_a_value_error_that_names_the_folder(tmp_path, kind, fields):
    folder = of_kind(tmp_path, kind)
    toys.edit(folder, **fields)
    for call in (load, describe):
        refused(re.escape(str(folder)), call, folder)


def test_a_damaged_generation_config_is_refused(tmp_path):
    save_causal(tmp_path, tokenizer=tiny_tokenizer())
    for text in ("{", "[]", '{"max_new_tokens": "many", "eos_token_id": {}}'):
        Path("generation_config.json").write_text(text)
        refused(rf"generation_config\.json of {re.escape(str(tmp_path))}", load, tmp_path)
