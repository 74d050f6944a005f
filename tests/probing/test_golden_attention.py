"""Received attention, sinks and sink masking against the numbers of the original LLaDA code."""

# L layers, H heads, S positions
from contextlib import nullcontext

import pytest
import torch

from golden_llada import golden_cases, golden_tensors, llada_denoiser, load_llada
from sinklab.core.probing import MaskSinks, intervene, trace
from sinklab.core.sampling import Canvas, denoise
from sinklab.core.sinks import Excess, find_sinks


@pytest.fixture(scope="module")
def golden():
    return golden_cases("attention"), golden_tensors("attention"), load_llada()


@pytest.mark.parametrize("name", ["base", "mask1", "mask3"])
@pytest.mark.parametrize("trace_first", [True, False])
def test_whole_run(golden, name, trace_first):
    cases, tensors, model = golden
    run = next(run for run in cases["runs"] if run["name"] == name)
    settings = run["settings"]
    canvas = Canvas.from_prompts(
        tensors[f"{name}.prompt"],
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
            llada_denoiser(model),
            canvas,
            steps=settings["steps"],
            block_length=settings["block_length"],
        ):
            recording.mark(step)
            canvases.append(step.ids_BS)
    assert torch.equal(torch.stack(canvases).int(), tensors[f"{name}.canvas"].int())
    for statistic, tolerance in (("received", 2e-5), ("row_entropy", 2e-5), ("value_norm", 1e-5)):
        ours = torch.from_numpy(recording.array(statistic)[:, 0]).double()
        torch.testing.assert_close(
            ours, tensors[f"{name}.{statistic}"].double(), rtol=0, atol=tolerance
        )
    if run["K"]:
        taken = torch.stack([removal.columns_BLHM[0] for removal in log.removals])
        assert torch.equal(taken.int(), tensors[f"{name}.masked_columns"][1:].int())
        assert (tensors[f"{name}.masked_columns"][0] == -1).all()
    else:
        for case in run["sinks"]:
            found = find_sinks(recording.array("received")[:, 0], Excess(case["eps"]))
            assert int(found.sum()) == case["count"]
