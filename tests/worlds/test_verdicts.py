"""Verdicts where nothing is to be found and where something was planted: a part of
benchmarks/calibration.py.

All worlds and seeds are fixed, so that the figures are those of docs/statistics.md, for fewer
worlds.
"""

import math

import numpy as np
import planted
import pytest
import trials
from trials import PAGES, VERDICTS

LONG = ("sinks are", "sinks of an", "an autoregressive")
QUICK = {row.verdict: row for row in VERDICTS if not row.verdict.startswith(LONG)}
AUTOREGRESSIVE = {row.verdict: row for row in VERDICTS if "autoregressive" in row.verdict}
SLOW = {row.verdict: row for row in VERDICTS if row.verdict not in {**QUICK, **AUTOREGRESSIVE}}


def check(row, worlds, samples):
    null, effect = row.null(worlds, samples), row.effect(worlds, samples)
    # the least that would be significant at 5 % if the true rate were the one that is promised
    chance = 100 * 1.645 * math.sqrt(0.25 * 0.2 / worlds)
    assert row.alarms(null) <= (7 if worlds >= 500 else 7 + chance)
    if samples >= row.enough:
        assert row.right(effect) >= 80
    for rates in (null, effect):
        if row.covers and not math.isnan(rates.covered):
            assert rates.covered >= (90 if worlds >= 500 else 90 - chance)


@pytest.mark.parametrize("samples", [8, 12])
@pytest.mark.parametrize("verdict", QUICK)
def test_shares_costs_and_differences(verdict, samples):
    check(QUICK[verdict], 500, samples)


@pytest.mark.slow
@pytest.mark.parametrize("samples", [8, 12])
def test_at_most_one_page_in_ten_says_something_false(samples):
    verdicts, _ = PAGES
    assert verdicts.null(500, samples).yes <= 7
    # eight samples that agree do for the two that are shares
    assert verdicts.effect(200, samples).yes >= 80


@pytest.mark.slow
def test_at_most_one_page_in_ten_says_something_false_in_words_too(
    monkeypatch,
):
    monkeypatch.setattr(trials, "POOL", 40)
    assert PAGES[1].null(40, 12).yes <= 10 + 100 * 1.645 * math.sqrt(0.1 * 0.9 / 40)


@pytest.mark.slow
@pytest.mark.parametrize("verdict", SLOW)
def test_explained_variance_and_motion(verdict, monkeypatch):
    monkeypatch.setattr(trials, "POOL", 40)
    monkeypatch.setattr(trials, "MANY", 200)
    check(SLOW[verdict], 40, 12)


@pytest.mark.slow
def test_with_fewer_than_six_samples_nothing_is_said():
    rng = np.random.default_rng(0)
    for samples in (1, 3, 5):
        assert trials.starts(20, samples, 0.97, 0.02).told == 0
        assert trials.filters(20, samples, 0.975, 0.0015).told == 0
        assert trials.semantic(3, samples, on_class=0.9).told == 0
        summary = trials.MotionSummary.pooled(
            trials.motion(planted.paths(rng, "moving")).overall for _ in range(samples)
        )
        assert summary.word is None


@pytest.mark.parametrize("verdict", AUTOREGRESSIVE)
def test_what_an_autoregressive_model_shows(verdict, monkeypatch):
    monkeypatch.setattr(trials, "POOL", 40)
    check(AUTOREGRESSIVE[verdict], 40, 12)
