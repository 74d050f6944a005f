"""Cost or gain of arms over samples, in one table.

A comparison of edits, a curve, a benchmark and a set of trained models ask the same: rows of (arm,
sample, value) go in, and a line per arm or pair of arms comes out, with an interval, a p-value that
is corrected for all lines of the call, what could have been seen, and one word.
"""

# S samples, T texts, G seeds
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import scipy  # its modules load where they are first used

from sinklab.core.errors import one_of
from sinklab.lab.analysis.estimates import (
    FEWEST,
    LEVEL,
    POWER,
    Estimate,
    Z,
    caution,
    corrected,
    discoveries,
    mean_over,
    mean_p,
)

INCONCLUSIVE = "inconclusive"


class Found(NamedTuple):
    """Mean of some differences, with its interval; NaN where there is none."""

    mean: float
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan
    detectable: float = math.nan


def effects(
    rows: pd.DataFrame,
    value: str = "value",
    *,
    arm: str | Sequence[str] = "arm",
    unit: str | Sequence[str] = "sample",
    base: Any = None,
    pairs: Iterable[tuple[Any, Any]] = (),
    apart: Iterable[tuple[Any, Any]] = (),
    design: str = "paired",
    correction: str = "holm",
    doses: Sequence[str] = (),
    threshold: float = 0.0,
    words: tuple[str, str] = ("above", "below"),
) -> pd.DataFrame:
    """A line per arm less `base`, and per pair.

    Columns: those of the arm; less, the other arm; mean, of the differences of samples; low and
    high, the ends of its 95 % interval; p, of the mean against the threshold, corrected for all
    lines; detectable, the difference from the threshold that such samples show 4 times
    in 5; n, samples that count; missing, those that lack an arm; caution, what the samples say
    against the interval; the doses; verdict, one of the words, or "inconclusive". With fewer than 8
    samples there is no interval.

    Args:
        rows: a line per arm and sample. Several of one arm and sample count once, by their mean; a
            sample with a line that is NaN is missing.
        value: column that is compared.
        arm: the column, or columns, that tell arms apart.
        unit: the column of the sample; for "crossed" those of text and seed.
        base: arm that all others are compared with. Without it and without pairs the arms
            themselves are compared with the threshold.
        pairs: (arm, other).
        apart: (arm, other) that have samples of their own, compared by Welch's t.
        design: "paired"; "binary", for right (1) and wrong (0) answers; or "crossed", for texts
            that several trained models read.
        correction: "holm" (1979), so that at most 5 % of such calls hold a false word; or
            "discoveries", so that 5 % of the words are false (Benjamini and Hochberg 1995).
        doses: further columns, of which the mean over all samples of an arm stands in its lines.
        threshold: that the mean is compared with.
        words: for a mean above the threshold, and below.

    Raises:
        ValueError: for an unknown design, column or arm, values that are infinite, and answers
            that are neither 0 nor 1.
    """
    one_of("design of effects", design, DESIGNS)
    one_of("correction of effects", correction, CORRECTIONS)
    arms, units = ([one] if isinstance(one, str) else [*one] for one in (arm, unit))
    if len(units) != 1 + (design == "crossed"):
        raise ValueError(f"the unit is one column, of crossed effects text and seed, got {unit!r}")
    wide = _by_sample(rows, value, arms, units)
    beside = rows.groupby(arms, sort=False)[[*doses]].mean().to_dict("index")
    lines = []
    alone = [*apart]
    for name, other in _asked(wide, base, [*pairs, *alone]):
        own = wide[name]
        if other is not None and (name, other) not in alone:
            own = own - wide[other]
        if design == "crossed":
            own = own.unstack()
        known = own.dropna()
        if (name, other) in alone:
            found = _unpaired(known.to_numpy(float), wide[other].dropna().to_numpy(float))
        else:
            found = DESIGNS[design](known.to_numpy(float), threshold)
        keys = name if len(arms) > 1 else (name,)
        line = dict(zip(arms, keys, strict=True)) | {"less": other} | found._asdict()
        line |= {"n": len(known), "missing": len(own) - len(known)}
        line["caution"] = ""
        if len(known):
            line["caution"] = caution(known.to_numpy().reshape(len(known), -1).mean(1), units[0])
        lines.append(line | beside.get(name, {}))
    table = pd.DataFrame(lines)
    table["p"] = CORRECTIONS[correction](table["p"])
    is_sure = table["p"] <= 1 - LEVEL
    told = [is_sure & (table["low"] > threshold), is_sure & (table["high"] < threshold)]
    return table.assign(verdict=np.select(told, words, INCONCLUSIVE))


def _by_sample(rows: pd.DataFrame, value: str, arms: list[str], units: list[str]) -> pd.DataFrame:
    """The value as a table of samples × arms, both in the order of the rows; NaN is missing."""
    absent = [name for name in (*arms, *units, value) if name not in rows]
    if absent or rows.empty:
        raise ValueError(
            f"effects are of rows with the columns {', '.join([*arms, *units, value])}, got "
            f"{len(rows)} with {', '.join(map(str, rows))}; name yours in arm=, unit= and value="
        )
    if np.isinf(rows[value].astype(float)).any():
        raise ValueError(f"{value} of effects is infinite in some rows; leave them out, as NaN")
    grouped = rows.assign(**{value: rows[value].astype(float)}).groupby(
        [*units, *arms], sort=False
    )[value]
    found = grouped.mean().where(grouped.count() == grouped.size())
    order = rows[arms].drop_duplicates()
    names = [*order.itertuples(index=False, name=None)]
    wide = found.unstack(arms)
    if len(arms) == 1:
        return wide[[name for (name,) in names]]
    return wide[names]


def _asked(wide: pd.DataFrame, base: Any, pairs: list[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Arms, each with the one it is compared with, or None. Raises ValueError for unknown arms."""
    asked = pairs
    if base is not None:
        asked = [(name, base) for name in wide if name != base] + pairs
    elif not pairs:
        asked = [(name, None) for name in wide]
    for name in {one for pair in asked for one in pair} - {None}:
        if name not in wide:
            raise ValueError(
                f"arms of these effects are {', '.join(map(repr, wide))}, got {name!r}"
            )
    return asked


def _paired(apart_S: np.ndarray, threshold: float) -> Found:
    over = mean_over(apart_S)
    return Found(over.value, *over.interval, mean_p(apart_S, threshold), over.reach)


def _unpaired(one_S: np.ndarray, other_S: np.ndarray) -> Found:
    """Samples of two arms that are not the same ones: Welch's t."""
    mean, fewer = mean_over(one_S).value - mean_over(other_S).value, min(len(one_S), len(other_S))
    if fewer < FEWEST:
        return Found(mean)
    test = scipy.stats.ttest_ind(one_S, other_S, equal_var=False)
    low, high = map(float, test.confidence_interval(LEVEL))
    return Found(mean, low, high, float(test.pvalue), Estimate(mean, low, high, fewer).reach)


def _binary(apart_S: np.ndarray, threshold: float) -> Found:
    """Differences of shares of right answers (Agresti and Min 2005, adjusted Wald): half an answer
    more in each of the four cells, so that no change at all still has a width.
    """
    if not {*apart_S} <= {-1.0, 0.0, 1.0}:
        raise ValueError(
            "binary effects are of right (1) and wrong (0) answers, got "
            f"{sorted({*apart_S} - {-1.0, 0.0, 1.0})[0]}; choose design='paired'"
        )
    if len(apart_S) < FEWEST:
        return Found(float(apart_S.mean()) if len(apart_S) else math.nan)
    gained, lost = int((apart_S > 0).sum()), int((apart_S < 0).sum())
    total = len(apart_S) + 2
    middle = (gained - lost) / total
    error = math.sqrt(gained + lost + 1 - (gained - lost) ** 2 / total) / total
    low, high = max(middle - Z * error, -1.0), min(middle + Z * error, 1.0)
    p = 2 * float(scipy.stats.norm.sf(abs(middle - threshold) / error))
    seen = error * (Z + float(scipy.stats.norm.ppf(POWER)))
    return Found(float(apart_S.mean()), low, high, p, seen)


def _crossed(apart_TG: np.ndarray, threshold: float) -> Found:
    """The mean over texts and seeds, both drawn at random (two-way layout without replication).

    The variance of the mean is (MS_texts + MS_seeds - MS_rest) / (T G), at least that of one factor
    alone, with the degrees of freedom of Satterthwaite (1946). With a single seed texts alone are
    the unit.
    """
    texts, seeds = apart_TG.shape
    if not texts:
        return Found(math.nan)
    mean = float(apart_TG.mean())
    if texts < FEWEST:
        return Found(mean)
    by_text_T, by_seed_G = apart_TG.mean(1), apart_TG.mean(0)
    of_texts = seeds * float(by_text_T.var(ddof=1))
    square, freedom = of_texts, float(texts - 1)
    if seeds > 1:
        of_seeds = texts * float(by_seed_G.var(ddof=1))
        rest_TG = apart_TG - by_text_T[:, None] - by_seed_G + mean
        degrees = np.array([texts - 1, seeds - 1, (texts - 1) * (seeds - 1)])
        parts = np.array([of_texts, of_seeds, float((rest_TG**2).sum()) / degrees[2]])
        square = max(of_texts + of_seeds - parts[2], of_texts, of_seeds)
        freedom = max(1.0, min(square**2 / max((parts**2 / degrees).sum(), 1e-300), texts - 1))
    error = math.sqrt(square / (texts * seeds))
    p = float(mean == threshold)
    if error:
        p = 2 * float(scipy.stats.t.sf(abs(mean - threshold) / error, freedom))
    reach, often = (error * float(scipy.stats.t.ppf(q, freedom)) for q in ((1 + LEVEL) / 2, POWER))
    return Found(mean, mean - reach, mean + reach, p, reach + often)


DESIGNS: dict[str, Callable[[np.ndarray, float], Found]] = {
    "paired": _paired,
    "binary": _binary,
    "crossed": _crossed,
}
CORRECTIONS: dict[str, Callable[[Any], np.ndarray]] = {
    "holm": corrected,
    "discoveries": discoveries,
}
