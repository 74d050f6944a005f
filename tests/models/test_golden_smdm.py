"""Parity with the code of «One Token Is Enough»: losses and gradient norms of its three variants,
through load().
"""

import math

import pytest
import torch

from golden import golden_cases, golden_folder, golden_model, golden_tensors, tensors_of
from sinklab.lab.checkpoints import families, materialize, weights
from sinklab.lab.data.noise import masked_token_loss

VARIANTS = {
    "smdm_vanilla": ("none", 0, "none"),
    "smdm_sink": ("token", 1, "none"),
    "smdm_gate": ("none", 0, "elementwise"),
}


@pytest.mark.parametrize("family", VARIANTS)
def test_the_variant_is_seen_in_the_tensors(family):
    loaded = golden_model(family)
    config, mask_id = loaded.model.config, golden_cases(family)["special_ids"]["mask"]
    assert (config.sink_kind, config.sink_count, config.gate) == VARIANTS[family]
    # the head has no row for [MASK], and the block of the original is all text
    assert config.output_vocab_size == config.text_vocab_size == config.vocab_size - 1 == mask_id
    full = golden_tensors(family)["logits.full_block.input_ids"]
    assert loaded.context == full.shape[1]
    with torch.inference_mode():
        assert (loaded.model(full).logits.softmax(-1)[..., mask_id] == 0).all()


@pytest.mark.parametrize("family", VARIANTS)
def test_the_rotary_tables_of_the_release_are_bfloat16(family):
    expected = golden_tensors(family)
    rounded, exact = (expected[f"logits.batch.{key}"] for key in ("logits_bf16_rope", "logits"))
    columns = expected.get("columns", slice(exact.shape[-1]))
    with torch.inference_mode():
        logits = golden_model(family).model(expected["logits.batch.input_ids"]).logits
    # float32 tables are those of test_golden_logits.py
    assert (logits[..., columns] - rounded).abs().max() < 5e-4
    assert (rounded - exact).abs().max() > 1e-2


@pytest.mark.parametrize("family", VARIANTS)
def test_golden_losses_and_gradients(family):
    folder = golden_folder(family)
    loaded = golden_model(family, rope_dtype="float32")
    model = loaded.model
    stored = weights.open_weights(folder, family)
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    checkpoint = families.read(families.read_config(folder / "config.json", family), family, shapes)
    plan = {}
    sources = materialize.sources_of(checkpoint, model, stored, {}, family)
    for target, piece in sources.items():
        plan.setdefault(piece.names[0], []).append(target)
    compared = 0
    for case in golden_cases(family)["losses"]:
        expected = tensors_of(family, f"loss.{case['name']}.")
        ids, noisy = expected["input_ids"], expected["noisy_input"]
        masked, p_mask = expected["mask_indices"], expected["p_mask"]
        model.zero_grad()
        logits = model(noisy, logits_to_keep=masked).logits
        if case["name"].startswith("pretrain"):
            loss = masked_token_loss(logits, ids, masked, p_mask[:, 0])
        else:  # the fine-tuning loss is divided by the number of tokens after the prompts
            answers = (ids.shape[1] - expected["prompt_length"]).sum()
            nll = torch.nn.functional.cross_entropy(logits, ids[masked], reduction="none")
            loss = (nll / p_mask[masked]).sum() / answers
        loss.backward()
        assert loss.item() == pytest.approx(case["loss"], rel=1e-5), case["name"]
        grads = {name: parameter.grad for name, parameter in model.named_parameters()}
        for name, norm in case.get("grad_l2", {}).items():
            squares = [grads[target].double().square().sum().item() for target in plan[name]]
            assert math.sqrt(sum(squares)) == pytest.approx(norm, rel=1e-3), name
            compared += 1
    assert compared >= len(plan)
