"""The conformance suites of unmasking rules and caches, over every built-in and the examples."""

from dataclasses import dataclass

import pytest
import torch

from conformance.decoding import check_cache, check_unmasking_rule
from refusals import refused
from sinklab.core.registry import caches, unmasking_rules
from sinklab.core.sampling import Cache, Canvas, DecodingSettings, UnmaskingRule, denoise
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
    refused(r"alg_temp.*discount", DecodingSettings(rule="discounted:alg_temp=0.3").values)


@dataclass(frozen=True)
class Forgetful(Cache):
    """Leaves a column of the block out."""

    def columns(self, start, stop, length, nth):
        return None if nth == 0 else slice(start + 1, stop)


@dataclass(frozen=True)
class Lazy(Forgetful):
    """Never computes everything."""

    def columns(self, start, stop, length, nth):
        return slice(start, stop)


@dataclass(frozen=True)
class Falling(Forgetful):
    """Has the block before what stands in front of it."""

    def columns(self, start, stop, length, nth):
        return None if nth == 0 else torch.tensor([*range(start, stop), 0])


@dataclass(frozen=True)
class OfTheBatch(Forgetful):
    """Counts columns of the padded canvas, so that a row depends on how long the others are."""

    def columns(self, start, stop, length, nth):
        return None if nth == 0 else slice(start if start % 2 else 0, stop)


@pytest.mark.parametrize(
    "wrong, message",
    [
        (Forgetful, "leaves out columns of the block"),
        (Lazy, "does not compute everything first"),
        (Falling, "columns rise"),
        (OfTheBatch, "a row of a batch is not written as alone"),
    ],
)
def test_a_cache_that_does_not_conform_is_seen(monkeypatch, wrong, message):
    monkeypatch.setattr(caches, "_classes", {**caches._all(), "wrong": wrong})
    with pytest.raises(AssertionError, match=message):
        check_cache("wrong")


def test_a_schedule_is_told_what_to_count():
    canvas = Canvas.from_prompts([[1]], new_tokens=4, mask_id=9)
    schedule = type("Own", (Schedule,), {"count": lambda self, turn: turn.size_B[None]})()
    steps = denoise(lambda ids_BS, wanted_BS: torch.zeros(4, 10), canvas, schedule=schedule)
    refused(r"int64 of shape \(1\), but is int64 .*\(1, 1\)", list, steps)


@dataclass(frozen=True)
class OfTheRow(UnmaskingRule):
    """Scores by the row's place in the batch."""

    def __call__(self, candidates):
        return candidates.columns_M.float() * (-1.0) ** candidates.rows_M


def test_an_unmasking_rule_that_does_not_conform_is_seen(monkeypatch):
    monkeypatch.setattr(unmasking_rules, "_classes", {**unmasking_rules._all(), "wrong": OfTheRow})
    with pytest.raises(AssertionError, match="batch is not written as alone"):
        check_unmasking_rule("wrong")


def test_what_is_not_registered_has_no_text_and_is_refused():
    refused(
        "no registered unmasking rule",
        DecodingSettings,
        rule=lambda candidates: candidates.columns_M,
    )


def test_denoise_takes_texts_with_fields():
    canvas = Canvas.from_prompts([[1]], new_tokens=3, mask_id=9)
    steps = denoise(
        lambda ids_BS, wanted_BS: torch.eye(9)[: int(wanted_BS.sum())],
        canvas,
        schedule="threshold:threshold=0.2",
    )
    assert len(list(steps)) == 1
    with pytest.raises(TypeError, match="keyword argument 'temprature'"):
        denoise(lambda *_: None, canvas, temprature=1.0)
