"""Numbers of a study: the facts of its samples, pooled into small tables."""

# N samples, T steps, L layers, H heads, E thresholds, S positions, G states of queries
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add
from typing import Any

import numpy as np
import pandas as pd

from sinklab.core.sinks import STATES, Rule
from sinklab.lab.analysis import Estimate, Explained, explained_mass, mean_over
from sinklab.lab.analysis.counts import ratio
from sinklab.lab.analysis.facts import (
    COUNTED,
    COUNTS,
    EDGES,
    EPSILONS,
    HEADS,
    MOTION,
    NORMS,
    SUMMED,
    rules_beside,
)
from sinklab.lab.analysis.movement import STRONG, MotionSummary, motion_word, summarised
from sinklab.lab.analysis.rules import threshold
from sinklab.lab.analysis.tokens import enriched, tallied
from sinklab.lab.records.info import SO_FAR
from sinklab.lab.reports.samples import ADDED, FIRST, OTHER, Sample, rule_name


@dataclass(frozen=True)
class EpsilonCurve:
    """Share of tokens that are not sinks, over epsilon (Rulli et al., Fig. 10)."""

    sinks_LE: np.ndarray
    """(layer, E) number of (step, head, key) that are sinks"""
    places_L: np.ndarray
    """(layer,) number of (step, head, key) there are"""
    epsilon = EPSILONS
    """(E,) thresholds, rising"""

    @property
    def filtered(self) -> np.ndarray:
        """(E,) share of (step, layer, head, key) that are no sinks; NaN when nothing was
        counted.
        """
        return np.asarray(1 - ratio(self.sinks_LE.sum(0), self.places_L.sum()))

    @property
    def filtered_by_layer(self) -> np.ndarray:
        """(layer, E) the same in each layer."""
        return np.asarray(1 - ratio(self.sinks_LE, self.places_L[:, None]))

    def at(self, epsilon: float = 3.0) -> float:
        """Filtered share at one of the thresholds."""
        return float(self.filtered[np.isclose(self.epsilon, epsilon)][0])


@dataclass(frozen=True)
class RuleRow:
    """The keys that one rule flags, over all samples."""

    name: str
    per_head: float
    """mean number of sinks per head and step"""
    rate: float
    """share of heads that have a sink anywhere"""
    absorb: float
    """share of all attention that lands on the sinks"""
    agreement: float
    """Jaccard overlap with the first rule, over all keys together; NaN when neither flags any"""
    filtered: float
    """share of keys that are no sinks"""


def _rule_row(name: str, counts: np.ndarray) -> RuleRow:
    of = dict(zip(COUNTS, counts.tolist(), strict=True))
    return RuleRow(
        name,
        float(ratio(of["sinks"], of["heads"])),
        float(ratio(of["with_sink"], of["heads"])),
        float(ratio(of["absorbed"], of["received"])),
        float(ratio(of["both"], of["either"])),
        1 - float(ratio(of["sinks"], of["keys"])),
    )


class Measured:
    """The numbers of a study that need attention. None, or empty, if no sample recorded what a
    number needs.
    """

    def __init__(
        self, found: list[dict[str, Any]], layers: Sequence[int], heads: Sequence[int], rule: Rule
    ) -> None:
        """found: `found_of` some samples."""
        self._found, self._layers, self._heads = found, np.asarray(layers, dtype=int), heads
        self._rule = rule
        self._facts = [one["facts"] for one in found]
        names = Counter(name for facts in self._facts for name in facts)
        self._sums = {name: self._sum(name) for name in names if name in ADD_UP}
        self.curve: EpsilonCurve | None = None
        self.rules: list[RuleRow] = []
        self.motion: MotionSummary | None = None
        """of the main sinks of all heads and samples together"""
        if found:
            self.curve = EpsilonCurve(self._sums["curve"], self._sums["places"])
            texts = (name or rule_name(rule) for name in rules_beside(rule))
            self.rules = [
                _rule_row(name, row) for name, row in zip(texts, self._sums["rules"], strict=True)
            ]
            self.motion = MotionSummary.pooled(one["motion"] for one in found)
        self.explained: Explained | None = self._added("explained")
        """how much of received attention the class and the position of tokens explain"""
        self.text_motion: MotionSummary | None = None
        """motion among text positions alone; None without added sinks"""
        if "text_heads" in names:
            self.text_motion = MotionSummary.pooled(
                summarised(dict(zip(MOTION, one["text_heads"], strict=True))) for one in self._facts
            )
        self.motions = _joined([one["motions"] for one in found])
        """how the main sink of every head of each sample moves"""
        self.strongest_keys: list[dict[str, Any]] = [one["strongest_keys"] for one in found]
        """facts about the strongest keys of the heads of each sample, by name as in `Existence`;
        ``holders``: how often each token is one
        """
        self.events_NS = pd.DataFrame([one["events_S"] for one in found]).to_numpy(float)
        """sinks of a sample by text position; NaN beyond its length"""
        self.norm_ratio_N = np.array([one["norm_ratio"] for one in found], dtype=float)
        """of each sample: sink_norm / rest_norm, mean over layers (`by_layer`)"""
        self.norm_ratio: Estimate = mean_over(self.norm_ratio_N)
        """the same over samples"""
        curves = [EpsilonCurve(one["curve"], one["places"]) for one in self._facts]
        self.filtered_NE = np.array([curve.filtered for curve in curves])
        """share of a sample's tokens that each threshold leaves out"""
        self.filtered_N = [curve.at(3.0) for curve in curves]
        """that of epsilon = 3"""
        thresholds = [one["threshold_T"] for one in found]
        self.threshold = float(np.median(np.concatenate(thresholds))) if found else math.nan
        """received attention that makes a sink, median over steps; NaN for a rule that is no such
        bound
        """
        shared_NLL = np.array([facts["overlap"] for facts in self._facts])
        self.overlap_by_layer_LL = ratio(
            np.nansum(shared_NLL, axis=0), (~np.isnan(shared_NLL)).sum(0)
        )
        """mean overlap of the sinks of two layers"""

    def _sum(self, name: str) -> np.ndarray:
        return np.sum([facts[name] for facts in self._facts if name in facts], axis=0)

    def _added(self, name: str) -> Any:
        parts = [one[name] for one in self._found if name in one]
        return reduce(add, parts) if parts else None

    def of(self, places: Iterable[int]) -> "Measured":
        """The same numbers of some of the samples alone, by their places among all."""
        some = [self._found[place] for place in places]
        return Measured(some, self._layers.tolist(), self._heads, self._rule)

    @cached_property
    def each(self) -> dict[str, pd.DataFrame]:
        """`by_layer` and `by_step` of each sample, and its number."""
        apart = [self.of([place]) for place in range(len(self._found))]
        return {
            "layer": _joined([one.by_layer.assign(sample=n) for n, one in enumerate(apart)]),
            "step": _joined([one.by_step.assign(sample=n) for n, one in enumerate(apart)]),
        }

    @cached_property
    def by_layer(self) -> pd.DataFrame:
        """A row per recorded layer, over all samples, recorded steps and heads; empty without
        attention.

        added_share: mean attention weight on the added sink columns together; NaN without any
        text_share: mean attention weight on the one text position that receives most, per head and
            step
        share_masked, share_committed, share_prompt: mean weight that queries in this state give to
            the key that they attend to most; NaN without such queries, or if states are not known
        absorbed: mean share of the attention that all sinks of a head receive together
        added_norm: mean length of the added sinks' value vectors; NaN without any, or without
            value_norm
        text_norm, mask_norm: mean length over visible text, committed or prompt, and over masks
        sink_norm: mean length over visible text at which a head has a sink, each head counting
            once; NaN without any
        rest_norm: mean length over visible text at which a head has none, committed and prompt
            weighted as among the sinks
        sink_norm_masked, sink_norm_committed, sink_norm_prompt, rest_norm_masked, …: mean length in
            one state; NaN if the tokens of positions are not known
        added_key_norm, sink_key_norm, rest_key_norm, …: mean length of key vectors, from key_norm
        received_masked, received_committed, received_prompt: received attention of a text position
            in this state, mean over heads, as a multiple of an even share
        events: number of (sample, step, head, key) that are sinks
        added_events: number of these that are added sink columns
        sinks: mean number of sinks of a head at a step
        score: mean score of a sink, as a multiple of an even share; NaN without any
        mains: number of (sample, step, head) that exist
        added_mains: number of these with an added sink as the strongest key
        moves: changes of the strongest key from one recorded step to the next, added sinks included
        text_moves: changes among text positions alone
        transitions: pairs of successive recorded steps: the most that either can be
        main_share: mean attention weight on the strongest key
        distinct_sinks: mean number of keys that are a sink of at least one head
        mobility: mean over heads, weighted by the strength of their main sinks; 0 static, 1 moving
        overlap_between_heads, overlap_with_next_layer: mean Jaccard overlap of sinks
        """
        if not self._found:
            return pd.DataFrame()
        sums, layers = self._sums, len(self._layers)
        table: dict[str, Any] = {"layer": self._layers}
        table |= {f"share_{state}": self._mean(f"sum_share_{state}") for state in STATES}
        table |= {name: self._mean(f"sum_{name}") for name in ("added_share", "text_share")}
        table["absorbed"] = self._mean("sum_absorbed")
        table |= {f"added_{norm}": self._mean(f"added_{norm}") for norm in NORMS.values()}
        counts = {name: sums[name].astype(int) for name in COUNTED}
        table |= {name: counts[name] for name in COUNTED[:2]}
        table |= {name: self._mean(f"sum_{name}") for name in ("sinks", "score")}
        table |= {name: counts[name] for name in COUNTED[2:]}
        table |= {f"received_{state}": self._mean(f"received_{state}") for state in STATES}
        for norm in NORMS.values():
            table |= _compared(sums, norm, layers)
        table["main_share"] = self.main_share_LH.mean(1)
        table["distinct_sinks"] = ratio(sums["sink_keys"], sums["steps"])
        mobility, strength = (
            self.motions["mobility"].to_numpy(),
            self.motions["strength"].to_numpy(),
        )
        here_LM = (self.motions["layer"].to_numpy() == self._layers[:, None]) & ~np.isnan(mobility)
        table["mobility"] = ratio(
            here_LM @ (strength * np.nan_to_num(mobility)), here_LM @ strength
        )
        table["overlap_between_heads"] = self._mean("sum_alike")
        table["overlap_with_next_layer"] = np.append(
            np.diagonal(self.overlap_by_layer_LL, 1), np.nan
        )
        return pd.DataFrame(table)

    def _mean(self, name: str) -> Any:
        """Means by layer; NaN if nothing was added up."""
        return ratio(*self._sums[name]) if name in self._sums else math.nan

    @cached_property
    def main_share_LH(self) -> np.ndarray:
        """Mean attention weight on the greatest key."""
        return np.asarray(self._sums["share_LH"] / np.maximum(self._sums["steps"], 1)[:, None])

    @property
    def strongest(self) -> tuple[int, int]:
        """Indices of the layer and head whose strongest key has the largest share."""
        layer, head = np.unravel_index(
            int(np.nan_to_num(self.main_share_LH).argmax()), self.main_share_LH.shape
        )
        return int(layer), int(head)

    @property
    def scores(self) -> tuple[np.ndarray, np.ndarray]:
        """Borders of the bins of received attention, and the share of tokens in each; those beyond
        in the outermost.
        """
        cells = self._sums["cells"]
        counts = cells[1:-1].copy()
        counts[0] += cells[0]
        counts[-1] += cells[-1]
        return EDGES, counts / max(counts.sum(), 1)

    @cached_property
    def by_step(self) -> pd.DataFrame:
        """``overlap``: mean Jaccard overlap of a head's sinks with those of the next recorded step,
        by ``step``.
        """
        parts = [
            pd.DataFrame(facts["sum_stays"][:, 1:].T, facts["step_number"][:-1])
            for facts in self._facts
        ]
        if not parts:
            return pd.DataFrame({"step": [], "overlap": []})
        sums = pd.concat(parts).groupby(level=0).sum()
        return pd.DataFrame({"step": sums.index, "overlap": ratio(*sums.to_numpy().T)})

    @cached_property
    def statistics(self) -> pd.DataFrame:
        """Means of the other statistics of each sample by layer and step, a row each."""
        parts = []
        for facts in self._facts:
            layer_TL, step_TL = np.meshgrid(self._layers, facts["step_number"])
            for name in facts:
                if name.startswith("mean "):
                    rows = {"layer": layer_TL, "step": step_TL, "mean": facts[name]}
                    rows = {column: values.ravel() for column, values in rows.items()}
                    parts.append(pd.DataFrame({"statistic": name[len("mean ") :]} | rows))
        return _joined(parts)

    def enriched(self, labels: str) -> pd.DataFrame | None:
        """Frequency of sinks against occupancy by "text", "class" or "age"; None without tokens."""
        tables = [one[labels] for one in self._found if labels in one]
        return enriched(tables) if tables else None


ADD_UP = {*COUNTED, *(f"sum_{name}" for name in SUMMED), *(f"received_{one}" for one in STATES)}
ADD_UP |= {f"{kind}_{norm}" for kind in ("added", "sink", "rest") for norm in NORMS.values()}
ADD_UP |= {"share_LH", "steps", "sink_keys", "curve", "places", "cells", "rules"}
"""facts of samples whose sum is that of all samples"""


def found_of(sample: Sample, layers: Sequence[int], heads: Sequence[int]) -> dict[str, Any]:
    """The facts of one sample, and what its tokens make of them."""
    facts, added, positions_T = sample.facts, sample.added, sample.positions_T
    norms = _compared(facts, "norm", len(layers))
    found: dict[str, Any] = {
        "facts": facts,
        "norm_ratio": pd.Series(norms["sink_norm"] / norms["rest_norm"]).mean(),
        "threshold_T": np.full(len(positions_T), threshold(sample.rule, positions_T), dtype=float),
        "events_S": pd.Series(facts["events_TK"][:, added:].sum(0)),
        "strongest_keys": _strongest_keys(sample),
    }
    return found | _motion(sample, layers, heads) | _tokens(sample)


def _strongest_keys(sample: Sample) -> dict[str, Any]:
    weight_LH = sample.facts["heads"][HEADS.index("weight")]
    known_LH = weight_LH[~np.isnan(weight_LH)]
    return {
        "strongest": float(known_LH.mean()) if len(known_LH) else np.nan,
        "strong": float((known_LH > STRONG).mean()) if len(known_LH) else np.nan,
        "ruled": float(ratio(*sample.facts["with_sink"])),
        "positions": float(sample.positions_T.mean()),
        "added": float(ratio(*sample.facts["sum_added_share"]).mean()),
        "holders": _holders(sample),
    }


def _holders(sample: Sample) -> Counter[str]:
    """How many heads, over steps, have each token as their strongest; the first one is named by its
    place.
    """
    added, counts_TK = sample.added, sample.facts["mains_TK"]
    labels_TK = np.full(counts_TK.shape, OTHER, dtype=object)
    labels_TK[:, :added] = ADDED
    if sample.has_tokens:
        labels_TK = sample.labels_TK.copy()
    labels_TK[:, added] = FIRST
    cells = np.nonzero(counts_TK)
    held = tallied(labels_TK[cells], counts_TK[cells])["events"]
    return Counter(held.astype(int).to_dict())


def _compared(sums: Mapping[str, np.ndarray], suffix: str, layers: int) -> dict[str, np.ndarray]:
    """Mean norms by layer: of sinks and of the rest in each state, and of visible text, state for
    state.
    """
    nothing = np.zeros((2, len(STATES), layers))
    kinds_2GL = {kind: sums.get(f"{kind}_{suffix}", nothing) for kind in ("sink", "rest")}
    means_GL = {kind: ratio(*sums_2GL) for kind, sums_2GL in kinds_2GL.items()}
    found = {
        f"{kind}_{suffix}_{state}": mean_L
        for kind, mean_GL in means_GL.items()
        for state, mean_L in zip(STATES, mean_GL, strict=True)
    }
    all_2GL = kinds_2GL["sink"] + kinds_2GL["rest"]
    found[f"text_{suffix}"] = ratio(*all_2GL[:, 1:].sum(1))
    found[f"mask_{suffix}"] = ratio(*all_2GL[:, 0])
    # positions of the same state are compared: the rest of each is weighted as its sinks are
    sinks_GL, rest_GL = kinds_2GL["sink"][1, 1:], kinds_2GL["rest"][1, 1:]
    both_GL = np.where(rest_GL > 0, sinks_GL, 0)
    alike_GL = np.where(both_GL.any(0), both_GL, rest_GL)
    for kind, weight_GL in (("sink", both_GL), ("rest", alike_GL)):
        total_L = (np.nan_to_num(means_GL[kind][1:]) * weight_GL).sum(0)
        found[f"{kind}_{suffix}"] = ratio(total_L, weight_GL.sum(0))
    return found


def _motion(sample: Sample, layers: Sequence[int], heads: Sequence[int]) -> dict[str, Any]:
    layer_LH, head_LH = np.meshgrid(layers, heads, indexing="ij")
    columns: dict[str, Any] = {
        "sample": sample.index,
        "layer": layer_LH.ravel(),
        "head": head_LH.ravel(),
    }
    of = dict(zip(HEADS, sample.facts["heads"], strict=True))
    columns |= {name: of[name].ravel() for name in MOTION}
    for name in ("steps", "moves", "transitions", "jumps"):
        columns[name] = columns[name].astype(int)
    mobility, strong = of["stable_mobility"], np.nan_to_num(of["weight"]) > STRONG
    columns["mobility"] = mobility.ravel()
    columns["word"] = [motion_word(value) for value in columns["mobility"]]
    columns |= {"weight": of["weight"].ravel(), "strong": strong.ravel()}
    columns["first"] = of["first"].ravel()
    overall = summarised({name: of[name] for name in MOTION})
    if sample.reading == SO_FAR:
        # a column sum keeps its old rows: a key may stay strongest by construction; a head counts
        # that has a strong key, be it another in every window of queries
        counted = strong | (np.nan_to_num(of["window_weight"]) > STRONG)
        overall = overall.of_heads(mobility, counted)
        columns["so_far_mobility"] = of["mobility"].ravel()
        if "mean last_row_main" in sample.facts:
            columns["last_row_mobility"] = of["last_row_mobility"].ravel()
    return {"motion": overall, "motions": pd.DataFrame(columns)}


def _tokens(sample: Sample) -> dict[str, Any]:
    if not sample.has_tokens:
        return {}
    # a head's share counts alike however long the sequence is
    score_TK = sample.facts["share_TK"] * sample.positions_T[:, None]
    labels = {"text": sample.labels_TK, "class": sample.classes_TK, "age": sample.ages_TK}
    explained = explained_mass(score_TK[:, sample.added :], labels["class"][:, sample.added :])
    return {"explained": explained} | {
        name: tallied(values_TK, sample.facts["events_TK"]) for name, values_TK in labels.items()
    }


def _joined(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
