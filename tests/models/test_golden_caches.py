"""Fast-dLLM's own prefix and dual caches on its golden weights: every canvas, confidence, and
evaluation.
"""

import pytest
import torch

from golden import golden_cases, golden_folder
from golden_fast_dllm import DUAL, IDLE, PLAIN, PREFIX, fast_dllm_case
from sinklab.core.attention import watching
from sinklab.core.sampling import denoise
from sinklab.lab.checkpoints import load


@pytest.fixture(scope="module")
def model():
    return load(golden_folder("fast_dllm")).model


def steps_of(model, case):
    return list(denoise(model.denoiser(), case.canvas, cache=case.cache, **case.arguments))


@pytest.mark.parametrize("road", ["lean", "watched"])
@pytest.mark.parametrize("name", [*PLAIN, *PREFIX, *DUAL])
def test_every_canvas_of_fast_dllm(model, name, road):
    case = fast_dllm_case(name)
    if road == "watched":
        with watching(model):
            steps = steps_of(model, case)
    else:
        steps = steps_of(model, case)
    assert len(steps) == case.nfe
    assert torch.equal(steps[0].before_BS, case.canvases_TBS[0])
    for step, after_BS in zip(steps, case.canvases_TBS[1:], strict=True):
        assert torch.equal(step.ids_BS, after_BS), (
            f"{name}: the canvas after step {step.index} differs"
        )
    for step, confidence_BS in zip(steps, case.confidence_TBS, strict=True):
        candidate_BS = ~step.confidence_BS.isnan()
        torch.testing.assert_close(
            step.confidence_BS[candidate_BS], confidence_BS[candidate_BS].float(), rtol=0, atol=5e-4
        )


@pytest.mark.parametrize("name", IDLE)
def test_idle_evaluations_of_revision_a_are_left_out(model, name):
    case = fast_dllm_case(name)
    pairs = zip(case.canvases_TBS[:-1], case.canvases_TBS[1:], strict=True)
    changed = [after_BS for before_BS, after_BS in pairs if not torch.equal(before_BS, after_BS)]
    steps = steps_of(model, case)
    assert len(steps) == len(changed) < case.nfe
    assert all(
        torch.equal(step.ids_BS, after_BS) for step, after_BS in zip(steps, changed, strict=True)
    )


def test_all_cases_without_a_quirk_are_run():
    cases = golden_cases("fast_dllm")["generate"]
    assert {case["name"] for case in cases if not case["quirk"]} == {*PLAIN, *PREFIX, *DUAL, *IDLE}
