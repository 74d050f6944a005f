"""Rows that end at a stop id: what is written, and how many evaluations it saves."""

import pytest
import torch
from plain_decoders import distinct, entropy_bound, even, plain_row, timed
from toy_denoiser import MASK, ROWS, ToyDenoiser, prompts, rows_of

from sinklab.core.subject import Canvas, denoise

LAB = pytest.mark.ring("lab")


@pytest.mark.parametrize(
    "settings, blocks",
    [
        pytest.param({"rule": "left_to_right"}, [(12, even(12))], marks=LAB),
        ({"block_length": 3}, [(3, even(3))] * 4),
        pytest.param({"schedule": "timed", "steps": 15}, [(12, timed(1e-3, 15))], marks=LAB),
        pytest.param(
            {"rule": "entropy", "schedule": "entropy_bound", "block_length": 6},
            [(6, entropy_bound(0.1))] * 2,
            marks=LAB,
        ),
    ],
)
def test_every_step_equals_the_loop_written_out(settings, blocks):
    canvas, saved, stops = prompts(), 0, [3, 11, 14]
    rule = settings.get("rule", "low_confidence")
    for seed in range(4):
        toy = ToyDenoiser(canvas.attention_BS, seed, sharpness=2.0)
        steps = list(denoise(toy, canvas, stop_ids=stops, **settings))
        saved += len(list(denoise(toy, canvas, **settings))) - len(steps)
        for prompt, ours in zip(ROWS, rows_of(canvas, steps), strict=True):
            expected = plain_row(toy, [*prompt, *[MASK] * 12], rule, blocks, stops)
            assert distinct(ours) == distinct(expected), f"seed {seed}, behind {prompt}"
    assert saved > 0 or "steps" in settings


def scripted(tokens):
    """Proposes the same tokens at every step, the leftmost with most confidence."""

    def denoiser(ids_BS, wanted_BS):
        logits_BSV = torch.zeros(*ids_BS.shape, 23)
        for row, line in enumerate(tokens):
            for place, token in enumerate(line):
                logits_BSV[row, place, token] = 20.0 - place
        return logits_BSV[wanted_BS]

    return denoiser


def test_a_stop_id_with_a_mask_to_its_left_does_not_end_the_row():
    canvas = prompts([[]], 4)
    right_to_left = list(
        denoise(
            scripted([[1, 2, 9, 4]]),
            canvas,
            rule=lambda candidates: candidates.columns_M.float(),
            stop_ids=[9],
        )
    )
    assert [step.ids_BS[0].tolist() for step in right_to_left] == [
        [MASK, MASK, MASK, 4],
        [MASK, MASK, 9, 4],
        [MASK, 2, 9, 4],
        [1, 2, 9, 9],
    ]


def test_a_stop_id_in_the_prompt_counts_for_nothing_and_given_text_stays():
    canvas = Canvas.infill([[9, MASK, 9, MASK, 7, MASK]], mask_id=MASK)
    steps = list(denoise(scripted([[0, 1, 0, 9, 0, 3]]), canvas, stop_ids=[9]))
    assert [step.ids_BS[0].tolist() for step in steps] == [
        [9, 1, 9, MASK, 7, MASK],
        [9, 1, 9, 9, 7, 9],
    ]
