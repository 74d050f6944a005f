"""Numbers of a study: the facts of its samples, pooled into small tables."""

# N samples, T steps, L layers, H heads, E thresholds, S positions, G states of positions
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from sinklab.core.sinks import STATES, Rule
from sinklab.lab.analysis import Estimate, Explained, cells_of, mean_over
from sinklab.lab.analysis.counts import ratio
from sinklab.lab.analysis.facts import COUNTS, EDGES, EPSILONS, HEADS, MOTION, WIDE, rules_beside
from sinklab.lab.analysis.movement import STRONG, MotionSummary, motion_word, summarised
from sinklab.lab.analysis.rules import threshold
from sinklab.lab.analysis.tokens import enriched, tallied
from sinklab.lab.records.info import SO_FAR
from sinklab.lab.reports.samples import ADDED, FIRST, OTHER, Sample, rule_name

THREE = EPSILONS.tolist().index(3.0)
"""place of the published threshold among those of the curve"""
STATISTIC = "mean "
"""begins the names of facts that are means of other statistics"""


@dataclass(frozen=True, eq=False)
class Measured:
    """The numbers of a study that need attention, over all its samples; tables are empty, and
    others None, if no sample recorded what they need.
    """

    found: list[dict[str, Any]]
    """`found_of` each sample"""
    layers: Sequence[int]
    heads: Sequence[int]
    rule: Rule

    def of(self, places: Iterable[int]) -> "Measured":
        """Numbers of some of the samples alone, by their places among all."""
        return replace(self, found=[self.found[place] for place in places])

    @cached_property
    def each(self) -> pd.DataFrame:
        """`by_layer` of each sample, and its number."""
        places = range(len(self.found))
        return _joined([self.of([place]).by_layer.assign(sample=place) for place in places])

    def _all(self, name: str) -> list[Any]:
        return [one[name] for one in self.found if name in one]

    def _sum(self, name: str) -> Any:
        return np.sum(self._all(name), axis=0)

    def _mean(self, name: str) -> Any:
        """Means by layer; NaN if nothing was added up."""
        parts = self._all(name)
        return ratio(*np.sum(parts, axis=0)) if parts else np.nan

    @cached_property
    def by_layer(self) -> pd.DataFrame:
        """A row per recorded layer, over all samples, recorded steps and heads; empty without
        attention.

        added_share: mean attention weight on the added sink columns together; NaN without any
        text_share: mean attention weight on the one text position that receives most, per head and
            step
        absorbed: mean share of the attention that all sinks of a head receive together
        sinks: mean number of sinks of a head at a step
        events: number of (sample, step, head, key) that are sinks
        added_events: number of these that are added sink columns
        mains: number of (sample, step, head) that exist
        main_share: mean attention weight on the strongest key
        mobility: mean over heads, weighted by the strength of their main sinks; 0 static, 1 moving
        added_norm: mean length of the added sinks' value vectors; NaN without any, or without
            value_norm
        text_norm, mask_norm: mean length over visible text, committed or prompt, and over masks
        sink_norm: mean length over visible text at which a head has a sink, each head counting
            once; NaN without any
        rest_norm: mean length over visible text at which a head has none, committed and prompt
            weighted as among the sinks
        """
        if not self.found:
            return pd.DataFrame()
        table: dict[str, Any] = {"layer": self.layers}
        table |= {name: self._mean(f"sum_{name}") for name in SHARES}
        table |= {name: self._sum(name).astype(int) for name in COUNTED}
        table["main_share"] = self.main_share_LH.mean(1)
        table["added_norm"] = self._mean("added_norm")
        norms = {name: self._sum(name) for name in ("sink_norm", "rest_norm") if self._all(name)}
        table |= _norms(norms, len(self.layers))
        known = self.motions.dropna(subset="mobility").set_index("layer")
        held = known["strength"].groupby("layer").sum()
        moved = (known["strength"] * known["mobility"]).groupby("layer").sum()
        return pd.DataFrame(table).join((moved / held).rename("mobility"), on="layer")

    @property
    def overlap(self) -> float:
        """Mean Jaccard overlap of a head's sinks with those of the next recorded step, mean over
        steps.
        """
        parts = [
            pd.DataFrame(one["sum_stays"][:, 1:].T, one["step_number"][:-1]) for one in self.found
        ]
        sums = pd.concat(parts).groupby(level=0).sum()
        return float(pd.Series(ratio(*sums.to_numpy().T)).mean())

    @cached_property
    def main_share_LH(self) -> np.ndarray:
        """Mean attention weight on the greatest key."""
        return np.asarray(self._sum("share_LH") / np.maximum(self._sum("steps"), 1)[:, None])

    @property
    def strongest(self) -> tuple[int, int]:
        """Indices of the layer and head whose strongest key has the largest share."""
        shares_LH = np.nan_to_num(self.main_share_LH)
        layer, head = np.unravel_index(int(shares_LH.argmax()), shares_LH.shape)
        return int(layer), int(head)

    @cached_property
    def curve(self) -> pd.DataFrame:
        """Share of tokens that are no sinks over the threshold (analysis paper, Fig. 10): epsilon,
        filtered, and of each layer.
        """
        if not self.found:
            return pd.DataFrame()
        sinks_LE, places_L = self._sum("curve"), self._sum("places")
        by_layer = 1 - ratio(sinks_LE, places_L[:, None])
        columns = {"epsilon": EPSILONS, "filtered": 1 - ratio(sinks_LE.sum(0), places_L.sum())}
        columns |= {f"layer_{n}": row for n, row in zip(self.layers, by_layer, strict=True)}
        return pd.DataFrame(columns)

    @cached_property
    def filtered_NE(self) -> np.ndarray:
        """Share of a sample's tokens that are no sinks at each threshold."""
        return np.array([1 - ratio(one["curve"].sum(0), one["places"].sum()) for one in self.found])

    @property
    def filtered_N(self) -> np.ndarray:
        """Shares at epsilon = 3."""
        return self.filtered_NE[:, THREE]

    @cached_property
    def rules(self) -> pd.DataFrame:
        """Sink rules side by side, that of the study first: the sinks of each, and its agreement
        with the first (Jaccard overlap; NaN when neither flags any).
        """
        if not self.found:
            return pd.DataFrame()
        count = dict(zip(COUNTS, self._sum("rules").T, strict=True))
        names = [name or rule_name(self.rule) for name in rules_beside(self.rule)]
        shares = {"sinks_per_head": ("sinks", "heads"), "heads_with_sink": ("with_sink", "heads")}
        shares |= {"filtered": ("sinks", "keys"), "absorbed": ("absorbed", "received")}
        shares |= {"agreement": ("both", "either")}
        table = {name: ratio(count[one], count[of]) for name, (one, of) in shares.items()}
        return pd.DataFrame({"rule": names} | table | {"filtered": 1 - table["filtered"]})

    @property
    def scores(self) -> tuple[np.ndarray, np.ndarray]:
        """Borders of the bins of received attention, and the share of tokens in each; those beyond
        in the outermost.
        """
        cells = self._sum("cells")
        counts = cells[1:-1].copy()
        counts[0] += cells[0]
        counts[-1] += cells[-1]
        return EDGES, counts / max(counts.sum(), 1)

    @property
    def threshold(self) -> float:
        """Received attention that makes a sink, median over steps; NaN for a rule that is no such
        bound.
        """
        return float(np.median(np.concatenate(self._all("threshold_T"))))

    @cached_property
    def motion(self) -> MotionSummary | None:
        """How the main sinks move, all heads and samples together."""
        return MotionSummary.pooled(self._all("motion")) if self.found else None

    @cached_property
    def text_motion(self) -> MotionSummary | None:
        """Motion among text positions alone; None without added sinks."""
        parts = [summarised(dict(zip(MOTION, one, strict=True))) for one in self._all("text_heads")]
        return MotionSummary.pooled(parts) if parts else None

    @cached_property
    def motions(self) -> pd.DataFrame:
        """How the main sink of every head of each sample moves."""
        return _joined(self._all("motions"))

    @cached_property
    def explained(self) -> Explained | None:
        """How much of received attention the class and the position of tokens explain; None without
        tokens.
        """
        parts = self._all("explained")
        return Explained(parts) if parts else None

    @property
    def strongest_keys(self) -> pd.DataFrame:
        """Facts about the strongest keys of the heads, a row a sample, by name as in `exists`;
        ``holders``: how often each token is one.
        """
        return pd.DataFrame(self._all("strongest_keys"))

    @property
    def events_NS(self) -> np.ndarray:
        """Sinks of a sample by text position; NaN beyond its length."""
        return pd.DataFrame(self._all("events_S")).to_numpy(float)

    @property
    def norm_ratio(self) -> Estimate:
        """Over samples: sink_norm / rest_norm, mean over layers (`by_layer`)."""
        return mean_over(np.array(self._all("norm_ratio"), dtype=float))

    @cached_property
    def statistics(self) -> pd.DataFrame:
        """Other recorded statistics, those of plug-ins included: a row per statistic, layer and
        step with the mean over samples and all its other axes, and the ``samples`` that had a
        number there.
        """
        parts = []
        for one in self.found:
            layer_TL, step_TL = np.meshgrid(self.layers, one["step_number"])
            for name in one:
                if name.startswith(STATISTIC):
                    rows = {"layer": layer_TL, "step": step_TL, "mean": one[name]}
                    rows = {column: values.ravel() for column, values in rows.items()}
                    parts.append(pd.DataFrame({"statistic": name[len(STATISTIC) :]} | rows))
        if not parts:
            return pd.DataFrame(columns=["statistic"])
        groups = pd.concat(parts).groupby(["statistic", "layer", "step"])["mean"]
        return groups.agg(mean="mean", samples="count").reset_index()

    @cached_property
    def enriched(self) -> dict[str, pd.DataFrame]:
        """The `enrichment` among the sinks under the rule, over all layers, heads, steps and
        samples, of each "token", "class" of tokens, and "age" of positions (masked, just committed,
        committed, prompt); empty without tokens.
        """
        found = {by: self._all(by) for by in ("token", "class", "age")}
        return {by: enriched(tables) for by, tables in found.items() if tables}


SHARES = ("added_share", "text_share", "absorbed", "sinks")
COUNTED = ("events", "added_events", "mains")


def found_of(sample: Sample, layers: Sequence[int], heads: Sequence[int]) -> dict[str, Any]:
    """The facts of one sample that are pooled, and what its tokens make of them."""
    positions_T = sample.positions_T
    found: dict[str, Any] = {
        name: one for name, one in sample.facts.items() if name not in ("main", *WIDE)
    }
    norms = _norms(found, len(layers))
    found |= {
        "norm_ratio": pd.Series(norms["sink_norm"] / norms["rest_norm"]).mean(),
        "threshold_T": np.full(len(positions_T), threshold(sample.rule, positions_T), dtype=float),
        "events_S": pd.Series(found["events_TK"][:, sample.added :].sum(0)),
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


def _norms(sums: Mapping[str, np.ndarray], layers: int) -> dict[str, np.ndarray]:
    """Mean value norms by layer: of masks, of visible text, and of its sinks and the rest, which
    are compared state for state.
    """
    nothing = np.zeros((2, len(STATES), layers))
    sink_2GL, rest_2GL = (sums.get(name, nothing) for name in ("sink_norm", "rest_norm"))
    all_2GL = sink_2GL + rest_2GL
    found = {"text_norm": ratio(*all_2GL[:, 1:].sum(1)), "mask_norm": ratio(*all_2GL[:, 0])}
    # the rest of each state of visible text is weighted as its sinks are
    sinks_GL, rest_GL = sink_2GL[1, 1:], rest_2GL[1, 1:]
    both_GL = np.where(rest_GL > 0, sinks_GL, 0)
    alike_GL = np.where(both_GL.any(0), both_GL, rest_GL)
    for name, of_2GL, weight_GL in (
        ("sink_norm", sink_2GL, both_GL),
        ("rest_norm", rest_2GL, alike_GL),
    ):
        total_L = (np.nan_to_num(ratio(*of_2GL[:, 1:])) * weight_GL).sum(0)
        found[name] = ratio(total_L, weight_GL.sum(0))
    return found


def _motion(sample: Sample, layers: Sequence[int], heads: Sequence[int]) -> dict[str, Any]:
    layer_LH, head_LH = np.meshgrid(layers, heads, indexing="ij")
    of = dict(zip(HEADS, sample.facts["heads"], strict=True))
    mobility, strong = of["stable_mobility"], np.nan_to_num(of["weight"]) > STRONG
    columns: dict[str, Any] = {"layer": layer_LH, "head": head_LH}
    columns |= {name: of[name] for name in MOTION}
    columns |= {name: of[name].astype(int) for name in WHOLE}
    columns |= {"mobility": mobility, "word": np.vectorize(motion_word)(mobility)}
    columns |= {"weight": of["weight"], "strong": strong, "first": of["first"]}
    overall = summarised({name: of[name] for name in MOTION})
    if sample.reading == SO_FAR:
        # a column sum keeps its old rows: a key may stay strongest by construction; a head counts
        # that has a strong key, be it another in every window of queries
        counted = strong | (np.nan_to_num(of["window_weight"]) > STRONG)
        overall = overall.of_heads(mobility, counted)
        columns["so_far_mobility"] = of["mobility"]
    table = pd.DataFrame({name: values.ravel() for name, values in columns.items()})
    table.insert(0, "sample", sample.index)
    return {"motion": overall, "motions": table}


WHOLE = ("steps", "moves", "transitions")
"""columns of `Measured.motions` that are whole numbers"""


def _tokens(sample: Sample) -> dict[str, Any]:
    # a head's share counts alike however long the sequence is
    score_TK = sample.facts["share_TK"] * sample.positions_T[:, None]
    # of a short autoregressive text too few queries see any key
    if not sample.has_tokens or np.isnan(score_TK[:, sample.added :]).all():
        return {}
    labels = {"token": sample.labels_TK, "class": sample.classes_TK, "age": sample.ages_TK}
    explained = cells_of(score_TK[:, sample.added :], labels["class"][:, sample.added :])
    return {"explained": explained} | {
        name: tallied(values_TK, sample.facts["events_TK"]) for name, values_TK in labels.items()
    }


def _joined(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()
