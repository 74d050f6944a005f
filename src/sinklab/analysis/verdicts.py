"""Statements about a model, held against measured numbers: each one says yes, no or not measured, in one sentence."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from sinklab.analysis.intervals import wilson
from sinklab.analysis.thresholds import EpsilonCurve


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


def start_only(events: Any, *, first: int = 4, threshold: float = 0.9) -> Verdict:
    """Failure signature «sinks only at the sequence start» (Rulli et al.): residual autoregressive behaviour.

    events: (..., position) numbers of sink events at canvas positions, added sink columns left out; NaN counts nothing.
    Holds when more than ``threshold`` of all events lie at the first ``first`` positions; None without any event, or
    when the sequence is so short that an even spread would do that. Raises ValueError for negative events.
    """
    count = np.nan_to_num(np.asarray(events, dtype=float))
    if count.ndim < 1 or (count < 0).any():
        raise ValueError(f"events are numbers of at least 0 with positions on the last axis: got shape {count.shape}.")
    verdict = partial(Verdict, "sinks only at the start", threshold=threshold)
    total = float(count.sum())
    if not total:
        return verdict(holds=None, value=math.nan, sentence="There is no sink, so none sits at the start.")
    value = float(count[..., :first].sum()) / total
    chance = min(first, count.shape[-1]) / count.shape[-1]
    holds = None if chance > threshold else value > threshold
    told = {None: "the sequence is too short to tell", True: "only at the start", False: "not only at the start"}
    where = f"{_percent(value)} of the sinks in the text are at the first {first} positions"
    return verdict(holds=holds, value=value, sentence=f"{where} (an even spread: {_percent(chance)}): {told[holds]}.")


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


def recovery(lost: Any, recovered: Any, *, within: int | None = None, threshold: float = 0.5) -> Verdict:
    """Failure signature «no recovery after the middle of the context was hidden» (Rulli et al.): fixed anchors.

    lost: boolean, any shape, one per head (of a sample): its main sink lay in what was hidden.
    recovered: boolean, same shape: afterwards it had a new main sink that passes the rule. A study with ``truncate``
        tabulates both.
    within: number of steps it was given, for the sentence.
    Holds (a bad sign) when fewer than ``threshold`` of the heads that lost recovered; None when no head lost or the
    95 % interval of the share (Wilson) contains the threshold.
    """
    gone, back = np.asarray(lost, dtype=bool), np.asarray(recovered, dtype=bool)
    if gone.shape != back.shape:
        raise ValueError(f"One recovered per lost: got shapes {back.shape} and {gone.shape}.")
    verdict, losers = partial(Verdict, "no recovery", threshold=threshold), int(gone.sum())
    if not losers:
        return verdict(holds=None, value=math.nan, sentence="No head had its main sink in what was hidden.")
    again = int((gone & back).sum())
    value = again / losers
    low, high = wilson(again, losers)
    soon = "" if within is None else f" within {within} step{'s' if within != 1 else ''}"
    sentence = f"{again} of {losers} heads whose main sink was hidden have a new one{soon} ({_percent(value)})"
    holds = None if low <= threshold <= high else value < threshold
    told = {None: f"too few to tell it from {_percent(threshold)}", True: "they do not recover", False: "they recover"}
    return verdict(holds=holds, value=value, sentence=f"{sentence}: {told[holds]}.")


def ninety_six(curve: EpsilonCurve, *, epsilon: float = 3.0, threshold: float = 0.96) -> Verdict:
    """The statement that epsilon = 3 filters at least 96 % of the tokens (Rulli et al., App. B); a good sign."""
    value = curve.at(epsilon)
    verdict = partial(Verdict, "96 % filtered", value=value, threshold=threshold, signature=False)
    if math.isnan(value):
        return verdict(holds=None, sentence="No attention was recorded, so nothing was filtered.")
    holds = value >= threshold
    sentence = f"Epsilon {epsilon:g} leaves out {_percent(value)} of the tokens"
    return verdict(holds=holds, sentence=f"{sentence}: {'at least' if holds else 'fewer than'} {_percent(threshold)}.")


def _percent(share: float) -> str:
    number = 100 * share
    return f"{number:.0f} %" if abs(number) >= 100 else f"{number:.3g} %"
