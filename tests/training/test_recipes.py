"""The recipes are the paper's runs: sizes, tokens, and nothing but the variant between two of
them.
"""

import copy
import dataclasses
import functools
import math

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from refusals import refused
from sinklab import load
from sinklab.lab.training import train
from sinklab.lab.training.checks import check
from sinklab.lab.training.model import new_model
from sinklab.lab.training.settings import RECIPES, VARIANTS, recipe
from tiny_diffusion import tiny_tokenizer
from tiny_training import tiny_settings, uneven_documents

MODEL = {"sink_kind", "sink_count", "sink_side", "gate", "out"}


@functools.cache
def llamas_words():
    """A tokenizer of as many words as Llama's has, and [MASK]."""
    words = {f"w{number}": number for number in range(31_999)} | {"</s>": 31_999, "[MASK]": 32_000}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, "w0")), mask_token="[MASK]", eos_token="</s>"
    )


def built(variant):
    """The 472M model without its memory."""
    with torch.device("meta"):
        return new_model(recipe("scratch-472m", variant), llamas_words())


def parameters(model):
    """All but the embedding and the head."""
    words = (model.get_input_embeddings().weight, model.get_output_embeddings().weight)
    return sum(weight.numel() for weight in model.parameters()) - sum(
        weight.numel() for weight in words
    )


def test_the_472m_recipe_has_the_published_sizes():
    plain = parameters(built("plain"))
    # the released Diff_LLaMA_472M: 471.91M, and 553.83M with its embedding and head
    assert plain == 18 * (4 * 1280**2 + 3 * 1280 * 5120 + 2 * 1280) + 1280 == 471_906_560
    assert parameters(built("gate")) - plain == 18 * 1280 * 1280  # 29.49M
    assert [
        parameters(built(f"{count}sink{end}")) - plain
        for count, end in (("", ""), ("2-", "s"), ("4-", "s"))
    ] == [
        1280,
        2 * 1280,
        4 * 1280,
    ]


def test_smdms_start_is_small_where_layers_write_to_the_residual_stream():
    assert recipe("scratch-472m").backbone == "smdm"
    tokenizer = tiny_tokenizer()
    sizes = {"hidden_size": 128, "mlp_size": 512, "layers": 6}
    model, plain = (
        new_model(recipe("laptop-scratch", "gate", backbone=kind, **sizes), tokenizer)
        for kind in ("smdm", "llama")
    )
    # SMDM, lit_gpt/diffmodel.py: all matrices, and those called proj (of attention) and w3 (of the
    # MLP)
    wide, deep = math.sqrt(2 / (5 * 128)), 1 / (math.sqrt(128) * 6)
    seen = set()
    # the head of its own is drawn last
    drawn = dict(model.named_parameters())
    assert drawn.pop("lm_head.weight").shape == plain.lm_head.weight.shape
    for (name, weight), usual in zip(drawn.items(), plain.parameters(), strict=True):
        kind = name.rpartition(".")[0].rpartition(".")[2]
        if weight.ndim == 1:
            assert torch.equal(weight, usual)
            continue
        expected = deep if kind in ("o_proj", "down_proj") else wide
        assert float(weight.detach().std() / expected) == pytest.approx(
            1, abs=6 / math.sqrt(2 * weight.numel())
        ), name
        # the same draws as any other start's
        assert torch.allclose(weight / expected, usual / 0.02, atol=1e-5), name
        seen.add(kind)
    assert {"o_proj", "down_proj", "q_proj", "up_proj", "embed_tokens"} <= seen
    # at the size of the paper: 12.9 times smaller than transformers' 0.02
    assert 0.02 * math.sqrt(1280) * 18 == pytest.approx(12.9, abs=0.05)


def test_the_end_of_a_text_is_learned_where_it_is_the_padding_too(tmp_path):
    settings = tiny_settings(uneven_documents(tmp_path), backbone="smdm", steps=4)
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(str(settings.tokenizer))
    before = new_model(settings, tokenizer).get_input_embeddings().weight[tokenizer.eos_token_id]
    after = load(train(settings)).model.get_input_embeddings().weight[tokenizer.eos_token_id]
    assert (after - before).abs().max() > 1e-3


@pytest.mark.parametrize("name", RECIPES)
def test_variants_of_a_recipe_differ_in_the_variant_alone(name):
    plain = dataclasses.asdict(recipe(name))
    folders = []
    for variant in VARIANTS:
        if plain["objective"] == "autoregressive" and variant != "plain":
            refused("plain autoregressive model", recipe, name, variant)
            continue
        if plain["train_only"] == "sink" and not VARIANTS[variant].get("sink_kind"):
            continue
        settings = recipe(name, variant)
        check(settings)
        changed = {
            key for key, value in dataclasses.asdict(settings).items() if plain[key] != value
        }
        # fine-tuning goes on with the model of its variant
        assert changed <= MODEL | ({"init_from"} if plain["pairs"] != "none" else set()), variant
        folders.append(settings.out)
    assert len(folders) == len(set(folders))


def test_changes_and_mistakes():
    assert recipe("laptop-scratch", steps=3, out="here").out == "here"
    refused("did you mean 'laptop-sft'", recipe, "laptop-sfd")
    with pytest.raises(TypeError, match="stepps"):
        recipe("laptop-scratch", stepps=3)
