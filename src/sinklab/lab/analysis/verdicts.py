"""Statements about a model, tested on measured numbers: each one says yes, no or not measured, in
one sentence.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from sinklab.lab.analysis.counts import ratio
from sinklab.lab.analysis.estimates import (
    FEWEST,
    LEVEL,
    Estimate,
    corrected,
    mean_over,
    mean_p,
    median_over,
    median_p,
)


@dataclass(frozen=True)
class Verdict:
    """One statement and whether it holds."""

    name: str
    """short name of the statement: "sinks only at the start", "blocking is costly", "96 % filtered"
    """
    holds: bool | None
    """True or False as measured; None if the result is inconclusive or the numbers are missing"""
    value: float
    """the number that decides; NaN if there is none"""
    threshold: float
    """the bound that it is compared with"""
    sentence: str
    """one sentence with the numbers in it"""
    signature: bool = True
    """whether it is a failure signature: a sign that the model leans on fixed anchors, as
    autoregressive ones do
    """
    estimate: Estimate | None = None
    """value with its interval over samples; None if nothing was measured, or not sample by
    sample
    """
    p: float = math.nan
    """p-value of value against threshold, over samples; NaN if no verdict could be given"""


def holm(found: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts of one page, corrected so that at most 5 % of pages have a false one (Holm
    1979).

    Verdicts with a p-value count. A verdict that does not pass the correction for their number
    holds None, and its sentence says so.
    """
    together = sum(not math.isnan(verdict.p) for verdict in found)
    kept = []
    for verdict, p in zip(found, corrected([verdict.p for verdict in found]), strict=True):
        if verdict.holds is not None and p > 1 - LEVEL:
            words = (
                f"inconclusive, as one of {together} statements judged together "
                f"(p = {verdict.p:.2g})"
            )
            sentence = f"{verdict.sentence.rpartition(': ')[0]}: {words}."
            verdict = replace(verdict, holds=None, sentence=sentence)
        kept.append(verdict)
    return kept


def start_only(events: Any, *, first: int = 4, threshold: float = 0.9) -> Verdict:
    """Failure signature «sinks only at the sequence start» (Rulli et al.): residual autoregressive
    behaviour.

    events: (sample, ..., position) numbers of sink events at canvas positions, added sink columns
    left out; NaN counts
        nothing. A sample without events does not count.
    Holds when in the typical sample (median) more than ``threshold`` of the events lie at the first
    ``first`` positions; None without any event, when the interval over samples contains the
    threshold, or when the sequence is so short that an even spread would do that. Raises ValueError
    for fewer than two axes and for negative events.
    """
    count = np.nan_to_num(np.asarray(events, dtype=float))
    if count.ndim < 2 or (count < 0).any():
        raise ValueError(
            f"events are numbers of at least 0, (sample, ..., position): got shape {count.shape}."
        )
    verdict = partial(Verdict, "sinks only at the start", threshold=threshold)
    count_SP = count.sum(tuple(range(1, count.ndim - 1)))
    share_S = ratio(count_SP[:, :first].sum(1), count_SP.sum(1))
    found = median_over(share_S)
    if not found.samples:
        return verdict(
            holds=None, value=math.nan, sentence="There is no sink, so none sits at the start."
        )
    chance = min(first, count.shape[-1]) / count.shape[-1]
    where = (
        f"{_percent(found.value)} of the sinks in the text are at the first {first} positions "
        f"({_over_samples(found)}; an even spread: {_percent(chance)})"
    )
    if chance > threshold:
        where = f"{where}: the sequence is too short to tell."
        return verdict(holds=None, value=found.value, sentence=where, estimate=found)
    words = "only at the start", "not only at the start"
    return _judged(verdict, found, median_p(share_S, threshold), where, words)


def masking_cost(
    plain: Any, masked: Any, *, measure: str = "loss", threshold: float = 0.05
) -> Verdict:
    """Failure signature «blocking the sinks costs more than 5 %» (Rulli et al.): dependence as in
    autoregressive models.

    plain, masked: (sample,) score of each row or problem without and with the sinks blocked.
    measure: "loss" (rising is worse) or "accuracy" (falling is worse).
    The cost is the relative change of the mean for the worse. Holds or not when its interval over
    samples lies on one side of the threshold, else None; differences are paired, and the mean of
    ``plain`` counts to first order (the delta method). Raises ValueError for another measure, for
    shapes that differ, and for a plain mean that is not above 0.
    """
    if measure not in ("loss", "accuracy"):
        raise ValueError(f"masking_cost judges 'loss' or 'accuracy': got {measure!r}.")
    before_S, after_S = _paired("masking_cost", plain, masked)
    verdict = partial(Verdict, "blocking is costly", threshold=threshold)
    if not len(before_S):
        return verdict(holds=None, value=math.nan, sentence="Blocking the sinks was not measured.")
    samples = len(before_S)
    base = float(before_S.mean())
    changed = float(after_S.mean())
    if not base > 0:
        raise ValueError(f"A relative cost needs a plain {measure} above 0: got {base}.")
    worse_S = after_S - before_S
    if measure == "accuracy":
        worse_S = -worse_S
    value = float(worse_S.mean()) / base
    if measure == "accuracy" and samples >= FEWEST:
        # few problems change: one more each way, or an interval of none would have no width (Bonett
        # and Price 2012)
        before_S, worse_S = np.append(before_S, [1, 0]), np.append(worse_S, [1, -1])
    # each sample's part in the ratio of two means
    cost_S = value + (worse_S - value * before_S) / base
    found = replace(mean_over(cost_S), value=value, samples=samples)
    change = "unchanged"
    if value:
        change = f"{_percent(abs(value))} {'worse' if value > 0 else 'better'}"
    numbers = (
        f"{measure} goes from {base:.4g} to {changed:.4g}, {change} "
        f"({_over_samples(found, 'mean')})"
    )
    words = f"over the limit of {_percent(threshold)}", f"within the limit of {_percent(threshold)}"
    return _judged(
        verdict, found, mean_p(cost_S, threshold), f"With the sinks blocked the {numbers}", words
    )


def _paired(what: str, one: Any, other: Any) -> tuple[np.ndarray, np.ndarray]:
    """Numbers of the samples that have both. Raises ValueError when shapes differ."""
    first_S, second_S = (np.asarray(values, dtype=float) for values in (one, other))
    if first_S.ndim != 1 or first_S.shape != second_S.shape:
        raise ValueError(
            f"{what} needs two (sample,): got shapes {first_S.shape} and {second_S.shape}."
        )
    there_S = ~np.isnan(first_S + second_S)
    return first_S[there_S], second_S[there_S]


def ninety_six(filtered: Any, *, epsilon: float = 3.0, threshold: float = 0.96) -> Verdict:
    """The statement that epsilon = 3 filters at least 96 % of the tokens (Rulli et al., App. B); a
    good sign.

    filtered: (sample,) share that each sample's ``EpsilonCurve`` leaves out. Judged by the typical
    sample (median).
    """
    found = median_over(filtered)
    verdict = partial(Verdict, "96 % filtered", threshold=threshold, signature=False)
    if not found.samples:
        return verdict(
            holds=None,
            value=math.nan,
            sentence="No attention was recorded, so nothing was filtered.",
        )
    shares = (
        f"Epsilon {epsilon:g} leaves out {_percent(found.value)} of the tokens "
        f"({_over_samples(found)})"
    )
    words = f"at least {_percent(threshold)}", f"fewer than {_percent(threshold)}"
    return _judged(verdict, found, median_p(filtered, threshold), shares, words)


def _percent(share: float) -> str:
    number = 100 * share
    return f"{number:.0f} %" if abs(number) >= 100 else f"{number:.3g} %"


def _over_samples(found: Estimate, centre: str = "median") -> str:
    """Spread of the samples: the interval, or the range of too few."""
    if found.samples == 1:
        return "1 sample"
    span = f"{_percent(found.low)} to {_percent(found.high)}"
    if not found.is_interval:
        return f"{found.samples} samples, {span}"
    return f"{centre} of {found.samples} samples, 95\u00a0% interval {span}"


def _judged(
    verdict: partial[Verdict],
    found: Estimate,
    p: float,
    numbers: str,
    words: tuple[str, str],
) -> Verdict:
    """Numbers, and the words for above or below the threshold; if inconclusive, the detectable
    difference.
    """
    threshold = verdict.keywords["threshold"]
    holds = found.above(threshold)
    said = words[0] if holds else words[1]
    if not found.is_interval:
        said = (
            f"inconclusive with fewer than {FEWEST} samples ({FEWEST - found.samples} more are "
            "needed)"
        )
    elif holds is None:
        reach = _percent(found.reach)
        said = f"inconclusive about {_percent(threshold)} (detectable difference: {reach})"
    return verdict(
        holds=holds, value=found.value, sentence=f"{numbers}: {said}.", estimate=found, p=p
    )
