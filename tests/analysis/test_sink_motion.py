from itertools import pairwise

import numpy as np
import pytest
from numpy.testing import assert_allclose

from refusals import refused
from sinklab.lab.analysis import MotionSummary, motion, motion_word
from sinklab.lab.analysis.rules import Top

ROUND = 128


def path(positions, keys=64, strength=10.0):
    """Received attention (step, 1 layer, 1 head, key) whose main sink visits ``positions``; None:
    no such step.
    """
    received = np.full((len(positions), 1, 1, keys), (keys - strength) / (keys - 1))
    for step, position in enumerate(positions):
        if position is None:
            received[step] = np.nan
        else:
            received[step, 0, 0, position] = strength
    return received


def heads(*paths):
    """Paths as the heads of one layer."""
    return np.concatenate(paths, axis=2)


@pytest.mark.parametrize(
    ("positions", "mobility", "word"),
    [
        ([9] * ROUND, 0.0, "static"),
        # Two places in turn: n (n - 1) pairs of steps agree at each, so 1 - 2 * 64 * 63 / (128 *
        # 127) = 64/127.
        ([3, 40] * (ROUND // 2), 64 / 127, "mixed"),
        (list(range(60)), 1.0, "moving"),
        # Four blocks of 32 steps, one place each: 1 - 4 * 32 * 31 / (128 * 127) = 96/127.
        ([5] * 32 + [20] * 32 + [35] * 32 + [50] * 32, 96 / 127, "moving"),
        # Away for 6 of 128 steps: 1 - (122 * 121 + 6 * 5) / (128 * 127).
        ([9] * 122 + [30] * 6, 1 - (122 * 121 + 30) / (128 * 127), "static"),
        ([7], np.nan, "no sink"),
    ],
)
def test_mobility_of_known_paths(positions, mobility, word):
    found = motion(path(positions))
    assert_allclose(found.mobility.item(), mobility, atol=1e-12)
    assert motion_word(found.mobility.item()) == word
    # One sample is none too many for a word; eight that agree are enough.
    assert found.overall.word == (word if word == "no sink" else None)
    assert MotionSummary.pooled([found.overall] * 8).word == word
    assert_allclose(found.overall.mobility, mobility, atol=1e-12)
    # Leaving and coming back in another order makes no difference to where the sink is.
    shuffled = list(np.random.default_rng(0).permutation(positions))
    assert_allclose(motion(path(shuffled)).mobility.item(), mobility, atol=1e-12)


@pytest.mark.parametrize(
    ("positions", "moves"),
    [
        ([0, 1, 2, 3], 3),
        ([3, 3, 7, 7, 7, 3], 2),
        ([5], 0),
        ([2, 2, 8, None, None], 1),
        ([2, 2, None, 2, 8], 1),
        ([None, None], 0),
    ],
)
def test_moves_are_counted_between_steps_that_follow_each_other(positions, moves):
    found = motion(path(positions))
    assert found.main[:, 0, 0].tolist() == [-1 if place is None else place for place in positions]
    exists = [place is not None for place in positions]
    assert found.counted[:, 0, 0].tolist() == exists and found.steps.item() == sum(exists)
    assert found.moves.item() == moves
    assert found.transitions.item() == sum(a and b for a, b in pairwise(exists))


def test_steps_without_a_sink_do_not_count():
    # The greatest key wanders at steps 2 and 3, where it gets no more than twice an even share.
    received = path([9, 9, 30, 41, 9, 9])
    received[2:4] = path([0, 0, 30, 41, 0, 0], strength=2.0)[2:4]
    found = motion(received)
    assert found.counted[:, 0, 0].tolist() == [True, True, False, False, True, True]
    assert found.mobility.item() == 0 and found.moves.item() == 0 and found.transitions.item() == 2
    assert_allclose(found.strength.item(), 10 / 64)
    every = motion(received, rule=Top(1))
    assert every.counted.all() and every.moves.item() == 3
    assert_allclose(every.mobility.item(), 1 - 4 * 3 / 30)
    weak = motion(path([1, 2, 3], strength=2.0))
    assert weak.overall.word == "no sink" and np.isnan(weak.mobility.item())
    assert np.isnan(weak.overall.moves_per_step) and weak.strength.item() == 0


def test_steps_of_a_cached_decoder_are_on_one_footing():
    received = path([5, 5, 5, 30, 30, 30])
    visible, positions = np.full((6, 1, 1, 64), 64.0), np.full((6, 1, 1), 64)
    whole = motion(received, visible, positions)
    partial, seen = received.copy(), visible.copy()
    partial[2:] /= 16
    seen[2:] /= 16
    found = motion(partial, seen, positions)
    for name, one in found._asdict().items():
        assert_allclose(one, getattr(whole, name), rtol=1e-6, err_msg=name)
    assert not motion(partial, seen).counted[2:].any()


def test_layers_and_heads_keep_their_places():
    one, two = path([1, 2, 3]), path([4, 4, None])
    received = np.concatenate([heads(one, two), heads(two, one)], axis=1)
    found = motion(received)
    assert received.shape == (3, 2, 2, 64) and found.main.shape == (3, 2, 2)
    assert found.moves.tolist() == [[2, 0], [0, 2]]
    assert found.transitions.tolist() == [[2, 1], [1, 2]]
    assert_allclose(motion(received.astype(np.float16)).strength, found.strength, rtol=1e-3)


def test_overall_weighs_heads_by_what_their_sinks_draw_and_how_long():
    # 32 of 64 against 8 of 64: the strong static head counts four times as much as the weak moving
    # one.
    strong, weak = path([9] * 20, strength=32.0), path(list(range(20)), strength=8.0)
    overall = motion(heads(strong, weak)).overall
    assert_allclose([overall.mobility, overall.moves_per_step], 0.2)
    # As strong, but only for four steps: a fifth of what the other draws.
    short = path(list(range(20)), strength=2.0)
    short[:4] = path([0, 1, 2, 3])
    overall = motion(heads(path([9] * 20), short)).overall
    assert_allclose([overall.mobility, overall.moves_per_step], 1 / 6)


def test_keys_that_nobody_sees_and_steps_without_queries():
    received, visible = path([9, 9, 9]), np.full((3, 1, 1, 64), 64.0)
    received[1, 0, 0, 4], visible[1, ..., 4] = 50, 0
    received[2], visible[2] = 0, 0
    found = motion(received, visible, rule=Top(1))
    assert found.main[:, 0, 0].tolist() == [9, 9, -1]
    assert found.transitions.item() == 1 and found.moves.item() == 0


def test_samples_pool_into_one_summary():
    # every sample counts alike in the median, however strong its sinks are, and by its strength in
    # the mean
    strong, weak = path([9] * 20, strength=32.0), path([0, 40] * 10, strength=8.0)
    parts = [motion(one).overall for one in (strong, weak)]
    pooled, side_by_side = MotionSummary.pooled(parts), motion(heads(strong, weak)).overall
    assert_allclose(pooled.mobility, side_by_side.mobility)
    assert_allclose(pooled.moves_per_step, side_by_side.moves_per_step)
    mean = np.mean([part.mobility for part in parts])
    assert pooled.mobility_over.value == mean > pooled.mobility
    assert pooled.mobility_over.samples == 2 and pooled.mobility_S.tolist()[0] == 0


def test_motion_words_and_errors():
    words = ["static"] * 2 + ["mixed"] * 2 + ["moving"] * 2
    assert [motion_word(m) for m in (0, 0.249, 0.25, 0.6, 0.601, 1)] == words
    refused(r"between 0 and 1: got 1\.2", motion_word, 1.2)
    refused(r"key\): got shape \(3, 4, 5\)", motion, np.ones((3, 4, 5)))
