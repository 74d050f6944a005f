"""What the statements of a page find in a study (a `Study` everywhere), and whether untrained twins show as much."""

# L layers
import math
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy import stats

from sinklab.analysis.counts import ratio
from sinklab.analysis.estimates import FEWEST, Estimate, mean_over
from sinklab.analysis.movement import motion_word
from sinklab.analysis.tokens import Enrichment
from sinklab.reports.samples import ADDED
from sinklab.reports.words import same

# A class with fewer places or events than this share is too rare to speak of.
RARE = 0.01
AS_MUCH = 1 / 3
"""A twin shows as much as the run when what it shows is at least this part of it, in whichever direction."""


class Finding(NamedTuple):
    """One thing that a statement may say of a study."""

    said: bool
    """whether it does"""
    size: float
    """how far the study is from nothing of it; NaN where that was not measured"""


def findings_of(study: Any) -> dict[str, Finding]:
    """Everything that statements may say of a study, by name; nothing of one without attention."""
    if not study.layers:
        return {}
    measured, motion, gap = study.measured, study.motion, hiding(study)["gap"]
    numbers_L = measured.layer_sinks.number
    pace = motion_word(motion.mobility)
    found = {
        "greatest share": _share(study, "text_share"),
        "drift": Finding(bool(motion.drift_word), motion.drift_over.value),
        "depth": Finding(bool(trend_word(numbers_L)), float(ratio(measured.layer_sinks.trend, numbers_L.mean()))),
        "norms": _length(study, with_sinks(study) >= FEWEST, "sink_norm", "rest_norm"),
        "hiding": Finding(gap.above() is not None, gap.value),
    }
    # a word for the pace is shown or not; there is no more or less of it
    found |= {word: Finding(motion.word == word, float(pace == word)) for word in ("static", "mixed", "moving")}
    if study.sink_count:
        found["added share"] = _share(study, "added_share")
        found["added norms"] = _length(study, True, "added_norm", "text_norm")
    if (shares := study.explained) is not None:
        found["semantic"] = Finding(shares.word == "semantic", shares.by_class.value)
        found["positional"] = Finding(shares.word == "positional", shares.by_position.value)
    for name, labels in (("class", study.classes), ("age", study.ages)):
        is_said = bool(richest(labels, name)) and with_sinks(study) >= FEWEST
        found[name] = Finding(is_said, _unevenness(labels))
    return found


def in_twins(study: Any) -> dict[str, bool]:
    """Of every finding and every verdict of a study, by name, whether an untrained twin shows as much.

    A verdict is shown by a twin whose own number lies on the same side of the threshold, whether or not it is sure of
    it. Empty for a study without twins.
    """
    if not (twins := study.twins.values()):
        return {}
    found = {
        name: any(abs(twin.findings[name].size) >= AS_MUCH * abs(one.size) for twin in twins)
        for name, one in study.findings.items()
        if one.said and not math.isnan(one.size)
    }
    others = [{verdict.name: verdict.value for verdict in twin.verdicts} for twin in twins]
    for one in study.verdicts:
        if one.holds is not None:
            values = [values[one.name] for values in others if not math.isnan(values[one.name])]
            found[one.name] = any((value > one.threshold) == (one.value > one.threshold) for value in values)
    return found


def _unevenness(found: Enrichment | None) -> float:
    """By how much the share of sinks on one label is above its share of positions, at most."""
    rows = zip(found.label, found.frequency, found.occupancy, strict=True) if found else ()
    return max((float(mine - there) for label, mine, there in rows if label not in (ADDED, "sink")), default=0.0)


def with_sinks(study: Any) -> int:
    """How many samples have a sink in the text."""
    return int((np.nan_to_num(study.measured.events_NS).sum(-1) > 0).sum())


def strength(study: Any) -> tuple[Estimate, float]:
    """Over samples, the attention that a head gives to its greatest key; and an even share."""
    positions = np.mean([study.sample(place).positions_T.mean() for place in study.recorded])
    return mean_over(study.each("layer").groupby("sample")["main_share"].mean()), 1 / float(positions)


def _share(study: Any, share: str) -> Finding:
    """How far a mean share of the attention is above an even one, as a multiple of that; said from twice of it on."""
    positions = np.mean([study.sample(place).positions_T.mean() for place in study.recorded])
    excess = float(study.over("layer")[share].mean() * positions - 1)
    return Finding(excess > 1, excess)


def _length(study: Any, is_known: bool, one: str, other: str) -> Finding:
    """How much longer some value vectors are than others, on a logarithmic scale; said from a fifth on."""
    both = study.over("layer").dropna(subset=[one, other])
    size = math.log(both[one].mean() / both[other].mean()) if len(both) else math.nan
    return Finding(is_known and abs(size) > 0.2, size)


def trend_word(numbers_L: Any) -> str:
    """rises or falls, of numbers by layer; empty where layers in random order would often look like it (Kendall)."""
    found = stats.kendalltau(np.arange(len(numbers_L)), numbers_L) if len(numbers_L) > 1 else None
    return "" if found is None or not found.pvalue < 0.05 else "rises" if found.statistic > 0 else "falls"


def richest(found: Enrichment | None, what: str) -> list[tuple[Any, ...]]:
    """``what``, label, frequency, occupancy and enrichment of the most enriched label that is not rare, if any is."""
    rows = zip(found.label, found.frequency, found.occupancy, found.enrichment, strict=True) if found else ()
    text = [row for row in rows if row[0] not in (ADDED, "sink") and min(row[1], row[2]) >= RARE]
    best = max(text, key=lambda row: float(row[3]), default=None)
    return [] if best is None or same(float(best[3]), 1) or best[3] < 1 else [(what, *best)]


def hiding(study: Any) -> dict[str, Any]:
    """Loss with nothing hidden, with the most sinks hidden and with as many random columns; and gap, what the sinks
    cost more, an `Estimate` over rows of text, of no samples where the run kept no losses of single rows.
    """
    frame, gap = study.heldout, mean_over([])
    if frame is None:
        return {"base": None, "hidden": None, "gap": gap}
    frame = frame.reindex(columns=frame.columns.union(["bits_per_byte"])).sort_values("k")
    base, hidden = _row(frame[frame["k"] == 0], 0), _row(frame[frame["control"] == "sinks"], -1)
    random = None if hidden is None else _row(frame[(frame["control"] == "random") & (frame["k"] == hidden["k"])], 0)
    rows = study.table("heldout")
    if hidden is not None and random is not None and "losses" in rows:
        losses = rows.set_index(["control", "k"])["losses"]
        gap = mean_over(np.subtract(losses["sinks", hidden["k"]], losses["random", hidden["k"]]))
    return {"base": base, "hidden": hidden, "random": random, "gap": gap}


def _row(frame: pd.DataFrame, place: int) -> pd.Series | None:
    return None if frame.empty else frame.iloc[place]
