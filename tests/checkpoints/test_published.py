"""Published models: tokenizers and chat formats without foreign code, special ids, settings, the
table itself.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch
from causal_toys import save_causal
from safetensors.torch import load_file, save_file
from transformers import Qwen2Tokenizer

import published_toys as toys
from refusals import refused
from sinklab.lab.checkpoints import PUBLISHED, Published, SpecialIds, describe, from_causal, load
from tiny_diffusion import save_tiny

IDS = torch.arange(3, 15)[None]


def test_dream_reads_its_tokenizer_without_its_class(tmp_path):
    folder, _ = toys.dream(tmp_path)
    ran, ids = toys.poison(folder), toys.save_dream_tokenizer(folder)
    loaded = load(folder)
    assert not ran.exists()
    assert loaded.published_family == "dream"
    tokenizer = loaded.tokenizer
    assert (tokenizer.mask_token, tokenizer.mask_token_id) == ("<|mask|>", ids["<|mask|>"])
    assert tokenizer("<|beginoftext|>hello<|mask|>")["input_ids"] == [
        ids["<|beginoftext|>"],
        *tokenizer.convert_tokens_to_ids(["hel", "l", "o"]),
        ids["<|mask|>"],
    ]
    assert tokenizer.decode(tokenizer("hé\n lo")["input_ids"]) == "hé\n lo"
    # the config has the last word, the tokenizer knows the end of a turn
    assert (loaded.special.mask, loaded.special.eot) == (301, ids["<|im_end|>"])
    assert loaded.special.stop == (1, ids["<|im_end|>"])
    assert loaded.model.config.eot_token_id == ids["<|im_end|>"]


@pytest.mark.parametrize("said_by", ["config.json", "the tokenizer"])
def test_a_dreamon_is_no_dream(tmp_path, said_by):
    """Its <|expand|> would be written as a word."""
    if said_by == "config.json":
        folder, _ = toys.dream(tmp_path, expand_token_id=303)
        refused("expand_token_id = 303", load, folder)
    else:
        folder, _ = toys.dream(tmp_path)
        toys.save_dream_tokenizer(folder, "<|expand|>")
        refused(r"has <\|expand\|>, so this is no dream", load, folder)


def test_llada_reads_its_tokenizer_without_its_code(tmp_path):
    folder, _ = toys.llada(tmp_path)
    ran, ids = toys.poison(folder), toys.save_llada_tokenizer(folder)
    toys.edit(folder, mask_token_id=ids["<|mdm_mask|>"])
    loaded = load(folder)
    assert not ran.exists()
    tokenizer = loaded.tokenizer
    # the checkpoint does not say which token is the mask
    assert (tokenizer.mask_token, tokenizer.mask_token_id) == ("<|mdm_mask|>", ids["<|mdm_mask|>"])
    assert loaded.special.eot == ids["<|eot_id|>"]
    chat = [{"role": "user", "content": "Why?"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|startoftext|><|start_header_id|>user<|end_header_id|>\n\nWhy?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


@pytest.mark.parametrize(
    "family, expected", [("LLaDAModelLM", "theirs"), ("MMadaModelLM", "one newline")]
)
def test_whose_chat_template(tmp_path, family, expected):
    folder, _ = toys.llada(tmp_path, architectures=[family])
    toys.save_llada_tokenizer(folder, template="theirs")
    written = load(folder).tokenizer.apply_chat_template(
        [{"role": "user", "content": "A"}, {"role": "assistant", "content": "B"}], tokenize=False
    )
    one_newline = (
        "<|startoftext|><|start_header_id|>user<|end_header_id|>\nA<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\nB<|eot_id|>"
    )
    assert written == {"theirs": "theirs", "one newline": one_newline}[expected]


@pytest.mark.parametrize("load", [load, partial(from_causal, mask_token_id=279)])
def test_a_head_that_should_be_tied_and_is_not(tmp_path, load):
    causal = save_causal(tmp_path, "qwen2", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    assert "lm_head.weight" not in tensors
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, tmp_path / "model.safetensors")
    model = load(tmp_path).model
    assert torch.equal(model.lm_head.weight, causal.lm_head.weight)
    for other, fault in ((embedding + 1, "head of .* is another"), (embedding[:5], "has shape")):
        save_file({**tensors, "lm_head.weight": other.clone()}, tmp_path / "model.safetensors")
        refused(fault, load, tmp_path)


def test_a_baseline_writes_as_its_authors_say(tmp_path):
    causal = save_causal(tmp_path, eos_token_id=7)
    causal.generation_config.eos_token_id = [7, 9]
    causal.generation_config.pad_token_id = 7
    causal.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    assert loaded.model.generation_config.eos_token_id == [7, 9]
    written = loaded.model.generate(IDS, max_new_tokens=4, do_sample=False)
    assert torch.equal(written, causal.generate(IDS, max_new_tokens=4, do_sample=False))


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"sink_count": 1, "sink_kind": "token"},
            "sink_count, sink_kind can be set for diffusion models only; from_causal",
        ),
        ({"sink_knid": "token"}, "'sink_knid' is no setting of .* did you mean 'sink_kind'"),
        ({"attn_implementation": "eager"}, "'attn_implementation' is no setting of"),
    ],
)
def test_settings_that_make_no_sense_are_refused(tmp_path, settings, message):
    save_causal(tmp_path)
    refused(message, load, tmp_path, **settings)


WITHOUT_SINK, WITHOUT_GATE = {"sink_kind": "none", "sink_count": 0}, {"gate": "none"}


@pytest.mark.parametrize(
    "removed", [WITHOUT_SINK, WITHOUT_GATE, WITHOUT_SINK | WITHOUT_GATE], ids="-".join
)
@pytest.mark.parametrize("own", [False, True])
def test_a_sink_or_gate_is_taken_away_on_request(tmp_path, own, removed):
    folder = (
        save_tiny(tmp_path, 1, gate="elementwise")
        if own
        else toys.smdm(tmp_path, sink=1, gate=True)[0]
    )
    whole, model = load(folder).model, load(folder, **removed).model
    assert hasattr(model, "sink_embeddings") == ("sink_kind" not in removed)
    assert hasattr(model, "gates") == ("gate" not in removed)
    kept = whole.state_dict()
    assert model.state_dict().keys() < kept.keys()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in model.state_dict().items())
    assert not torch.equal(model(IDS).logits, whole(IDS).logits)
    model.save_pretrained("again")
    assert torch.equal(load("again").model(IDS).logits, model(IDS).logits)


def test_a_setting_does_not_hide_a_tensor(tmp_path):
    folder = save_tiny(tmp_path, 1, gate="elementwise")
    assert load(folder, sink_side="end").model.config.sink_side == "end"
    tensors = load_file(folder / "model.safetensors")
    config = toys.config_of(folder)
    # the file says there is none, and nobody asked for that
    for said, asked, found in (
        (WITHOUT_SINK, WITHOUT_GATE, "sink_embeddings"),
        (WITHOUT_GATE, WITHOUT_SINK, r"gates\.0"),
    ):
        toys.edit(folder, **said)
        for settings in ({}, asked):
            refused(f"unexpected: {found}", load, folder, **settings)
        toys.edit(folder, **config)
    strangers = {
        name: torch.ones(1) for name in ("gates.2.weight", "sink_embeddings_2", "stranger")
    }
    save_file({**tensors, **strangers}, folder / "model.safetensors")
    refused(r"unexpected: gates\.2\.weight", load, folder, **WITHOUT_SINK, **WITHOUT_GATE)
    refused("mismatched: sink_embeddings", load, folder, sink_count=2)


def test_the_table_fills_in_what_the_config_leaves_out(tmp_path, monkeypatch):
    row = Published("llada", 300, SpecialIds(mask=298, eot=297, bos=296), 48)
    monkeypatch.setitem(PUBLISHED, "someone/toy", row)
    folder, _ = toys.llada(tmp_path, _name_or_path="someone/toy", mask_token_id=None)
    loaded = load(folder)
    assert loaded.special == SpecialIds(mask=298, eos=1, eot=297, pad=1, bos=296, stop=(1, 297))
    assert loaded.context == 48
    assert (loaded.model.config.mask_token_id, loaded.model.config.eot_token_id) == (298, 297)
    folder, _ = toys.llada(
        tmp_path, _name_or_path="someone/toy", embedding_size=299, mask_token_id=290
    )
    assert load(folder).special == SpecialIds(mask=290, eos=1, pad=1, stop=(1,))


def test_a_folder_called_like_a_checkpoint_is_taken_for_it(tmp_path, monkeypatch):
    row = Published("llada", 300, SpecialIds(mask=298, bos=296), 48)
    monkeypatch.setitem(PUBLISHED, "someone/a-toy-1B", row)
    folder, _ = toys.llada(tmp_path / "a-toy-1B", mask_token_id=None)
    loaded = load(folder)
    note = "taken for someone/a-toy-1B: matched by folder name, family and vocabulary"
    assert (loaded.special.mask, loaded.special.bos, loaded.context) == (298, 296, 48)
    assert loaded.notes == describe(folder).notes == (note,)
    monkeypatch.setitem(PUBLISHED, "someone/a-toy-1B", replace(row, vocabulary=301))
    assert load(folder).special.mask is None


def test_the_stated_context_is_saved(monkeypatch):
    row = Published("llada", 300, SpecialIds(mask=298), 48)
    monkeypatch.setitem(PUBLISHED, "someone/toy", row)
    folder, _ = toys.llada("m", _name_or_path="someone/toy")
    loaded = load(folder)
    # advice: its positions reach further
    assert loaded.context == 48
    assert loaded.model(torch.arange(3, 59)[None]).logits.shape[1] == 56
    loaded.model.save_pretrained("again")
    toys.edit("again", _name_or_path="")
    assert load("again").context == describe("again").context == 48
    assert load("again", context=1000).context == 64


@pytest.mark.parametrize(
    "kind, change",
    [
        ("own", {}),
        ("qwen2", {"auto_map": "absent"}),
        ("qwen3", {"tokenizer_class": "Qwen2Tokenizer"}),
    ],
)
def test_dreams_tokenizer_beside_another_model(tmp_path, kind, change):
    folder = tmp_path / "m"
    if kind == "own":
        load(toys.dream("dream")[0]).model.save_pretrained(folder)
    else:
        save_causal(folder, kind)
    ids = toys.save_dream_tokenizer(folder)
    toys.edit(folder, "tokenizer_config.json", **change)
    ran = toys.poison(folder)
    tokenizer = load(folder).tokenizer
    assert not ran.exists()
    assert isinstance(tokenizer, Qwen2Tokenizer)
    expected = [*tokenizer.convert_tokens_to_ids(["hel", "l", "o"]), ids["<|mask|>"]]
    assert tokenizer("hello<|mask|>")["input_ids"] == expected
