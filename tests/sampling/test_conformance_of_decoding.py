"""What rules, schedules and caches are held to by name: their text and their options."""

import pytest
import torch

from refusals import refused
from sinklab.core.registry import caches, schedules, unmasking_rules
from sinklab.core.subject import Canvas, DecodingSettings, denoise
from sinklab.core.subject.schedules import Schedule
from sinklab.lab.checks import check_text

pytestmark = pytest.mark.ring("lab")


@pytest.mark.parametrize("known", [unmasking_rules, schedules, caches], ids=lambda one: one.what)
def test_values_are_read_from_their_text(known):
    for text in known:
        check_text(known, text)


def test_the_unmasking_rule_of_the_example_has_the_options_that_it_names(scratch):
    scratch(unmasking_rules, example="add_a_unmasking_rule")
    refused(r"alg_temp.*discount", DecodingSettings(rule="discounted:alg_temp=0.3").values)


def test_a_schedule_is_told_what_to_count():
    canvas = Canvas.from_prompts([[1]], new_tokens=4, mask_id=9)
    schedule = type("Own", (Schedule,), {"count": lambda self, turn: turn.size_B[None]})()
    steps = denoise(lambda ids_BS, wanted_BS: torch.zeros(4, 10), canvas, schedule=schedule)
    refused(r"int64 of shape \(1\), but is int64 .*\(1, 1\)", list, steps)


def test_what_is_not_registered_has_no_text_and_is_refused():
    refused(
        "no registered unmasking rule",
        DecodingSettings,
        rule=lambda candidates: candidates.columns_M,
    )
