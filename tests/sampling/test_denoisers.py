import torch
from toy_denoiser import ToyDenoiser, prompts

from refusals import refused
from sinklab.core.subject import denoise

CANVAS = prompts([[1, 2, 3], [4]], 6)


def test_ids_beyond_the_vocabulary_are_refused():
    toy = ToyDenoiser(CANVAS.attention_BS)
    refused(r"0 to 22, got \[3, 99\]", next, denoise(toy, CANVAS, suppress_ids=[3, 99]))


def test_a_limited_vocabulary_leaves_the_other_ids_out_of_every_probability():
    toy = ToyDenoiser(CANVAS.attention_BS)
    steps = list(denoise(toy, CANVAS, steps=3, text_vocabulary=10))
    assert steps[-1].ids_BS[CANVAS.open_BS].max() < 10
    few_MV = toy(CANVAS.ids_BS, CANVAS.open_BS)[:, :10].softmax(-1)
    torch.testing.assert_close(steps[0].score_M, few_MV.amax(-1), rtol=1e-13, atol=1e-13)
