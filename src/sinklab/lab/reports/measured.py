"""Sums and small tables from one pass over the samples of a study, no arrays of the run."""

# T steps, L layers, H heads, K keys (added sinks first), R text keys, S positions, G states of
# queries
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property, reduce
from typing import Any

import numpy as np
import pandas as pd

from sinklab.core.sinks import STATES, where_exists
from sinklab.lab.analysis import Estimate, Explained, explained_mass, mean_over, overlap, thresholds
from sinklab.lab.analysis.counts import ratio, spans
from sinklab.lab.analysis.movement import Motion, MotionCounter, MotionSummary, motion_word
from sinklab.lab.analysis.tokens import enriched, tallied
from sinklab.lab.files import counted
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


def _weighted(values: Any, weights: Any) -> np.ndarray:
    """(2, ...) the numbers times their weights, and the weights; both 0 if the number is NaN."""
    there, both = ~np.isnan(values), np.empty((2, *np.shape(values)))
    both[1] = where_exists(there, np.broadcast_to(weights, there.shape))
    np.multiply(where_exists(there, values), both[1], out=both[0])
    return both


def _summed(values: np.ndarray, weights: Any = 1.0) -> np.ndarray:
    """(2, N) sums of weighted numbers and of their weights, for each place on the first axis."""
    # without a step (the pairs of a single one) the last axis could not be guessed
    return _weighted(values, weights).reshape(2, len(values), math.prod(values.shape[1:])).sum(2)


def _in_states(places_TGR: np.ndarray, values_TLR: np.ndarray, weights: Any = 1.0) -> Any:
    """(2, G, L) the same over the places of each state (1 there)."""
    shape, sums = values_TLR.shape, 0.0
    for steps in spans(len(places_TGR), 4 * math.prod(shape[1:])):
        both = _weighted(values_TLR[steps], np.broadcast_to(weights, shape)[steps])
        sums = sums + np.matmul(places_TGR[steps], both.swapaxes(-1, -2)).sum(1)
    return sums


class Measured:
    """The numbers of a study that need its arrays. None, or empty, if no sample recorded the arrays
    that a number needs.
    """

    def __init__(self, found: list[dict[str, Any]], layers: Sequence[int]) -> None:
        """found: results of `_found` of some samples."""
        self._found, self._layers = found, np.asarray(layers, dtype=int)
        self._sums: Any = Counter()
        self._stays: Any = Counter()
        parts: defaultdict[str, list[Any]] = defaultdict(list)
        for one in found:
            self._sums.update(one["sums"])
            self._stays.update(one["stays"])
            for name, part in one.items():
                parts[name].append(part)
        self.curve: thresholds.EpsilonCurve | None = _total(parts["curve"])
        self.histogram: thresholds.ScoreHistogram | None = _total(parts["histogram"])
        self.explained: Explained | None = _total(parts["explained"])
        """how much of received attention the class and the position of tokens explain"""
        self.rules: list[thresholds.RuleRow] = [
            _total(rows) for rows in zip(*parts["rules"], strict=True)
        ]
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
        self.statistics = _joined(parts["statistics"])
        """`means_of` other statistics of each sample"""
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

    def of(self, places: Iterable[int]) -> "Measured":
        """The same numbers of some of the samples alone, by their places among all."""
        return Measured([self._found[place] for place in places], self._layers.tolist())

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
        if not self._sums:
            return pd.DataFrame()
        table: dict[str, Any] = {"layer": self._layers}
        table |= {name: self._of(name) for name in SUMMED}
        for suffix in NORMS:
            table |= _compared(self._sums, suffix, len(self._layers))
        table["main_share"] = self.main_share_LH.mean(1)
        table["distinct_sinks"] = ratio(self._sums["sink_keys_L"], self._sums["steps_L"])
        mobility, strength = (
            self.motions["mobility"].to_numpy(),
            self.motions["strength"].to_numpy(),
        )
        here_LM = (self.motions["layer"].to_numpy() == self._layers[:, None]) & ~np.isnan(mobility)
        table["mobility"] = ratio(
            here_LM @ (strength * np.nan_to_num(mobility)), here_LM @ strength
        )
        table["overlap_between_heads"] = self._of("overlap_between_heads")
        table["overlap_with_next_layer"] = np.append(
            np.diagonal(self.overlap_by_layer_LL, 1), np.nan
        )
        return pd.DataFrame(table)

    def _of(self, name: str) -> Any:
        """Counts, or means, by layer; NaN if nothing was added up."""
        if name not in self._sums:
            return math.nan
        sums = self._sums[name]
        return sums if sums.ndim == 1 else ratio(*sums)

    @cached_property
    def main_share_LH(self) -> np.ndarray:
        """Mean attention weight on the greatest key."""
        return self._sums["share_LH"] / np.maximum(self._sums["steps_L"], 1)[:, None]

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
        steps = sorted(self._stays)
        sums_T2 = np.array([self._stays[step] for step in steps]).reshape(-1, 2)
        return pd.DataFrame({"step": steps, "overlap": ratio(*sums_T2.T)})

    def enriched(self, labels: str) -> pd.DataFrame | None:
        """Frequency of sinks against occupancy by "text", "class" or "age"; None without tokens."""
        return enriched(self._labels[labels]) if self._labels[labels] else None


def measured(
    sample: Callable[[int], Sample],
    recorded: Sequence[int],
    kept: Collection[int],
    layers: Sequence[int],
    heads: Sequence[int],
) -> Measured:
    """The numbers of the samples at the places ``recorded``, which ``sample`` reads. Those at the
    places ``kept`` stay in memory, with what was read of them, and are measured here; the others in
    processes.
    """

    def measure(place: int) -> dict[str, Any]:
        return _found(sample(place), layers, heads, len(recorded))

    others = [place for place in recorded if place not in kept]
    workers, elsewhere = begun(measure, others)
    try:
        by_place = {place: measure(place) for place in recorded if place in kept}
        by_place |= zip(others, counted("reading samples", elsewhere, len(others)), strict=True)
    finally:
        workers.shutdown(cancel_futures=True)
    return Measured([by_place[place] for place in recorded], layers)


def _found(
    sample: Sample, layers: Sequence[int], heads: Sequence[int], samples: int
) -> dict[str, Any]:
    """Everything of one of so many samples, from one pass over its attention.

    ``sums`` has, by name, counts (L,), or sums of numbers and of their weights (2, …, L).
    """
    shape = sample.shape
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
    sums = _by_layer(sample) | _by_state(sample)
    norms = _compared(sums, "norm", shape[1])
    found: dict[str, Any] = {
        "sums": sums,
        "stays": dict(
            zip(sample.step_numbers_T[:-1].tolist(), _summed(seen.stays_TLH[1:]).T, strict=True)
        ),
        "norm_ratio": pd.Series(norms["sink_norm"] / norms["rest_norm"]).mean(),
        "curve": curve,
        "histogram": histogram,
        "rules": rules.rows,
        "threshold_T": sample.threshold_T,
        "events_S": pd.Series(sample.events_TK[:, sample.added :].sum(0)),
        "shared_LL": overlap.overlap_of_counts(seen.events_TLK),
        "bounds": drawn_bounds(sample, samples),
        "strongest_keys": seen_of(sample),
        "statistics": means_of(sample, layers),
    }
    if sample.added:
        found["text_motion"] = text.counter.motion.overall
    return found | _motion(sample, moved.motion, layers, heads) | _tokens(sample)


def _by_layer(sample: Sample) -> dict[Any, np.ndarray]:
    """Sums over heads, and over steps, of every layer in one sample."""
    seen, added = sample.seen, sample.added
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
    sums = {name: _summed(of_steps.swapaxes(0, 1)) for name, of_steps in values.items()}
    pairs_L, moves_L = _moves(seen.main_TLH)
    return sums | {
        "score": _summed(ratio(seen.score_TL, sinks_TL).T, sinks_TL.T),
        "events": sinks_TL.sum(0),
        "added_events": seen.events_TLK[..., :added].sum((0, 2), dtype=int),
        "mains": here_TLH.sum((0, 2)),
        "added_mains": (here_TLH & (seen.main_TLH < added)).sum((0, 2)),
        "moves": moves_L,
        "text_moves": _moves(seen.text_main_TLH)[1],
        "transitions": pairs_L,
        "share_LH": np.nansum(seen.share_TLH, axis=0, dtype=float),
        "steps_L": here_TLH.any(2).sum(0),
        "sink_keys_L": (seen.events_TLK > 0).sum((0, 2)),
    }


def _by_state(sample: Sample) -> dict[Any, Any]:
    """Sums of the norms of every layer in one sample, and of the attention received there, of
    positions in each state apart.

    Masks differ from text in everything: a mean over both is that of a mixture.
    """
    seen, added, sums = sample.seen, sample.added, dict[Any, Any]()
    if sample.has_tokens:
        states_GTR = [sample.states_TS == state for state in range(len(STATES))]
        places_TGR = np.array(states_GTR, dtype=float).swapaxes(0, 1)
        received_TLR = seen.share_TLK[..., added:] * sample.positions_T[:, None, None]
        received_G2L = np.moveaxis(_in_states(places_TGR, received_TLR), 1, 0)
        sums |= {f"received_{state}": one for state, one in zip(STATES, received_G2L, strict=True)}
    events_TLR = seen.events_TLK[..., added:].astype(float)
    others_TLR = (seen.main_TLH >= 0).sum(2)[..., None] - events_TLR
    for suffix, recorded_TLK in zip(
        NORMS, (sample.value_norm_TLK, sample.key_norm_TLK), strict=True
    ):
        if recorded_TLK is None:
            continue
        norm_TLK = np.where(sample.exists_TK[:, None], recorded_TLK, np.nan)
        sums[f"added_{suffix}"] = _summed(norm_TLK[..., :added].swapaxes(0, 1))
        if sample.has_tokens:
            for kind, weights_TLR in (("sink", events_TLR), ("rest", others_TLR)):
                sums[kind, suffix] = _in_states(places_TGR, norm_TLK[..., added:], weights_TLR)
    return sums


def _compared(sums: Mapping[Any, np.ndarray], suffix: str, layers: int) -> dict[str, np.ndarray]:
    """Mean norms by layer: of sinks and of the rest in each state, and of visible text, state for
    state.
    """
    nothing = np.zeros((2, len(STATES), layers))
    kinds_2GL = {kind: sums.get((kind, suffix), nothing) for kind in ("sink", "rest")}
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


def _motion(
    sample: Sample, found: Motion, layers: Sequence[int], heads: Sequence[int]
) -> dict[str, Any]:
    layer_LH, head_LH = np.meshgrid(layers, heads, indexing="ij")
    columns: dict[str, Any] = {
        "sample": sample.index,
        "layer": layer_LH.ravel(),
        "head": head_LH.ravel(),
    }
    columns |= {name: vars(found)[name].ravel() for name in MOTION_FIELDS}
    overall, strongest = found.overall, sample.strongest
    columns["mobility"] = strongest.mobility_LH.ravel()
    columns["word"] = [motion_word(value) for value in columns["mobility"]]
    columns |= {"weight": strongest.weight_LH.ravel(), "strong": strongest.strong_LH.ravel()}
    columns["first"] = strongest.first_LH.ravel()
    if sample.reading == SO_FAR:
        # a column sum keeps its old rows: a key may stay strongest by construction
        overall = overall.of_heads(strongest.mobility_LH, strongest.counted_LH)
        columns["so_far_mobility"] = found.mobility.ravel()
        if sample.last_row_mobility_LH is not None:
            columns["last_row_mobility"] = sample.last_row_mobility_LH.ravel()
    return {"motion": overall, "motions": pd.DataFrame(columns)}


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
