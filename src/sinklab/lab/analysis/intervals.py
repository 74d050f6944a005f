"""Textbook statistics in one place: intervals of shares and of differences of shares, errors over
dependent steps.
"""

# T steps, "..." any other axes
import math
from functools import lru_cache

import scipy  # its modules load where they are first used

LEVEL = 0.95
"""Coverage of every interval."""

Z = 1.959963984540054
"""Quantile of the normal distribution that goes with it, two-sided."""


@lru_cache
def wilson(hits: int, total: int) -> tuple[float, float]:
    """95 % interval of a share (Wilson 1927). NaN for a total of 0; ValueError for more hits than
    that.
    """
    if not total:
        return math.nan, math.nan
    found = scipy.stats.binomtest(hits, total).proportion_ci(LEVEL, "wilson")
    return float(found.low), float(found.high)


def paired_share_interval(gained: int, lost: int, total: int) -> tuple[float, float]:
    """95 % interval of the difference of two shares on the same problems (Agresti and Min 2005,
    adjusted Wald).

    Half a problem is added to each of the four cells, so that no change at all still has a width.
    NaN for a total of 0.

    Args:
        gained: problems that only the second has right.
        lost: problems that only the first has right.
        total: all problems.
    """
    if not total:
        return math.nan, math.nan
    cells, up, down = total + 2, gained + 0.5, lost + 0.5
    middle = (up - down) / cells
    half = Z * math.sqrt(max(up + down - (up - down) ** 2 / cells, 0.0)) / cells
    return max(middle - half, -1.0), min(middle + half, 1.0)
