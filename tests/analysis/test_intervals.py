"""Intervals and tests against the books, against scipy, and against cases that can be counted by
hand.
"""

import math

import pytest

from sinklab.lab.analysis.intervals import paired_share_interval, wilson


def test_wilson_is_newcombes_and_knows_its_ends():
    assert wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert (wilson(0, 20)[0], wilson(20, 20)[1]) == (0.0, 1.0)
    assert all(map(math.isnan, wilson(0, 0)))
    with pytest.raises(ValueError):
        wilson(3, 2)


def test_a_paired_share_has_a_width_without_any_change():
    low, high = paired_share_interval(0, 0, 100)
    assert low == -high < 0
    # either order of the two gives the same interval, turned round
    assert paired_share_interval(3, 9, 50) == tuple(
        -end for end in reversed(paired_share_interval(9, 3, 50))
    )
    assert all(map(math.isnan, paired_share_interval(0, 0, 0)))
    # (b - c)/n ± z sqrt(b + c - (b - c)²/n)/n with 0.5 more in every cell
    half = 1.959963984540054 * math.sqrt(41 - 400 / 202) / 202
    ends = (-20 / 202 - half, -20 / 202 + half)
    assert paired_share_interval(10, 30, 200) == pytest.approx(ends)
