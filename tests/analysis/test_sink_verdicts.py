import math

import numpy as np
from numpy.testing import assert_allclose

from refusals import refused
from sinklab.lab.analysis import Verdict, holm, mean_over, start_only


def events(*at_start, length=100):
    """(sample, step, position): of 20 sinks this many are at position 0, the others at 50."""
    found = np.zeros((len(at_start), 2, length))
    found[:, 0, 0] = at_start
    found[:, 1, 50] = 20 - np.array(at_start)
    return found


def test_sinks_only_at_the_start():
    found = start_only(events(19, 20, 19, 20, 19, 20, 19, 19))
    assert_allclose(found.estimate.value, 0.95)
    assert found.word == "seen" and found.estimate.samples == 8
    moved = start_only(events(19, 12, 11, 12, 10, 12, 12, 10, 12))
    assert moved.holds is False and moved.estimate.value == 0.6
    # one sample in eight that differs, and it is inconclusive
    assert start_only(events(19, 20, 19, 20, 19, 20, 19, 2)).holds is None
    # exactly at the threshold is not over it
    assert start_only(events(*[18] * 8)).holds is None
    assert start_only(events(*[18] * 8), threshold=0.85).holds is True


def test_events_of_a_lasting_sink_are_one_observation():
    # A thousand sinks at the start in one sample: as much as one.
    many = events(20, 2, 2, 2, 2, 2, 2, 2)
    many[0] *= 1000
    assert start_only(many).estimate.value == 0.1
    few = start_only(events(20, 20, 20))
    assert few.holds is None and few.estimate.value == 1
    # a sample without sinks is none
    some = np.concatenate([events(*[20] * 5), np.zeros((3, 2, 100))])
    assert start_only(some).estimate.samples == 5


def test_the_start_of_a_short_sequence_says_nothing():
    short = start_only(np.array([[1, 2, 3, 4]] * 8))
    assert short.holds is None and math.isnan(short.p) and short.estimate.value == 1
    none = start_only(np.zeros((6, 30)))
    assert none.holds is None and none.estimate.samples == 0
    assert start_only(np.zeros((0, 0))).holds is None
    refused("at least 0", start_only, [[1, -1]])


def judged(holds, p):
    return Verdict("one", mean_over([0.2]), 0.1, p, holds)


def test_verdicts_of_a_page_are_corrected_for_their_number():
    # 3 · 0.01, then 2 · 0.02 stand; 0.06 never did
    told = [judged(True, 0.02), judged(False, 0.01), judged(None, 0.06), judged(None, math.nan)]
    kept = holm(told)
    assert [one.holds for one in kept] == [True, False, None, None]
    # 4 · 0.01 stands, 3 · 0.02 does not, and nothing behind it does
    many = [judged(True, 0.02), judged(True, 0.01), judged(True, 0.021), judged(None, 0.9)]
    assert [one.holds for one in holm(many)] == [None, True, None, None]
    # of a page with more on it, fewer stand; once more changes nothing
    more = holm([*kept, judged(None, 0.5)])
    assert [one.holds for one in more] == [None, False, None, None, None]
    assert [one.holds for one in holm(kept)] == [one.holds for one in kept] and holm([]) == []
