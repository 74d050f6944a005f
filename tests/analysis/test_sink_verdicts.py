import math

import numpy as np
import pytest

from sinklab.analysis import epsilon_curve, masking_cost, ninety_six, recovery, start_only


def events(*at_start: float, length: int = 100) -> np.ndarray:
    """(sample, step, position): of 20 sinks this many are at position 0, the others at 50."""
    found = np.zeros((len(at_start), 2, length))
    found[:, 0, 0] = at_start
    found[:, 1, 50] = 20 - np.array(at_start)
    return found


def test_sinks_only_at_the_start():
    found = start_only(events(19, 20, 19, 20, 19, 20, 19))
    np.testing.assert_allclose(found.value, 0.95)
    assert found.holds is True and found.signature and found.estimate.samples == 7
    assert found.sentence == (
        "95 % of the sinks in the text are at the first 4 positions (median of 7 samples, 95\u00a0% interval 95 % to "
        "100 %; an even spread: 4 %): only at the start."
    )
    moved = start_only(events(19, 12, 11, 12, 10, 12, 12, 10, 12))
    assert moved.holds is False and moved.sentence.endswith("not only at the start.") and moved.value == 0.6
    # one sample in six that differs, and it cannot be told
    assert start_only(events(19, 20, 19, 20, 19, 2)).holds is None
    # exactly at the threshold is not over it
    assert start_only(events(*[18] * 8)).holds is None
    assert start_only(events(*[18] * 8), threshold=0.85).holds is True


def test_events_of_a_lasting_sink_are_one_observation():
    # A thousand sinks at the start in one sample: as much as one.
    many = events(20, 2, 2, 2, 2, 2)
    many[0] *= 1000
    assert start_only(many).value == 0.1
    few = start_only(events(20, 20, 20))
    assert few.holds is None and few.value == 1 and few.sentence.endswith("too few samples to tell (at least 6).")
    # a sample without sinks is none
    assert start_only(np.concatenate([events(*[20] * 5), np.zeros((3, 2, 100))])).estimate.samples == 5


def test_the_start_of_a_short_sequence_says_nothing():
    short = start_only(np.array([[1, 2, 3, 4]] * 6))
    assert short.holds is None and short.sentence.endswith("the sequence is too short to tell.")
    none = start_only(np.zeros((6, 30)))
    assert none.holds is None and math.isnan(none.value) and none.sentence.startswith("There is no sink")
    assert start_only(np.zeros((0, 0))).holds is None
    with pytest.raises(ValueError, match="at least 0"):
        start_only([[1, -1]])


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


def heads(samples: int, lost: int, back: int, others: int = 10, others_back: int = 0) -> tuple[np.ndarray, ...]:
    """(sample, head) lost, renormalised, recovered: ``back`` of ``lost`` heads, ``others_back`` of the others."""
    gone, recovered = np.zeros((2, samples, lost + others), dtype=bool)
    gone[:, :lost], recovered[:, :back], recovered[:, lost : lost + others_back] = True, True, True
    return gone, np.zeros_like(gone), recovered


def test_recovery_is_held_against_the_base_rate():
    found = recovery(*heads(6, 20, 16), within=4)
    assert found.holds is False and found.value == 0.8 and found.signature
    assert found.sentence == (
        "80 % of the heads that were left without a sink when theirs was hidden have a new one within 4 steps, 0 % of "
        "those that had none (difference 80 %, median of 6 samples, 95\u00a0% interval 80 % to 80 %): they recover."
    )
    stuck = recovery(*heads(6, 20, 2, 10, 1), within=1)
    assert stuck.holds is True and "within 1 step, 10 % of those" in stuck.sentence
    assert stuck.sentence.endswith("they do not recover.")
    # as many of those that lost nothing: no recovery, though 80 % have a sink
    assert recovery(*heads(6, 20, 16, 10, 8)).holds is True
    few = recovery(*heads(3, 20, 16))
    assert few.holds is None and few.sentence.endswith("too few samples to tell (at least 6).")


def test_renormalisation_is_no_recovery():
    lost, renormalised, recovered = heads(6, 20, 16)
    renormalised[:, :16] = True
    assert recovery(lost, renormalised, recovered).holds is True
    renormalised[:, :20] = True
    all_of_them = recovery(lost, renormalised, recovered)
    assert all_of_them.holds is None and math.isnan(all_of_them.value)
    assert all_of_them.sentence.startswith("All 120 heads whose main sink was hidden have another by renormalisation")
    none = recovery(*(np.zeros((6, 2), dtype=bool) for _ in range(3)))
    assert none.holds is None and none.sentence == "No head had its main sink in what was hidden."
    alone = recovery(*heads(6, 20, 16, 0))
    assert alone.holds is None and "to take the base rate from" in alone.sentence
    with pytest.raises(ValueError, match=r"three \(sample, head\): got shapes \(2,\), \(3,\), \(2,\)"):
        recovery([True] * 2, [True] * 3, [True] * 2)


def test_ninety_six_percent():
    received = np.full((4, 2, 2, 64), 0.5)
    received[..., 3] = 32
    found = ninety_six([epsilon_curve(received).at(3.0)] * 6)
    assert found.holds is True and not found.signature and found.value == 1 - 1 / 64
    assert found.sentence == (
        "Epsilon 3 leaves out 98.4 % of the tokens (median of 6 samples, 95\u00a0% interval 98.4 % to "
        "98.4 %): at least 96 %."
    )
    received[..., :4] = 10
    crowded = ninety_six([epsilon_curve(received).at(3.0)] * 6)
    assert crowded.holds is False and crowded.sentence.endswith("fewer than 96 %.")
    assert ninety_six([0.97, 0.98, 0.97, 0.96, 0.95, 0.97]).sentence.endswith("cannot tell on which side of 96 %.")
    one = ninety_six([0.98])
    assert one.holds is None and "(1 sample): too few samples" in one.sentence
    assert ninety_six([epsilon_curve(np.full((1, 1, 1, 4), np.nan)).at(3.0)]).holds is None
