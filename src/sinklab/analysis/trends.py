"""Motion of all heads in one line, weighted by how strong their sinks are."""

# T steps, "..." any other axes
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sinklab.analysis.counts import ratio
from sinklab.analysis.intervals import newey_west_error

CRITICAL = 13.1
"""|slope| / error that a random walk without drift exceeds in 5 % of cases (own simulation, 16 to 128 steps)"""

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
    """(step, ...) what each step's residual adds to the error of the slope; 0 where there is no point"""


def trend(position: np.ndarray, here: np.ndarray) -> Trend:
    """Slope with a 95 % interval for each path ``position`` (step, ...), at the points where ``here`` is True.

    The main sink stays for many steps and then leaves for another place: its residuals are far from independent, and
    the textbook interval would be many times too narrow. The error is the autocorrelation-consistent one of Newey and
    West (1987) with Bartlett weights up to a quarter of the path. Such a long window makes the ratio slope / error
    free of nuisance for independent residuals and for a random walk alike, with different quantiles; the interval uses
    the greater one, that of the random walk. It is therefore about right for a wandering path and wide (a factor of
    four) for independent scatter. Time O(T size) in the window.
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


STATIC, MOVING = 0.2, 0.6
"""cuts of ``motion_word``"""


def motion_word(mobility: float) -> str:
    """«static», «mixed» or «moving» for a mobility; «no sink» when it is NaN.

    static: below 0.2, when one place holds the main sink at about nine steps in ten or more.
    moving: above 0.6, which two places cannot reach in a long run (they give at most a half): three or more take turns.
    mixed: between. Raises ValueError for a number outside [0, 1].
    """
    if np.isnan(mobility):
        return "no sink"
    if not 0 <= mobility <= 1:
        raise ValueError(f"Mobility is a chance between 0 and 1: got {mobility}.")
    return "static" if mobility < STATIC else "moving" if mobility > MOVING else "mixed"


@dataclass(frozen=True)
class MotionSummary:
    """All heads (of all samples) together; each head weighs as much attention as its main sink drew over the run."""

    mobility: float
    """weighted mean over heads with at least two counted steps; NaN without any"""
    moves_per_step: float
    """moves over successive counted steps, weighted; NaN without any"""
    expected_lifetime: float
    """steps that a sink lasts (see ``Motion``), all sinks of all heads alike; infinite when none ended"""
    drift: float
    """weighted mean slope in positions per step"""
    drift_low: float
    """lower end of its 95 % interval; the heads of a sample are not taken as independent, samples are"""
    drift_high: float
    """upper end"""
    drift_relative: float
    """weighted mean of the drift over the whole run as a share of the sequence"""
    heads: int
    """number of (sample, layer, head)"""
    heads_with_sink: int
    """how many of them have at least two counted steps"""
    sums: Mapping[str, float] = field(repr=False)
    """what ``pooled`` adds up"""

    @property
    def word(self) -> str:
        """static, mixed, moving or no sink (``motion_word``)."""
        return motion_word(self.mobility)

    @property
    def drift_word(self) -> str:
        """right, left, or neither when the interval holds 0 or there is none."""
        return "right" if self.drift_low > 0 else "left" if self.drift_high < 0 else "neither"

    @classmethod
    def pooled(cls, summaries: Iterable[MotionSummary]) -> MotionSummary:
        """One summary of several samples. Raises ValueError for none."""
        parts = [summary.sums for summary in summaries]
        if not parts:
            raise ValueError("pooled needs at least one summary: got none.")
        return _of({name: sum(part[name] for part in parts) for name in parts[0]})


MEANS = ("mobility", "moves_per_step", "drift", "drift_relative")


def summarised(fields: Mapping[str, np.ndarray], scores: np.ndarray, at_risk: np.ndarray) -> MotionSummary:
    """The summary of ``Motion`` fields (..., layer, head) and of the steps' ``scores`` (step, ..., layer, head)."""
    # What the main sink drew over all its steps.
    strength: Any = fields["strength"] * fields["steps"]
    with np.errstate(divide="ignore", invalid="ignore"):
        values = {**fields, "moves_per_step": fields["moves"] / fields["transitions"]}
    sums: dict[str, float] = {}
    for name in MEANS:
        known = ~np.isnan(values[name])
        sums[name] = float((strength * np.where(known, values[name], 0)).sum())
        sums[f"{name}_weight"] = float((strength * known).sum())
    # One series per sample: heads that wander together then widen the interval together.
    weight = np.where(np.isnan(fields["drift"]), 0, strength)
    reach = CRITICAL * newey_west_error((scores * weight).sum((-2, -1)), (scores != 0).any((-2, -1)))
    long_enough = bool((fields["steps"] >= SHORTEST).any())
    sums["drift_variance"] = float((reach**2).sum()) if long_enough else float("nan")
    sums |= {"at_risk": float(at_risk.sum()), "deaths": float(fields["deaths"].sum()), "heads": float(strength.size)}
    return _of(sums | {"heads_with_sink": float((~np.isnan(fields["mobility"])).sum())})


def _of(sums: dict[str, float]) -> MotionSummary:
    means = {name: float(ratio(sums[name], sums[f"{name}_weight"])) for name in MEANS}
    reach = float(ratio(np.sqrt(sums["drift_variance"]), sums["drift_weight"]))
    return MotionSummary(
        **means,
        expected_lifetime=sums["at_risk"] / sums["deaths"] if sums["deaths"] else np.inf if sums["at_risk"] else np.nan,
        drift_low=means["drift"] - reach,
        drift_high=means["drift"] + reach,
        heads=int(sums["heads"]),
        heads_with_sink=int(sums["heads_with_sink"]),
        sums=sums,
    )
