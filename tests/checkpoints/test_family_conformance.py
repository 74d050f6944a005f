"""The conformance suite of checkpoint families, over every built-in and every example."""

import functools

import pytest
import transformers
from packaging.version import Version
from transformers import (
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

import published_toys as toys
from conformance.models import check_family
from refusals import refused
from sinklab.lab.checkpoints import families as readers
from sinklab.lab.checkpoints import load
from sinklab.lab.registry import families
from tiny_diffusion import save_tiny
from tiny_gemma import save_gemma
from tiny_masked import FAMILIES as MASKED
from tiny_masked import save_masked
from tiny_models import SIZES

pytestmark = pytest.mark.ring("extras")

SIZES = {**SIZES, "vocab_size": 60}
EXPERTS = {"moe_intermediate_size": 12, "num_experts_per_tok": 2}
FAMILIES = {
    **{name: functools.partial(save_masked, name) for name in MASKED},
    **{name: functools.partial(toys.adapted, name=name) for name in toys.ADAPTED},
    "diffusion_gemma": save_gemma,
    "dream": lambda folder: toys.dream(folder)[0],
    "glm4_moe": lambda folder: Glm4MoeForCausalLM(
        Glm4MoeConfig(**SIZES, **EXPERTS, n_routed_experts=4)
    ).save_pretrained(folder),
    "llada": lambda folder: toys.llada(folder)[0],
    "llada2": lambda folder: toys.llada2(folder)[0],
    "llada_moe": lambda folder: toys.llada_moe(folder)[0],
    "llama": lambda folder: LlamaForCausalLM(LlamaConfig(**SIZES)).save_pretrained(folder),
    "mmada": lambda folder: toys.llada(
        folder, architectures=["MMadaModelLM"], codebook_size=40, mask_token_id=240
    )[0],
    "qwen2": lambda folder: Qwen2ForCausalLM(Qwen2Config(**SIZES)).save_pretrained(folder),
    "qwen3": lambda folder: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)).save_pretrained(
        folder
    ),
    "qwen3_moe": lambda folder: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4)
    ).save_pretrained(folder),
    "sinklab": lambda folder: save_tiny(folder, 2, gate="elementwise"),
    "smdm": lambda folder: toys.smdm(folder, sink=1, gate=True)[0],
}


def test_every_built_in_family_is_checked():
    built_in = {
        name
        for name, kind in families.items()
        if kind.__module__.startswith(("sinklab.lab.checkpoints.", "sinklab.extras.zoo."))
    }
    assert built_in == set(FAMILIES)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_conforms(tmp_path, name):
    if name == "diffusion_gemma" and Version(transformers.__version__) < Version("5.23"):
        pytest.skip("DiffusionGemma needs transformers 5.23")
    FAMILIES[name]("m")
    check_family(name, tmp_path / "m")


REFUSED = {
    "llada": {
        "alibi": True,
        "layer_norm_type": "default",
        "block_type": "sequential",
        "scale_logits": True,
        "attention_layer_norm": True,
        "input_emb_norm": True,
        "rope": False,
        "rope_scaling": {"type": "linear", "factor": 4.0},
        "include_bias": True,
        "activation_type": "swiglu",
        "residual_dropout": 0.1,
    },
    "dream": {
        "use_sliding_window": True,
        "use_mrope": True,
        "rope_theta": None,
        "expand_token_id": 303,
    },
    "smdm": {"_norm_class": "LayerNorm", "rotary_percentage": 0.25},
    "illada": {"layer_norm_eps": 1e-5, "rope_scaling": {"type": "linear"}, "resid_pdrop": 0.1},
    "llada_moe": {
        "clip_qkv": 8.0,
        "qk_layernorm": False,
        "shared_expert_intermediate_size": 20,
        "moe_router_enable_expert_bias": True,
        "partial_rotary_factor": 0.5,
        "expert_intermediate_size": None,
    },
    "llada2": {
        "use_bias": True,
        "use_qk_norm": False,
        "use_sliding_window": True,
        "num_shared_experts": None,
        "n_group": None,
    },
}
"""Values under which a family computes something else, or cannot."""


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_family_cannot_be_here_is_refused_by_name(tmp_path, name):
    FAMILIES[name](tmp_path)
    config = toys.config_of(tmp_path)
    for field, value in REFUSED[name].items():
        refused(field, readers.read, {**config, field: value}, name)


@pytest.fixture
def toy(scratch, tmp_path):
    """A checkpoint of the example's family, which is forgotten afterwards."""
    scratch(families, example="add_a_family")
    plan = (family := families["toy"]()).read(
        {"width": 32, "depth": 2, "heads": 4, "words": 50}, None
    )
    tensors = {
        family.source(plan, name)[0]: tensor
        for name, tensor in LlamaForCausalLM(plan.backbone).state_dict().items()
    }
    config = {"architectures": ["ToyDLM"], "width": 32, "depth": 2, "heads": 4, "words": 50}
    return toys.write("toy", config, tensors)


def test_the_family_of_the_example_conforms(toy):
    check_family("toy", toy)


def test_two_families_that_claim_a_checkpoint_are_refused(toy, monkeypatch):
    other = type("Other", (families["toy"],), {})
    monkeypatch.setitem(families._classes, "other", other)
    refused("families other and toy", load, toy)


class Forgetful(families["llada"]):
    def source(self, plan, target):
        name, take = super().source(plan, target)
        return name.replace("k_proj", "q_proj"), take


class Lenient(families["llada"]):
    represented = {"alibi": (False, "a value that no checkpoint has")}  # noqa: RUF012


@pytest.mark.parametrize(
    "wrong, message", [(Forgetful, "other tensors than"), (Lenient, "alibi .* is not refused")]
)
def test_a_family_that_does_not_conform_is_seen(monkeypatch, wrong, message):
    monkeypatch.setattr(families, "_classes", {**families._all(), "llada": wrong})
    with pytest.raises(AssertionError, match=message):
        check_family("llada", toys.llada("m")[0])
