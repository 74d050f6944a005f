"""Received attention, sinks and sink masking against the numbers of the original LLaDA code."""

# L layers, H heads, S positions
from contextlib import nullcontext

import pytest
import torch

from golden import golden_case, golden_cases, golden_model, tensors_of
from sinklab.core.instrument import intervene, trace
from sinklab.core.subject import Canvas, denoise
from sinklab.lab.measures import MaskSinks


@pytest.fixture
def model():
    return golden_model("llada").model


@pytest.mark.parametrize(
    "name, trace_first", [("base", True), ("mask1", True), ("mask3", True), ("mask3", False)]
)
def test_whole_run(model, name, trace_first):
    run, expected = golden_case("attention", "runs", name), tensors_of("attention", f"{name}.")
    settings = run["settings"]
    canvas = Canvas.from_prompts(
        expected["prompt"],
        new_tokens=settings["gen_length"],
        mask_id=golden_cases("llada")["special_ids"]["mask"],
    )
    watch = trace(model, ("received", "value_norm", "row_entropy"))
    edit = intervene(model, MaskSinks(run["K"])) if run["K"] else nullcontext()
    outer, inner = (watch, edit) if trace_first else (edit, watch)
    with torch.no_grad(), outer as first, inner as second:
        recording, log = (first, second) if trace_first else (second, first)
        canvases = [canvas.ids_BS]
        for step in denoise(
            model.denoiser(),
            canvas,
            steps=settings["steps"],
            block_length=settings["block_length"],
        ):
            recording.mark(step)
            canvases.append(step.ids_BS)
    assert torch.equal(torch.stack(canvases), expected["canvas"])
    for statistic, tolerance in (("received", 2e-5), ("row_entropy", 2e-5), ("value_norm", 1e-5)):
        ours = torch.from_numpy(recording.array(statistic)[:, 0]).double()
        torch.testing.assert_close(ours, expected[statistic].double(), rtol=0, atol=tolerance)
    if run["K"]:
        taken = torch.stack([removal.columns_BLHM[0] for removal in log.removals])
        assert torch.equal(taken, expected["masked_columns"][1:])
        assert (expected["masked_columns"][0] == -1).all()
