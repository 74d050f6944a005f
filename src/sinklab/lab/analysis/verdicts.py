"""Statements about a model, tested on measured numbers: rows of the table ``measures``."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sinklab.lab.analysis.counts import ratio
from sinklab.lab.analysis.differences import INCONCLUSIVE
from sinklab.lab.analysis.estimates import (
    LEVEL,
    Estimate,
    corrected,
    median_over,
    median_p,
)


@dataclass(frozen=True)
class Verdict:
    """One statement and whether it holds."""

    name: str
    """short name of the statement: "sinks only at the start", "96 % filtered"
    """
    estimate: Estimate
    """the number that decides, over samples; of no samples if it was not measured"""
    threshold: float
    """the bound that it is compared with"""
    p: float
    """p-value of the number against the threshold; NaN if no verdict could be given"""
    holds: bool | None
    """whether it is above the threshold; None if the result is inconclusive"""
    words: tuple[str, str] = ("seen", "not seen")
    """if it holds, and if not: of a failure signature, a sign that a model leans on fixed anchors,
    as autoregressive ones do, or of a good sign
    """

    @property
    def word(self) -> str:
        """One of the words, or inconclusive."""
        return {True: self.words[0], False: self.words[1], None: INCONCLUSIVE}[self.holds]


def holm(found: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts of one page, corrected so that at most 5 % of pages have a false one (Holm
    1979): one that does not pass the correction for the number of p-values holds None.
    """
    failed = corrected([one.p for one in found]) > 1 - LEVEL
    return [
        replace(one, holds=None) if fails else one
        for one, fails in zip(found, failed.tolist(), strict=True)
    ]


def start_only(events: Any, *, first: int = 4, threshold: float = 0.9) -> Verdict:
    """Failure signature «sinks only at the sequence start» (Rulli et al.): residual autoregressive
    behaviour.

    events: (sample, ..., position) numbers of sink events at canvas positions, added sink columns
    left out; NaN counts nothing. A sample without events does not count.
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
    count_SP = count.sum(tuple(range(1, count.ndim - 1)))
    share_S = ratio(count_SP[:, :first].sum(1), count_SP.sum(1))
    found = _typical("sinks only at the start", share_S, threshold)
    if min(first, count.shape[-1]) > threshold * count.shape[-1]:
        return replace(found, p=np.nan, holds=None)
    return found


def ninety_six(filtered: Any, *, threshold: float = 0.96) -> Verdict:
    """The statement that epsilon = 3 filters at least 96 % of the tokens (Rulli et al., App. B); a
    good sign.

    filtered: (sample,) share that each sample's ``EpsilonCurve`` leaves out. Judged by the typical
    sample (median).
    """
    return _typical("96 % filtered", filtered, threshold, ("holds", "does not hold"))


def _typical(name: str, shares_S: Any, threshold: float, *words: tuple[str, str]) -> Verdict:
    """Whether the typical sample (median) is above a threshold."""
    found, p = median_over(shares_S), median_p(shares_S, threshold)
    return Verdict(name, found, threshold, p, found.above(threshold), *words)
