"""The conformance suites of unmasking rules and caches, over every built-in and the examples."""

import dataclasses

import pytest
import torch

from conformance.decoding import check_cache, check_unmasking_rule
from refusals import refused
from sinklab.core.registry import caches, unmasking_rules
from sinklab.core.sampling import Canvas, DecodingSettings, denoise
from sinklab.core.sampling.schedules import Schedule

pytestmark = pytest.mark.ring("lab")


@pytest.mark.parametrize(
    "text", [*unmasking_rules, "entropy:alg_temp=0.5", "low_confidence:defer_ids=3+4"]
)
def test_an_unmasking_rule_conforms(text):
    check_unmasking_rule(text)


@pytest.mark.parametrize("text", [*caches, "dual:refresh_every=2"])
def test_a_cache_conforms(text):
    check_cache(text)


@pytest.mark.parametrize("fields", ["", ":width=0", ":width=2"])
def test_the_cache_of_the_example_conforms(scratch, fields):
    scratch(caches, example="add_a_cache")
    check_cache(f"near{fields}")
    made = DecodingSettings(cache=f"near{fields}", block_length=4).values()["cache"]
    assert made == caches.parse(f"near{fields}")
    assert DecodingSettings(cache=made).cache == caches.as_text(made)


def test_the_unmasking_rule_of_the_example_conforms(scratch):
    scratch(unmasking_rules, example="add_a_unmasking_rule")
    check_unmasking_rule("discounted:discount=0.2")
    refused(
        r"alg_temp does .*'discounted'", DecodingSettings(rule="discounted", alg_temp=0.3).values
    )


def test_a_schedule_is_told_what_to_count():
    canvas = Canvas.from_prompts([[1]], new_tokens=4, mask_id=9)
    schedule = type("Own", (Schedule,), {"count": lambda self, turn: turn.size_B[None]})()
    steps = denoise(lambda ids_BS, wanted_BS: torch.zeros(4, 10), canvas, schedule=schedule)
    refused(r"int64 of shape \(1\), but is int64 .*\(1, 1\)", list, steps)


def test_what_is_chosen_in_text_and_in_an_option_is_refused():
    settings = DecodingSettings(cache="dual:refresh_every=2", refresh_every=3)
    refused(r"refresh_every=3 stands beside", settings.values)
    assert dataclasses.replace(settings, refresh_every=None).values()["cache"].refresh_every == 2
    refused(
        "no registered unmasking rule",
        DecodingSettings,
        rule=lambda candidates: candidates.columns_M,
    )
