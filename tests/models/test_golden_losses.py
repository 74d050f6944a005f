"""Training losses and gradients of dLLM (MDLM, BD3LM), SDAR and Fast-dLLM v2 against what the
authors' code gives.
"""

import math

import pytest
import torch
from test_diffusion_lm import gradients

from golden import golden_cases, golden_model, tensors_of

pytestmark = pytest.mark.ring("extras")
DLLM = ("a2d_qwen3", "a2d_qwen2", "a2d_llama", "bd3lm_qwen3", "bd3lm_llama")


def check(case, loss, model):
    assert loss.item() == pytest.approx(case["loss"], rel=1e-5)
    found = gradients(model, loss)
    for name, norm in case.get("gradient_norms", {}).items():
        assert found[name].norm().item() == pytest.approx(norm, rel=1e-3), name


def dllm_weights(case, t_B, asked_BS):
    """Weight of each token, (B, S): of its row's time, over what the mean is taken of."""
    if case["loss_weight_type"] == "uniform":
        weight_B = torch.ones_like(t_B)
    elif case["scheduler"] == "CosineAlphaScheduler":
        angle_B = math.pi / 2 * (1 - t_B)
        weight_B = math.pi / 2 * torch.sin(angle_B) / (torch.cos(angle_B) + 1e-6)
    else:
        weight_B = 1 / (t_B + 1e-6)
    own_B1 = asked_BS.sum(1, keepdim=True)
    count = {"token": asked_BS.sum(), "sequence": own_B1 * len(t_B), "batch": len(t_B)}[
        case["loss_norm_type"]
    ]
    return weight_B[:, None] / count


@pytest.mark.parametrize("folder", DLLM)
def test_golden_losses_of_dllm(folder):
    seen = 0
    for case in golden_cases(folder)["loss"]:
        given = tensors_of(folder, f"loss.{case['name']}.")
        ids_BS, labels_BS = given["input_ids"], given["labels"]
        noisy_BS = given["noised_input_ids"]
        fields = {"logit_shift": case["right_shift_logits"], "block_length": case["block_size"]}
        model = golden_model(folder, **fields).model
        # what was masked, not what changed: a token may be [MASK] already
        alpha_B = 1 - given["t"].double()
        if case["scheduler"] == "CosineAlphaScheduler":
            alpha_B = 1 - torch.cos(math.pi / 2 * alpha_B)
        asked_BS = labels_BS != -100
        masked_BS = asked_BS & (noisy_BS == golden_cases(folder)["special_ids"]["mask"])
        assert torch.equal(masked_BS, asked_BS & (given["rand_mask"] < 1 - alpha_B[:, None])), case[
            "name"
        ]
        # BD3LM's trainer overwrites the mask of padding
        form = (
            {"clean": ids_BS} if case["block_size"] else {"attention_mask": given["attention_mask"]}
        )
        loss = model(
            noisy_BS,
            labels=labels_BS.masked_fill(~masked_BS, -100),
            label_weights=dllm_weights(case, given["t"], asked_BS).expand(ids_BS.shape),
            **form,
        ).loss
        check(case, loss, model)
        seen += 1
    assert seen >= 6


@pytest.mark.parametrize("number", [0, 1])
def test_golden_losses_of_sdar(number):
    case = golden_cases("sdar")["loss"][number]
    given = tensors_of("sdar", f"loss.{case['name']}.")
    model = golden_model("sdar", block_length=4).model
    mask_id, lengths = model.config.mask_token_id, case["sample_lengths"]
    assert model.config.block_length == case["block_size"]
    total = (given["labels"] != -100).sum()
    loss = torch.zeros(())
    for row, ids_S in enumerate(given["input_ids"]):
        times, draws = given[f"noise.{2 * row}"], given[f"noise.{2 * row + 1}"][0]
        start = 0
        for length, t in zip(lengths, times, strict=True):
            # what was packed is its own sample: positions and blocks begin anew
            part = slice(start, start + length)
            ids_1S, labels_1S = ids_S[None, part], given["labels"][row : row + 1, part]
            share = (1 - 1e-3) * t + 1e-3
            masked_1S = (draws[None, part] < share) & (labels_1S != -100)
            noisy_1S = ids_1S.masked_fill(masked_1S, mask_id)
            shown_S = given["concat_input_ids"][row, 2 * start : 2 * start + length]
            assert torch.equal(noisy_1S[0], shown_S)
            labels_1S = labels_1S.masked_fill(~masked_1S, -100)
            weights_1S = (1 / share / total).expand(ids_1S.shape)
            loss = (
                loss
                + model(noisy_1S, labels=labels_1S, label_weights=weights_1S, clean=ids_1S).loss
            )
            start += length
    check(case, loss, model)


def test_golden_losses_of_fast_dllm_v2():
    (case,) = golden_cases("fast_dllm_v2")["loss"]
    given = tensors_of("fast_dllm_v2", f"loss.{case['name']}.")
    model = golden_model("fast_dllm_v2", block_length=case["bd_size"]).model
    assert model.config.logit_shift
    noisy_BS, clean_BS = given["model_input_ids"].chunk(2, dim=1)
    # the first token has nothing before it that would predict it
    labels_BS = given["model_labels"].clone()
    labels_BS[:, 0] = -100
    weights_BS = torch.full(labels_BS.shape, 1 / (labels_BS != -100).sum().item())
    # both masks of a text and its complement are rows
    masked_BS = noisy_BS == golden_cases("fast_dllm_v2")["special_ids"]["mask"]
    assert torch.equal(clean_BS[:2], given["input_ids"])
    assert not (masked_BS[:2] & masked_BS[2:]).any()
    loss = model(noisy_BS, labels=labels_BS, label_weights=weights_BS, clean=clean_BS).loss
    check(case, loss, model)
