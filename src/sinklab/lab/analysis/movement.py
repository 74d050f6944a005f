"""How main sinks move and how long keys stay sinks, step by step, and the motion of all heads in
one line.
"""

# T steps, L layers, H heads, K keys (added sink columns first), "..." any other axes
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sinklab.core.sinks import DEFAULT, Rule
from sinklab.lab.analysis.counts import Slab, one_pass, ratio, slabs
from sinklab.lab.analysis.estimates import Estimate, mean_over, median_over
from sinklab.lab.analysis.intervals import newey_west_error
from sinklab.lab.analysis.strongest import chance_elsewhere

CRITICAL = 13.1
"""|slope| / error that a random walk without drift exceeds in 5 % of cases (own simulation, 16 to
128 steps)
"""

SHORTEST = 8
"""fewest points for which an interval is given"""


@dataclass(frozen=True)
class Trend:
    """Least-squares line through positions over steps, one per path."""

    slope: np.ndarray
    """(...) positions per step; NaN with fewer than two points"""
    low: np.ndarray
    """(...) lower end of the 95 % interval; NaN with fewer than ``SHORTEST`` points"""
    high: np.ndarray
    """(...) upper end"""
    scores: np.ndarray
    """(step, ...) contribution of each step's residual to the error of the slope; 0 without a
    point
    """


def trend(position: np.ndarray, here: np.ndarray) -> Trend:
    """Slope with a 95 % interval for each path ``position`` (step, ...), at the points at which
    ``here`` is True.

    The main sink stays for many steps and then leaves for another place: its residuals are far from
    independent, and the textbook interval would be many times too narrow. The error is the
    autocorrelation-consistent one of Newey and West (1987) with Bartlett weights up to a quarter of
    the path. Such a long window makes the ratio slope / error free of nuisance for independent
    residuals and for a random walk alike, with different quantiles; the interval uses the greater
    one, that of the random walk. It is therefore about right for a wandering path and wide (a
    factor of four) for independent scatter. Time O(T size) in the window.
    """
    weight = here.astype(float)
    count = weight.sum(0)
    step = np.arange(len(position), dtype=float).reshape(-1, *[1] * (position.ndim - 1))
    points = np.maximum(count, 1)
    from_mean = (step - (step * weight).sum(0) / points) * weight
    spread = (from_mean * step).sum(0)
    spread = np.where(count > 1, spread, np.nan)
    level = np.where(here, position, 0)
    slope = (from_mean * level).sum(0) / spread
    mean = level.sum(0) / points
    residual = (level - mean) * weight - slope * from_mean
    scores = np.where(np.isnan(spread), 0, from_mean * residual / spread)
    reach = np.where(count >= SHORTEST, CRITICAL * newey_west_error(scores, here), np.nan)
    return Trend(slope, slope - reach, slope + reach, scores)


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
    expected_lifetime: float
    """steps that a sink lasts (see ``Motion``), all sinks of all heads alike; infinite when none
    ended
    """
    drift: float
    """weighted mean slope in positions per step"""
    drift_relative: float
    """weighted mean of the drift over the whole run as a share of the sequence"""
    mobility_over: Estimate
    """mobility of the typical sample (median)"""
    drift_over: Estimate
    """mean over samples of the relative drift; the heads of a sample are not independent"""
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

    @property
    def drift_word(self) -> str | None:
        """right or left; None when inconclusive."""
        return {True: "right", False: "left", None: None}[self.drift_over.above()]

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


MEANS = ("mobility", "moves_per_step", "drift", "drift_relative")


def summarised(fields: Mapping[str, np.ndarray], at_risk: np.ndarray) -> MotionSummary:
    """The summary of ``Motion`` fields (..., layer, head), with numbers of sinks ``at_risk`` of
    ending.
    """
    # Attention of the main sink, summed over all its steps.
    strength = fields["strength"] * fields["steps"]
    values = {**fields, "moves_per_step": ratio(fields["moves"], fields["transitions"])}
    parts = {
        "at_risk": at_risk,
        "deaths": fields["deaths"],
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
    expected_lifetime = float(ratio(total["at_risk"], total["deaths"]))
    if total["at_risk"] and not total["deaths"]:
        expected_lifetime = np.inf
    return MotionSummary(
        **{name: float(ratio(total[name], total[f"{name}_weight"])) for name in MEANS},
        expected_lifetime=expected_lifetime,
        mobility_over=median_over(ratio(sums["mobility"], sums["mobility_weight"])),
        drift_over=mean_over(ratio(sums["drift_relative"], sums["drift_relative_weight"])),
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
    births: np.ndarray
    """keys that became sinks (any sink, not only the main one), those of the first step apart"""
    deaths: np.ndarray
    """sinks that stopped being one while the watch went on"""
    lasting: np.ndarray
    """sinks still there at the last step (right-censored)"""
    mean_lifetime: np.ndarray
    """mean number of steps that the sinks of ``deaths`` had lasted; NaN without any"""
    expected_lifetime: np.ndarray
    """steps a sink lasts when its chance to end is the same at each: sinks with a next step over
    deaths. The lasting ones count too, so that long lives are not lost; infinite when none ended,
    NaN when there was no sink to end
    """
    drift: np.ndarray
    """least-squares slope of the main sink's canvas position, in positions per step; added sinks do
    not enter
    """
    drift_low: np.ndarray
    """lower end of the 95 % interval NaN with fewer than 8 points"""
    drift_high: np.ndarray
    """upper end"""
    drift_relative: np.ndarray
    """drift over the whole run as a share of the sequence: slope * (steps - 1) / positions, +1 from
    left to right
    """
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

    visible, positions: see ``find_sinks``. added: number of added sink columns in front of the
    keys. They take part (a head with an added sink as its main sink stands still) but have no place
    on the canvas, so no jump or drift; for the text alone pass ``received[..., added:]`` with the
    visible counts of those keys. jump: moves over more than this many positions are jumps.
    Time O(size); working memory a few (layer, head, key) slabs, whatever the number of steps.
    Raises ValueError for fewer than four axes or when shapes do not fit.
    """
    shape = np.shape(received)
    if len(shape) < 4:
        raise ValueError(f"motion needs (..., step, layer, head, key): got shape {shape}.")
    counter = MotionCounter(shape, rule, added, jump)
    one_pass(slabs(received, visible, positions), counter)
    return counter.motion


class MotionCounter:
    """`motion`, slab by slab, in the order of the steps. Working memory: two slabs."""

    def __init__(
        self, shape: tuple[int, ...], rule: Rule = DEFAULT, added: int = 0, jump: int = 4
    ) -> None:
        if not 0 <= added < max(shape[-1], 1):
            raise ValueError(
                f"added counts the added sink columns, fewer than the {shape[-1]} keys: got "
                f"{added}."
            )
        self.rule = rule
        self.added = added
        self.jump = jump
        self._keys = shape[-1]
        lead, (steps, layers, heads) = shape[:-4], shape[-4:-1]
        self.main = np.full((*lead, steps, layers, heads), -1, dtype=np.int32)
        self.counted = np.zeros(self.main.shape, dtype=bool)
        self.share = np.zeros(self.main.shape, dtype=np.float32)
        self.length = np.zeros((*lead, steps), dtype=float)
        self.lives = np.zeros((*lead, 5, layers, heads), dtype=np.int64)

    def add(self, slab: Slab) -> None:
        """Find the main sinks of the next steps, and the keys that became sinks or stopped being
        one.
        """
        index = slab.at
        if index[-1].start == 0:
            self._life = _Lifetimes(self.lives[index[:-1]], self._keys)
        found = slab.found(self.rule)
        exists_TLH = slab.main >= 0
        if slab.queries is None:
            visible = slab.at_main(np.broadcast_to(slab.visible, slab.received.shape))
        else:
            visible = slab.queries[..., 0]
        seen_TLH = np.where(exists_TLH, visible, 1)
        self.main[index] = slab.main
        self.counted[index] = exists_TLH & slab.at_main(found.flags)
        self.share[index] = np.where(exists_TLH, slab.at_main(slab.received) / seen_TLH, 0)
        # Scaled as if all ran, the greatest count is the number of positions.
        self.length[index] = np.fmax.reduce(slab.visible, axis=(1, 2, 3), initial=0)
        of_step_T = np.searchsorted(found.cells, np.arange(1, len(slab.main)) * found.flags[0].size)
        cells_T = np.split(found.cells % found.flags[0].size, of_step_T)
        for cells, flags_LHK, exists_LH in zip(cells_T, found.flags, exists_TLH, strict=True):
            self._life.add(cells, flags_LHK.reshape(-1), exists_LH)

    @property
    def motion(self) -> Motion:
        """The paths in numbers."""
        place, here = np.moveaxis(self.main, -3, 0), np.moveaxis(self.counted, -3, 0)
        drawn = np.moveaxis(self.share * self.counted, -3, 0)
        births, deaths, lasted, at_risk, lasting = np.moveaxis(self.lives, -3, 0)
        pairs = here[1:] & here[:-1]
        moved = pairs & (place[1:] != place[:-1])
        text = here & (place >= self.added)
        distance = np.abs(np.diff(place.astype(float), axis=0))
        jumped = moved & text[1:] & text[:-1] & (distance > self.jump)
        line = trend(place.astype(float), text)
        steps = (self.length > 0).sum(-1)
        crossed = np.maximum(steps - 1, 0) / np.maximum(self.length.max(-1), 1)
        with np.errstate(divide="ignore", invalid="ignore"):
            expected_lifetime = at_risk / deaths
        fields = dict(
            steps=here.sum(0),
            strength=drawn.sum(0) / np.maximum(here.sum(0), 1),
            mobility=chance_elsewhere(place, here),
            moves=moved.sum(0),
            transitions=pairs.sum(0),
            jumps=jumped.sum(0),
            mean_jump=ratio(np.where(jumped, distance, 0).sum(0), jumped.sum(0)),
            births=births,
            deaths=deaths,
            lasting=lasting,
            mean_lifetime=ratio(lasted, deaths),
            expected_lifetime=expected_lifetime,
            drift=line.slope,
            drift_low=line.low,
            drift_high=line.high,
            drift_relative=line.slope * crossed[..., None, None],
        )
        return Motion(self.main, self.counted, **fields, overall=summarised(fields, at_risk))


class _Lifetimes:
    """Counts over one sample, filled by ``add`` step by step.

    counts: (5, layer, head) to add to: keys that became sinks after the first step; sinks that
    stopped being one; steps that those had lasted; sinks that had a next step at which they could
    stop; sinks at the last step.
    """

    def __init__(self, counts: np.ndarray, keys: int) -> None:
        self.counts = counts
        self.step = 0
        self.keys = keys
        self.flags = np.zeros(counts[0].size * keys, dtype=bool)
        """the sinks of the step before"""
        self.cells = np.flatnonzero(self.flags)
        """their places"""
        self.since = np.zeros(self.flags.size, dtype=np.int64)
        """step at which a key that is a sink became one"""
        self.alive = np.zeros(counts.shape[1:], dtype=bool)
        """heads for which the step before exists"""

    def add(self, cells: np.ndarray, flags: np.ndarray, exists_LH: np.ndarray) -> None:
        """Count the sinks of the next step, at these flat places (layer, head, key), and the same
        as flags. A step that does not exist ends the watch.
        """
        births_LH, deaths_LH, lasted_LH, at_risk_LH, lasting_LH = self.counts
        watched_LH = exists_LH & self.alive
        began = cells[~self.flags[cells]]
        ended = self.cells[~flags[self.cells]]
        births_LH += watched_LH * self._by_head(began)
        deaths_LH += watched_LH * self._by_head(ended)
        lasted_LH += watched_LH * self._by_head(ended, self.step - self.since[ended])
        at_risk_LH += watched_LH * lasting_LH
        lasting_LH[:] = self._by_head(cells)
        self.since[began] = self.step
        self.flags, self.cells = flags, cells
        self.alive = exists_LH
        self.step += 1

    def _by_head(self, cells: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        """Sum (layer, head) of the weights of keys at these flat places; their number without."""
        found = np.bincount(cells // self.keys, weights, self.alive.size)
        return found.reshape(self.alive.shape).astype(np.int64)
