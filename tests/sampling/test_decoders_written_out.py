"""Every rule under every schedule against the loops written out in plain_decoders, canvas for
canvas, in float64.
"""

import pytest
from plain_decoders import (
    distinct,
    dynamic,
    entropy_bound,
    even,
    factor,
    plain_row,
    threshold,
    timed,
)
from toy_denoiser import MASK, PAD, ToyDenoiser

from sinklab.core.sampling import Canvas, EvenQuota, Timed, denoise

LAB = pytest.mark.ring("lab")
OF_LAB = [pytest.param(rule, marks=LAB) for rule in ("maskgit_plus", "topk_margin", "entropy")]
RULES = ["low_confidence", *OF_LAB, "left_to_right"]
PROMPTS = [[1, 2, 3, 4, 5], [6, 7], [], [8, 9, 10]]


def rows(canvas, seed, **settings):
    """The canvases of each row of a batch, before the first evaluation and after each, without
    padding.
    """
    # Sharper logits, so that thresholds and bounds let through one, several or all.
    toy = ToyDenoiser(canvas.attention_BS, seed, sharpness=2.0)
    steps = list(denoise(toy, canvas, **settings))
    canvases = [canvas.ids_BS, *(step.ids_BS for step in steps)]
    real = [
        [ids_BS[number][canvas.attention_BS[number]].tolist() for ids_BS in canvases]
        for number in range(len(PROMPTS))
    ]
    return toy, real, steps


SCHEDULES = [
    ("low_confidence", "threshold:threshold=0.5", threshold(0.5)),
    ("low_confidence", "threshold:threshold=0.0", threshold(0.0)),
    ("low_confidence", "threshold:threshold=1.0", threshold(1.0)),
    ("maskgit_plus", "threshold:threshold=0.8", threshold(0.8)),
    ("topk_margin", "threshold:threshold=0.4", threshold(0.4)),
    ("low_confidence", "factor:factor=1.0", factor(1.0, False)),
    ("low_confidence", "factor:factor=1.0,strict=true", factor(1.0, True)),
    ("maskgit_plus", "factor:factor=0.5", factor(0.5, False)),
    ("maskgit_plus", "factor:factor=2.5,strict=true", factor(2.5, True)),
    ("entropy", "entropy_bound:gamma=0.0", entropy_bound(0.0)),
    ("entropy", "entropy_bound:gamma=0.7", entropy_bound(0.7)),
    ("entropy", "entropy_bound:gamma=3.0", entropy_bound(3.0)),
    ("entropy", "entropy_bound:gamma=1e9", entropy_bound(1e9)),
]


@LAB
@pytest.mark.parametrize("rule, schedule, count", SCHEDULES, ids=lambda value: str(value)[:32])
def test_schedules_that_read_the_scores(rule, schedule, count):
    sizes = set()
    for seed, block_length in enumerate((12, 5, 4)):
        canvas = Canvas.from_prompts(PROMPTS, new_tokens=12, mask_id=MASK, pad_id=PAD)
        toy, ours, steps = rows(
            canvas, seed, rule=rule, schedule=schedule, block_length=block_length
        )
        sizes |= {int(n) for step in steps for n in step.committed_BS.sum(1)}
        assert {step.total for step in steps} == {None}
        blocks = [(min(block_length, 12 - start), count) for start in range(0, 12, block_length)]
        for prompt, canvases in zip(PROMPTS, ours, strict=True):
            expected = plain_row(toy, [*prompt, *[MASK] * 12], rule, blocks)
            # A row that has finished its block waits for the others, so its canvas may repeat.
            assert distinct(canvases) == expected, f"seed {seed}"
    if schedule not in ("threshold:threshold=1.0", "entropy_bound:gamma=0.0"):
        assert max(sizes) > 1, "the setting never commits more than one"


@pytest.mark.ring("extras")
@pytest.mark.parametrize("tau", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(
    "steps, quotas",
    [
        ("", [1] * 5),
        (",steps=2,block_length=5", [3, 2]),
        (",steps=4,block_length=5", [2, 1, 1, 1]),
    ],
)
def test_sdars_quota_is_that_of_a_whole_block(tau, steps, quotas):
    count = dynamic(tau, quotas)
    for seed in range(2):
        canvas = Canvas.from_prompts(PROMPTS, new_tokens=12, mask_id=MASK, pad_id=PAD)
        schedule = f"dynamic:threshold={tau}{steps}"
        toy, ours, _ = rows(canvas, seed, schedule=schedule, block_length=5)
        for prompt, canvases in zip(PROMPTS, ours, strict=True):
            blocks = [(5, count), (5, count), (2, count)]
            expected = plain_row(toy, [*prompt, *[MASK] * 12], "low_confidence", blocks)
            assert distinct(canvases) == expected, f"seed {seed}"


@pytest.mark.parametrize("rule", RULES)
def test_dreams_time_schedule(rule):
    cases = [(12, 12, 1e-3), (5, 12, 0.2), (7, 5, 1e-5), (20, 12, 1e-3), (9, 4, 0.2)]
    for seed, (steps, block_length, eps) in enumerate(cases):
        blocks = [min(block_length, 12 - start) for start in range(0, 12, block_length)]
        share, rest = divmod(steps, len(blocks))
        dealt = [share + (block < rest) for block in range(len(blocks))]
        canvas = Canvas.from_prompts(PROMPTS, new_tokens=12, mask_id=MASK, pad_id=PAD)
        toy, ours, done = rows(
            canvas, seed, rule=rule, schedule=Timed(eps), steps=steps, block_length=block_length
        )
        assert [step.total for step in done] == [steps] * steps
        for prompt, canvases in zip(PROMPTS, ours, strict=True):
            counts = [(size, timed(eps, n)) for size, n in zip(blocks, dealt, strict=True)]
            assert canvases == plain_row(toy, [*prompt, *[MASK] * 12], rule, counts)


QUOTAS = [
    (12, 12, [12]),
    (5, 12, [5]),
    (None, 4, [4, 4, 4]),
    (8, 4, [3, 3, 2]),
    (7, 5, [3, 2, 2]),
    (11, 5, [5, 4, 2]),
    (12, 1, [1] * 12),
    (1, 12, [1]),
    (3, 50, [3]),
]
"""steps, length of blocks, and the steps of each block"""


@pytest.mark.parametrize("rule", RULES)
def test_lladas_even_quota(rule):
    for seed, (steps, block_length, dealt) in enumerate(QUOTAS):
        canvas = Canvas.from_prompts(PROMPTS, new_tokens=12, mask_id=MASK, pad_id=PAD)
        toy, ours, done = rows(
            canvas, seed, rule=rule, schedule=EvenQuota(), steps=steps, block_length=block_length
        )
        assert [step.total for step in done] == [sum(dealt)] * sum(dealt)
        for prompt, canvases in zip(PROMPTS, ours, strict=True):
            sizes = [min(block_length, 12 - start) for start in range(0, 12, block_length)]
            blocks = [(size, even(n)) for size, n in zip(sizes, dealt, strict=True)]
            assert canvases == plain_row(toy, [*prompt, *[MASK] * 12], rule, blocks)


@pytest.mark.parametrize("rule", OF_LAB)
@pytest.mark.parametrize(
    "cuts", [{"top_p": 0.6}, {"top_k": 3}, {"top_p": 0.9, "top_k": 5}, {"top_k": 99}], ids=str
)
def test_scores_after_top_p_and_top_k(rule, cuts):
    differs = False
    for seed in range(2):
        canvas = Canvas.from_prompts(PROMPTS, new_tokens=12, mask_id=MASK, pad_id=PAD)
        toy, ours, _ = rows(canvas, seed, rule=rule, **cuts)
        for prompt, canvases in zip(PROMPTS, ours, strict=True):
            start = [*prompt, *[MASK] * 12]
            assert canvases == plain_row(toy, start, rule, [(12, even(12))], **cuts)
            differs |= canvases != plain_row(toy, start, rule, [(12, even(12))])
    assert differs or cuts == {"top_k": 99}, "the cut changes nothing"
