"""Parity with the code of «One Token Is Enough»: logits, losses and gradient norms of its three variants."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

from golden_llada import golden_cases, golden_folder, golden_tensors
from sinklab.diffusion import masked_token_loss
from sinklab.models import DiffusionLM, DiffusionLMConfig

VARIANTS = {
    "smdm_vanilla": {},
    "smdm_sink": {"sink_kind": "token", "sink_count": 1},
    "smdm_gate": {"gate": "elementwise"},
}


def parts(name, layers):
    """Names of ours that one tensor of theirs is split into."""
    fixed = {
        "transformer.wte.weight": ["model.embed_tokens.weight", "sink_embeddings"],
        "transformer.ln_f.weight": ["model.norm.weight"],
        "lm_head.weight": ["lm_head.weight"],
    }
    if name in fixed:
        return fixed[name]
    layer, rest = name.removeprefix("transformer.h.").split(".", 1)
    assert int(layer) < layers
    here = f"model.layers.{layer}."
    return {
        "norm_1.weight": [here + "input_layernorm.weight"],
        "norm_2.weight": [here + "post_attention_layernorm.weight"],
        "attn.attn.weight": [here + f"self_attn.{kind}_proj.weight" for kind in "qkv"],
        "attn.proj.weight": [here + "self_attn.o_proj.weight"],
        "attn.gate.weight": [f"gates.{layer}.weight"],
        "mlp.swiglu.w1.weight": [here + "mlp.gate_proj.weight"],
        "mlp.swiglu.w2.weight": [here + "mlp.up_proj.weight"],
        "mlp.swiglu.w3.weight": [here + "mlp.down_proj.weight"],
    }[rest]


def split(name, tensor, heads, vocab):
    if name.endswith("attn.attn.weight"):  # per head: q, k, v
        return [part.flatten(0, 1) for part in tensor.view(heads, 3, -1, tensor.shape[1]).unbind(1)]
    if name == "transformer.wte.weight":
        return [tensor[:vocab], tensor[vocab:]]
    if name == "lm_head.weight":
        return [torch.cat([tensor, torch.zeros(vocab - len(tensor), tensor.shape[1])])]
    return [tensor]


def load_smdm(family):
    folder = golden_folder(family)
    raw = json.loads((folder / "config.json").read_text())
    tensors = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}
    settings = VARIANTS[family]
    vocab = raw["vocab_size"] + 1  # [MASK] has an embedding and no row in the head
    backbone = LlamaConfig(
        vocab_size=vocab,
        hidden_size=raw["n_embd"],
        intermediate_size=raw["intermediate_size"],
        num_hidden_layers=raw["n_layer"],
        num_attention_heads=raw["n_head"],
        num_key_value_heads=raw["n_query_groups"],
        max_position_embeddings=raw["block_size"] + 1,
        rms_norm_eps=raw["norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=False,
    )
    model = DiffusionLM(DiffusionLMConfig(backbone, mask_token_id=vocab - 1, **settings)).eval()
    state = {}
    for name, tensor in tensors.items():
        pieces = split(name, tensor, raw["n_head"], vocab)
        state.update({n: p for n, p in zip(parts(name, raw["n_layer"]), pieces, strict=False) if len(p)})
    model.load_state_dict(state, strict=True)
    return model


@pytest.mark.parametrize("family", VARIANTS)
def test_golden_logits(family):
    model, expected = load_smdm(family), golden_tensors(family)
    columns = expected["columns"].long() if "columns" in expected else slice(model.config.vocab_size - 1)
    for case in golden_cases(family)["logits"]:
        ids = expected[f"logits.{case['name']}.input_ids"].long()
        logits = model(ids).logits
        assert (logits[..., columns] - expected[f"logits.{case['name']}.logits"]).abs().max() < 5e-4, case["name"]


@pytest.mark.parametrize("family", VARIANTS)
def test_golden_losses_and_gradients(family):
    model, expected = load_smdm(family), golden_tensors(family)
    compared = 0
    for case in golden_cases(family)["losses"]:
        if not case["name"].startswith("pretrain"):
            continue
        prefix = f"loss.{case['name']}."
        ids, noisy = expected[prefix + "input_ids"].long(), expected[prefix + "noisy_input"].long()
        masked, t_B = expected[prefix + "mask_indices"], expected[prefix + "p_mask"][:, 0]
        model.zero_grad()
        logits = model(noisy, logits_to_keep=masked).logits[:, : model.config.vocab_size - 1]
        loss = masked_token_loss(logits, ids, masked, t_B)
        loss.backward()
        assert loss.item() == pytest.approx(case["loss"], rel=1e-5)
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        for name, norm in case["grad_l2"].items():
            pieces = [grads[piece] for piece in parts(name, 99) if piece in grads]
            ours = math.sqrt(sum(piece.double().square().sum().item() for piece in pieces))
            assert ours == pytest.approx(norm, rel=1e-3), name
            compared += 1
    assert compared > 0
