"""Numbers for the statements of a page about a study (a `Study` everywhere), and the same numbers
of its controls.
"""

# L layers, N samples, R rows of held-out text
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from sinklab.lab.analysis import mean_over
from sinklab.lab.analysis.answers import beside
from sinklab.lab.reports.answered import blocked_at, mobility_of
from sinklab.lab.reports.samples import ADDED
from sinklab.lab.reports.words import number, percent, same

# A class with fewer places or events than this share is too rare to speak of.
RARE = 0.01


class Shown(NamedTuple):
    """A number of a study as it is written beside that of its controls, and of each of its
    samples.
    """

    text: str
    """empty if it was not measured"""
    each_N: Any = ()
    """the number of each sample; empty if it is not one over samples"""


def controls_of(study: Any) -> dict[str, str]:
    """Numbers of the controls, in words, for every number and every verdict stated about a study.

    Empty for a study without controls.
    """
    if not study.twins or not study.layers:
        return {}
    found = {}
    for name, shown in NUMBERS.items():
        others = {kind: shown(twin) for kind, twin in study.twins.items()}
        each = {kind: other.each_N for kind, other in others.items()}
        texts = {kind: other.text.replace("-", "−") for kind, other in others.items()}
        found[name] = beside(texts, shown(study).each_N, each)
    twins = study.twins.items()
    found["class"] = beside({kind: _favoured(study.classes, one.classes) for kind, one in twins})
    found["age"] = beside({kind: _favoured(study.ages, one.ages) for kind, one in twins})
    for verdict in study.verdicts:
        texts = {kind: _value_of(verdict.name, twin) for kind, twin in study.twins.items()}
        found[verdict.name] = beside(texts)
    return {name: words for name, words in found.items() if words}


def _value_of(verdict: str, study: Any) -> str:
    value = next(one.value for one in study.verdicts if one.name == verdict)
    return _said(value)


def _said(value: float, form: Callable[[float], str] = percent) -> str:
    """A number as it is written; empty if there is none."""
    if math.isnan(value):
        return ""
    return form(value)


def _mean_of(study: Any, share: str) -> Shown:
    each = study.each("layer").groupby("sample")[share].mean().to_numpy()
    return Shown(_said(study.over("layer")[share].mean()), each)


def _mobility(study: Any) -> Shown:
    return Shown(_said(study.motion.mobility), mobility_of(study.motion))


def _norms(study: Any) -> Shown:
    return Shown(_said(study.measured.norm_ratio.value, _times), study.measured.norm_ratio_N)


def _times(value: float) -> str:
    return f"{number(value)} times"


def _added_norms(study: Any) -> Shown:
    both = study.over("layer").dropna(subset=["added_norm", "text_norm"])
    if both.empty:
        return Shown("")
    return Shown(f"{number(both['added_norm'].mean())} and {number(both['text_norm'].mean())}")


def _blocking(study: Any) -> Shown:
    found = blocking(study)
    if found["blocked"] is None:
        return Shown("")
    return Shown(f"{found['blocked']['delta']:+.2f}", found["gap_R"])


def _explained(study: Any) -> Shown:
    shares = study.explained
    if shares is None or not shares.by_class.is_interval:
        return Shown("")
    return Shown(f"{percent(shares.by_class.value)} and {percent(shares.by_position.value)}")


def _favoured(page: pd.DataFrame | None, control: pd.DataFrame | None) -> str:
    """How often, in multiples of chance, sinks of a control have the label that they favour in the
    study of a page; both are tables of `enrichment`.
    """
    best = richest(page, "")
    if not best or control is None:
        return ""
    known = control[control["label"] == best[0][1]]["enrichment"].dropna()
    return "".join(f"{number(enrichment, 2)} times" for enrichment in known)


NUMBERS: dict[str, Callable[[Any], Shown]] = {
    "greatest share": partial(_mean_of, share="text_share"),
    "added share": partial(_mean_of, share="added_share"),
    "mobility": _mobility,
    "norms": _norms,
    "added norms": _added_norms,
    "blocking": _blocking,
    "explained": _explained,
}
"""Numbers in statements, by name -> function that gives that of a study."""


def with_sinks(study: Any) -> int:
    """How many samples have a sink in the text."""
    return int((np.nan_to_num(study.measured.events_NS).sum(-1) > 0).sum())


def richest(found: pd.DataFrame | None, what: str) -> list[tuple[Any, ...]]:
    """``what``, label, frequency, occupancy and enrichment of the most enriched label that is not
    rare, if there is one.
    """
    if found is None:
        return []
    shares = found[["frequency", "occupancy"]].min(axis=1)
    text = found[(shares >= RARE) & ~found["label"].isin((ADDED, "sink"))]
    if text.empty:
        return []
    best = text.loc[text["enrichment"].idxmax()]
    if best["enrichment"] < 1 or same(best["enrichment"], 1):
        return []
    return [(what, *best[["label", "frequency", "occupancy", "enrichment"]])]


def blocking(study: Any) -> dict[str, Any]:
    """Loss with nothing blocked (``base``), with the most sinks blocked (``blocked``) and with as
    many random columns; and ``gap``, the excess cost of the sinks, an `Estimate` over rows of text,
    with no samples if the run kept no losses of single rows (``gap_R``).
    """
    frame, gap_R = study.heldout, np.array([])
    found: dict[str, Any] = dict.fromkeys(("base", "blocked", "random"))
    if frame is not None:
        base, arms = blocked_at(frame.reindex(columns=frame.columns.union(["bits_per_byte"])), -1)
        found["base"] = base
        for name, control in (("blocked", "sinks"), ("random", "random")):
            if control in arms.index:
                found[name] = arms.loc[control]
    if found["random"] is not None and "losses" in arms:
        gap_R = np.subtract(*arms["losses"][["sinks", "random"]])
    return found | {"gap": mean_over(gap_R), "gap_R": gap_R}
