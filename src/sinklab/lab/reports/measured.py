"""Sums and small tables from one pass over the samples of a study, no arrays of the run."""

# T steps, L layers, H heads, K keys (added sinks first), R text keys, S positions, G states of
# queries
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import fields
from functools import cached_property, partial, reduce
from typing import Any

import numpy as np
import pandas as pd

from sinklab.core.sinks.normalize import only
from sinklab.core.sinks.states import STATES
from sinklab.lab.analysis import Estimate, Explained, explained_mass, mean_over, overlap, thresholds
from sinklab.lab.analysis.counts import ratio, spans
from sinklab.lab.analysis.movement import Motion, MotionCounter, MotionSummary, motion_word
from sinklab.lab.analysis.tokens import Enrichment, enriched, tallied
from sinklab.lab.records.info import SO_FAR
from sinklab.lab.reports.answered import seen_of
from sinklab.lab.reports.recorded import means_of
from sinklab.lab.reports.samples import Sample, rule_name
from sinklab.lab.reports.seen import TextMotion, begun

SUMMED = (
    *(f"share_{state}" for state in STATES),
    "added_share",
    "text_share",
    "absorbed",
    "added_norm",
    "added_key_norm",
    "events",
    "added_events",
    "sinks",
    "score",
    "mains",
    "added_mains",
    "moves",
    "text_moves",
    "transitions",
    *(f"received_{state}" for state in STATES),
)
"""columns of `Measured.by_layer` that `Measured` adds up, described there"""
NORMS = ("norm", "key_norm")
MOTION_FIELDS = [
    one.name for one in fields(Motion) if one.name not in ("main", "counted", "overall")
]
MOST_BOUNDS = 6_000


class Means:
    """Running weighted means; numbers that are NaN do not count."""

    def __init__(self) -> None:
        self.sums: defaultdict[Any, np.ndarray] = defaultdict(partial(np.zeros, 2))
        """name -> total and weight so far"""

    def add_each(self, names: Iterable[Any], values: np.ndarray, weights: Any = 1.0) -> None:
        """Add the numbers of each place on the first axis to a name of their own."""
        sums = _weighted(values, weights).reshape(2, len(values), -1).sum(2)
        for name, total in zip(names, sums.T, strict=True):
            self.sums[name] += total

    def add_in(
        self,
        places_TGR: np.ndarray,
        names: Sequence[Any],
        values_TLR: np.ndarray,
        weights: Any = 1.0,
    ) -> None:
        """Add the values of every layer at the ``places`` of a name (1 there): all layers of one
        group after another.
        """
        shape = values_TLR.shape
        for steps in spans(len(places_TGR), 4 * math.prod(shape[1:])):
            both = _weighted(values_TLR[steps], np.broadcast_to(weights, shape)[steps])
            sums = np.matmul(places_TGR[steps], both.swapaxes(-1, -2)).sum(1)
            for name, total in zip(names, sums.reshape(2, -1).T, strict=True):
                self.sums[name] += total

    def include(self, other: "Means") -> None:
        """Add the sums of another."""
        for name, sums in other.sums.items():
            self.sums[name] += sums

    def mean(self, name: Any) -> float:
        """The mean so far; NaN when nothing was added."""
        return float(ratio(*self.sums[name])) if name in self.sums else float("nan")


def _weighted(values: Any, weights: Any) -> np.ndarray:
    """(2, ...) the numbers times their weights, and the weights; both 0 if the number is NaN."""
    there, both = ~np.isnan(values), np.empty((2, *np.shape(values)))
    both[1] = only(there, np.broadcast_to(weights, there.shape))
    np.multiply(only(there, values), both[1], out=both[0])
    return both


class Measured:
    """The numbers of a study that need its arrays. None, or empty, if no sample recorded the arrays
    that a number needs.
    """

    def __init__(
        self,
        sample: Callable[[int], Sample],
        recorded: Sequence[int],
        kept: Collection[int],
        layers: Sequence[int],
        heads: Sequence[int],
    ) -> None:
        """sample: reads the sample at a place, one of ``recorded``. Those at the places ``kept``
        stay in memory, with what was read of them, and are measured here; the others in processes.
        """
        self._layers, self._heads = np.asarray(layers, dtype=int), np.asarray(heads, dtype=int)

        def measure(place: int) -> dict[str, Any]:
            found = self._found(sample(place), len(recorded))
            alone, number = self._of_one(found), recorded.index(place)
            by = {"layer": alone.by_layer, "step": alone.by_step}
            return found | {axis: frame.assign(sample=number) for axis, frame in by.items()}

        others = [place for place in recorded if place not in kept]
        workers, elsewhere = begun(measure, others)
        try:
            by_place = {place: measure(place) for place in recorded if place in kept}
            by_place |= zip(others, elsewhere, strict=True)
        finally:
            workers.shutdown(cancel_futures=True)
        found = [by_place[place] for place in recorded]
        self.each: dict[str, pd.DataFrame] = {
            axis: _joined([one[axis] for one in found]) for axis in ("layer", "step")
        }
        """`by_layer` and `by_step` of each sample"""
        self._add_up(found)

    def _of_one(self, found: dict[str, Any]) -> "Measured":
        """Numbers of one sample on its own."""
        alone = object.__new__(Measured)
        alone._layers, alone._heads = self._layers, self._heads
        alone._add_up([found])
        return alone

    def _add_up(self, found: list[dict[str, Any]]) -> None:
        """Everything of some samples together."""
        self._means, self._counts = Means(), Counter[tuple[str, int]]()
        self._share_LH, self._steps_L = (
            np.zeros((len(self._layers), len(self._heads))),
            np.zeros(len(self._layers)),
        )
        parts: defaultdict[str, list[Any]] = defaultdict(list)
        for one in found:
            self._means.include(one["means"])
            self._counts.update(one["counts"])
            self._share_LH += one["share_LH"]
            self._steps_L += one["steps_L"]
            for name, part in one.items():
                parts[name].append(part)
        self.curve: thresholds.EpsilonCurve | None = _total(parts["curve"])
        self.histogram: thresholds.ScoreHistogram | None = _total(parts["histogram"])
        self.layer_sinks: overlap.LayerSinks | None = _total(parts["layer_sinks"])
        self.explained: Explained | None = _total(parts["explained"])
        """how much of received attention the class and the position of tokens explain"""
        self.split: overlap.SplitSinks | None = _total(parts["split"])
        self.rules: list[thresholds.RuleRow] = [
            _total(rows) for rows in zip(*parts["rules"], strict=True)
        ]
        self.blocks: list[overlap.BlockEffects] = [
            _total(effects) for effects in zip(*parts["blocks"], strict=True)
        ]
        """moves at block borders and inside, of each layer"""
        self.motion: MotionSummary | None = MotionSummary.pooled(parts["motion"]) if found else None
        """of the main sinks of all heads and samples together"""
        texts = parts["text_motion"]
        self.text_motion: MotionSummary | None = MotionSummary.pooled(texts) if texts else None
        """the same among text positions alone; None without added sinks"""
        self.motions, self.bounds = map(_joined, (parts["motions"], parts["bounds"]))
        self.events_NS = pd.DataFrame(parts["events_S"]).to_numpy(float)
        """sinks of a sample by text position; NaN beyond its length"""
        self.strongest_keys: list[dict[str, Any]] = parts["strongest_keys"]
        """facts about the strongest keys of the heads of each sample, by
        `sinklab.lab.reports.answered`
        """
        self.statistics: list[tuple[np.ndarray, dict[str, np.ndarray]]] = parts["statistics"]
        """of each sample the numbers of its steps, and `means_of` other statistics"""
        self.norm_ratio_N = np.array(parts["norm_ratio"], dtype=float)
        """of each sample: sink_norm / rest_norm, mean over layers (`by_layer`)"""
        self.norm_ratio: Estimate = mean_over(self.norm_ratio_N)
        """the same over samples"""
        self.filtered_NE = np.array([curve.filtered for curve in parts["curve"]])
        """share of a sample's tokens that each threshold leaves out"""
        self.filtered_N = [curve.at(3.0) for curve in parts["curve"]]
        """that of epsilon = 3"""
        self.threshold = (
            float(np.median(np.concatenate(parts["threshold_T"]))) if found else float("nan")
        )
        """received attention that makes a sink, median over steps; NaN for a rule that is no such
        bound
        """
        shared_NLL = np.array(parts["shared_LL"])
        self.overlap_by_layer_LL = ratio(
            np.nansum(shared_NLL, axis=0), (~np.isnan(shared_NLL)).sum(0)
        )
        """mean overlap of the sinks of two layers"""
        self._labels = {name: parts[name] for name in ("text", "class", "age")}

    def _found(self, sample: Sample, samples: int) -> dict[str, Any]:
        """Everything of one of so many samples, from one pass over its attention."""
        shape, means = sample.shape, Means()
        first = next(iter(thresholds.DEFAULT_RULES.values()))
        own = {} if sample.rule == first else {rule_name(sample.rule): sample.rule}
        curve, histogram = (
            thresholds.EpsilonCurve.empty(shape[1]),
            thresholds.ScoreHistogram.empty(bins=80, log=True),
        )
        rules = thresholds.RuleCounter({**own, **thresholds.DEFAULT_RULES})
        moved = MotionCounter(shape, sample.rule, sample.added)
        text = TextMotion(shape, sample.added, sample.rule, sample.positions_T)
        seen = sample.read(curve, histogram, rules, moved, *([text] if sample.added else []))
        here_TLH = seen.main_TLH >= 0
        found: dict[str, Any] = {
            "means": means,
            "counts": self._layers_of(sample, means),
            "share_LH": np.nansum(seen.share_TLH, axis=0, dtype=float),
            "steps_L": here_TLH.any(2).sum(0),
            "curve": curve,
            "histogram": histogram,
            "rules": rules.rows,
            "threshold_T": sample.threshold_T,
            "events_S": pd.Series(sample.events_TK[:, sample.added :].sum(0)),
            "shared_LL": overlap.overlap_of_counts(seen.events_TLK),
            "layer_sinks": overlap.LayerSinks(
                here_TLH.sum((0, 2)),
                here_TLH.any(2).sum(0),
                seen.sinks_TLH.sum((0, 2)),
                (seen.events_TLK > 0).sum((0, 2)),
                seen.taken_TLH.sum((0, 2), dtype=float),
            ),
            "bounds": drawn_bounds(sample, samples),
            "strongest_keys": seen_of(sample),
            "statistics": (sample.step_numbers_T, means_of(sample)),
        }
        self._states(sample, means)
        norms = pd.DataFrame([_compared(means, "norm", layer) for layer in self._layers.tolist()])
        found["norm_ratio"] = (norms["sink_norm"] / norms["rest_norm"]).mean()
        if sample.added:
            found["text_motion"] = text.counter.motion.overall
        return found | self._motion(sample, moved.motion) | _tokens(sample)

    def _layers_of(self, sample: Sample, means: Means) -> Counter[tuple[str, int]]:
        """Add the numbers of every layer in one sample; counts are returned."""
        seen, added, layers = sample.seen, sample.added, self._layers.tolist()
        here_TLH = seen.main_TLH >= 0
        sinks_TL = seen.sinks_TLH.sum(2)
        values = {
            "added_share": seen.added_share_TLH,
            "text_share": seen.text_share_TLH,
            "absorbed": ratio(seen.taken_TLH, seen.total_TLH),
            "sinks": np.where(here_TLH, seen.sinks_TLH, np.nan),
            "overlap_between_heads": seen.alike_TL,
        }
        if sample.share_by_state_TGLH is not None:
            for number, state in enumerate(STATES):
                values[f"share_{state}"] = sample.share_by_state_TGLH[:, number]
        for name, of_steps in values.items():
            means.add_each([(name, layer) for layer in layers], of_steps.swapaxes(0, 1))
        scores_LT = ratio(seen.score_TL, sinks_TL).T
        means.add_each([("score", layer) for layer in layers], scores_LT, sinks_TL.T)
        steps = sample.step_numbers_T[:-1].tolist()
        means.add_each([("step", step) for step in steps], seen.stays_TLH[1:])
        pairs_L, moves_L = _moves(seen.main_TLH)
        counts = {
            "events": sinks_TL.sum(0),
            "added_events": seen.events_TLK[..., :added].sum((0, 2)),
            "mains": here_TLH.sum((0, 2)),
            "added_mains": (here_TLH & (seen.main_TLH < added)).sum((0, 2)),
            "moves": moves_L,
            "text_moves": _moves(seen.text_main_TLH)[1],
            "transitions": pairs_L,
        }
        return Counter(
            {
                (name, layer): count
                for name, counts_L in counts.items()
                for layer, count in zip(layers, counts_L.tolist(), strict=True)
            }
        )

    def _states(self, sample: Sample, means: Means) -> None:
        """Add the norms of every layer in one sample, and the attention received there, of
        positions in each state apart.

        Masks differ from text in everything: a mean over both is that of a mixture.
        """
        seen, added, layers = sample.seen, sample.added, self._layers.tolist()
        states = range(len(STATES)) if sample.has_tokens else range(0)
        received_TLR = seen.share_TLK[..., added:] * sample.positions_T[:, None, None]
        places_GTR = np.array([sample.states_TS == state for state in states], dtype=float)
        places_TGR = places_GTR.reshape(len(states), *received_TLR.shape[::2]).swapaxes(0, 1)
        means.add_in(
            places_TGR,
            [(f"received_{STATES[g]}", layer) for g in states for layer in layers],
            received_TLR,
        )
        events_TLR = seen.events_TLK[..., added:].astype(float)
        others_TLR = (seen.main_TLH >= 0).sum(2)[..., None] - events_TLR
        for suffix, recorded_TLK in zip(
            NORMS, (sample.value_norm_TLK, sample.key_norm_TLK), strict=True
        ):
            if recorded_TLK is None:
                continue
            norm_TLK = np.where(sample.exists_TK[:, None], recorded_TLK, np.nan)
            names = [(f"added_{suffix}", layer) for layer in layers]
            means.add_each(names, norm_TLK[..., :added].swapaxes(0, 1))
            for kind, weights_TLR in (("sink", events_TLR), ("rest", others_TLR)):
                kinds = [(kind, suffix, layer, state) for state in states for layer in layers]
                means.add_in(places_TGR, kinds, norm_TLK[..., added:], weights_TLR)

    def _motion(self, sample: Sample, found: Motion) -> dict[str, Any]:
        layer_LH, head_LH = np.meshgrid(self._layers, self._heads, indexing="ij")
        columns: dict[str, Any] = {
            "sample": sample.index,
            "layer": layer_LH.ravel(),
            "head": head_LH.ravel(),
        }
        columns |= {name: getattr(found, name).ravel() for name in MOTION_FIELDS}
        columns["word"] = [motion_word(value) for value in columns["mobility"]]
        overall, strongest = found.overall, sample.strongest
        columns |= {"weight": strongest.weight_LH.ravel(), "strong": strongest.strong_LH.ravel()}
        columns["first"] = strongest.first_LH.ravel()
        if sample.reading == SO_FAR:
            # a column sum keeps its old rows: a key may stay strongest by construction
            overall = overall.of_heads(strongest.mobility_LH, strongest.counted_LH)
            columns |= {
                "so_far_mobility": columns["mobility"],
                "mobility": strongest.mobility_LH.ravel(),
            }
            columns["word"] = [motion_word(value) for value in columns["mobility"]]
            if sample.last_row_mobility_LH is not None:
                columns["last_row_mobility"] = sample.last_row_mobility_LH.ravel()
        parts: dict[str, Any] = {"motion": overall, "motions": pd.DataFrame(columns)}
        if (sample.blocks_T >= 0).all():
            parts["blocks"] = [
                overlap.block_effects(
                    found.main[:, [place]], sample.blocks_T, found.counted[:, [place]]
                )
                for place in range(len(self._layers))
            ]
        if sample.main_by_state_TGLH is not None:
            # the least weight that makes a key a sink of all queries together
            floor_T111 = np.nan_to_num(sample.threshold_T / sample.positions_T)[:, None, None, None]
            parts["split"] = overlap.split_sinks(
                sample.main_by_state_TGLH, sample.share_by_state_TGLH, floor_T111
            )
        return parts

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
        split_sinks: share of heads with different main sinks of masked and unmasked queries
        border_moves, inside_moves: moves of the main sink per pair of steps at block borders and
            inside blocks
        """
        rows = []
        for layer in self._layers.tolist():
            rows.append({"layer": layer} | {name: self._of(name, layer) for name in SUMMED})
            for suffix in NORMS:
                rows[-1] |= _compared(self._means, suffix, layer)
        if not rows:
            return pd.DataFrame()
        table: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
        table["main_share"] = self.main_share_LH.mean(1)
        if self.layer_sinks is not None:
            table["distinct_sinks"] = self.layer_sinks.distinct
        mobility, strength = (
            self.motions["mobility"].to_numpy(),
            self.motions["strength"].to_numpy(),
        )
        here_LM = (self.motions["layer"].to_numpy() == self._layers[:, None]) & ~np.isnan(mobility)
        table["mobility"] = ratio(
            here_LM @ (strength * np.nan_to_num(mobility)), here_LM @ strength
        )
        table["overlap_between_heads"] = [
            self._of("overlap_between_heads", layer) for layer in self._layers.tolist()
        ]
        table["overlap_with_next_layer"] = np.append(
            np.diagonal(self.overlap_by_layer_LL, 1), np.nan
        )
        if self.split is not None:
            table["split_sinks"] = self.split.share_by_layer
        if self.blocks:
            table["border_moves"] = [effect.border_rate for effect in self.blocks]
            table["inside_moves"] = [effect.inside_rate for effect in self.blocks]
        return pd.DataFrame(table)

    def _of(self, name: str, layer: int) -> float:
        key = name, layer
        return self._counts[key] if key in self._counts else self._means.mean(key)

    @cached_property
    def main_share_LH(self) -> np.ndarray:
        """Mean attention weight on the greatest key."""
        return (self._share_LH / np.maximum(self._steps_L, 1)[:, None]).astype(np.float64)

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
        assert self.histogram is not None
        counts = self.histogram.counts.astype(float)
        counts[0] += self.histogram.below
        counts[-1] += self.histogram.above
        return self.histogram.edges, counts / max(counts.sum(), 1)

    @cached_property
    def by_step(self) -> pd.DataFrame:
        """``overlap``: mean Jaccard overlap of a head's sinks with those of the next recorded step,
        by ``step``.
        """
        steps = sorted(key[1] for key in self._means.sums if key[0] == "step")
        return pd.DataFrame(
            {"step": steps, "overlap": [self._means.mean(("step", step)) for step in steps]}
        )

    def enriched(self, labels: str) -> Enrichment | None:
        """Frequency of sinks against occupancy by "text", "class" or "age"; None without tokens."""
        return enriched(self._labels[labels]) if self._labels[labels] else None


def _compared(means: Means, suffix: str, layer: int) -> dict[str, float]:
    """Mean norms in a layer: of sinks and of the rest in each state, and of visible text, state for
    state.
    """
    sums = np.array(
        [
            [means.sums[kind, suffix, layer, state] for state in range(3)]
            for kind in ("sink", "rest")
        ]
    )
    mean_2G, weight_2G = ratio(sums[..., 0], sums[..., 1]), sums[..., 1]
    found = {
        f"{kind}_{suffix}_{state}": mean_2G[place, column]
        for place, kind in enumerate(("sink", "rest"))
        for column, state in enumerate(STATES)
    }
    sum_G, count_G = sums[..., 0].sum(0), weight_2G.sum(0)
    found[f"text_{suffix}"] = ratio(sum_G[1:].sum(), count_G[1:].sum())
    found[f"mask_{suffix}"] = ratio(sum_G[0], count_G[0])
    # positions of the same state are compared: the rest of each is weighted as its sinks are
    both_G = np.where(weight_2G[1, 1:] > 0, weight_2G[0, 1:], 0)
    alike_G = both_G if both_G.any() else weight_2G[1, 1:]
    for place, kind, weight_G in ((0, "sink", both_G), (1, "rest", alike_G)):
        found[f"{kind}_{suffix}"] = ratio(
            (np.nan_to_num(mean_2G[place, 1:]) * weight_G).sum(), weight_G.sum()
        )
    return {name: float(value) for name, value in found.items()}


def _tokens(sample: Sample) -> dict[str, Any]:
    if not sample.has_tokens:
        return {}
    # a head's share counts alike however long the sequence is
    score_TK = sample.mean_share_TK * sample.positions_T[:, None]
    labels = {"text": sample.labels_TK, "class": sample.classes_TK, "age": sample.ages_TK}
    explained = explained_mass(score_TK[:, sample.added :], labels["class"][:, sample.added :])
    return {"explained": explained} | {
        name: tallied(values_TK, sample.events_TK) for name, values_TK in labels.items()
    }


def _moves(main_TLH: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(layer,) pairs of successive steps of a head that have a main sink, and at how many of them
    it is another key.
    """
    pairs = (main_TLH[1:] >= 0) & (main_TLH[:-1] >= 0)
    moved = pairs & (main_TLH[1:] != main_TLH[:-1])
    return pairs.sum((0, 2)), moved.sum((0, 2))


def _total(parts: Sequence[Any]) -> Any:
    return reduce(operator.add, parts) if parts else None


def _joined(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def drawn_bounds(sample: Sample, samples: int) -> pd.DataFrame:
    """Mean output norm and no-op bound per step, state, layer and head: at most 6,000 over all
    ``samples``.

    Columns: state, output, bound. Empty when either was not recorded.
    """
    output, bound = sample.output_norm_TGLH, sample.noop_bound_TGLH
    if output is None or bound is None:
        return pd.DataFrame()
    cells, most = np.flatnonzero(~np.isnan(output) & ~np.isnan(bound)), MOST_BOUNDS // samples + 1
    if len(cells) > most:
        cells = np.sort(np.random.default_rng(sample.index).choice(cells, most, replace=False))
    state = np.unravel_index(cells, output.shape)[1]
    return pd.DataFrame(
        {"state": state, "output": output.ravel()[cells], "bound": bound.ravel()[cells]}
    )
