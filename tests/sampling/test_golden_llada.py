"""Canvas for canvas against the numbers of LLaDA's own generate.py."""

from __future__ import annotations

import pytest
import torch

from golden_llada import golden_cases, golden_tensors, llada_denoiser, load_llada
from sinklab.core.sampling import Canvas, LowConfidence, denoise, guided, suppressed

PLAIN = ["full", "uneven", "blocks3", "blocks3_uneven", "one_step", "batch_equal", "batch_leftpad"]
GUIDED = ["cfg", "batch_leftpad_cfg"]


@pytest.fixture(scope="module")
def golden():
    return golden_cases("llada"), golden_tensors("llada"), load_llada()


def canvas_and_settings(golden, name):
    cases, tensors, _ = golden
    settings = next(case["settings"] for case in cases["generate"] if case["name"] == name)
    canvas = Canvas.from_prompts(
        tensors[f"gen.{name}.prompt"],
        new_tokens=settings["gen_length"],
        mask_id=cases["special_ids"]["mask"],
        attention_BP=tensors.get(f"gen.{name}.attention_mask"),
    )
    return canvas, settings


def run(golden, name, wrap=lambda denoiser, canvas: denoiser, rule="low_confidence"):
    canvas, settings = canvas_and_settings(golden, name)
    denoiser = wrap(llada_denoiser(golden[2], canvas.attention_BS), canvas)
    return list(
        denoise(
            denoiser,
            canvas,
            rule=rule,
            steps=settings["steps"],
            block_length=settings["block_length"],
        )
    )


def assert_same_run(golden, name, steps):
    expected = golden[1][f"gen.{name}.canvas"].long()
    assert len(steps) == len(expected) - 1
    assert torch.equal(steps[0].before_BS, expected[0])
    for step, after_BS in zip(steps, expected[1:], strict=True):
        assert torch.equal(step.ids_BS, after_BS), (
            f"{name}: the canvas after step {step.index} differs"
        )
    confidence = golden[1][f"gen.{name}.confidence"]
    ours = torch.stack([step.confidence_BS for step in steps])
    assert torch.equal(ours.isnan(), confidence.isinf())
    torch.testing.assert_close(ours[~ours.isnan()], confidence[~ours.isnan()], rtol=0, atol=5e-4)


@pytest.mark.parametrize("name", PLAIN)
def test_low_confidence_decoding(golden, name):
    assert_same_run(golden, name, run(golden, name))


@pytest.mark.parametrize("name", GUIDED)
def test_classifier_free_guidance(golden, name):
    _, settings = canvas_and_settings(golden, name)

    def wrap(denoiser, canvas):
        return guided(denoiser, settings["cfg_scale"], canvas.prompt_BS, canvas.mask_id)

    assert_same_run(golden, name, run(golden, name, wrap))


def test_logits_eos_inf_is_a_wrapper(golden):
    eos = golden[0]["special_ids"]["eos"]
    assert_same_run(
        golden,
        "eos_inf",
        run(golden, "eos_inf", lambda denoiser, canvas: suppressed(denoiser, [eos])),
    )


def test_confidence_eos_eot_inf_defers_them(golden):
    deferred = tuple(golden[0]["special_ids"][name] for name in ("eos", "eot"))
    steps = run(golden, "conf_eos_eot_inf", rule=LowConfidence(defer_ids=deferred))
    assert_same_run(golden, "conf_eos_eot_inf", steps)
    assert any((step.confidence_BS == 0).any() for step in steps), (
        "the case never proposes such a token"
    )


@pytest.mark.parametrize("name", ["single", "batch", "leftpad"])
def test_the_checkpoint_is_read_right(golden, name):
    _, tensors, model = golden
    ids_BS = tensors[f"logits.{name}.input_ids"].long()
    valid_BS = tensors.get(f"logits.{name}.valid", torch.ones_like(ids_BS, dtype=torch.bool))
    with torch.no_grad():
        logits_MV = llada_denoiser(model, tensors.get(f"logits.{name}.attention_mask"))(
            ids_BS, valid_BS
        )
    torch.testing.assert_close(
        logits_MV, tensors[f"logits.{name}.logits"][valid_BS], rtol=0, atol=5e-4
    )
