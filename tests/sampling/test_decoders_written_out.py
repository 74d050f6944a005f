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
from toy_denoiser import MASK, ROWS, ToyDenoiser, prompts, rows_of

from sinklab.core.subject import EvenQuota, denoise
from sinklab.lab.samplers import Timed

LAB = pytest.mark.ring("lab")
OF_LAB = [pytest.param(rule, marks=LAB) for rule in ("maskgit_plus", "topk_margin", "entropy")]
RULES = ["low_confidence", *OF_LAB, pytest.param("left_to_right", marks=LAB)]


def rows(seed, **settings):
    """A toy, the canvases of each row of a batch that it decodes, and the steps."""
    canvas = prompts()
    # Sharper logits, so that thresholds and bounds let through one, several or all.
    toy = ToyDenoiser(canvas.attention_BS, seed, sharpness=2.0)
    steps = list(denoise(toy, canvas, **settings))
    return toy, rows_of(canvas, steps), steps


def written_out(toy, rule, blocks, **cuts):
    """The canvases of each row by the loop."""
    return [plain_row(toy, [*prompt, *[MASK] * 12], rule, blocks, **cuts) for prompt in ROWS]


def sizes_of(block_length):
    """Of the blocks that 12 new tokens make."""
    return [min(block_length, 12 - start) for start in range(0, 12, block_length)]


SCHEDULES = [
    ("low_confidence", "threshold:threshold=0.5", threshold(0.5)),
    ("low_confidence", "threshold:threshold=1.0", threshold(1.0)),
    ("topk_margin", "threshold:threshold=0.4", threshold(0.4)),
    ("low_confidence", "factor:factor=1.0", factor(1.0, False)),
    ("maskgit_plus", "factor:factor=2.5,strict=true", factor(2.5, True)),
    ("entropy", "entropy_bound:gamma=0.0", entropy_bound(0.0)),
    ("entropy", "entropy_bound:gamma=0.7", entropy_bound(0.7)),
    ("entropy", "entropy_bound:gamma=1e9", entropy_bound(1e9)),
]


@LAB
@pytest.mark.parametrize("rule, schedule, count", SCHEDULES, ids=lambda value: str(value)[:32])
def test_schedules_that_read_the_scores(rule, schedule, count):
    sizes = set()
    for seed, block_length in enumerate((12, 5, 4)):
        toy, ours, steps = rows(seed, rule=rule, schedule=schedule, block_length=block_length)
        sizes |= {int(n) for step in steps for n in step.committed_BS.sum(1)}
        assert {step.total for step in steps} == {None}
        blocks = [(size, count) for size in sizes_of(block_length)]
        # A row that has finished its block waits for the others, so its canvas may repeat.
        assert [*map(distinct, ours)] == written_out(toy, rule, blocks), f"seed {seed}"
    if schedule not in ("threshold:threshold=1.0", "entropy_bound:gamma=0.0"):
        assert max(sizes) > 1, "the setting never commits more than one"


@pytest.mark.ring("extras")
@pytest.mark.parametrize("tau", [0.5, 1.0])
@pytest.mark.parametrize(
    "steps, quotas",
    [
        ("", [1] * 5),
        (",steps=4,block_length=5", [2, 1, 1, 1]),
    ],
)
def test_sdars_quota_is_that_of_a_whole_block(tau, steps, quotas):
    count = dynamic(tau, quotas)
    for seed in range(2):
        toy, ours, _ = rows(seed, schedule=f"dynamic:threshold={tau}{steps}", block_length=5)
        expected = written_out(toy, "low_confidence", [(5, count), (5, count), (2, count)])
        assert [*map(distinct, ours)] == expected, f"seed {seed}"


@pytest.mark.parametrize("rule", RULES)
def test_dreams_time_schedule(rule):
    cases = [(5, 12, 0.2), (7, 5, 1e-5), (20, 12, 1e-3)]
    for seed, (steps, block_length, eps) in enumerate(cases):
        sizes = sizes_of(block_length)
        share, rest = divmod(steps, len(sizes))
        blocks = [(size, timed(eps, share + (nth < rest))) for nth, size in enumerate(sizes)]
        toy, ours, done = rows(
            seed, rule=rule, schedule=Timed(eps), steps=steps, block_length=block_length
        )
        assert [step.total for step in done] == [steps] * steps
        assert ours == written_out(toy, rule, blocks)


QUOTAS = [
    (None, 4, [4, 4, 4]),
    (8, 4, [3, 3, 2]),
    (11, 5, [5, 4, 2]),
    (12, 1, [1] * 12),
    (3, 50, [3]),
]
"""steps, length of blocks, and the steps of each block"""


@pytest.mark.parametrize("rule", RULES)
def test_lladas_even_quota(rule):
    for seed, (steps, block_length, dealt) in enumerate(QUOTAS):
        blocks = [(size, even(n)) for size, n in zip(sizes_of(block_length), dealt, strict=True)]
        toy, ours, done = rows(
            seed, rule=rule, schedule=EvenQuota(), steps=steps, block_length=block_length
        )
        assert [step.total for step in done] == [sum(dealt)] * sum(dealt)
        assert ours == written_out(toy, rule, blocks)


@pytest.mark.parametrize("rule", OF_LAB)
@pytest.mark.parametrize("cuts", [{"top_p": 0.6}, {"top_p": 0.9, "top_k": 5}], ids=str)
def test_scores_after_top_p_and_top_k(rule, cuts):
    differs, blocks = False, [(12, even(12))]
    for seed in range(2):
        toy, ours, _ = rows(seed, rule=rule, **cuts)
        assert ours == written_out(toy, rule, blocks, **cuts)
        differs |= ours != written_out(toy, rule, blocks)
    assert differs, "the cut changes nothing"
