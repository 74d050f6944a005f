"""Published formats: every name and shape is checked in the names of the checkpoint, and what
cannot be is refused.
"""

import re

import pytest
import torch
from safetensors.torch import save_file

import published_toys as toys
from refusals import refused
from sinklab.lab.checkpoints import load


def test_tensors_arrive_where_they_belong(tmp_path):
    folder, tensors = toys.llada(tmp_path, n_kv_heads=2)
    model = load(folder).model
    attention = model.model.layers[1].self_attn
    here = "model.transformer.blocks.1."
    for kind in "qkv":
        ours = getattr(attention, f"{kind}_proj").weight
        assert torch.equal(ours, tensors[f"{here}{kind}_proj.weight"])
    assert torch.equal(attention.o_proj.weight, tensors[here + "attn_out.weight"])
    assert torch.equal(model.model.layers[1].mlp.gate_proj.weight, tensors[here + "ff_proj.weight"])
    assert torch.equal(model.lm_head.weight, tensors["model.transformer.ff_out.weight"])
    assert not model.training
    assert model.model.rotary_emb.inv_freq[1].item() == pytest.approx(500000.0 ** (-2 / 8))


def test_a_tied_head_is_the_embedding(tmp_path):
    folder, tensors = toys.llada(tmp_path, weight_tying=True)
    model = load(folder, dtype=torch.bfloat16).model
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, tensors["model.transformer.wte.weight"].bfloat16())
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize("sink, gate", [(0, False), (1, True)])
def test_fused_and_interleaved_projections(tmp_path, sink, gate):
    folder, tensors = toys.smdm(tmp_path, sink, gate)
    model = load(folder).model
    # two groups of: two query heads, a key head, a value head, each of 8 rows
    fused = tensors["transformer.h.1.attn.attn.weight"].view(2, 4, 8, 32)
    attention = model.model.layers[1].self_attn
    assert torch.equal(
        attention.q_proj.weight, torch.cat([fused[0, 0], fused[0, 1], fused[1, 0], fused[1, 1]])
    )
    assert torch.equal(attention.k_proj.weight, torch.cat([fused[0, 2], fused[1, 2]]))
    assert torch.equal(attention.v_proj.weight, torch.cat([fused[0, 3], fused[1, 3]]))
    assert torch.equal(model.model.embed_tokens.weight, tensors["transformer.wte.weight"][:61])
    if sink:
        assert torch.equal(model.sink_embeddings, tensors["transformer.wte.weight"][61:])
    if gate:
        assert torch.equal(model.gates[1].weight, tensors["transformer.h.1.attn.gate.weight"])
    assert (model.config.sink_count, model.config.gate != "none") == (sink, gate)
    assert model.config.backbone.max_position_embeddings == 40 + sink
    assert model(torch.arange(40)[None]).logits.shape == (1, 40, 61)


def test_wrong_tensors_are_named_as_the_checkpoint_names_them(tmp_path):
    folder, tensors = toys.llada(tmp_path)
    name = "model.transformer.blocks.1.up_proj.weight"
    for change, message in [
        ({key: value for key, value in tensors.items() if key != name}, f"missing: {name}"),
        (
            {**tensors, "model.transformer.blocks.2.q_norm.weight": torch.ones(2)},
            "unexpected: .*blocks.2.q_norm",
        ),
        (
            {**tensors, name: torch.ones(3, 32)},
            f"mismatched: {name} has shape (3, 32), which does not give "
            "model.layers.1.mlp.up_proj.weight (48, 32)",
        ),
    ]:
        save_file(change, folder / "model.safetensors")
        refused(message if ".*" in message else re.escape(message), load, folder)


def test_a_fused_tensor_of_the_wrong_size_is_named(tmp_path):
    folder, tensors = toys.smdm(tmp_path)
    name = "transformer.h.0.attn.attn.weight"
    for rows in (66, 48):
        save_file({**tensors, name: torch.ones(rows, 32)}, folder / "model.safetensors")
        refused(rf"{name} has shape \({rows}, 32\)", load, folder)
    save_file(
        {**tensors, "transformer.wte.weight": torch.ones(64, 32)}, folder / "model.safetensors"
    )
    refused(r"weight has shape \(64, 32\)", load, folder)


def test_images_are_no_text(tmp_path):
    for extra, expected in (
        ({"llm_vocab_size": 250}, 250),
        ({"codebook_size": 40}, 260),
        ({}, None),
    ):
        folder, _ = toys.llada(tmp_path, architectures=["MMadaModelLM"], mask_token_id=240, **extra)
        loaded = load(folder)
        assert (loaded.published_family, loaded.model.config.text_vocab_size) == ("mmada", expected)


def test_quantised_tensors_are_refused(tmp_path):
    folder, tensors = toys.llada(tmp_path)
    name = "model.transformer.blocks.0.q_proj.weight"
    save_file({**tensors, name: torch.ones(32, 32, dtype=torch.int8)}, folder / "model.safetensors")
    refused(f"{name} holds I8, but", load, folder)
