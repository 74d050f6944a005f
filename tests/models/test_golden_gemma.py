"""DiffusionGemma through load(), trace and our own sampler, against what transformers' own class
gives.
"""

import pytest
import torch
import transformers
from packaging.version import Version

from golden import golden_case, golden_cases, golden_folder, golden_model, tensors_of
from sinklab.core.instrument import trace
from sinklab.core.sinks import PROMPT
from sinklab.extras.zoo.renoising import CanvasDenoiser, Renoising, renoise
from sinklab.lab.checkpoints import describe

FAMILY, CANVAS = "diffusion_gemma", 8
LOGITS = ("p9", "p9_selfcond", "p5", "p5_selfcond", "leftpad")
WRITTEN = ("greedyish", "default_rule", "adaptive_stop", "accept_all", "batch_eos")
pytestmark = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="DiffusionGemma needs transformers 5.23",
)


def expected(kind, case):
    return tensors_of(FAMILY, f"{kind}.{case}.")


def off(ours, theirs):
    return (ours - theirs).abs().max()


def read(model, case):
    """A denoiser that has read the prompt of a case."""
    ids_BP = case["input_ids"]
    real_BP = case.get("attention_mask", torch.ones_like(ids_BP)).bool()
    denoiser = CanvasDenoiser(model, ids_BP)
    denoiser.read(ids_BP, torch.where(real_BP, PROMPT, -1))
    return denoiser


@pytest.mark.parametrize("name", LOGITS)
@torch.inference_mode()
def test_golden_logits(name):
    model, case = golden_model(FAMILY).model, expected("logits", name)
    canvas_BL, before_BLV = case["canvas"], case.get("self_conditioning_logits")
    ours = read(model, case)(canvas_BL, torch.ones_like(canvas_BL, dtype=torch.bool), before_BLV)
    assert off(ours, case["logits"]) < 5e-4
    given = {key: case[key] for key in ("attention_mask", "decoder_attention_mask") if key in case}
    out = model(
        case["input_ids"], decoder_input_ids=canvas_BL, self_conditioning_logits=before_BLV, **given
    )
    assert off(out.logits, case["logits"]) < 5e-4
    if (states := case.get("encoder_last_hidden_state")) is not None:
        assert off(out.encoder_last_hidden_state, states) < 5e-4


@pytest.mark.parametrize("name", ["p9", "p9_selfcond"])
@torch.inference_mode()
def test_golden_attention(name):
    model, case = golden_model(FAMILY).model, expected("logits", name)
    canvas_BL, before_BLV = case["canvas"], case.get("self_conditioning_logits")
    maps = [(0, layer, head) for layer in range(4) for head in range(4)]
    with trace(model, maps=maps) as decoder, trace(model.model.encoder, maps=maps) as encoder:
        read(model, case)(canvas_BL, torch.ones_like(canvas_BL, dtype=torch.bool), before_BLV)
    for side, recording in (("decoder", decoder), ("encoder", encoder)):
        (received_BLHK,) = recording.received
        assert received_BLHK.shape[1:3] == (4, 4) and recording.prefix == 0
        for layer in range(4):
            probs_BHQK = case[f"{side}_probs.{layer}"]
            # transformers' cache drops what lies before a sliding window: those are the first
            # columns here
            absent = received_BLHK.shape[-1] - probs_BHQK.shape[-1]
            assert absent == (4 if side == "decoder" and layer < 3 else 0)
            assert (received_BLHK[:, layer, :, :absent] == 0).all()
            assert off(received_BLHK[:, layer, :, absent:], probs_BHQK.sum(2)) < 3e-4
            for head in range(4):
                map_BQK = recording.map(0, layer, head)[..., absent:]
                assert off(map_BQK, probs_BHQK[:, head]) < 3e-4


def settings(case):
    given = dict(case["settings"])
    if "eos_token_id" in given:
        given["eos_token_id"] = (given["eos_token_id"],)
    return Renoising(**given, seed=case["torch_seed"])


@pytest.mark.slow
@pytest.mark.parametrize("name", WRITTEN)
def test_golden_writing_step_by_step(name):
    model, want = golden_model(FAMILY).model, expected("gen", name)
    case = golden_case(FAMILY, "generate", name)
    steps = list(renoise(model, want["prompt"], settings(case)))
    assert len(steps) == case["decoder_evaluations"] == len(want["block"])
    for step, block, number in zip(
        steps, want["block"].tolist(), want["step"].tolist(), strict=True
    ):
        row = step.index
        is_first = row == 0 or block != want["block"][row - 1]
        is_last = row + 1 == len(steps) or want["block"][row + 1] != block
        before_B = (
            torch.zeros(case["batch"], dtype=torch.bool) if is_first else want["finished"][row - 1]
        )
        assert step.block == block and is_first == (
            number == case["settings"]["max_denoising_steps"]
        )
        assert torch.equal(step.before_BS[:, -CANVAS:], want["canvas"][row])
        assert torch.equal(step.best_BL, want["argmax"][row])
        assert torch.equal(step.done_B, want["finished"][row])
        assert torch.equal(step.after_BL, want["next_canvas"][row])
        # what the original notes for rows whose canvas is done changes nothing there
        accepted_BL = want["accepted_mask"][row] & ~before_B[:, None]
        assert torch.equal(step.committed_BS[:, -CANVAS:], accepted_BL)
        drawn_BL = torch.where(accepted_BL, want["denoised"][row], want["noise"][row])
        assert torch.equal(step.after_BL[~before_B], drawn_BL[~before_B])
        error_BL = (step.confidence_BS[:, -CANVAS:] + want["entropy"][row]).abs()
        assert not is_first or error_BL.max() < 3e-4
        assert before_B.all() or error_BL[~before_B].max() < 3e-4
        written_BL = want["sequences"][:, step.ids_BS.shape[1] - CANVAS : step.ids_BS.shape[1]]
        assert torch.equal(
            step.ids_BS[:, -CANVAS:], written_BL if is_last else want["next_canvas"][row]
        )
    assert torch.equal(steps[-1].ids_BS, want["sequences"])


def test_golden_facts_of_the_folder():
    lm, ids = golden_model(FAMILY), golden_cases(FAMILY)["special_ids"]
    assert (lm.family, lm.published_family, lm.tokenizer, lm.context) == (
        "diffusion",
        FAMILY,
        None,
        256,
    )
    assert (lm.special.mask, lm.special.eos, lm.special.pad, lm.special.bos) == (
        None,
        ids["eos"],
        ids["pad"],
        ids["bos"],
    )
    assert {parameter.dtype for parameter in lm.model.parameters()} == {torch.float32}
    chosen = Renoising.of(lm.model)
    assert (chosen.eos_token_id, chosen.pad_token_id, chosen.entropy_bound) == ((1, 5), 0, 0.1)
    facts = describe(golden_folder(FAMILY))
    assert facts.parameters == sum(parameter.numel() for parameter in lm.model.parameters())
    assert facts.attention.endswith("in a window in 3 of 4 layers")
    assert (facts.kv_heads, facts.head_dim) == (2, 8)
