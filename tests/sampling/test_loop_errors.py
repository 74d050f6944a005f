import pytest
import torch
from toy_denoiser import VOCABULARY, ToyDenoiser, prompts, seeded

from refusals import refused
from sinklab.core.subject import EvenQuota, denoise


def test_nan_logits_name_the_step():
    canvas = prompts()
    toy = ToyDenoiser(canvas.attention_BS)

    def breaks(ids_BS, wanted_BS):
        logits_MV = toy(ids_BS, wanted_BS)
        if len(toy.calls) == 6:
            logits_MV[3, 7] = torch.nan
        return logits_MV

    steps = denoise(breaks, canvas, block_length=4)
    seen = [next(steps).index for _ in range(5)]
    assert seen == [0, 1, 2, 3, 4]
    refused(r"step 5 \(block 1\) 1 of 12", next, steps)


def test_logits_of_the_wrong_shape_are_refused():
    canvas = prompts()
    toy = ToyDenoiser(canvas.attention_BS)
    steps = denoise(lambda ids_BS, wanted_BS: toy.dense(ids_BS, canvas.attention_BS), canvas)
    refused(r"\(48, any\), .* \(4, 17, 23\)", next, steps)


@pytest.mark.ring("lab")
@pytest.mark.parametrize(
    "value, message", [(-torch.inf, "1 of 48 positions have .*-inf"), (torch.nan, "1 of 48")]
)
@pytest.mark.parametrize(
    "settings",
    [{}, {"rule": "random"}, {"temperature": 1.0, "top_k": 2}],
)
def test_positions_without_a_possible_token_are_refused(settings, value, message):
    canvas = prompts()
    table = torch.zeros(48, VOCABULARY)
    table[7] = value
    steps = denoise(lambda ids_BS, wanted_BS: table, canvas, generator=seeded(), **settings)
    refused(message, next, steps)


def test_a_schedule_that_never_ends_is_refused():
    class Idle(EvenQuota):
        def count(self, turn):
            return torch.zeros_like(turn.size_B)

    canvas = prompts()
    refused(
        "in block 0 after 3 evaluations",
        list,
        denoise(ToyDenoiser(canvas.attention_BS), canvas, schedule=Idle(), steps=3),
    )


@pytest.mark.parametrize(
    "rule, found",
    [
        (lambda candidates: candidates.probability_MV, r"float64 of shape \(48, 23\)"),
        (lambda candidates: candidates.probability_MV[:, 0] * torch.nan, "NaN"),
    ],
)
def test_scores_of_another_shape_or_kind_are_refused(rule, found):
    canvas = prompts()
    refused(
        rf"step 0 .*{found}", next, denoise(ToyDenoiser(canvas.attention_BS), canvas, rule=rule)
    )
