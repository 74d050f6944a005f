import pytest
from toy_denoiser import MASK, PAD, ToyDenoiser

from refusals import refused
from sinklab.core.subject import (
    Canvas,
    DecodingSettings,
    EvenQuota,
    LowConfidence,
    denoise,
    guided,
)
from sinklab.lab.caching import DualCache
from sinklab.lab.samplers import Entropy, Threshold, Timed

CANVAS = Canvas.from_prompts([[1, 2, 3], [4]], new_tokens=8, mask_id=MASK, pad_id=PAD)


def decoded(settings, **given):
    return [
        step.ids_BS.tolist()
        for step in settings.decode(ToyDenoiser(CANVAS.attention_BS), CANVAS, **given)
    ]


@pytest.mark.parametrize(
    "settings, expected",
    [
        ({}, {"rule": LowConfidence(), "schedule": EvenQuota(), "cache": None}),
        ({"rule": "entropy:alg_temp=0.4"}, {"rule": Entropy(alg_temp=0.4)}),
        ({"rule": "low_confidence:defer_ids=3+4"}, {"rule": LowConfidence(defer_ids=(3, 4))}),
        (
            {"schedule": "timed:eps=1e-5,pooled=true"},
            {"schedule": Timed(1e-5, pooled=True)},
        ),
        ({"rule": "origin"}, {"schedule": Timed(1e-3)}),
        ({"rule": "origin", "schedule": "timed:eps=0.1"}, {"schedule": Timed(0.1)}),
        ({"cache": "dual:refresh_every=4"}, {"cache": DualCache(4)}),
    ],
    ids=str,
)
def test_names_and_numbers_become_values(settings, expected):
    values = DecodingSettings(**settings).values()
    assert expected.items() <= values.items()


def test_decode_is_denoise_with_the_wrappers_around_the_denoiser():
    toy = ToyDenoiser(CANVAS.attention_BS)
    settings = DecodingSettings(
        schedule="threshold:threshold=0.2",
        cfg_scale=0.7,
        suppress_ids=(1, 2),
        stop_ids=(5, 7),
        block_length=4,
    )
    plain = denoise(
        guided(toy, 0.7, CANVAS.prompt_BS, MASK),
        CANVAS,
        suppress_ids=[1, 2],
        schedule=Threshold(0.2),
        block_length=4,
        stop_ids=[5, 7],
    )
    assert decoded(settings) == [step.ids_BS.tolist() for step in plain]


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"schedule": "even:threshold=0.9"}, "even.*threshold"),
        ({"cache": "none:refresh_every=2"}, "cache must be|none.*refresh_every"),
        ({"cache": "duel"}, r"cache must be .*'duel'; did you mean 'dual'\?"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused_by_values(settings, message):
    refused(message, DecodingSettings(**settings).values)


@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"stop_at_eos": True},
            "stop_at_eos needs the id of end of text, but the model names none; give stop_ids",
        ),
        (
            {"stop_ids": (3, 4), "suppress_ids": (4,)},
            r"a suppressed token cannot end a row, got \[4\] as both",
        ),
        ({"steps": 20}, "steps must not exceed the open positions"),
    ],
    ids=str,
)
def test_what_the_model_or_canvas_cannot_do_is_refused_before_the_first_step(settings, message):
    refused(message, DecodingSettings(**settings).decode, ToyDenoiser(CANVAS.attention_BS), CANVAS)
