import pytest
import torch
from toy_denoiser import MASK, ToyDenoiser, prompts

from refusals import refused
from sinklab.core.subject import denoise, guided

CANVAS = prompts([[1, 2, 3], [4]], 6)


def test_scale_zero_is_the_conditional_denoiser():
    toy = ToyDenoiser(CANVAS.attention_BS)
    assert guided(toy, 0.0, CANVAS.prompt_BS, MASK) is toy


@pytest.mark.parametrize("scale", [-0.5, 1.5])
def test_guidance_equals_the_formula_on_dense_logits(scale):
    toy = ToyDenoiser(CANVAS.attention_BS)
    mixed_MV = guided(toy, scale, CANVAS.prompt_BS, MASK)(CANVAS.ids_BS, CANVAS.open_BS)
    hidden_BS = CANVAS.ids_BS.clone()
    hidden_BS[CANVAS.prompt_BS] = MASK
    cond_BSV, un_BSV = (
        toy.dense(ids_BS, CANVAS.attention_BS) for ids_BS in (CANVAS.ids_BS, hidden_BS)
    )
    expected_MV = (un_BSV + (scale + 1) * (cond_BSV - un_BSV))[CANVAS.open_BS]
    torch.testing.assert_close(mixed_MV, expected_MV, rtol=1e-13, atol=1e-13)
    assert not torch.allclose(mixed_MV, cond_BSV[CANVAS.open_BS], atol=1e-3)


def test_bad_wrappers_are_refused():
    toy = ToyDenoiser(CANVAS.attention_BS)
    refused(r"guidance scale .*got nan", guided, toy, float("nan"), CANVAS.prompt_BS, MASK)
    refused(
        r"\(2, 9\), but .* \(2, 3\)",
        guided(toy, 1.0, CANVAS.prompt_BS[:, :3], MASK),
        CANVAS.ids_BS,
        CANVAS.open_BS,
    )
    refused(r"0 to 22, got \[3, 99\]", next, denoise(toy, CANVAS, suppress_ids=[3, 99]))


def test_a_limited_vocabulary_leaves_the_other_ids_out_of_every_probability():
    toy = ToyDenoiser(CANVAS.attention_BS)
    steps = list(denoise(toy, CANVAS, steps=3, text_vocabulary=10))
    assert steps[-1].ids_BS[CANVAS.open_BS].max() < 10
    few_MV = toy(CANVAS.ids_BS, CANVAS.open_BS)[:, :10].softmax(-1)
    torch.testing.assert_close(steps[0].score_M, few_MV.amax(-1), rtol=1e-13, atol=1e-13)
