"""Effect of rounding on margins, and on a score: pure functions over tables."""

# N texts, D quantiles of the noise
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources
from typing import Any

import numpy as np
import pandas as pd
import scipy  # its modules load where they are first used

from sinklab.lab.analysis.estimates import LEVEL

QUANTILES = 99
WITHIN = ("backend", "fast", "batch")
"""Possible differences between runs with one type of numbers; another number of threads changed
nothing.
"""


@dataclass(frozen=True)
class Noise:
    """Rounding error of a margin under one difference, as multiples of its change under a jitter.

    Fitted over models (`benchmarks/referee.py`): the logarithm of the multiple is Student's t over
    models.
    """

    kind: str
    """Type of the numbers and the difference, such as bfloat16.batch or float32.float16."""
    log: float
    """Mean over models of the natural logarithm of the multiple."""
    spread: float
    """Standard deviation of a further model's."""
    freedom: int
    """Degrees of freedom of the spread."""

    def multiples(self) -> np.ndarray:
        """Equally likely values for a further model (D,)."""
        places = (np.arange(QUANTILES) + 0.5) / QUANTILES
        return np.exp(self.log + self.spread * scipy.stats.t.ppf(places, self.freedom))


@lru_cache
def known_noise() -> dict[str, Noise]:
    """Fitted noise by kind of difference; runs without a difference have none."""
    facts = tomllib.loads(resources.files(__package__).joinpath("noise.toml").read_text("utf-8"))
    return {kind: Noise(kind, **numbers) for kind, numbers in facts.items()}


def pooled_noise(noise: np.ndarray, probes: int) -> tuple[np.ndarray, float]:
    """The noise of each margin drawn towards that of all, and its degrees of freedom.

    A few probes know the noise of one margin badly; how much the margins of one kind differ in
    truth says how far they may learn from one another (Smyth 2004, empirical Bayes of variances).
    Noise of 0 stays 0.
    """
    known, digamma = np.square(noise[noise > 0]), scipy.special.digamma
    if len(known) < 2:
        return noise, float(probes)
    level = np.log(known) - digamma(probes / 2) + math.log(probes / 2)
    excess = float(level.var(ddof=1) - scipy.special.polygamma(1, probes / 2))
    # the prior's freedom is where the trigamma function of its half is the excess
    half = scipy.optimize.brentq(
        lambda x: scipy.special.polygamma(1, x) - max(excess, 0.02), 1e-3, 100
    )
    middle = math.exp(level.mean() + digamma(half) - math.log(half))
    whole = (2 * half * middle + probes * np.square(noise)) / (2 * half + probes)
    return np.where(noise > 0, np.sqrt(whole), 0.0), 2 * half + probes


def change_chances(margins: pd.DataFrame, noise: Noise, probes: int) -> np.ndarray:
    """The chance of each text to take another way somewhere, for each of the `Noise.multiples` (D,
    N).

    Args:
        margins: of all texts, with the noise that so many probes found.
        noise: of the kind of difference.
        probes: how many.
    """
    multiples, (_, place) = noise.multiples(), np.unique(margins["row"], return_inverse=True)
    stays = np.zeros((len(multiples), place.max() + 1))
    for kind in margins["kind"].unique():
        here = (margins["kind"] == kind).to_numpy()
        scale, freedom = pooled_noise(margins["noise"].to_numpy()[here], probes)
        margin = margins["margin"].to_numpy()[here]
        for number, one in enumerate(multiples):
            ratio = np.divide(
                margin, scale * one, out=np.full(len(margin), np.inf), where=scale > 0
            )
            kept = np.log1p(-scipy.stats.t.sf(ratio, freedom))
            stays[number] += np.bincount(place[here], kept, stays.shape[1])
    return 1 - np.exp(stays)


def counted(chances_DN: np.ndarray, level: float = LEVEL) -> tuple[float, int, int]:
    """Mean and interval of how many of N independent events happen, their chances being any of D
    sets.
    """
    total = np.zeros(chances_DN.shape[1] + 1)
    for chances_N in chances_DN:
        counts = np.ones(1)
        for chance in chances_N:
            counts = np.convolve(counts, [1 - chance, chance])
        total += counts / len(chances_DN)
    below = total.cumsum()
    low, high = (int(np.searchsorted(below, share)) for share in ((1 - level) / 2, (1 + level) / 2))
    return float(chances_DN.sum(1).mean()), low, min(high, chances_DN.shape[1])


def swing(items: int, share: float) -> float:
    """How far apart the scores of two runs fall by rounding, 95 %: half the interval of their
    difference.

    Two runs that differ by rounding alone are draws of one and the same thing, neither better than
    the other: an item that rounding changes is as likely to be gained as lost, so that the
    difference has mean 0 and variance share / n.

    Args:
        items: how many both answered.
        share: of them that are right in one and wrong in the other.
    """
    return float(scipy.stats.norm.ppf((1 + LEVEL) / 2)) * math.sqrt(share / items)


def redrawn(one: float, other: float) -> float:
    """The share of items that are right in one run and wrong in the other, were every item drawn
    anew in each.
    """
    return one * (1 - other) + other * (1 - one)


def noise_between(
    one: Mapping[str, Any], other: Mapping[str, Any] | None = None
) -> dict[str, Noise]:
    """Possible differences between runs of models described by `run.json`, by kind, and the noise
    of each.

    Two types of numbers are one kind; of one type it is each difference within it. If that was not
    measured, because the device is not the CPU or the type is another, the largest measured one
    (else all of bfloat16's) stands in for it as "device".
    """
    known, types = known_noise(), [one["dtype"], (other or one)["dtype"]]
    kinds = (
        [".".join(types), ".".join(types[::-1])]
        if types[0] != types[1]
        else [f"{types[0]}.{what}" for what in WITHIN]
    )
    found = {kind: known[kind] for kind in kinds if kind in known}
    if found and {one["device"], (other or one)["device"]} == {"cpu"}:
        return found
    stands_in = found or {
        kind: noise for kind, noise in known.items() if kind.startswith("bfloat16")
    }
    return found | {"device": max(stands_in.values(), key=lambda noise: noise.log)}


def draws_variance(items: pd.DataFrame) -> float:
    """The variance of a mean score over items that are choices by estimated likelihoods, from the
    estimates' errors.

    The errors of the choices of an item are taken as independent; they share their draws, so that
    this is at the most.
    """
    draw, total = np.random.default_rng(0), 0.0
    for right, means, errors in items[["right", "logprobs", "stderrs"]].itertuples(index=False):
        if right == right and len(means):
            drawn_N = draw.normal(means, np.nan_to_num(errors), (1000, len(means))).argmax(1)
            again = (drawn_N == np.argmax(means)).mean()
            total += again * (1 - again)
    return total / len(items) ** 2
