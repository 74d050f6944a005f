"""The registered outcomes of smollm2_diffusion.py: estimates over texts crossed with seeds, and
Holm's correction.
"""

# S seeds, T texts
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sinklab.lab.analysis.answers import staying_word
from sinklab.lab.analysis.differences import DESIGNS
from sinklab.lab.analysis.estimates import LEVEL, corrected, median_over, median_p
from sinklab.lab.analysis.movement import MOVING, STATIC

SEEDS, STEPS = (0, 1, 2), 500
"""Seeds of each sibling, and the steps in all at which the outcomes are read."""
INHERITED, FEW_HEADS, RISE, SHORT, LESS = 0.8, 0.05, 0.1, 0.5, 0.2
"""Registered limits: share of pairs that keep the first token, share of heads with a strong key,
rise of a mean weight, ratio of value norms, and how much smaller a rise of the loss must be."""
POWER = 0.8


@dataclass(frozen=True)
class Crossed:
    """A mean over texts crossed with seeds, with its 95 % interval."""

    value: float
    low: float
    high: float
    p: float
    """Of the mean against the threshold that was given."""
    reach: float
    """Difference from the threshold that so many texts and seeds show with a power of 80 %."""
    seeds: int
    texts: int

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} … {self.high:.3f})".replace("-", "−")


NOTHING = Crossed(math.nan, math.nan, math.nan, math.nan, math.nan, 0, 0)


def crossed(values_ST: np.ndarray, threshold: float = 0.0) -> Crossed:
    """The mean over seeds and texts, both drawn at random (`effects`, crossed)."""
    seeds, texts = values_ST.shape
    if seeds == 0 or texts < 2:
        return NOTHING
    known_T = ~np.isnan(values_ST).any(0)
    return Crossed(*DESIGNS["crossed"](values_ST[:, known_T].T, threshold), seeds, texts)


def of_seeds(found: dict[str, Any], sibling: str, read: Callable[[Any], Any]) -> np.ndarray:
    """What `read` finds in the points of a sibling at 0.5M tokens, (S, T); (0, 0) where none was
    measured.
    """
    rows = []
    for seed in SEEDS:
        one = found.get(f"{sibling}-{seed}-{STEPS}")
        values = None if one is None else _read(one, read)
        if values is not None:
            rows.append(values)
    return np.array(rows) if rows else np.zeros((0, 0))


def _read(one: dict[str, Any], read: Callable[[Any], Any]) -> np.ndarray | None:
    try:
        return np.asarray(read(one), dtype=float)
    except KeyError:
        return None


def late(keys: str) -> Callable[[Any], np.ndarray]:
    """Reads what late blocks of the strongest keys cost beyond random ones, in nats by text; keys
    "1" or "25 %".
    """

    def read(one: Any) -> np.ndarray:
        loss = one["costs"]["keys"][keys]["loss"]
        return np.array(loss["late"]) - np.array(loss["random late"])

    return read


REGISTERED = (("ii", "iii"), ("parent", "iii"))
DESCRIBED = (("i", "ii"), ("iv", "iii"), ("v", "iii"))
"""Contrasts of question 4: those that were registered, and what else the siblings isolate."""


def contrasts(
    found: dict[str, Any], keys: str, pairs: tuple[tuple[str, str], ...] = REGISTERED
) -> dict[str, Crossed]:
    """What late blocks cost the first model of each pair less the second, over texts crossed with
    the seeds that both have.
    """
    read = late(keys)
    told = {}
    for first, second in pairs:
        of_first_ST, of_second_ST = of_seeds(found, first, read), of_seeds(found, second, read)
        if first == "parent":
            parent_T = _read(found.get("parent", {}), read)
            of_first_ST = np.zeros((0, 0))
            if parent_T is not None:
                of_first_ST = np.tile(parent_T, (len(of_second_ST), 1))
        shared = min(len(of_first_ST), len(of_second_ST))
        told[f"{first} − {second}"] = NOTHING
        if shared:
            told[f"{first} − {second}"] = crossed(of_first_ST[:shared] - of_second_ST[:shared])
    return told


@dataclass(frozen=True)
class Outcome:
    """A primary question answered."""

    name: str
    sentence: str
    """«word: numbers»"""
    p: float
    holds: bool | None


def outcomes(found: dict[str, Any]) -> list[Outcome]:
    """The six primary outcomes, corrected together; a question without a p-value counts among the
    six with 1.
    """
    told = [
        _survives(found),
        _moves(found),
        _alone(found),
        _recomputed(found),
        _added(found),
        _short(found),
    ]
    stand = corrected([one.p for one in told]) <= 1 - LEVEL
    return [
        one if stands else _unsure(one, len(told)) for one, stands in zip(told, stand, strict=True)
    ]


def _unsure(one: Outcome, together: int) -> Outcome:
    """An outcome that did not pass the correction."""
    if one.holds is None:
        return one
    word = f"inconclusive, as one of {together} statements judged together (p = {one.p:.2g})"
    return replace(one, holds=None, sentence=f"{one.sentence.rpartition(': ')[0]}: {word}.")


def _verdict(name: str, word: str, estimate: Crossed, holds: bool | None) -> Outcome:
    """A verdict whose sentence is «word: numbers»."""
    missing = estimate.texts == 0
    sentence = f"{word}: {estimate}, {estimate.seeds} seeds × {estimate.texts} texts"
    if missing:
        sentence = "not measured"
    p = 1.0 if math.isnan(estimate.p) else estimate.p
    return Outcome(name, sentence, p, None if missing else holds)


def parent_channel(found: dict[str, Any]) -> str:
    """The channel in which the parent's strong keys peak."""
    counted: Counter[str] = Counter()
    for shares in found["parent"]["channel"]["0.0"]["channels"]:
        counted.update(shares)
    return counted.most_common(1)[0][0]


def _survives(found: dict[str, Any]) -> Outcome:
    kept = crossed(
        of_seeds(found, "iii", lambda one: one["channel"]["0.15"]["kept_pairs"]), INHERITED
    )
    word = "inherited" if kept.low > INHERITED else "inconclusive"
    if kept.high < INHERITED:
        strong = of_seeds(found, "iii", lambda one: one["strength"]["0.15"]["strong_heads"]).mean()
        channel = parent_channel(found)

        def in_channel(one: Any) -> list[float]:
            return [shares.get(channel, 0.0) for shares in one["channel"]["0.15"]["channels"]]

        peaks = of_seeds(found, "iii", in_channel).mean()
        word = "lost" if strong < FEW_HEADS else "relocated" if peaks > 0.5 else "new"
        word += f", {peaks:.0%} of strong heads peak in the parent's channel {channel}"
    return _verdict("1 Does the parent's sink survive?", word, kept, kept.low > INHERITED)


def _moves(found: dict[str, Any]) -> Outcome:
    mobility_ST = of_seeds(found, "iii", lambda one: one["motion"]["mobility"])
    if not len(mobility_ST):
        return _verdict("2 Does it move?", "", NOTHING, None)
    mobility_T = np.ma.masked_invalid(mobility_ST).mean(0).filled(np.nan)
    median = median_over(mobility_T)
    threshold = min((STATIC, MOVING), key=lambda each: abs(each - median.value))
    p = median_p(mobility_T, threshold)
    whole = Crossed(
        median.value, median.low, median.high, p, median.reach, len(mobility_ST), median.samples
    )
    word = staying_word(median)
    return _verdict("2 Does it move?", word, whole, None if word == "inconclusive" else True)


def _alone(found: dict[str, Any]) -> Outcome:
    lone = found.get("lifted", {}).get("lone")
    if lone is None:
        return _verdict("3 Is seeing only itself the cause?", "", NOTHING, None)
    rise = crossed(np.array([np.array(lone["alone-0"]["share"]) - np.array(lone["full"]["share"])]))
    is_yes = rise.value >= RISE and rise.low > 0
    return _verdict("3 Is seeing only itself the cause?", "yes" if is_yes else "no", rise, is_yes)


def _recomputed(found: dict[str, Any]) -> Outcome:
    told = contrasts(found, "1")
    worse = max(told.values(), key=lambda one: one.p if not math.isnan(one.p) else 2.0)
    ours, causal = (of_seeds(found, sibling, late("1")) for sibling in ("iii", "ii"))
    word = "inconclusive"
    if len(ours) and len(causal):
        is_less = worse.low > 0 and ours.mean() < (1 - LESS) * causal.mean()
        word = "less dependent" if is_less else "not less dependent"
    return _verdict("4 Is robustness recomputation? (nats)", word, worse, worse.low > 0)


def _added(found: dict[str, Any]) -> Outcome:
    points = [found[name] for name in (f"iv-{seed}-{STEPS}" for seed in SEEDS) if name in found]
    shares = [one["strength"]["0.5"]["added_of_strong"] for one in points if "strength" in one]
    if not shares:
        return _verdict("5 Does the added token become the sink?", "", NOTHING, None)
    sentence = (
        f"{np.mean(shares):.1%}, range {min(shares):.1%} … {max(shares):.1%} of "
        f"{len(shares)} seeds: no interval"
    )
    return Outcome("5 Does the added token become the sink?", sentence, 1.0, None)


def _short(found: dict[str, Any]) -> Outcome:
    ratio = crossed(of_seeds(found, "iii", lambda one: one["value_norms"]["ratio"]), SHORT)
    word = "short" if ratio.high < SHORT else "not short" if ratio.low > SHORT else "inconclusive"
    return _verdict("6 Are the sink's values short?", word, ratio, ratio.high < SHORT)
