"""How main sinks move, step by step, and the motion of all heads in one line."""

# T steps, W windows of queries, L layers, H heads, K keys (added sink columns first), P paths of
# heads, "..." any other axes
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

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

    mobility: float
    """weighted mean over heads with at least two counted steps; NaN without any"""
    moves_per_step: float
    """moves over successive counted steps, weighted; NaN without any"""
    mobility_over: Estimate
    """mobility of the typical sample (median)"""
    heads: int
    """number of (sample, layer, head)"""
    heads_with_sink: int
    """how many of them have at least two counted steps"""
    sums: Mapping[str, np.ndarray] = field(repr=False)
    """(sample,) sums that ``pooled`` adds up"""

    @property
    def word(self) -> str | None:
        """static, mixed, moving as the typical sample is (``motion_word``), or no sink; None when
        inconclusive.
        """
        if np.isnan(self.mobility):
            return "no sink"
        return word_over(self.mobility_over)

    def of_heads(self, mobility_LH: np.ndarray, counts_LH: np.ndarray) -> MotionSummary:
        """Summary of one sample, with another mobility (layer, head), the plain mean over the heads
        that count.
        """
        known = mobility_LH[counts_LH & ~np.isnan(mobility_LH)]
        heads = np.array([float(len(known))])
        sums = {"mobility": np.array([known.sum()]), "mobility_weight": heads}
        return _of({**self.sums, **sums, "heads_with_sink": heads})

    @classmethod
    def pooled(cls, summaries: Iterable[MotionSummary]) -> MotionSummary:
        """One summary of several samples. Raises ValueError for none."""
        parts = [summary.sums for summary in summaries]
        if not parts:
            raise ValueError("pooled needs at least one summary: got none.")
        return _of({name: np.concatenate([part[name] for part in parts]) for name in parts[0]})


MEANS = ("mobility", "moves_per_step")


def summarised(fields: Mapping[str, np.ndarray]) -> MotionSummary:
    """The summary of ``Motion`` fields (..., layer, head)."""
    # Attention of the main sink, summed over all its steps.
    strength = fields["strength"] * fields["steps"]
    values = {**fields, "moves_per_step": ratio(fields["moves"], fields["transitions"])}
    parts = {
        "heads": np.ones_like(strength),
        "heads_with_sink": ~np.isnan(fields["mobility"]),
    }
    for name in MEANS:
        known = ~np.isnan(values[name])
        parts[name] = strength * np.where(known, values[name], 0)
        parts[f"{name}_weight"] = strength * known
    return _of({name: part.sum((-2, -1), dtype=float).ravel() for name, part in parts.items()})


def _of(sums: dict[str, np.ndarray]) -> MotionSummary:
    total = {name: float(part_N.sum()) for name, part_N in sums.items()}
    return MotionSummary(
        **{name: float(ratio(total[name], total[f"{name}_weight"])) for name in MEANS},
        mobility_over=median_over(ratio(sums["mobility"], sums["mobility_weight"])),
        heads=int(total["heads"]),
        heads_with_sink=int(total["heads_with_sink"]),
        sums=sums,
    )


@dataclass(frozen=True)
class Motion:
    """Paths of the main sinks and statistics of them. Steps are the recorded ones, in their order.

    The main sink of a head at a step is the key that receives most. A step *counts* for a head when
    its main sink is a sink under the rule: if nothing stands out, the greatest key wanders without
    meaning. With ``Top(1)`` every step counts. All fields but the first two have the axes (...,
    layer, head).
    """

    main: np.ndarray
    """(..., step, layer, head) key of the main sink, -1 if the step does not exist"""
    counted: np.ndarray
    """(..., step, layer, head) whether the step counts"""
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
    jumps: np.ndarray
    """moves over more than the set distance, both places on the canvas"""
    mean_jump: np.ndarray
    """mean distance of the jumps, in positions; NaN without any"""
    overall: MotionSummary
    """one line for all heads"""


def motion(
    received: Any,
    visible: Any = None,
    positions: Any = None,
    *,
    rule: Rule = DEFAULT,
    added: int = 0,
    jump: int = 4,
) -> Motion:
    """Follow the main sinks of ``received`` (..., step, layer, head, key); any axes in front are
    samples.

    visible, positions: see `scored`. added: number of added sink columns in front of the keys.
    They take part (a head with an added sink as its main sink stands still) but have no place
    on the canvas, so no jump; for the text alone pass ``received[..., added:]`` with the
    visible counts of those keys. jump: moves over more than this many positions are jumps.
    Raises ValueError for fewer than four axes or when shapes do not fit.
    """
    shape = np.shape(received)
    if len(shape) < 4:
        raise ValueError(f"motion needs (..., step, layer, head, key): got shape {shape}.")
    if not 0 <= added < max(shape[-1], 1):
        raise ValueError(
            f"added counts the added sink columns, fewer than the {shape[-1]} keys: got {added}."
        )
    one = scored(received, visible, positions)
    main, counted = main_sink(one.score), one.flags(rule)
    return followed(one, main, counted, added=added, jump=jump)


def at_key(values: np.ndarray, key: np.ndarray) -> np.ndarray:
    """The value (...) of (..., key) at one key of every head; at the first for a negative one."""
    return np.take_along_axis(values, np.maximum(key, 0)[..., None], -1)[..., 0]


def followed(
    one: Scored, main: np.ndarray, sinks: np.ndarray, *, added: int = 0, jump: int = 4
) -> Motion:
    """The paths of the strongest keys (..., step, layer, head), in numbers."""
    exists = main >= 0
    counted = exists & at_key(sinks, main)
    seen = np.where(exists, at_key(np.broadcast_to(one.seen_by, one.received.shape), main), 1)
    share = np.where(exists, at_key(one.received, main) / seen, 0)
    place, here = np.moveaxis(main, -3, 0), np.moveaxis(counted, -3, 0)
    drawn = np.moveaxis(share * counted, -3, 0)
    pairs = here[1:] & here[:-1]
    moved = pairs & (place[1:] != place[:-1])
    text = here & (place >= added)
    distance = np.abs(np.diff(place.astype(float), axis=0))
    jumped = moved & text[1:] & text[:-1] & (distance > jump)
    fields = dict(
        steps=here.sum(0),
        strength=drawn.sum(0) / np.maximum(here.sum(0), 1),
        mobility=chance_elsewhere(place, here),
        moves=moved.sum(0),
        transitions=pairs.sum(0),
        jumps=jumped.sum(0),
        mean_jump=ratio(np.where(jumped, distance, 0).sum(0), jumped.sum(0)),
    )
    return Motion(main, counted, **fields, overall=summarised(fields))


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
    shape, keys = weight_WPK.shape[1:3], weight_WPK.shape[-1]
    # the first window sees a single key
    greatest_WLH = np.nan_to_num(np.fmax.reduce(weight_WPK[1:], axis=-1))
    weight_LH = ratio(greatest_WLH.sum(0, dtype=float), np.full(shape, len(greatest_WLH)))
    weight_WPK = weight_WPK.reshape(len(weight_WPK), -1, keys)
    seen_W = (~np.isnan(weight_WPK)).any(1).sum(-1)
    weight_WPK = np.nan_to_num(weight_WPK, nan=-1.0)
    # the strongest of the first so many keys, for every number of them
    highest_WPK = np.maximum.accumulate(weight_WPK, axis=-1)
    before_WPK = np.concatenate(
        [np.full_like(highest_WPK[..., :1], -np.inf), highest_WPK[..., :-1]], axis=-1
    )
    rises_WPK = weight_WPK > before_WPK
    leader_WPK = np.maximum.accumulate(np.where(rises_WPK, np.arange(keys), 0), axis=-1)
    counts = [window for window, seen in enumerate(seen_W.tolist()) if seen > 1]
    differ_P, pairs = np.zeros(weight_WPK.shape[1]), 0
    for place, window in enumerate(counts):
        last = seen_W[window] - 1
        for later in counts[place + 1 :]:
            differ_P += leader_WPK[window, :, last] != leader_WPK[later, :, last]
            pairs += 1
    return ratio(differ_P, np.full(differ_P.shape, pairs)).reshape(shape), weight_LH
