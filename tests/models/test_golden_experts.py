"""Mixtures of experts: logits, attention, routers and experts chosen, against what the authors'
code gives.
"""

from contextlib import ExitStack

import pytest
import torch
from torch.testing import assert_close

from golden import golden_cases, golden_model, tensors_of
from sinklab.core.instrument import trace

pytestmark = pytest.mark.ring("extras")

LLADA2 = ("llada2_moe", "llada21_moe")
BACKBONES = {"llada_moe": ("llada_moe", {"qwen3_moe", "llada_moe"})}
BACKBONES |= {family: ("llada2", {"glm4_moe"}) for family in LLADA2}
CASES = {"llada_moe": {"plain", "batch", "leftpad", "rightpad"}}
CASES |= {family: {"blockmask", "batch", "full", "no_mask"} for family in LLADA2}


def loaded_of(family, **settings):
    mask_id = golden_cases(family)["special_ids"]["mask"]
    return golden_model(family, mask_token_id=mask_id, **settings)


def case_of(family, name):
    """The tensors of a case, by their short names."""
    return tensors_of(family, f"logits.{name}.")


def logits_of(model, case):
    with torch.inference_mode():
        return model(case["input_ids"], case.get("attention_mask"), visible=case.get("mask")).logits


@pytest.mark.parametrize("family", LLADA2)
def test_golden_blocks(family):
    """The same without a mask that says so: in blocks as told, and in those of the family, which
    are longer.
    """
    assert loaded_of(family).model.config.block_length == 32
    for case in golden_cases(family)["logits"]:
        if "block_length" in case:
            model = loaded_of(family, block_length=case["block_length"]).model
            tensors = case_of(family, case["name"])
            tensors.pop("mask")
            assert (logits_of(model, tensors) - tensors["logits"]).abs().max() < 5e-4, case["name"]


@pytest.mark.parametrize("family", CASES)
def test_golden_logits(family):
    assert {case["name"] for case in golden_cases(family)["logits"]} == CASES[family]
    for name in CASES[family]:
        case = case_of(family, name)
        off_BSV = (logits_of(loaded_of(family).model, case) - case["logits"]).abs()
        assert off_BSV[case.get("valid", ...)].max() < 5e-4, name


@pytest.mark.parametrize(
    "family, name", [("llada_moe", "plain"), *((family, "blockmask") for family in LLADA2)]
)
def test_golden_attention(family, name):
    model, case = loaded_of(family).model, case_of(family, name)
    config = model.config.backbone
    heads, layers = range(config.num_attention_heads), range(config.num_hidden_layers)
    with trace(model, maps=[(0, layer, head) for layer in layers for head in heads]) as recording:
        logits_of(model, case)
    assert len(layers) == sum(key.startswith("probs.") for key in case)
    for layer in layers:
        ours_HQK = torch.stack(
            [torch.as_tensor(recording.map(0, layer, head))[0] for head in heads]
        )
        assert_close(ours_HQK, case[f"probs.{layer}"][0], rtol=0, atol=3e-4)


@pytest.mark.parametrize("family", LLADA2)
def test_golden_routers(family):
    model, case, seen = loaded_of(family).model, case_of(family, "blockmask"), []
    blocks = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    with ExitStack() as hooks:
        for block in blocks:
            hooks.enter_context(
                block.gate.register_forward_hook(lambda *call: seen.append(call[2]))
            )
        logits_of(model, case)
    assert len(seen) == len(blocks) == sum(key.startswith("experts.") for key in case)
    for number, (logits_TX, _, chosen_TC) in enumerate(seen):
        assert_close(logits_TX, case[f"router_logits.{number}"][0], rtol=0, atol=5e-4)
        assert torch.equal(chosen_TC.sort(-1).values, case[f"experts.{number}"][0])


@pytest.mark.parametrize("family", CASES)
def test_golden_families(family):
    loaded, ids = loaded_of(family), golden_cases(family)["special_ids"]
    name, backbones = BACKBONES[family]
    assert (loaded.family, loaded.published_family, loaded.tokenizer) == ("diffusion", name, None)
    assert loaded.model.config.backbone.model_type in backbones
    assert (loaded.special.mask, loaded.special.eos, loaded.special.pad) == (
        ids["mask"],
        ids["eos"],
        ids["pad"],
    )
    assert not loaded.model.config.logit_shift
    assert not loaded.model.denoiser().is_fast
