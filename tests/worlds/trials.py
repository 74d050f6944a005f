"""Verdicts in worlds with a known answer: how often they are wrong or right, how often their
intervals cover.
"""

# W worlds, N samples
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import planted
from scipy import optimize

from sinklab.core.sinks import DEFAULT, find_sinks
from sinklab.lab.analysis.counts import mean_weight
from sinklab.lab.analysis.differences import DESIGNS
from sinklab.lab.analysis.estimates import Estimate, mean_interval
from sinklab.lab.analysis.explained import Explained, cells_of
from sinklab.lab.analysis.movement import STRONG, MotionSummary, motion, of_windows
from sinklab.lab.analysis.verdicts import (
    holm,
    ninety_six,
    start_only,
)
from sinklab.lab.measures.statistics import WINDOW


@dataclass(frozen=True)
class Rates:
    """Of many worlds of one kind, in percent."""

    yes: float
    """says that it holds, or lies above"""
    no: float
    """says that it does not, or lies below"""
    covered: float
    """intervals that contain the true value; NaN where it is not known"""

    @property
    def told(self):
        """Any verdict: false alarms where none is due."""
        return self.yes + self.no


def _rates(said, covered=()):
    verdicts, held = [*said], [*covered]
    yes, no = (
        100 * float(np.mean([verdict is which for verdict in verdicts])) for which in (True, False)
    )
    return Rates(yes, no, 100 * float(np.mean(held)) if held else float("nan"))


def _covers(found, truth):
    return found is not None and found.low <= truth <= found.high


def _judged(worlds, judge, truth):
    """Verdicts in worlds of seeds 0, 1, …"""
    found = [judge(np.random.default_rng(seed)) for seed in range(worlds)]
    known = [_covers(verdict.estimate, truth) for verdict in found]
    return _rates((verdict.holds for verdict in found), known)


# --- explained variance ---


@cache
def explained(worlds, samples, at_place=0.0, on_class=0.0):
    """Explained variance in worlds of ``planted.tokens``."""
    found = []
    for seed in range(worlds):
        rng = np.random.default_rng(seed)
        received_NTS, classes_NTS = planted.tokens(
            rng, samples, at_place=at_place, on_class=on_class
        )
        found.append(Explained([*map(cells_of, received_NTS, classes_NTS)]))
    return found


MANY = 2000
"""samples from which on what is explained is known"""


@cache
def _shares(at_place, on_class):
    """What class and position explain where samples are many."""
    rng = np.random.default_rng(10**6)
    received_NTS, classes_NTS = planted.tokens(rng, MANY, at_place=at_place, on_class=on_class)
    parts = [*map(cells_of, received_NTS, classes_NTS)]
    tens = [Explained(parts[first : first + 100]) for first in range(0, len(parts), 100)]
    return [
        float(np.mean([getattr(ten, name).value for ten in tens]))
        for name in ("by_class", "by_position")
    ]


def semantic(worlds, samples, at_place=0.0, on_class=0.0):
    """«Rather semantic» (yes) or «rather positional» (no), and coverage of the difference of the
    two shares.
    """
    by_class, by_position = _shares(at_place, on_class)
    found = explained(worlds, samples, at_place, on_class)
    said = ({"semantic": True, "positional": False}.get(one.word or "") for one in found)
    return _rates(said, (_covers(one.class_over_position, by_class - by_position) for one in found))


# --- shares against a threshold ---


@cache
def _share_with_median(median, spread):
    """The mean for which ``planted.start_shares`` has this median."""
    return float(
        optimize.brentq(lambda share: planted.median_of_beta(share, spread) - median, 0.3, 0.9999)
    )


def _start(samples, median, spread, length=64):
    share = _share_with_median(median, spread)

    def judge(rng):
        shares_N1 = planted.start_shares(rng, samples, share, spread)[:, None]
        return start_only(
            np.where(np.arange(length) < 4, shares_N1 / 4, (1 - shares_N1) / (length - 4))
        )

    return judge


@cache
def starts(worlds, samples, median, spread):
    """«Only at the start» where the typical sample has this share of its sinks at the first four
    positions.
    """
    return _judged(worlds, _start(samples, median, spread), median)


def _filter(samples, median, spread):
    share = _share_with_median(median, spread)
    return lambda rng: ninety_six(planted.start_shares(rng, samples, share, spread))


@cache
def filters(worlds, samples, median, spread):
    """«96 % filtered» where epsilon leaves out this share of a typical sample's tokens."""
    return _judged(worlds, _filter(samples, median, spread), median)


# --- the cost of blocking ---


@cache
def answers(worlds, samples, drop):
    """«Drops» of table 1, more than 5 points lost, where 80 % are right and this share of all is
    lost.
    """
    said, held = [], []
    for seed in range(worlds):
        rng = np.random.default_rng(seed)
        right_N = rng.random(samples) < 0.8
        lost_N = right_N & (rng.random(samples) < drop / 0.8)
        found = DESIGNS["binary"](-lost_N.astype(float), -0.05)
        said.append(None if found.p > 0.05 else found.high < -0.05)
        held.append(found.low <= -drop <= found.high)
    return _rates(said, held)


# --- paired differences ---


def differences(worlds, samples, kind, effect=0.0):
    """Differences of losses on the same rows, whose mean is ``effect`` standard deviations, judged
    against 0.
    """
    rows_WN = effect + planted.differences(np.random.default_rng(0), kind, (worlds, samples))
    found = [
        Estimate(effect, low, high, samples)
        for low, high in zip(*mean_interval(rows_WN), strict=True)
    ]
    return _rates((one.above() for one in found), (_covers(one, effect) for one in found))


# --- motion ---

POOL = 1000
"""samples of which worlds are drawn"""


@cache
def _paths(kind, pool):
    """Samples of ``planted.paths``."""
    rng = np.random.default_rng(1)
    return [motion(planted.paths(rng, kind)).overall for _ in range(pool)]


def _drawn(pool, worlds, samples, seed):
    """Worlds of this many samples, drawn from a pool of them."""
    rng = np.random.default_rng(seed)
    drawn = (rng.choice(len(pool), samples, replace=False) for _ in range(worlds))
    return [[pool[one] for one in some] for some in drawn]


def _motions(worlds, samples, kind):
    return map(MotionSummary.pooled, _drawn(_paths(kind, POOL), worlds, samples, 2))


def words(worlds, samples, kind, word):
    """The word for the motion: yes where it is this one, no where it is another."""
    truth = float(np.nanmedian([one.mobility for one in _paths(kind, POOL)]))
    found = [*_motions(worlds, samples, kind)]
    said = (None if one.word is None else one.word == word for one in found)
    return _rates(
        said, [] if kind == "none" else (_covers(one.mobility_over, truth) for one in found)
    )


@dataclass(frozen=True)
class Written:
    """What an autoregressive model shows of one text."""

    motion: MotionSummary
    """of the heads with a strong key, by disjoint windows of queries"""
    sinks: int
    """sinks by the rule at the last step, of all heads"""


def read_causal(map_HSS, prompt=16):
    """Read a causal map as a recording is read: all queries so far at every step behind the
    prompt.
    """
    heads, length, _ = map_HSS.shape
    sums_SHS = map_HSS.cumsum(1).swapaxes(0, 1)[prompt - 1 :, None]
    steps = np.arange(prompt, length + 1)[:, None]
    visible_TK = np.maximum(steps - np.arange(length), 0)
    received_TLHK = np.where(visible_TK[:, None, None] > 0, sums_SHS, np.nan)
    weight_TLHK = mean_weight(received_TLHK, visible_TK[:, None, None])
    windows_WLHK = np.full((length // WINDOW, 1, heads, length), np.nan, np.float32)
    for number in range(len(windows_WLHK)):
        start, seen = WINDOW * number, WINDOW * number + 1
        windows_WLHK[number, 0, :, :seen] = map_HSS[:, start : start + WINDOW, :seen].mean(1)
    mobility_LH, window_LH = of_windows(windows_WLHK)
    weight_TLH = np.fmax.reduce(weight_TLHK, axis=-1)
    counted_LH = (np.nan_to_num(np.nanmean(weight_TLH, axis=0)) > STRONG) | (window_LH > STRONG)
    visible = visible_TK[:, None, None]
    whole = motion(received_TLHK, visible).overall
    sinks = find_sinks(received_TLHK[-1], DEFAULT, visible[-1]).sum()
    return Written(whole.of_heads(mobility_LH, counted_LH), int(sinks))


@cache
def _written(kind, pool):
    rng = np.random.default_rng(3)
    return [read_causal(planted.causal_maps(rng, kind)) for _ in range(pool)]


def _texts(worlds, samples, kind):
    return _drawn(_written(kind, POOL), worlds, samples, 4)


def causal_words(worlds, samples, kind, word):
    """The word for the motion of an autoregressive model: yes where it is this one, no where it is
    another.
    """
    found = [
        MotionSummary.pooled(one.motion for one in texts) for texts in _texts(worlds, samples, kind)
    ]
    return _rates(None if one.word is None else one.word == word for one in found)


def causal_sinks(worlds, samples, kind):
    """Whether any head of an autoregressive model has a sink by the rule in any of the texts."""
    return _rates(
        True if any(one.sinks for one in texts) else None for texts in _texts(worlds, samples, kind)
    )


# --- all that a page says ---


def pages(worlds, samples, due=False, words=False):
    """The two verdicts of a page, corrected: yes where any is given; with ``due`` the share of
    them that are right.

    Not ``due``: each true value lies on its threshold. ``words``: the word for the motion and
    «semantic or positional», which are not corrected, in worlds in which none is due.
    """
    judges = (
        _start(samples, *((0.97, 0.02) if due else (0.9, 0.3))),
        _filter(samples, *((0.975, 0.0015) if due else (0.96, 0.005))),
    )
    told = []
    for seed in range(worlds):
        rng = np.random.default_rng(seed)
        told.append([verdict.holds for verdict in holm([judge(rng) for judge in judges])])
    if due:
        return Rates(
            100 * float(np.mean([[one is True for one in page] for page in told])),
            0.0,
            float("nan"),
        )
    said = [any(one is not None for one in page) for page in told]
    if words:
        others = zip(_motions(worlds, samples, "none"), explained(worlds, samples), strict=True)
        more = [still.word not in (None, "no sink") or share.word for still, share in others]
        said = [one or bool(other) for one, other in zip(said, more, strict=True)]
    return Rates(100 * float(np.mean(said)), 0.0, float("nan"))


# --- the table ---


@dataclass(frozen=True)
class Row:
    """A verdict with a world where none is due, or a wrong one is at hand, and one where it is
    due.
    """

    verdict: str
    world: str
    null: Callable[[int, int], Rates]
    """(worlds, samples)"""
    effect: Callable[[int, int], Rates]
    right: Callable[[Rates], float]
    alarms: Callable[[Rates], float] = lambda rates: rates.told
    enough: int = 12
    """samples from which on the effect is found in 80 % of the worlds"""
    covers: bool = True
    """whether the interval is meant to cover in 90 to 98 % of the worlds; an exact one of ties
    covers more, one of shares of 8 or 12 answers less
    """


def _yes(rates):
    return rates.yes


def _no(rates):
    return rates.no


def world(rates, *what, **how):
    """Rates in worlds of this kind, of numbers of worlds and of samples."""
    return lambda worlds, n: rates(worlds, n, *what, **how)


NOT_TRIED = Rates(*[float("nan")] * 3)
EFFECTS = {8: 1.5, 12: 1.0, 30: 0.6}
"""differences that are to be found, in standard deviations"""

VERDICTS = (
    Row(
        "sinks are rather positional",
        "still sinks at places of each sample's own; 8 of 10 at the same places (position "
        "explains 60 %)",
        semantic,
        world(semantic, at_place=0.8),
        _no,
    ),
    Row(
        "sinks are rather semantic",
        "the same; 9 of 10 on punctuation (class explains 23 %)",
        semantic,
        world(semantic, on_class=0.9),
        _yes,
    ),
    Row(
        "sinks only at the start",
        "90 % in the typical sample, samples alike or not; 97 %",
        world(starts, 0.9, 0.3),
        world(starts, 0.97, 0.02),
        _yes,
    ),
    Row(
        "sinks not only at the start",
        "90 % in the typical sample, most have all or none; 50 %",
        world(starts, 0.9, 0.7),
        world(starts, 0.5, 0.2),
        _no,
    ),
    Row(
        "96 % filtered",
        "96 % in the typical sample; 97.5 %",
        world(filters, 0.96, 0.005),
        world(filters, 0.975, 0.0015),
        _yes,
        enough=8,
    ),
    Row(
        "blocking costs right answers",
        "5 points of 80, the threshold; half of all that were right",
        world(answers, 0.05),
        world(answers, 0.4),
        _yes,
        enough=30,
        covers=False,
    ),
    *(
        Row(
            f"a difference of losses ({kind})",
            "none; 1.5, 1, 0.6 standard deviations at 8, 12, 30 samples",
            world(differences, kind),
            lambda worlds, n, kind=kind: differences(worlds, n, kind, EFFECTS[n]),
            _yes,
            enough=8,
        )
        for kind in ("normal", "heavy", "skewed")
    ),
    Row(
        "sinks are static",
        "no sinks (alarm: any word for their motion); one place each",
        world(words, "none", "no sink"),
        world(words, "static", "static"),
        _yes,
        alarms=_no,
        enough=8,
        covers=False,
    ),
    Row(
        "sinks are partly moving",
        "moving ones (alarm: another word); two places in turn",
        world(words, "moving", "moving"),
        world(words, "split", "mixed"),
        _yes,
        alarms=_no,
        enough=8,
    ),
    Row(
        "sinks are moving",
        "static ones (alarm: another word); elsewhere at each step",
        world(words, "static", "static"),
        world(words, "moving", "moving"),
        _yes,
        alarms=_no,
        enough=8,
        covers=False,
    ),
    Row(
        "an autoregressive model has sinks",
        "previous-token heads alone; half of the heads on the first token",
        world(causal_sinks, "previous"),
        world(causal_sinks, "first"),
        _yes,
        enough=6,
    ),
    Row(
        "an autoregressive model has sinks (uniform)",
        "uniform causal attention; half of the heads on the first token",
        world(causal_sinks, "uniform"),
        world(causal_sinks, "first"),
        _yes,
        enough=6,
    ),
    Row(
        "sinks of an autoregressive model are static",
        "previous-token heads alone (alarm: any word for their motion); "
        "half on the first token, half on the one before",
        world(causal_words, "previous", "no sink"),
        world(causal_words, "first", "static"),
        _yes,
        alarms=_no,
        enough=6,
    ),
    Row(
        "sinks of an autoregressive model are moving",
        "static ones (alarm: another word); on another key for every window of eight queries",
        world(causal_words, "first", "static"),
        world(causal_words, "moving", "moving"),
        _yes,
        alarms=_no,
        enough=6,
    ),
)
"""all that docs/statistics.md tabulates"""

PAGES = (
    Row(
        "any of the two verdicts of a page",
        "the true value of each is its threshold; both are due (found: of two)",
        pages,
        lambda worlds, n: pages(worlds, n, due=True),
        _yes,
    ),
    Row(
        "the same, the word for the motion, semantic or positional",
        "none is due; –",
        lambda worlds, n: pages(worlds, n, words=True),
        lambda worlds, n: NOT_TRIED,
        _yes,
    ),
)
"""of which at most 10 % may be false, and what is left of the power"""
