import numpy as np
import pytest

from sinklab.lab.analysis.movement import chance_elsewhere, of_windows


def windows_of(places, share=0.6):
    """(W, 1, H, K) mean weights: the key of each head that gets ``share`` in every window; the rest
    is even.
    """
    heads, count = len(places), len(places[0])
    found = np.full((count, 1, heads, 8 * count), np.nan)
    for head, row in enumerate(places):
        for window, place in enumerate(row):
            seen = 8 * window + 1
            found[window, 0, head, :seen] = (1 - share) / seen
            found[window, 0, head, place] += share
    return found


def test_two_windows_are_compared_on_the_keys_that_both_see():
    still, moves, newest = [0] * 6, [0, 1, 2, 3, 4, 5], [0, 8, 16, 24, 32, 40]
    found, weight = of_windows(windows_of([still, moves, newest]))
    assert found.shape == (1, 3)
    # 0.6, and an even share of what is left
    assert weight[0, 0] == pytest.approx(0.6 + np.mean(0.4 / (8 * np.arange(1, 6) + 1)))
    # the first window sees one key and says nothing; of keys that are new to a window, the window
    # before knows none
    assert found[0, 0] == 0 and found[0, 1] == 1
    # without its newest key a window weighs all others alike, and the first of these is the
    # strongest
    assert found[0, 2] == 1
    one, _ = of_windows(windows_of([still])[:2])
    assert np.isnan(one).all(), "two windows, of which the first says nothing"


def test_steps_of_a_denoiser_are_compared_as_they_are():
    key_TLH = np.array([[[2, 0]], [[2, 1]], [[2, 3]]])
    assert chance_elsewhere(key_TLH, key_TLH >= 0).tolist() == [[0, 1]]
