import math

import numpy as np
import pytest

from sinklab.analysis import epsilon_curve, masking_cost, ninety_six, recovery, start_only


def test_sinks_only_at_the_start():
    events = np.zeros((3, 100))
    events[:, 0] = 19
    events[0, 50] = 3
    found = start_only(events)
    np.testing.assert_allclose(found.value, 57 / 60)
    assert found.holds is True and found.signature
    assert found.sentence == (
        "95 % of the sinks in the text are at the first 4 positions (an even spread: 4 %): only at the start."
    )
    events[1, 70] = 30
    moved = start_only(events)
    assert moved.holds is False and moved.sentence.endswith("not only at the start.")
    np.testing.assert_allclose(moved.value, 57 / 90)
    # Exactly at the threshold is not over it.
    assert start_only([9, 0, 0, 0, 0, 0, 0, 1.0], first=1).holds is False
    assert start_only([9, 0, 1.0, np.nan], first=2, threshold=0.85).holds is True


def test_the_start_of_a_short_sequence_says_nothing():
    assert start_only([1, 2, 3, 4]).holds is None
    assert start_only([1, 2, 3, 4]).sentence.endswith("the sequence is too short to tell.")
    none = start_only(np.zeros(30))
    assert none.holds is None and math.isnan(none.value) and none.sentence.startswith("There is no sink")
    with pytest.raises(ValueError, match="at least 0"):
        start_only([1, -1])


def test_the_published_accuracies_are_judged_by_their_errors():
    # Table 1 of the analysis, GSM8K, one sink masked: the autoregressive model breaks down, LLaDA does not.
    llama = masking_cost((0.85, 0.01), (0.02, 0.004), measure="accuracy")
    assert llama.holds is True and llama.signature
    assert llama.sentence == (
        "With the sinks masked the accuracy goes from 0.85 to 0.02, 97.6 % worse: over the limit of 5 %."
    )
    # 0.76 -> 0.75 with 0.012 each: 1.3 % +- 4.4 % stays below 5 % only by less than two errors.
    llada = masking_cost((0.76, 0.012), (0.75, 0.012), measure="accuracy")
    assert llada.holds is None and "cannot tell" in llada.sentence and "± 4.44 %" in llada.sentence
    paired = masking_cost((0.76, 0.012), (0.75, 0.012), measure="accuracy", paired_error=0.004)
    assert paired.holds is False and paired.sentence.endswith("1.32 % worse: within the limit of 5 %.")


def test_a_rising_loss_is_a_cost():
    found = masking_cost((4.0, 0.01), (4.4, 0.01))
    np.testing.assert_allclose(found.value, 0.1)
    assert found.holds is True and "loss goes from 4 to 4.4, 10 % worse" in found.sentence
    better = masking_cost((4.0, 0.01), (3.9, 0.01))
    assert better.holds is False and "2.5 % better" in better.sentence
    assert "unchanged: within" in masking_cost((4.0, 0.01), (4.0, 0.01)).sentence
    # 2 * sqrt(0.05^2 + (1.04 * 0.05)^2) / 4 = 3.6 %: 4 % could be over 5 %.
    unsure = masking_cost((4.0, 0.05), (4.16, 0.05))
    assert unsure.holds is None and unsure.value == pytest.approx(0.04)
    unknown = masking_cost((4.0, math.nan), (4.4, math.nan))
    assert unknown.holds is None and "(no error is known)" in unknown.sentence
    missing = masking_cost((4.0, 0.1), (math.nan, math.nan))
    assert missing.holds is None and missing.sentence == "Masking the sinks was not measured."
    with pytest.raises(ValueError, match="judges 'loss' or 'accuracy': got 'perplexity'"):
        masking_cost((4.0, 0.1), (4.0, 0.1), measure="perplexity")
    with pytest.raises(ValueError, match="plain accuracy above 0: got 0"):
        masking_cost((0.0, 0.1), (0.0, 0.1), measure="accuracy")


def test_recovery_after_truncation():
    lost = np.array([[True] * 20 + [False] * 12])
    found = recovery(lost, np.ones((1, 32), dtype=bool), within=4)
    assert found.holds is False and found.value == 1
    assert found.sentence == (
        "20 of 20 heads whose main sink was hidden have a new one within 4 steps (100 %): they recover."
    )
    stuck = recovery(lost, ~lost, within=1)
    assert stuck.holds is True and stuck.signature
    assert stuck.sentence.endswith("have a new one within 1 step (0 %): they do not recover.")
    few = recovery([True, True, True], [True, True, False])
    assert few.holds is None and few.sentence.endswith("too few to tell it from 50 %.")
    none = recovery([False, False], [True, True])
    assert none.holds is None and none.sentence == "No head had its main sink in what was hidden."
    with pytest.raises(ValueError, match=r"got shapes \(2,\) and \(3,\)"):
        recovery([True] * 3, [True] * 2)


def test_ninety_six_percent():
    received = np.full((4, 2, 2, 64), 0.5)
    received[..., 3] = 32
    found = ninety_six(epsilon_curve(received))
    assert found.holds is True and not found.signature and found.value == 1 - 1 / 64
    assert found.sentence == "Epsilon 3 leaves out 98.4 % of the tokens: at least 96 %."
    received[..., :4] = 10
    crowded = ninety_six(epsilon_curve(received))
    assert crowded.holds is False and crowded.sentence.endswith("93.8 % of the tokens: fewer than 96 %.")
    assert ninety_six(epsilon_curve(np.full((1, 1, 1, 4), np.nan))).holds is None
