"""Mixtures of experts: their tensors, their arithmetic written out, and everything that is done
with a loaded model.
"""

# T tokens, E hidden size, X experts, C chosen experts
import json

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F
from torch.testing import assert_close
from transformers import Glm4MoeConfig, Glm4MoeForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import published_toys as toys
from refusals import refused
from sinklab.core.instrument import intervene, trace
from sinklab.core.subject import DiffusionLM, DiffusionLMConfig
from sinklab.lab.checkpoints import describe, load, untrained_twins
from sinklab.lab.measures import MaskSinks
from tiny_models import SIZES

pytestmark = pytest.mark.ring("extras")

IDS = torch.arange(3, 21).view(1, 18)
OWN = {"shared_expert_intermediate_size": 20, "moe_router_enable_expert_bias": True}
MAKES = {
    "llada_moe-own": lambda folder, **fields: toys.llada_moe(folder, **{**OWN, **fields}),
    "llada2": toys.llada2,
}
every_make = pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)


def gated(tensors, here, x_TE):
    gate, up, down = (
        tensors[f"{here}{kind}_proj.weight"].to(x_TE) for kind in ("gate", "up", "down")
    )
    return (F.silu(x_TE @ gate.T) * (x_TE @ up.T)) @ down.T


def mixed(tensors, here, x_TE, weights_TX):
    """Every expert on every token, by its weight, which is 0 where it was not chosen."""
    return sum(
        weights_TX[:, [expert]] * gated(tensors, f"{here}experts.{expert}.", x_TE)
        for expert in range(weights_TX.shape[1])
    )


def llada_moe_block(tensors, config, layer, x_TE):
    here = f"model.layers.{layer}."
    scores_TX = (x_TE @ tensors[here + "mlp.gate.weight"].to(x_TE).T).softmax(-1)
    if config["moe_router_enable_expert_bias"]:
        scores_TX = scores_TX + tensors[here + "mlp.expert_bias"].to(x_TE)
    least = scores_TX.sort(-1).values[:, [-config["num_experts_per_tok"]]]
    out_TE = mixed(tensors, here + "mlp.", x_TE, scores_TX * (scores_TX >= least))
    is_shared = config["shared_expert_intermediate_size"] is not None
    return out_TE + gated(tensors, here + "shared_expert.", x_TE) if is_shared else out_TE


def llada2_block(tensors, config, layer, x_TE):
    here, count = f"model.layers.{layer}.mlp.", config["num_experts"]
    scores_TX = torch.sigmoid(x_TE @ tensors[here + "gate.weight"].to(x_TE).T)
    rows = []
    for scores_X in scores_TX:
        ranked_X = scores_X.detach() + tensors[here + "gate.expert_bias"]
        groups = ranked_X.view(config["n_group"], -1)
        best = groups.topk(2).values.sum(-1).topk(config["topk_group"]).indices.tolist()
        allowed = [expert for expert in range(count) if expert // groups.shape[1] in best]
        chosen = sorted(allowed, key=lambda expert: -ranked_X[expert])[
            : config["num_experts_per_tok"]
        ]
        weights_X = scores_X * torch.tensor([expert in chosen for expert in range(count)])
        rows.append(weights_X / weights_X.sum() * config["routed_scaling_factor"])
    return mixed(tensors, here, x_TE, torch.stack(rows)) + gated(
        tensors, here + "shared_experts.", x_TE
    )


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


@pytest.mark.parametrize(
    "make, reference, fields",
    [
        (toys.llada_moe, llada_moe_block, {}),
        (toys.llada_moe, llada_moe_block, OWN),
        (toys.llada_moe, llada_moe_block, {**OWN, "moe_router_enable_expert_bias": False}),
        (toys.llada2, llada2_block, {}),
        (
            toys.llada2,
            llada2_block,
            {"num_experts_per_tok": 2, "topk_group": 1, "routed_scaling_factor": 1.0},
        ),
    ],
    ids=["softmax", "shared and bias", "shared", "groups", "one group"],
)
def test_a_layer_of_experts_is_what_is_written(tmp_path, make, reference, fields):
    folder, tensors = make(tmp_path, **fields)
    block = load(folder, dtype=torch.float64).model.model.layers[2].mlp
    x_TE = torch.randn(40, 32, dtype=torch.float64)
    outcomes = []
    for function in (
        lambda x: block(x[None])[0],
        lambda x: reference(tensors, toys.config_of(folder), 2, x),
    ):
        given_TE = x_TE.clone().requires_grad_()
        out_TE = function(given_TE)
        out_TE.square().sum().backward()
        outcomes.append((out_TE.detach(), given_TE.grad))
    # routers go through float32
    for ours, theirs in zip(*outcomes, strict=True):
        assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert len(block.gate(x_TE)[2].unique()) >= 4, (
        "one set of experts would not show how they are chosen"
    )
    assert block.gate.weight.grad.abs().max() > 0


def test_one_expert_is_not_weighed_against_itself(tmp_path):
    folder, _ = toys.llada2(tmp_path, num_experts_per_tok=1)
    weights_TC = load(folder).model.model.layers[1].mlp.gate(torch.randn(9, 32))[1]
    assert weights_TC.unique().numel() == 9 and weights_TC.max() < 2.5


@every_make
def test_a_mixture_is_a_model_like_any_other(tmp_path, make):
    folder, _ = make(tmp_path)
    model = load(folder).model
    with torch.inference_mode(), trace(model, ("received",)) as recording:
        traced = model(IDS).logits
    with torch.inference_mode():
        assert torch.equal(model(IDS).logits, traced)
        with intervene(model, MaskSinks(k=2)):
            # the second step loses what received most in the first
            first, masked = model(IDS).logits, model(IDS).logits
    assert torch.equal(first, traced)
    received = recording.array("received")
    assert received.shape[-3:] == (3, 4, 18)
    assert received.sum(-1) == pytest.approx(18, rel=1e-4)
    assert not torch.allclose(masked, traced, atol=1e-3)


@pytest.mark.parametrize(
    "name, bias", [("llada_moe-own", "expert_bias"), ("llada2", "e_score_correction_bias")]
)
def test_what_corrects_a_router_stays_float32(tmp_path, name, bias):
    folder, tensors = MAKES[name](tmp_path)
    model = load(folder, dtype=torch.bfloat16).model
    found = getattr(model.model.layers[2].mlp.gate, bias)
    assert torch.equal(
        found, next(t for n, t in tensors.items() if n.startswith("model.layers.2") and "bias" in n)
    )
    assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}
    assert model(IDS).logits.dtype == torch.bfloat16


def test_finished_blocks_of_a_mixture_are_kept(tmp_path):
    folder, _ = toys.llada2(tmp_path)
    assert load(folder).model.config.block_length == 32
    model = load(folder, block_length=4).model
    settings = {"max_new_tokens": 8, "seed": 0}
    written = model.generate(IDS[:, :6], cache="none", **settings)
    assert torch.equal(model.generate(IDS[:, :6], cache="committed", **settings), written)
    assert torch.equal(model.generate(IDS[:, :6], **settings), written)


@every_make
def test_untrained_twins_of_experts(tmp_path, make):
    loaded = load(make(tmp_path)[0])
    twins = untrained_twins(loaded)
    assert list(twins) == ["initialised", "permuted"]
    fresh = twins["initialised"].model.state_dict()
    for name in ("gate.weight", "experts.gate_up_proj", "experts.down_proj"):
        assert abs(fresh[f"model.layers.2.mlp.{name}"].std().item() / 0.02 - 1) < 0.2, name
    assert all((tensor == 0).all() for name, tensor in fresh.items() if name.endswith("bias"))


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
    model = DiffusionLM.from_backbone(causal, mask_token_id=59).eval()
    assert_close(model(IDS, causal=True).logits, causal(IDS).logits)
    assert not torch.allclose(model(IDS).logits, causal(IDS).logits, atol=1e-4)
    causal.save_pretrained(tmp_path)
    start = load(tmp_path, as_diffusion=True, mask_token_id=59).model
    assert_close(start(IDS, causal=True).logits, causal(IDS).logits, rtol=1e-4, atol=1e-4)


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


def test_the_sizes_of_llada_moe(tmp_path):
    sizes = {
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "moe_layer_freq": [1] * 16,
        "vocab_size": 157184,
    }
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 16, "dense_intermediate_size": 8192}
    sizes |= {"expert_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8}
    expert, rest = 3 * 2048 * 1024, 4 * 2048**2 + 2 * 128 + 2 * 2048 + 64 * 2048
    ends = 2 * 157184 * 2048 + 2048
    _check_sizes(
        tmp_path,
        {**toys.LLADA_MOE, **sizes},
        *(ends + 16 * (rest + count * expert) for count in (64, 8)),
    )
    # what its authors call 7B with 1.4B active, which leaves out the embedding
    assert round((ends + 16 * (rest + 8 * expert) - 157184 * 2048) / 1e9, 1) == 1.4


def test_the_sizes_of_llada2_mini(tmp_path):
    sizes = {
        "hidden_size": 2048,
        "num_hidden_layers": 20,
        "vocab_size": 157184,
        "num_attention_heads": 16,
    }
    sizes |= {
        "num_key_value_heads": 4,
        "head_dim": 128,
        "intermediate_size": 5120,
        "num_experts": 256,
        "n_group": 8,
    }
    sizes |= {"num_experts_per_tok": 8, "moe_intermediate_size": 512, "num_shared_experts": 1}
    expert, rest = 3 * 2048 * 512, (16 + 2 * 4 + 16) * 128 * 2048 + 2 * 128 + 2 * 2048
    ends = 2 * 157184 * 2048 + 2048 + rest + 3 * 2048 * 5120
    counts = (ends + 19 * (rest + 256 * 2048 + (count + 1) * expert) for count in (256, 8))
    _check_sizes(tmp_path, {**toys.LLADA2, **sizes}, *counts)


def _check_sizes(folder, config, parameters, active):
    (folder / "config.json").write_text(json.dumps(config))
    info = describe(folder)
    assert (info.parameters, info.active_parameters) == (parameters, active)
    assert (info.experts, info.experts_per_token) == (config["num_experts"], 8)
    line = (
        f"experts          {info.experts} a layer, 8 for each token: {active:,} parameters active"
    )
    assert line in info.lines()
    assert info.as_dict()["experts"] == info.experts


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


def test_a_decoder_that_nobody_knows_is_refused():
    refused("llada_moe, but is 'gpt2'", DiffusionLMConfig, backbone={"model_type": "gpt2"})
