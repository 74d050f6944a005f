"""How long keys stay sinks: births, deaths and runs, counted step by step."""

# T steps, L layers, H heads, K keys (added sink columns first)
# L layers, H heads, K keys
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sinklab.analysis.trends import MotionSummary, summarised, trend
from sinklab.sinks.normalize import main_sink, slabs
from sinklab.sinks.rules import Excess, Rule, find_sinks


@dataclass(frozen=True)
class Motion:
    """Paths of the main sinks and what they come to. Steps are the recorded ones, in their order.

    The main sink of a head at a step is the key that receives most. A step *counts* for a head when its main sink is a
    sink under the rule: where nothing stands out, the greatest key wanders without meaning. With ``Top(1)`` every step
    counts. All fields but the first two have the axes (..., layer, head).
    """

    main: np.ndarray
    """(..., step, layer, head) key of the main sink, -1 where the step does not exist"""
    counted: np.ndarray
    """(..., step, layer, head) whether the step counts"""
    steps: np.ndarray
    """steps that count"""
    strength: np.ndarray
    """mean weight that the main sink receives where the step counts, 0 where none does"""
    mobility: np.ndarray
    """chance that two different counted steps have their main sinks at different places, 0 static to 1 everywhere else;
    NaN with fewer than two counted steps"""
    moves: np.ndarray
    """successive counted steps with the main sink at different places"""
    transitions: np.ndarray
    """successive counted steps: the most that ``moves`` can be"""
    longest_stay: np.ndarray
    """longest run of successive counted steps at one place"""
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
    """steps a sink lasts when its chance to end is the same at each: sinks with a next step over deaths. The lasting
    ones count too, so that long lives are not lost; infinite when none ended, NaN when there was no sink to end"""
    drift: np.ndarray
    """least-squares slope of the main sink's canvas position, in positions per step; added sinks do not enter"""
    drift_low: np.ndarray
    """lower end of the 95 % interval NaN with fewer than 8 points"""
    drift_high: np.ndarray
    """upper end"""
    drift_relative: np.ndarray
    """drift over the whole run as a share of the sequence: slope * (steps - 1) / positions, +1 from left to right"""
    overall: MotionSummary
    """one line for all heads"""


_RULE = Excess()


def motion(
    received: Any,
    visible: Any = None,
    positions: Any = None,
    *,
    rule: Rule = _RULE,
    added: int = 0,
    jump: int = 4,
) -> Motion:
    """Follow the main sinks of ``received`` (..., step, layer, head, key); any axes in front are samples.

    visible, positions: as in ``find_sinks``. added: number of added sink columns in front of the keys. They take part
    (a head whose main sink is an added one stands still) but have no place on the canvas, so no jump or drift; for the
    text alone pass ``received[..., added:]`` with the visible counts of those keys.
    jump: moves over more than this many positions are jumps.
    Time O(size); working memory a few (layer, head, key) slabs, whatever the number of steps.
    Raises ValueError for fewer than four axes or when shapes do not fit.
    """
    shape = np.shape(received)
    if len(shape) < 4:
        raise ValueError(f"motion needs (..., step, layer, head, key): got shape {shape}.")
    if not 0 <= added < max(shape[-1], 1):
        raise ValueError(f"added counts the added sink columns, fewer than the {shape[-1]} keys: got {added}.")
    lead, (steps, layers, heads, keys) = shape[:-4], shape[-4:]
    main = np.full((*lead, steps, layers, heads), -1, dtype=np.int32)
    counted = np.zeros(main.shape, dtype=bool)
    share = np.zeros(main.shape, dtype=np.float32)
    length = np.zeros((*lead, steps), dtype=float)
    lives = {index: Lifetimes() for index in np.ndindex(lead)}
    for index, a_LHK, seen in slabs(received, visible, positions, 3):
        seen_LHK = np.broadcast_to(seen, a_LHK.shape)
        sinks_LHK = find_sinks(a_LHK, rule, seen)
        main_LH = main_sink(np.where(seen_LHK > 0, a_LHK, np.nan))
        at = np.maximum(main_LH, 0)[..., None]
        exists_LH = main_LH >= 0
        weight_LH = np.take_along_axis(a_LHK, at, -1)[..., 0]
        weight_LH = weight_LH / np.where(exists_LH, np.take_along_axis(seen_LHK, at, -1)[..., 0], 1)
        main[index] = main_LH
        counted[index] = exists_LH & np.take_along_axis(sinks_LHK, at, -1)[..., 0]
        share[index] = np.where(exists_LH, weight_LH, 0)
        # Scaled as if all ran, the greatest count is the number of positions.
        length[index] = np.nan_to_num(seen).max(initial=0)
        lives[index[:-1]].add(sinks_LHK, exists_LH)
    return _measured(main, counted, share, length, [lives[index] for index in np.ndindex(lead)], (added, jump, keys))


def _measured(
    main: np.ndarray,
    counted: np.ndarray,
    share: np.ndarray,
    length: np.ndarray,
    lives: list[Lifetimes],
    numbers: tuple[int, int, int],
) -> Motion:
    added, jump, keys = numbers
    shape = (*main.shape[:-3], *main.shape[-2:])
    steps_first, here = np.moveaxis(main, -3, 0), np.moveaxis(counted, -3, 0)
    steps = here.sum(0)
    strength = np.moveaxis(share * counted, -3, 0).sum(0) / np.maximum(steps, 1)
    mobility = _mobility(steps_first, here, keys)
    pairs = here[1:] & here[:-1]
    moved = pairs & (steps_first[1:] != steps_first[:-1])
    distance = np.abs(np.diff(steps_first.astype(float), axis=0))
    text = here & (steps_first >= added)
    jumped = moved & text[1:] & text[:-1] & (distance > jump)
    jumps = jumped.sum(0)
    lived = {
        name: np.array([getattr(life, name) for life in lives], dtype=float).reshape(shape)
        for name in ("births", "deaths", "finished", "at_risk", "lasting")
    }
    with np.errstate(divide="ignore", invalid="ignore"):
        mean_jump = np.where(jumped, distance, 0).sum(0) / np.where(jumps > 0, jumps, np.nan)
        mean_lifetime = lived["finished"] / np.where(lived["deaths"] > 0, lived["deaths"], np.nan)
        expected = lived["at_risk"] / lived["deaths"]
    line = trend(steps_first.astype(float), text)
    existing = (length > 0).sum(-1)
    crossed = (np.maximum(existing - 1, 0) / np.maximum(length.max(-1), 1))[..., None, None]
    fields = {
        "steps": steps,
        "strength": strength,
        "mobility": mobility,
        "moves": moved.sum(0),
        "transitions": pairs.sum(0),
        "longest_stay": _longest_stay(here, pairs & ~moved),
        "jumps": jumps,
        "mean_jump": mean_jump,
        "births": lived["births"].astype(int),
        "deaths": lived["deaths"].astype(int),
        "lasting": lived["lasting"].astype(int),
        "mean_lifetime": mean_lifetime,
        "expected_lifetime": expected,
        "drift": line.slope,
        "drift_low": line.low,
        "drift_high": line.high,
        "drift_relative": line.slope * crossed,
    }
    return Motion(main, counted, **fields, overall=summarised(fields, line.scores, crossed, lived["at_risk"]))


def _mobility(main: np.ndarray, here: np.ndarray, keys: int) -> np.ndarray:
    """1 - sum over places of n (n - 1) / (N (N - 1)): the unbiased Gini-Simpson index of the places."""
    flat, flags = main.reshape(len(main), -1), here.reshape(len(main), -1)
    paths = flat.shape[1]
    cell = (np.arange(paths) * keys + np.maximum(flat, 0))[flags]
    visits = np.bincount(cell, minlength=paths * keys).reshape(paths, keys).astype(float)
    total = visits.sum(-1)
    same = (visits * (visits - 1)).sum(-1)
    pairs = np.where(total > 1, total * (total - 1), np.nan)
    return (1 - same / pairs).reshape(main.shape[1:])


def _longest_stay(here: np.ndarray, stayed: np.ndarray) -> np.ndarray:
    stay = here[:1].sum(0)
    longest = stay.copy()
    for counts, same in zip(here[1:], stayed, strict=True):
        stay = np.where(counts, np.where(same, stay + 1, 1), 0)
        longest = np.maximum(longest, stay)
    return longest


@dataclass
class Lifetimes:
    """Counts over one sample, filled by ``add`` in the order of the steps. Working memory: two slabs."""

    births: np.ndarray = field(init=False)
    """(layer, head) keys that became sinks, those of the first step apart"""
    deaths: np.ndarray = field(init=False)
    """(layer, head) sinks that stopped being one at the next step"""
    finished: np.ndarray = field(init=False)
    """(layer, head) steps that the sinks of ``deaths`` had lasted"""
    at_risk: np.ndarray = field(init=False)
    """(layer, head) sinks that had a next step at which they could stop"""
    age: np.ndarray | None = field(init=False, default=None)
    """(layer, head, key) steps that the key has been a sink without a break"""
    alive: np.ndarray = field(init=False)
    """(layer, head) whether the step before existed"""

    def add(self, sinks_LHK: np.ndarray, exists_LH: np.ndarray) -> None:
        """One step: which keys are sinks, and for which heads the step exists. A missing step ends the watch."""
        if self.age is None:
            self.births, self.deaths, self.finished, self.at_risk = np.zeros((4, *exists_LH.shape), dtype=np.int64)
            self.age = np.zeros(sinks_LHK.shape, dtype=np.int32)
            self.alive = np.zeros(exists_LH.shape, dtype=bool)
        pair_LH = self.alive & exists_LH
        before_LHK = self.age > 0
        ended_LHK = before_LHK & ~sinks_LHK
        self.births += np.where(pair_LH, (sinks_LHK & ~before_LHK).sum(-1), 0)
        self.deaths += np.where(pair_LH, ended_LHK.sum(-1), 0)
        self.finished += np.where(pair_LH, np.where(ended_LHK, self.age, 0).sum(-1), 0)
        self.at_risk += np.where(pair_LH, before_LHK.sum(-1), 0)
        self.age = np.where(sinks_LHK, self.age + 1, 0)
        self.alive = exists_LH

    @property
    def lasting(self) -> np.ndarray:
        """(layer, head) sinks still there at the last step: their whole lives are not known."""
        assert self.age is not None
        return (self.age > 0).sum(-1)
