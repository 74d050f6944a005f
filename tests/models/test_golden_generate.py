"""`DiffusionLM.generate` on LLaDA's golden weights: the sequences of the original generate.py, token for token."""

import pytest
import torch

from golden_llada import golden_cases, golden_tensors, load_llada
from sinklab.models import DiffusionLM

CASES = [
    "full",
    "uneven",
    "blocks3",
    "blocks3_uneven",
    "one_step",
    "cfg",
    "batch_leftpad",
    "batch_leftpad_cfg",
    "batch_equal",
]


@pytest.fixture(scope="module")
def model():
    mask_id = golden_cases("llada")["special_ids"]["mask"]
    return DiffusionLM.from_backbone(load_llada(), mask_token_id=mask_id).eval()


@pytest.mark.parametrize("name", CASES)
def test_golden_sequences(model, name):
    tensors = golden_tensors("llada")
    settings = next(case["settings"] for case in golden_cases("llada")["generate"] if case["name"] == name)
    written = model.generate(
        tensors[f"gen.{name}.prompt"].long(),
        tensors.get(f"gen.{name}.attention_mask"),
        max_new_tokens=settings["gen_length"],
        steps=settings["steps"],
        block_length=settings["block_length"],
        cfg_scale=settings["cfg_scale"],
    )
    assert torch.equal(written, tensors[f"gen.{name}.sequences"].long())
