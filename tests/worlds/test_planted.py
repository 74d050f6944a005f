"""The worlds hold what they are said to hold."""

import numpy as np
import planted
import pytest


def test_sinks_of_a_sample_last_for_all_its_steps():
    received_NTS, classes_NTS = planted.tokens(np.random.default_rng(0), 20)
    greatest_NT = received_NTS.argmax(-1)
    assert received_NTS.shape == classes_NTS.shape == (20, 16, 48)
    assert ((received_NTS > 4).all(1) | (received_NTS < 4).all(1)).all()
    assert len(np.unique(greatest_NT[:, 0])) > 8, "every sample has places of its own"


def test_planted_sinks_are_at_their_place_and_on_their_class():
    received_NTS, _ = planted.tokens(np.random.default_rng(0), 20, at_place=1.0)
    assert (received_NTS[:, :, [0, 5, 10]] > 4).all() and (received_NTS > 4).sum(-1).max() == 3
    received_NTS, classes_NTS = planted.tokens(np.random.default_rng(0), 20, on_class=1.0)
    assert {*classes_NTS[received_NTS > 4]} <= {"punctuation"}


@pytest.mark.parametrize("kind", ["normal", "heavy", "skewed"])
def test_differences_have_mean_0_and_deviation_1(kind):
    drawn = planted.differences(np.random.default_rng(0), kind, (100_000,))
    assert abs(drawn.mean()) < 0.02 and drawn.std() == pytest.approx(1, abs=0.03)


def test_paths_go_where_they_are_said_to_go():
    for kind, places in {"static": 1, "moving": 12}.items():
        received = planted.paths(np.random.default_rng(0), kind)
        main_TH = received[:, 0].argmax(-1)
        assert len(np.unique(main_TH[:, 0])) >= places and received.shape == (24, 1, 3, 40)
        assert (len(np.unique(main_TH[:, 0])) == 1) == (kind == "static")
    none = planted.paths(np.random.default_rng(0), "none")
    assert none.max() < 5
