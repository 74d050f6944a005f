import pytest
import torch
from toy_denoiser import MASK, VOCABULARY, ToyDenoiser

from refusals import refused
from sinklab.core.subject import Canvas, DecodingSettings, LowConfidence, denoise
from sinklab.lab.samplers import Entropy

CANVAS = Canvas.from_prompts([[1, 2]], new_tokens=4, mask_id=MASK)


def start(**settings):
    return denoise(ToyDenoiser(CANVAS.attention_BS), CANVAS, **settings)


@pytest.mark.parametrize(
    "given",
    [5, (5,), [5], {5}, torch.tensor(5), torch.tensor([5]), iter([5])],
    ids=lambda given: type(given).__name__,
)
def test_one_id_or_several_in_any_form(given):
    settings = DecodingSettings(stop_ids=given)
    assert settings.stop_ids == (5,)
    assert settings == DecodingSettings(stop_ids=(5,))


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: DecodingSettings(stop_ids="<eos>"),
            "stop_ids takes whole numbers from 0, .*'<eos>'.* tokenizer\\.conv",
        ),
        (
            lambda: LowConfidence(defer_ids=None),
            "defer_ids takes whole numbers from 0, one or several, got None",
        ),
        (
            lambda: next(start(stop_ids=[3, -100])),
            r"stop_ids takes whole numbers from 0, one or several, got \[3, -100\]",
        ),
        (
            lambda: next(start(stop_ids=[3, VOCABULARY])),
            r"stop_ids must lie in the vocabulary, 0 to 22, got \[3, 23\]; check the tokenizer",
        ),
    ],
)
def test_what_is_no_id_is_refused(make, message):
    refused(message, make)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"rule": Entropy}, r"object of class UnmaskingRule, got <class .*Entropy"),
        ({"cache": False}, r"object of class Cache, got False"),
        ({"schedule": 0.9}, r"object of class Schedule, got 0.9"),
    ],
    ids=str,
)
def test_classes_and_other_things_in_place_of_objects_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        start(**settings)
    with pytest.raises(ValueError, match=message):
        DecodingSettings().decode(ToyDenoiser(CANVAS.attention_BS), CANVAS, **settings)
