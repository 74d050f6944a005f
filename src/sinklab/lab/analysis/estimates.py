"""Estimates over samples: one number a sample goes in, an interval and a verdict come out.

The sample (text, problem, row, seed) is the unit: the steps, heads and positions within one are not
independent. docs/statistics.md has how often the verdicts are wrong and the intervals cover.
"""

# S samples, N resamples, "..." worlds or any other axes in front
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import scipy  # its modules load where they are first used

FEWEST = 8
"""samples that a verdict takes: with them the least p of an exact test, 2 / 2^8 = 0.78 %, outlives
the correction for the four verdicts of a page of two runs (5 % / 4); seven reach 1.6 %, and could
not
"""
SEEDS = 6
"""trained models, a seed each, that a verdict takes: one difference of means was registered before
they were trained
"""
LEVEL, POWER = 0.95, 0.8
Z = 1.959963984540054
"""quantile of the normal distribution that goes with the level, two-sided"""
LUMP = 0.5
"""share of all differences in one sample from which on it is said"""
RESAMPLES, MANY, GROUPS = 2000, 200, 50


@dataclass(frozen=True)
class Estimate:
    """A number over samples with its 95 % interval."""

    value: float
    """mean or median of the samples; NaN for none"""
    low: float
    """lower end of the interval; with fewer than ``FEWEST`` samples the least sample"""
    high: float
    """upper end; with fewer than ``FEWEST`` samples the greatest sample"""
    samples: int
    """how many there are"""
    fewest: int = FEWEST
    """how many an interval takes"""

    @property
    def is_interval(self) -> bool:
        """Whether low and high are an interval, not the range of too few samples."""
        return self.samples >= self.fewest

    @property
    def interval(self) -> tuple[float, float]:
        """low and high if they are an interval, else NaN."""
        return (self.low, self.high) if self.is_interval else (math.nan, math.nan)

    @property
    def reach(self) -> float:
        """The difference from a threshold that such samples would show 4 times in 5 (80 % power);
        NaN for too few.

        Computed with Student's t: the longer half of the interval, extended by the quantile of the
        power.
        """
        if not self.is_interval:
            return math.nan
        often = scipy.special.stdtrit(self.samples - 1, POWER)
        ends = scipy.special.stdtrit(self.samples - 1, (1 + LEVEL) / 2)
        longer = max(self.high - self.value, self.value - self.low)
        return float(longer * (1 + often / ends))

    def above(self, threshold: float = 0.0) -> bool | None:
        """The verdict: True or False when the whole interval lies above or below, None when
        inconclusive.
        """
        if self.is_interval and self.low > threshold:
            return True
        return False if self.is_interval and self.high < threshold else None


def mean_over(values_S: Any, *, fewest: int = FEWEST) -> Estimate:
    """The mean over samples (S,), NaN left out; for numbers with a meaningful size, such as
    differences of losses.

    See ``mean_interval``. fewest: samples that an interval takes; `SEEDS` of trained models.
    """
    return _estimate(values_S, np.mean, mean_interval, fewest)


def caution(values_S: Any, sample: str = "sample") -> str:
    """What the sample itself says against an interval of its mean: that one sample bears most of
    it, or that none differs from 0; "" where it says neither.

    A rare effect that no sample shows cannot be said: docs/statistics.md has how often intervals
    miss it.
    """
    size = np.abs(_known(values_S))
    if len(size) < FEWEST:
        return ""
    if not size.any():
        unseen = 1 - (1 - LEVEL) ** (1 / len(size))
        return f"no {sample} differs: an effect in {unseen:.0%} of them could be missed"
    share = size.max() / size.sum()
    return f"one {sample} bears {share:.0%} of it" if share >= LUMP else ""


def median_over(values_S: Any) -> Estimate:
    """The median over samples (S,), NaN left out: the typical sample; for shares compared with a
    threshold.

    Shares near 0 or 1 are so skewed that no interval of their mean holds with few samples. That of
    the median is exact whatever their distribution (``median_interval``).
    """
    return _estimate(values_S, np.median, median_interval)


def _estimate(values_S: Any, centre: Any, interval: Any, fewest: int = FEWEST) -> Estimate:
    known = _known(values_S)
    if not len(known):
        return Estimate(math.nan, math.nan, math.nan, 0, fewest)
    low, high = known.min(), known.max()
    if len(known) >= fewest:
        low, high = interval(known)
    return Estimate(float(centre(known)), float(low), float(high), len(known), fewest)


def _known(values_S: Any) -> np.ndarray:
    known = np.asarray(values_S, dtype=float)
    if known.ndim != 1:
        raise ValueError(
            f"an estimate takes one number a sample, on one axis, but got shape {known.shape}"
        )
    return known[~np.isnan(known)]


def mean_interval(values: Any) -> tuple[np.ndarray, np.ndarray]:
    """95 % interval (...) of the mean over the last axis of (..., S): Student's t and the
    studentised bootstrap.

    Each end is the one that lies farther out. Student's interval is too short on the long side of
    skewed numbers, the bootstrap (bootstrap-t: Efron 1982; DiCiccio and Efron 1996) for heavy
    tails; the percentile interval is too short everywhere with so few samples. The bootstrap
    reaches at most twice as far as Student's: if one sample stands apart from all others, resamples
    without it have hardly an error. From 200 samples on it is Student's alone.
    """
    mean, error, ratio, samples = _studentised(values)
    reach = float(scipy.special.stdtrit(samples - 1, (1 + LEVEL) / 2))
    least, most = np.array(-reach), np.array(reach)
    if ratio is not None:
        least, most = np.quantile(ratio, ((1 - LEVEL) / 2, (1 + LEVEL) / 2), axis=-1)
    low = mean - np.clip(most, reach, 2 * reach) * error
    high = mean - np.clip(least, -2 * reach, -reach) * error
    return low, high


def mean_p(values_S: Any, threshold: float = 0.0) -> float:
    """p-value of the mean of samples (S,) against a threshold: the level at which ``mean_interval``
    would reach it.

    NaN, as the interval is no interval, for fewer than ``FEWEST`` samples; NaN among them are left
    out.
    """
    known = _known(values_S)
    if len(known) < FEWEST:
        return math.nan
    mean, error, ratio, samples = _studentised(known)
    if not error:
        return float(mean == threshold)
    apart = float(mean - threshold) / float(error)
    student = 2 * scipy.special.stdtr(samples - 1, -abs(apart))
    if ratio is not None:
        drawn = 2 * np.mean(ratio * np.sign(apart) >= abs(apart))
        student = max(student, min(drawn, 2 * scipy.special.stdtr(samples - 1, -abs(apart) / 2)))
    return float(min(student, 1.0))


def _studentised(values: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray | None, int]:
    """Means (...), their errors (...), of resamples how many of their own errors their means lie
    off (..., N), and S.

    From ``MANY`` samples on there are no resamples.
    """
    found = np.asarray(values, dtype=float)
    samples = found.shape[-1]
    mean = found.mean(-1, keepdims=True)
    apart = found - mean
    ratio = None
    error = found.std(-1, ddof=1, keepdims=True) / math.sqrt(samples)
    if samples < MANY:
        weights_NS = _resampled_weights(samples)
        shift = apart @ weights_NS.T
        spread = np.sqrt(np.maximum(apart**2 @ weights_NS.T - shift**2, 0) / (samples - 1))
        # a resample of one value over and over has no error of its own
        ratio = np.divide(shift, spread, out=np.zeros_like(shift), where=spread > 1e-9 * error)
    return mean[..., 0], error[..., 0], ratio, samples


@lru_cache(maxsize=32)
def _resampled_weights(samples: int) -> np.ndarray:
    """Weight of every sample in every resample with replacement, (N, S); rows sum to 1."""
    rng = np.random.default_rng(0)
    return rng.multinomial(samples, np.full(samples, 1 / samples), RESAMPLES) / samples


def median_interval(values: Any) -> tuple[np.ndarray, np.ndarray]:
    """Interval (...) of the median over the last axis of (..., S), at least 95 %: order statistics
    (the sign test).
    """
    ranked = np.sort(np.asarray(values, dtype=float), axis=-1)
    left_out = _left_out(ranked.shape[-1])
    return ranked[..., left_out - 1], ranked[..., -left_out]


@lru_cache
def _left_out(samples: int) -> int:
    """Number of samples beyond either end of the interval of their median."""
    return int(scipy.stats.binom.ppf((1 - LEVEL) / 2, samples, 0.5))


@lru_cache
def _at_most(fewer: int, samples: int) -> float:
    """Probability that a fair coin falls so often on one side, or fewer times."""
    return float(scipy.stats.binom.cdf(fewer, samples, 0.5))


def median_p(values_S: Any, threshold: float = 0.0) -> float:
    """p-value of the median of samples (S,) against a threshold, as ``mean_p``: the exact sign
    test.

    A sample that equals the threshold counts for either side.
    """
    known = _known(values_S)
    if len(known) < FEWEST:
        return math.nan
    fewer = min(np.sum(known <= threshold), np.sum(known >= threshold))
    return min(2 * _at_most(int(fewer), len(known)), 1.0)


def corrected(p: Any) -> np.ndarray:
    """p-values that were judged together, corrected so that at most 5 % of such families hold a
    false verdict (Holm 1979); NaN is left out.
    """
    found = np.asarray(p, dtype=float).copy()
    ranked = [place for place in np.argsort(found) if not math.isnan(found[place])]
    worst = 0.0
    for left, place in zip(range(len(ranked), 0, -1), ranked, strict=True):
        worst = max(worst, min(left * found[place], 1.0))
        found[place] = worst
    return found


def discoveries(p: Any) -> np.ndarray:
    """p-values that were judged together, corrected so that 5 % of what passes is false, in the
    long run (Benjamini and Hochberg 1995; with samples in common it holds under positive dependence
    too); NaN is left out.
    """
    found = np.asarray(p, dtype=float).copy()
    known = ~np.isnan(found)
    found[known] = scipy.stats.false_discovery_control(found[known])
    return found


def jackknife(statistic: Callable[[np.ndarray], np.ndarray], samples: int) -> np.ndarray:
    """Pseudo-values (..., S) of a statistic of all samples together: a number a sample that can be
    averaged.

    Their mean is the statistic itself, and their spread holds whatever the samples went into, a fit
    included (Tukey 1958). If there is no effect, the interval of a cross-fitted share is too wide
    rather than too narrow.

    statistic: takes numbers of samples and gives (...); it is called samples + 1 times, at most 51:
        many samples are left out in 50 groups, with a pseudo-value each.
    """
    whole = np.asarray(statistic(np.arange(samples)), dtype=float)
    groups = np.array_split(np.arange(samples), min(samples, GROUPS))
    if len(groups) < 2:
        return whole[..., None]
    without = np.stack([statistic(np.delete(np.arange(samples), group)) for group in groups], -1)
    return whole[..., None] + (len(groups) - 1) * (without.mean(-1, keepdims=True) - without)
