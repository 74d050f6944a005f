"""Mixtures of experts: their tensors, their arithmetic written out, and everything that is done
with a loaded model.
"""

# T tokens, E hidden size, X experts, C chosen experts

import pytest
import torch
from safetensors.torch import save_file
from torch.testing import assert_close
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import published_toys as toys
from refusals import refused
from sinklab.lab.checkpoints import describe, from_causal, load
from tiny_models import SIZES

pytestmark = pytest.mark.ring("extras")

IDS = torch.arange(3, 21).view(1, 18)


def test_query_key_and_value_are_taken_apart(tmp_path):
    folder, tensors = toys.llada2(tmp_path, use_qkv_bias=True)
    model = load(folder).model
    attention, here = model.model.layers[1].self_attn, "model.layers.1.attention."
    for what in ("weight", "bias"):
        parts = [getattr(getattr(attention, f"{kind}_proj"), what) for kind in "qkv"]
        assert [len(part) for part in parts] == [64, 32, 32]
        assert torch.equal(torch.cat(parts), tensors[f"{here}query_key_value.{what}"])
    assert torch.equal(attention.o_proj.weight, tensors[here + "dense.weight"])
    assert torch.equal(attention.k_norm.weight, tensors[here + "key_layernorm.weight"])
    gate = model.model.layers[1].mlp.gate
    assert torch.equal(gate.e_score_correction_bias, tensors["model.layers.1.mlp.gate.expert_bias"])
    # half of the head is turned
    assert model.model.rotary_emb.inv_freq.shape == (4,)


def test_what_corrects_a_router_stays_float32(tmp_path):
    folder, tensors = toys.llada2(tmp_path)
    model = load(folder, dtype=torch.bfloat16).model
    found = model.model.layers[2].mlp.gate.e_score_correction_bias
    assert torch.equal(
        found, next(t for n, t in tensors.items() if n.startswith("model.layers.2") and "bias" in n)
    )
    assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}
    assert model(IDS).logits.dtype == torch.bfloat16


@pytest.mark.parametrize(
    "kind, config, experts",
    [
        (Qwen3MoeForCausalLM, Qwen3MoeConfig, "num_experts"),
        (Glm4MoeForCausalLM, Glm4MoeConfig, "n_routed_experts"),
    ],
)
def test_a_causal_mixture_is_the_start_of_a_diffusion_model(tmp_path, kind, config, experts):
    own = {"vocab_size": 60, experts: 4, "moe_intermediate_size": 12, "num_experts_per_tok": 2}
    causal = kind(config(**SIZES | own)).eval()
    causal.save_pretrained(tmp_path)
    start = from_causal(tmp_path, mask_token_id=59).model
    assert_close(start(IDS, causal=True).logits, causal(IDS).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(start(IDS).logits, causal(IDS).logits, atol=1e-4)


@pytest.mark.parametrize(
    "change, message",
    [
        (
            lambda t: t.pop("model.layers.1.mlp.experts.5.up_proj.weight"),
            r"missing: model\.layers\.1\.mlp\.experts\.5",
        ),
        (
            lambda t: t.update({"model.layers.1.mlp.experts.5.up_proj.weight": torch.ones(11, 32)}),
            r"mismatched: model\.layers\.1\.mlp\.experts\.5\.up_proj\.weight has shape \(11, 32\)",
        ),
        (
            lambda t: t.update(
                {"model.layers.1.attention.query_key_value.weight": torch.ones(136, 32)}
            ),
            r"mismatched: model\.layers\.1\.attention\.query_key_value\.weight has shape \(136, "
            r"32\)",
        ),
    ],
)
def test_wrong_experts_are_named_as_the_checkpoint_names_them(tmp_path, change, message):
    folder, tensors = toys.llada2(tmp_path)
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    refused(message, load, folder)


def test_the_mask_that_no_config_names():
    rows = {
        "vocab_size": 156900,
        "hidden_size": 8,
        "head_dim": 4,
        "mask_token_id": None,
        "intermediate_size": 8,
    }
    folder, _ = toys.llada2("a", **rows, num_hidden_layers=1, num_attention_heads=2)
    info = describe(folder)
    assert info.special.mask == 156895
    assert "[MASK] is id 156895" in info.notes[0]
    folder, _ = toys.llada_moe("b", mask_token_id=None)
    assert describe(folder).special.mask is None and describe(folder).notes == ()


def test_the_chat_format_is_the_authors(tmp_path):
    folder, _ = toys.llada2(tmp_path, vocab_size=300)
    toys.save_llada_tokenizer(folder)
    tokenizer = load(folder).tokenizer
    said = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True
    )
    head = "<role>SYSTEM</role>{}<|role_end|><role>HUMAN</role>a<|role_end|>"
    assert said == head.format("detailed thinking off") + "<role>ASSISTANT</role>"
    chat = [
        {"role": "system", "content": "b"},
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "c"},
    ]
    said = tokenizer.apply_chat_template(chat, tokenize=False)
    assert said == head.format("b") + "<role>ASSISTANT</role>c<|role_end|>"
