"""Fast-dLLM's own decoding, plain and under its two caches, on its golden weights: every canvas,
confidence, and evaluation.
"""

from contextlib import nullcontext

import pytest
import torch

from golden import check_canvases, golden_case, golden_cases, golden_model, tensors_of
from sinklab.core.attention import watching
from sinklab.core.subject import Canvas, denoise
from sinklab.lab.samplers import Factor, Threshold

CACHES = {
    "generate": "none",
    "generate_with_prefix_cache": "prefix",
    "generate_with_dual_cache": "dual",
}
"""Name of our cache for the original's function."""
IDLE = ("prefix_threshold_low_a", "dual_threshold_low_a")
"""Revision a spends one evaluation more on a block that its first one has finished; b mended
that.
"""


@pytest.fixture
def model():
    return golden_model("fast_dllm").model


def run(model, case):
    """Our steps of a stored run, and what the original left of it."""
    theirs, stored = case["settings"], tensors_of("fast_dllm", f"gen.{case['name']}.")
    canvas = Canvas.from_prompts(
        stored["prompt"], new_tokens=theirs["gen_length"], mask_id=model.config.mask_token_id
    )
    how = {"block_length": theirs["block_length"], "cache": CACHES[case["function"]]}
    if theirs.get("factor") is not None:
        how["schedule"] = Factor(theirs["factor"])
    elif theirs["threshold"] is not None:
        how["schedule"] = Threshold(theirs["threshold"])
    else:
        how["steps"] = theirs["steps"]
    return list(denoise(model.denoiser(), canvas, **how)), stored


@pytest.mark.slow
@pytest.mark.parametrize("road", ["lean", "watched"])
@pytest.mark.parametrize("function", CACHES)
def test_every_canvas_of_fast_dllm(model, function, road):
    cases = [
        case
        for case in golden_cases("fast_dllm")["generate"]
        if case["function"] == function and not case["quirk"] and case["name"] not in IDLE
    ]
    assert len(cases) >= 6
    assert {case["function"] for case in golden_cases("fast_dllm")["generate"]} == {*CACHES}
    for case in cases:
        with watching(model) if road == "watched" else nullcontext():
            steps, stored = run(model, case)
        name, canvas_TBS = case["name"], stored["canvas"]
        assert len(steps) == case["nfe"], name
        assert torch.equal(steps[0].before_BS, canvas_TBS[0]), name
        check_canvases(name, steps, canvas_TBS[1:])
        for step, confidence_BS in zip(steps, stored["confidence"], strict=True):
            is_one_BS = ~step.confidence_BS.isnan()
            ours, theirs = step.confidence_BS[is_one_BS], confidence_BS[is_one_BS].float()
            torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-4)


@pytest.mark.parametrize("name", IDLE)
def test_idle_evaluations_of_revision_a_are_left_out(model, name):
    case = golden_case("fast_dllm", "generate", name)
    steps, stored = run(model, case)
    pairs = zip(stored["canvas"][:-1], stored["canvas"][1:], strict=True)
    changed = [after_BS for before_BS, after_BS in pairs if not torch.equal(before_BS, after_BS)]
    assert len(steps) == len(changed) < case["nfe"]
    check_canvases(name, steps, changed)
