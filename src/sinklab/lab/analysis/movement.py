"""How main sinks move, step by step, and the motion of all heads in one line."""

# S samples, T steps, W windows of queries, L layers, H heads, K keys (added sink columns first), P
# paths of heads, "..." any other axes
from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from sinklab.core.sinks import DEFAULT, Rule
from sinklab.lab.analysis.counts import Scored, main_sink, ratio, scored
from sinklab.lab.analysis.estimates import Estimate, median_over

STRONG = 0.3
"""mean attention weight above which a key is strong (Gu et al. 2410.10781, 3.2)"""
STATIC, MOVING = 0.25, 0.6
"""cuts of ``motion_word``"""


def motion_word(mobility: float) -> str:
    """«static», «mixed» or «moving» for a mobility; «no sink» when it is NaN.

    static: below 0.25, when one place holds the main sink at about seven steps in eight or more.
    moving: above 0.6, which two places cannot reach in a long run (they give at most a half): three
    or more take turns. mixed: between. Raises ValueError for a number outside [0, 1].
    """
    if np.isnan(mobility):
        return "no sink"
    if not 0 <= mobility <= 1:
        raise ValueError(f"Mobility is a chance between 0 and 1: got {mobility}.")
    if mobility < STATIC:
        return "static"
    return "moving" if mobility > MOVING else "mixed"


def word_over(mobility: Estimate) -> str | None:
    """«static», «mixed» or «moving» by the whole interval of a mobility; None when inconclusive."""
    over_static = mobility.above(STATIC)
    over_moving = mobility.above(MOVING)
    if over_moving:
        return "moving"
    if over_static is False:
        return "static"
    return "mixed" if over_static and over_moving is False else None


@dataclass(frozen=True)
class MotionSummary:
    """All heads (of all samples) together; each head weighs as much attention as its main sink drew
    over the run.
    """

    sums: Mapping[str, np.ndarray]
    """(S,) of each sample: mobility and moves_per_step, summed over heads, and their weights"""

    @property
    def mobility(self) -> float:
        """Weighted mean over heads with at least two counted steps; NaN without any."""
        return self._mean("mobility")

    @property
    def moves_per_step(self) -> float:
        """Moves over successive counted steps, weighted; NaN without any."""
        return self._mean("moves_per_step")

    def _mean(self, name: str) -> float:
        return float(ratio(self.sums[name].sum(), self.sums[f"{name}_weight"].sum()))

    @property
    def mobility_S(self) -> np.ndarray:
        """Mobility of each sample; NaN for one without sinks at two steps."""
        return np.asarray(ratio(self.sums["mobility"], self.sums["mobility_weight"]))

    @property
    def mobility_over(self) -> Estimate:
        """Mobility of the typical sample (median)."""
        return median_over(self.mobility_S)

    @property
    def word(self) -> str | None:
        """static, mixed, moving as the typical sample is (``motion_word``), or no sink; None when
        inconclusive.
        """
        return "no sink" if np.isnan(self.mobility) else word_over(self.mobility_over)

    def of_heads(self, mobility_LH: np.ndarray, counts_LH: np.ndarray) -> MotionSummary:
        """Summary of one sample, with another mobility (layer, head), the plain mean over the heads
        that count.
        """
        known = mobility_LH[counts_LH & ~np.isnan(mobility_LH)]
        sums = {"mobility": known.sum(), "mobility_weight": float(len(known))}
        return MotionSummary({**self.sums, **{name: np.array([one]) for name, one in sums.items()}})

    @classmethod
    def pooled(cls, summaries: Iterable[MotionSummary]) -> MotionSummary:
        """One summary of several samples."""
        parts = [one.sums for one in summaries]
        return cls({name: np.concatenate([one[name] for one in parts]) for name in parts[0]})


def summarised(fields: Mapping[str, np.ndarray]) -> MotionSummary:
    """The summary of one sample by the ``Motion`` of its heads."""
    # attention of the main sink, summed over all its steps
    strength = fields["strength"] * fields["steps"]
    rate = ratio(fields["moves"], fields["transitions"])
    sums = {}
    for name, value in (("mobility", fields["mobility"]), ("moves_per_step", rate)):
        sums[name] = np.array([np.nansum(strength * value)])
        sums[f"{name}_weight"] = np.array([strength[~np.isnan(value)].sum()])
    return MotionSummary(sums)


class Motion(NamedTuple):
    """Paths of the main sinks and statistics of them. Steps are the recorded ones, in their order.

    The main sink of a head at a step is the key that receives most. A step *counts* for a head when
    its main sink is a sink under the rule: if nothing stands out, the greatest key wanders without
    meaning. With ``Top(1)`` every step counts. All fields but the first two have the axes (layer,
    head).
    """

    main: np.ndarray
    """(step, layer, head) key of the main sink, -1 if the step does not exist"""
    counted: np.ndarray
    """(step, layer, head) whether the step counts"""
    steps: np.ndarray
    """steps that count"""
    strength: np.ndarray
    """mean weight that the main sink receives at the steps that count, 0 if none does"""
    mobility: np.ndarray
    """chance that two different counted steps have their main sinks at different places, 0 static
    to 1 everywhere else; NaN with fewer than two counted steps"""
    moves: np.ndarray
    """successive counted steps with the main sink at different places"""
    transitions: np.ndarray
    """successive counted steps: the most that ``moves`` can be"""

    @property
    def overall(self) -> MotionSummary:
        """One line for all heads."""
        return summarised(self._asdict())


def motion(
    received: Any, visible: Any = None, positions: Any = None, *, rule: Rule = DEFAULT
) -> Motion:
    """Follow the main sinks of ``received`` (step, layer, head, key), added sink columns in front.

    visible, positions: see `scored`. For the text alone pass ``received[..., added:]`` with the
    visible counts of those keys. Raises ValueError for other axes.
    """
    if np.ndim(received) != 4:
        raise ValueError(f"motion needs (step, layer, head, key): got shape {np.shape(received)}.")
    one = scored(received, visible, positions)
    return followed(one, main_sink(one.score), one.flags(rule))


def at_key(values: np.ndarray, key: np.ndarray) -> np.ndarray:
    """The value (...) of (..., key) at one key of every head; at the first for a negative one."""
    return np.take_along_axis(values, np.maximum(key, 0)[..., None], -1)[..., 0]


def followed(one: Scored, main_TLH: np.ndarray, sinks: np.ndarray) -> Motion:
    """The paths of the strongest keys, in numbers."""
    exists = main_TLH >= 0
    counted = exists & at_key(sinks, main_TLH)
    seen = np.where(exists, at_key(np.broadcast_to(one.seen_by, sinks.shape), main_TLH), 1)
    drawn = np.where(counted, at_key(one.received, main_TLH) / seen, 0)
    steps, pairs = counted.sum(0), counted[1:] & counted[:-1]
    moved = pairs & (main_TLH[1:] != main_TLH[:-1])
    return Motion(
        main_TLH,
        counted,
        steps,
        strength=drawn.sum(0) / np.maximum(steps, 1),
        mobility=chance_elsewhere(main_TLH, counted),
        moves=moved.sum(0),
        transitions=pairs.sum(0),
    )


def chance_elsewhere(key: np.ndarray, here: np.ndarray) -> np.ndarray:
    """Chance (...) that at two of the steps ``here`` the keys (step, ...) differ; NaN with fewer
    than two.

    1 - sum over places of n (n - 1) / (N (N - 1)): the unbiased Gini-Simpson index of the places.
    """
    flat, flags = key.reshape(len(key), -1), here.reshape(len(key), -1)
    paths, keys = flat.shape[1], int(key.max(initial=0)) + 1
    cell = (np.arange(paths) * keys + np.maximum(flat, 0))[flags]
    visits = np.bincount(cell, minlength=paths * keys).reshape(paths, keys).astype(float)
    total = visits.sum(-1)
    same = (visits * (visits - 1)).sum(-1)
    pairs = np.where(total > 1, total * (total - 1), np.nan)
    return (1 - same / pairs).reshape(key.shape[1:])


def of_windows(windows: Any) -> tuple[np.ndarray, np.ndarray]:
    """Chance (layer, head) that two windows of queries have their strongest keys at different
    places, and the weight of a window's strongest key, mean over windows.

    A column sum keeps its old rows, so that the strongest key of all queries so far stands still by
    construction; disjoint windows share none. Of two windows only the keys that both see are
    compared, and a window that sees a single key is not counted. NaN with fewer than two windows
    that count.

    windows: (window, layer, head, key) mean weight that the queries of each window give the keys
    that all of them may see; NaN elsewhere.
    """
    weight_WPK = np.asarray(windows, dtype=np.float32)
    shape = weight_WPK.shape[1:3]
    # the first window sees a single key
    greatest_WLH = np.nan_to_num(np.fmax.reduce(weight_WPK[1:], axis=-1))
    weight_LH = ratio(greatest_WLH.sum(0, dtype=float), np.full(shape, len(greatest_WLH)))
    weight_WPK = weight_WPK.reshape(len(weight_WPK), -1, weight_WPK.shape[-1])
    seen_W = (~np.isnan(weight_WPK)).any(1).sum(-1)
    weight_WPK = np.nan_to_num(weight_WPK, nan=-1.0)
    pairs = [*itertools.combinations(np.flatnonzero(seen_W > 1), 2)]
    differ_P = np.zeros(weight_WPK.shape[1])
    for pair in pairs:
        one_P, other_P = weight_WPK[[*pair], :, : seen_W[pair[0]]].argmax(-1)
        differ_P += one_P != other_P
    return ratio(differ_P, np.full(differ_P.shape, len(pairs))).reshape(shape), weight_LH
