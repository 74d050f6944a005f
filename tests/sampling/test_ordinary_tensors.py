"""Logits may come from inference mode; nothing that the loop hands out does."""

import pytest
import torch
from toy_denoiser import ToyDenoiser, prompts, seeded

from sinklab.core.registry import unmasking_rules
from sinklab.core.subject import denoise

CANVAS = prompts([[1, 2, 3], [4]], 6)
NAMES = ["before_BS", "ids_BS", "filled_BS", "masked_BS", "committed_BS", "confidence_BS"]
NAMES += ["score_M", "candidates_BS"]


def inferring(ids_BS, wanted_BS):
    with torch.inference_mode():
        logits_MV = ToyDenoiser(CANVAS.attention_BS)(ids_BS, wanted_BS)
    assert logits_MV.is_inference()
    return logits_MV


def assert_ordinary(denoiser, **settings):
    count = 0
    for step in denoise(denoiser, CANVAS, generator=seeded(), **settings):
        for name in NAMES:
            tensor = getattr(step, name)
            assert not tensor.is_inference() and not tensor.requires_grad, name
        count += 1
    assert count
    weight_VD = torch.randn(23, 3, requires_grad=True)
    weight_VD[step.ids_BS].sum().backward()
    assert weight_VD.grad.abs().sum() > 0


@pytest.mark.parametrize(
    "more", [{}, {"stop_ids": range(9), "temperature": 1.0, "top_k": 5}], ids=str
)
def test_every_rule(more):
    for rule in (*unmasking_rules, lambda candidates: candidates.logits_MV[:, 3]):
        assert_ordinary(inferring, rule=rule, **more)


def test_logits_with_a_gradient_leave_none_behind():
    weight = torch.ones((), requires_grad=True)
    toy = ToyDenoiser(CANVAS.attention_BS)
    assert_ordinary(lambda ids_BS, wanted_BS: toy(ids_BS, wanted_BS) * weight)
