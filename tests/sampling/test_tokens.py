import pytest
import torch
from plain_decoders import cut
from torch.testing import assert_close
from toy_denoiser import candidates, seeded

from refusals import refused
from sinklab.core.subject import Canvas, denoise


def sample_tokens(logits_MV, temperature=0.0, generator=None, **cuts):
    return candidates(logits_MV, generator, temperature=temperature, **cuts).tokens_M


def test_the_sample_is_lladas_own_form_of_the_noise():
    # E = -log U makes exp(l) / (-log U)^T and l - T log E the same ordering, draw for draw.
    logits_MV = torch.randn(500, 13, generator=seeded(4), dtype=torch.float64)
    exponential_MV = torch.empty(500, 13, dtype=torch.float64).exponential_(generator=seeded(5))
    for temperature in (0.3, 1.0, 1.7):
        expected_M = (logits_MV.exp() / exponential_MV**temperature).argmax(-1)
        assert torch.equal(sample_tokens(logits_MV, temperature, seeded(5)), expected_M)


def test_temperature_zero_is_the_argmax_and_draws_nothing():
    logits_MV = torch.randn(9, 5, generator=seeded())
    generator = seeded(8)
    before = generator.get_state()
    assert torch.equal(sample_tokens(logits_MV, 0.0, generator), logits_MV.argmax(-1))
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("top_p", [None, 0.2, 0.75])
@pytest.mark.parametrize("top_k", [None, 4, 50])
def test_shaped_logits_equal_the_definition(top_p, top_k):
    logits_MV = torch.randn(20, 17, generator=seeded(6), dtype=torch.float64) * 2
    for temperature in (0.0, 0.4, 1.0):
        ours = candidates(logits_MV, temperature=temperature, top_p=top_p, top_k=top_k)
        rows = [
            cut([logit / (temperature or 1) for logit in row], top_p, top_k)
            for row in logits_MV.tolist()
        ]
        assert_close(
            ours.shaped_MV.softmax(-1),
            torch.tensor(rows, dtype=torch.float64),
            rtol=1e-12,
            atol=1e-15,
        )


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 1.0}, {"temperature": 2.0, "top_p": 0.1}],
    ids=str,
)
def test_a_mask_that_is_the_likeliest_token_is_never_proposed(sampling):
    # top_k = 1 and a small top_p leave nothing but [MASK]: then the best other token is taken.
    logits_MV = torch.randn(50, 9, generator=seeded(2))
    logits_MV[:, 4] = 30.0
    canvas = Canvas.from_prompts([[1]], new_tokens=50, mask_id=4)
    step = next(
        denoise(
            lambda ids_BS, wanted_BS: logits_MV, canvas, steps=1, generator=seeded(1), **sampling
        )
    )
    assert not (step.ids_BS == 4).any()
    if sampling.get("temperature", 0) == 0 or "top_k" in sampling or "top_p" in sampling:
        logits_MV[:, 4] = -torch.inf
        assert torch.equal(step.ids_BS[0, 1:], logits_MV.argmax(-1))


@pytest.mark.parametrize("vocabulary, rows", [(512, 9), (700, 1), (4100, 64)])
def test_the_best_token_in_two_levels_is_the_argmax(vocabulary, rows):
    logits_MV = torch.randn(rows, vocabulary, generator=seeded(vocabulary + rows))
    assert torch.equal(sample_tokens(logits_MV), logits_MV.argmax(-1))
    few_MV = logits_MV.mul(2).round()  # many ties: the first is taken
    first_M = (few_MV == few_MV.amax(-1, keepdim=True)).int().argmax(-1)
    assert torch.equal(sample_tokens(few_MV), first_M)
    for column in (0, 63, 64, vocabulary - 65, vocabulary - 64, vocabulary - 1):
        peak_MV = logits_MV.clone()
        peak_MV[:, column] = 50.0
        assert (sample_tokens(peak_MV) == column).all()
        assert (sample_tokens(peak_MV.narrow(1, 0, vocabulary - 1))[0] == column) == (
            column < vocabulary - 1
        )


@pytest.mark.parametrize(
    "name, values",
    [
        ("temperature", (-0.1, torch.nan, torch.inf)),
        ("top_p", (0.0, 1.1, -1, torch.nan)),
        ("top_k", (0,)),
    ],
)
def test_bad_numbers_are_refused(name, values):
    for value in values:
        refused(
            f"{name} must be",
            sample_tokens,
            torch.zeros(1, 2),
            generator=seeded(),
            **{"temperature": 1.0, name: value},
        )
