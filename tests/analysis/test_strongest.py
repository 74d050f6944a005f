import numpy as np
import pytest

from refusals import refused
from sinklab.lab.analysis.strongest import strongest, window_mobility


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
    found = window_mobility(windows_of([still, moves, newest]))
    assert found.shape == (1, 3)
    # the first window sees one key and says nothing; of keys that are new to a window, the window
    # before knows none
    assert found[0, 0] == 0 and found[0, 1] == 1
    # without its newest key a window weighs all others alike, and the first of these is the
    # strongest
    assert found[0, 2] == 1
    one = window_mobility(windows_of([still])[:2])
    assert np.isnan(one).all(), "two windows, of which the first says nothing"


def test_a_head_with_a_strong_key_counts_be_it_another_one_in_every_window():
    places = [[0] * 6, [0, 1, 2, 3, 4, 5], [0, 8, 15, 23, 31, 39]]
    key_TLH = np.array([[[0, 3, 5]], [[0, 3, 5]], [[0, 4, -1]], [[1, 4, -1]]])
    weight_TLH = np.where(key_TLH < 0, np.nan, np.array([0.6, 0.2, 0.1]))
    windows = windows_of(places)
    windows[:, 0, 2] = np.where(np.isnan(windows[:, 0, 2]), np.nan, 0.05)
    found = strongest(key_TLH, weight_TLH, windows_WLHK=windows)
    assert found.strong_LH.tolist() == [[True, False, False]]
    assert found.counted_LH.tolist() == [[True, True, False]]
    assert found.mobility_strong == pytest.approx(0.5) and found.strong_share == pytest.approx(
        1 / 3
    )
    assert found.weight_LH[0] == pytest.approx([0.6, 0.2, 0.1])
    assert found.first_LH[0].tolist() == [0.75, 0, 0]


def test_steps_of_a_denoiser_are_compared_as_they_are():
    key_TLH = np.array([[[2, 0]], [[2, 1]], [[2, 3]]])
    found = strongest(key_TLH, np.full(key_TLH.shape, 0.4), added=2)
    assert found.mobility_LH.tolist() == [[0, 1]] and found.mobility_strong == 0.5
    assert found.first_LH.tolist() == [[1, 0]]
    given = strongest(key_TLH, np.full(key_TLH.shape, 0.1), mobility_LH=np.array([[0.1, np.nan]]))
    assert np.isnan(given.mobility_strong)
    refused(r"\(3, 1, 2\) and \(3, 2\)", strongest, key_TLH, np.ones((3, 2)))
