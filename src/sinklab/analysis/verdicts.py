"""Statements about a model, held against measured numbers: each one says yes, no or not measured, in one sentence."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from sinklab.analysis.counts import ratio
from sinklab.analysis.estimates import FEWEST, Estimate, median_over


@dataclass(frozen=True)
class Verdict:
    """One statement and whether it holds."""

    name: str
    """short name of the statement: "sinks only at the start", "masking is costly", "no recovery", "96 % filtered" """
    holds: bool | None
    """True or False as measured; None where the numbers cannot tell or are not there"""
    value: float
    """the number that decides; NaN where there is none"""
    threshold: float
    """what it is held against"""
    sentence: str
    """one sentence with the numbers in it"""
    signature: bool = True
    """whether it is a failure signature: a sign that the model leans on fixed anchors, as autoregressive ones do"""
    estimate: Estimate | None = None
    """value with its interval over samples; None where nothing was measured, or not sample by sample"""


def start_only(events: Any, *, first: int = 4, threshold: float = 0.9) -> Verdict:
    """Failure signature «sinks only at the sequence start» (Rulli et al.): residual autoregressive behaviour.

    events: (sample, ..., position) numbers of sink events at canvas positions, added sink columns left out; NaN counts
        nothing. A sample without events does not count.
    Holds when in the typical sample (median) more than ``threshold`` of the events lie at the first ``first``
    positions; None without any event, when the interval over samples contains the threshold, or when the sequence is so
    short that an even spread would do that. Raises ValueError for fewer than two axes and for negative events.
    """
    count = np.nan_to_num(np.asarray(events, dtype=float))
    if count.ndim < 2 or (count < 0).any():
        raise ValueError(f"events are numbers of at least 0, (sample, ..., position): got shape {count.shape}.")
    verdict = partial(Verdict, "sinks only at the start", threshold=threshold)
    count_SP = count.sum(tuple(range(1, count.ndim - 1)))
    found = median_over(ratio(count_SP[:, :first].sum(1), count_SP.sum(1)))
    if not found.samples:
        return verdict(holds=None, value=math.nan, sentence="There is no sink, so none sits at the start.")
    chance = min(first, count.shape[-1]) / count.shape[-1]
    where = (
        f"{_percent(found.value)} of the sinks in the text are at the first {first} positions "
        f"({_over_samples(found)}; an even spread: {_percent(chance)})"
    )
    holds, words = _against(found, threshold, "only at the start", "not only at the start")
    if chance > threshold:
        holds, words = None, "the sequence is too short to tell"
    return verdict(holds=holds, value=found.value, sentence=f"{where}: {words}.", estimate=found)


def masking_cost(
    plain: tuple[float, float],
    masked: tuple[float, float],
    *,
    measure: str = "loss",
    threshold: float = 0.05,
    paired_error: float | None = None,
) -> Verdict:
    """Failure signature «masking the sinks costs more than 5 %» (Rulli et al.): dependence as in autoregressive models.

    plain, masked: (value, standard error) without and with the sinks masked. measure: "loss" (rising is worse) or
    "accuracy" (falling is worse). The cost is the relative change for the worse. paired_error: standard error of the
    difference where the two were measured on the same items; None: the two errors are taken as independent.
    Holds or not only when two standard errors of the cost leave no doubt; else None and «cannot tell».
    Raises ValueError for another measure or a plain value that is not above 0.
    """
    if measure not in ("loss", "accuracy"):
        raise ValueError(f"masking_cost judges 'loss' or 'accuracy': got {measure!r}.")
    (base, base_error), (changed, changed_error) = plain, masked
    verdict = partial(Verdict, "masking is costly", threshold=threshold)
    if math.isnan(base) or math.isnan(changed):
        return verdict(holds=None, value=math.nan, sentence="Masking the sinks was not measured.")
    if not base > 0:
        raise ValueError(f"A relative cost needs a plain {measure} above 0: got {base}.")
    sign = 1 if measure == "loss" else -1
    value = sign * (changed - base) / base
    # First order in the ratio changed / base, or the paired error of the difference.
    error = math.hypot(changed_error, changed / base * base_error) if paired_error is None else paired_error
    reach = 2 * error / base
    numbers = f"{measure} goes from {base:.4g} to {changed:.4g}, " + (
        f"{_percent(abs(value))} {'worse' if value > 0 else 'better'}" if value else "unchanged"
    )
    doubt = "no error is known" if math.isnan(reach) else f"± {_percent(reach)}"
    holds = value > threshold if abs(value - threshold) > reach else None
    told = {None: f" ({doubt}): cannot tell whether that is over", True: ": over", False: ": within"}
    sentence = f"With the sinks masked the {numbers}{told[holds]} the limit of {_percent(threshold)}."
    return verdict(holds=holds, value=value, sentence=sentence)


def recovery(
    lost: Any, renormalised: Any, recovered: Any, *, within: int | None = None, threshold: float = 0.25
) -> Verdict:
    """Failure signature «no recovery after the middle of the context was hidden» (Rulli et al.): fixed anchors.

    Attention sums to 1, so when a sink is hidden the others receive more, and one of them may pass the rule without
    anything having been rebuilt. Heads count that have no sink by such renormalisation, and those that lost their sink
    are held against the base rate, that of the others.

    lost: boolean (sample, head): the main sink of the head lay in what was hidden.
    renormalised: boolean, same shape: of what was left, a key passes the rule when the attention before the cut is
        divided by what was not hidden.
    recovered: boolean, same shape: afterwards the head had a main sink that passes the rule. A study with ``truncate``
        tabulates all three.
    within: number of steps it was given, for the sentence.
    Holds (a bad sign) when in the typical sample (median) the share that recovered is less than ``threshold`` above the
    base rate; None when the interval over samples contains the threshold. Samples without heads of both kinds do not
    count. Raises ValueError when shapes differ.
    """
    gone, passes, back = (np.asarray(one, dtype=bool) for one in (lost, renormalised, recovered))
    if gone.ndim != 2 or not gone.shape == passes.shape == back.shape:
        raise ValueError(f"recovery needs three (sample, head): got shapes {gone.shape}, {passes.shape}, {back.shape}.")
    verdict = partial(Verdict, "no recovery", threshold=threshold)
    if not gone.any():
        return verdict(holds=None, value=math.nan, sentence="No head had its main sink in what was hidden.")
    losers, others = gone & ~passes, ~gone & ~passes
    rate_S, base_S = (ratio((kind & back).sum(1), kind.sum(1)) for kind in (losers, others))
    found = median_over(rate_S - base_S)
    if not found.samples:
        alone = f"All {gone.sum()} heads whose main sink was hidden have another by renormalisation alone"
        if losers.any():
            alone = "There is no head without a sink to take the base rate from"
        return verdict(holds=None, value=math.nan, sentence=f"{alone}, so recovery cannot be judged.")
    soon = "" if within is None else f" within {within} step{'s' if within != 1 else ''}"
    rate, base = (_percent(float(np.median(one_S[~np.isnan(rate_S - base_S)]))) for one_S in (rate_S, base_S))
    sentence = (
        f"{rate} of the heads that were left without a sink when theirs was hidden have a new one{soon}, {base} of "
        f"those that had none (difference {_percent(found.value)}, {_over_samples(found)})"
    )
    holds, words = _against(found, threshold, "they recover", "they do not recover")
    stuck = None if holds is None else not holds
    return verdict(holds=stuck, value=found.value, sentence=f"{sentence}: {words}.", estimate=found)


def ninety_six(filtered: Any, *, epsilon: float = 3.0, threshold: float = 0.96) -> Verdict:
    """The statement that epsilon = 3 filters at least 96 % of the tokens (Rulli et al., App. B); a good sign.

    filtered: (sample,) share that each sample's ``EpsilonCurve`` leaves out. Judged by the typical sample (median).
    """
    found = median_over(filtered)
    verdict = partial(Verdict, "96 % filtered", value=found.value, threshold=threshold, signature=False)
    if not found.samples:
        return verdict(holds=None, sentence="No attention was recorded, so nothing was filtered.")
    holds, words = _against(found, threshold, f"at least {_percent(threshold)}", f"fewer than {_percent(threshold)}")
    shares = f"Epsilon {epsilon:g} leaves out {_percent(found.value)} of the tokens ({_over_samples(found)})"
    return verdict(holds=holds, sentence=f"{shares}: {words}.", estimate=found)


def _over_samples(found: Estimate) -> str:
    """Where the samples lie: the interval, or the range of too few."""
    if found.samples == 1:
        return "1 sample"
    span = f"{_percent(found.low)} to {_percent(found.high)}"
    return (
        f"median of {found.samples} samples, 95\u00a0% interval {span}"
        if found.is_interval
        else f"{found.samples} samples, {span}"
    )


def _against(found: Estimate, threshold: float, above: str, below: str) -> tuple[bool | None, str]:
    """Whether it is above the threshold, and the words for it."""
    if not found.is_interval:
        return None, f"too few samples to tell (at least {FEWEST})"
    holds = found.above(threshold)
    return holds, f"cannot tell on which side of {_percent(threshold)}" if holds is None else above if holds else below


def _percent(share: float) -> str:
    number = 100 * share
    return f"{number:.0f} %" if abs(number) >= 100 else f"{number:.3g} %"
