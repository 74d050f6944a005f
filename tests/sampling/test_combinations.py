"""Combinations that make no sense are refused by name before the first step; all others decode
everything.
"""

import itertools

import pytest
import torch
from toy_denoiser import MASK, ToyDenoiser, prompts, seeded

from refusals import refused
from sinklab.core.registry import schedules, unmasking_rules
from sinklab.core.subject import LowConfidence, denoise
from sinklab.lab.samplers import Origin, Timed

CANVAS = prompts()
READ = ("threshold", "dynamic", "editing", "factor")
"""Schedules that read confidences."""


def start(seed=0, **settings):
    generator = None if seed is None else seeded(seed)
    return denoise(ToyDenoiser(CANVAS.attention_BS), CANVAS, generator=generator, **settings)


@pytest.mark.ring("lab")
@pytest.mark.parametrize(
    "settings, message",
    [
        (
            {"rule": "random", "schedule": "threshold"},
            r"the schedule 'threshold' does not go with the rule RandomOrder\(\), which gives no "
            r"confidence; use",
        ),
        (
            {"rule": Origin(), "schedule": Timed(pooled=True)},
            r"'timed' does not go .* leave pooled out",
        ),
        (
            {"schedule": "threshold", "steps": 4},
            "the schedule 'threshold' runs until each block is done, got steps=4; leave steps "
            "out, or use",
        ),
        (
            {"rule": LowConfidence(alg_temp=0.5), "schedule": "threshold"},
            "the schedule 'threshold' reads the scores themselves, got alg_temp=0.5; leave "
            "alg_temp out",
        ),
        (
            {"rule": LowConfidence(alg_temp=0.5), "seed": None},
            r"the rule LowConfidence\(alg_temp=0.5.*needs a source of",
        ),
        (
            {"top_k": 5},
            r"top_p and top_k do nothing at temperature 0 with the rule LowConfidence.* got "
            r"top_p=None and top_k=5",
        ),
        ({"block_length": 0}, "block_length must be at least 1"),
        ({"temperature": 1.0, "seed": None}, "temperature above 0 needs"),
        (
            {"cache": "dual"},
            "needs a denoiser that remembers keys and values, but .*ToyDenoiser",
        ),
        ({"stop_ids": []}, "stop_ids needs at least one token id, got none"),
        (
            {"stop_ids": [3, MASK]},
            rf"\[MASK\] \(id {MASK}\) is never written, so it cannot be a stop id",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_before_the_first_step(settings, message):
    refused(message, start, **settings)


@pytest.mark.ring("extras")
@pytest.mark.parametrize(
    "registry, text, message",
    [
        (schedules, "threshold:threshold=1.1", "at least 0 and at most 1, but is 1.1"),
        (schedules, "factor:factor=0", "factor must be more than 0, but is 0"),
        (schedules, "entropy_bound:gamma=-1", "gamma must be at least 0, but is -1"),
        (schedules, "timed:eps=0", "eps must be more than 0 and less than 1, but is 0.*1e-3"),
        (unmasking_rules, "low_confidence:alg_temp=-0.1", "alg_temp .*finite .* is -0.1"),
        (schedules, "even:zeta=1", "'zeta'; it has none"),
    ],
)
def test_numbers_out_of_range_or_of_another_are_refused(registry, text, message):
    refused(message, registry.parse, text)


@pytest.mark.ring("extras")
def test_every_other_pair_of_rule_and_schedule_decodes_everything():
    refused = []
    for rule, schedule in itertools.product(unmasking_rules, schedules):
        try:
            steps = list(start(rule=rule, schedule=schedule, block_length=5))
        except ValueError as error:
            assert "does not go with the rule" in str(error)
            refused.append((rule, schedule))
            continue
        assert not (steps[-1].ids_BS == MASK).any()
        filled_BS = torch.stack([step.committed_BS & step.masked_BS for step in steps]).sum(0)
        # edits may mask a position again
        assert torch.equal(
            filled_BS.clamp(max=1) if schedule == "editing" else filled_BS, CANVAS.open_BS.long()
        )
    orders = ["left_to_right", "origin", "random"]
    expected = [(rule, schedule) for rule in [*orders, "entropy"] for schedule in READ]
    expected += [(rule, "entropy_bound") for rule in unmasking_rules if rule != "entropy"]
    expected += [
        ("topk_margin", "factor"),
        ("topk_margin", "editing"),
        ("origin", "even"),
        ("origin", "alpha"),
    ]
    assert sorted(refused) == sorted(expected)
