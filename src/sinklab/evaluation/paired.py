"""Shares and their differences on the same problems: intervals and an exact test."""

from __future__ import annotations

import math

Z = 1.959963984540054
"""Two-sided 95 %."""


def wilson(right: int, n: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927). NaN for n = 0."""
    if not n:
        return math.nan, math.nan
    share, z2 = right / n, Z * Z
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    # where none or all are right the bound is 0 or 1, which rounding would miss
    return (middle - half if right else 0.0), (middle + half if right < n else 1.0)


def paired_interval(gained: int, lost: int, n: int) -> tuple[float, float]:
    """95 % interval of the difference of two shares on the same n problems (Agresti and Min 2005, adjusted Wald).

    Half a problem is added to each of the four cells, so that no change at all still has a width.

    Args:
        gained: problems that only the second has right.
        lost: problems that only the first has right.
        n: all problems.
    """
    if not n:
        return math.nan, math.nan
    total, up, down = n + 2, gained + 0.5, lost + 0.5
    middle = (up - down) / total
    half = Z * math.sqrt(max(up + down - (up - down) ** 2 / total, 0.0)) / total
    return max(middle - half, -1.0), min(middle + half, 1.0)


def mcnemar(gained: int, lost: int) -> float:
    """Two-sided exact McNemar test: the probability of a split as uneven as this one, were either side as likely."""
    discordant = gained + lost
    tail = sum(math.comb(discordant, few) for few in range(min(gained, lost) + 1))
    return min(1.0, 2 * tail / 2**discordant)
