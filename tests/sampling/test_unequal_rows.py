"""Rows with unequal numbers of masks: each gets what it gets alone, or the settings are refused by
name.
"""

import pytest
from plain_decoders import distinct
from toy_denoiser import HOLES, MASK, ToyDenoiser, rows_of

from refusals import refused
from sinklab.core.subject import Canvas, denoise
from sinklab.lab.samplers import Timed


def texts(canvas, seed, **settings):
    done = list(denoise(ToyDenoiser(canvas.attention_BS, seed, sharpness=2.0), canvas, **settings))
    return [*map(distinct, rows_of(canvas, done))]


@pytest.mark.ring("extras")
@pytest.mark.parametrize(
    "settings",
    [
        {"steps": 2},
        {"block_length": 2, "schedule": "threshold:threshold=0.3"},
        {"schedule": "timed", "steps": 9},
        {"schedule": "alpha", "steps": 9},
    ],
    ids=str,
)
def test_unequal_rows_get_what_they_get_alone(settings):
    canvas = Canvas.infill(HOLES, mask_id=MASK)
    for seed in range(4):
        together = texts(canvas, seed, **settings)
        for row in range(2):
            alone = texts(Canvas.infill([HOLES[row]], mask_id=MASK), seed, **settings)[0]
            assert together[row] == alone, (seed, row)


@pytest.mark.ring("extras")
@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"steps": 4, "block_length": 2},
            r"'even' splits steps=4 over 3 block\(s\) .* same in every row, got rows with 2, 5; "
            r"leave steps or block",
        ),
        (
            {"schedule": "timed"},
            r"'timed' splits steps=None over 1 .* with 2, 5; decode these rows one by one",
        ),
        (
            {"schedule": "timed", "block_length": 2},
            r"'timed' splits steps=None over 3 .*, or give steps and no block",
        ),
    ],
    ids=str,
)
def test_what_would_change_a_row_is_refused(settings, message):
    canvas = Canvas.infill(HOLES, mask_id=MASK)
    refused(message, denoise, ToyDenoiser(canvas.attention_BS), canvas, **settings)


def test_rows_ranked_as_one_are_not_refused():
    canvas = Canvas.infill(HOLES, mask_id=MASK)
    steps = list(denoise(ToyDenoiser(canvas.attention_BS), canvas, schedule=Timed(pooled=True)))
    assert not (steps[-1].ids_BS[canvas.open_BS] == MASK).any()
