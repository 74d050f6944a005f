"""What one pass over the samples of a study leaves behind: sums and small tables, no arrays of the run."""

# T steps, L layers, H heads, K keys (added sinks first), R text keys, S positions, G states of queries
from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pandas as pd

from sinklab.analysis import overlap, thresholds
from sinklab.analysis.movement import Motion, MotionSummary, motion
from sinklab.analysis.tokens import Enrichment, Explained, enrichment, explained_mass
from sinklab.reports.samples import Sample, rule_name
from sinklab.sinks.normalize import main_sink


@dataclass(frozen=True)
class LayerFacts:
    """What one layer did, over all samples, recorded steps and heads."""

    layer: int
    """number of the layer"""
    added_share: float
    """mean attention weight on the added sink columns together; NaN without any"""
    text_share: float
    """mean attention weight on the one text position that receives most, per head and step"""
    absorbed: float
    """mean share of the attention that all sinks of a head take together"""
    added_norm: float
    """mean length of the added sinks' value vectors; NaN without any, or where value_norm was not recorded"""
    text_norm: float
    """the same over all text positions"""
    sink_norm: float
    """the same over text positions where a head has a sink, each head counting once; NaN without any"""
    rest_norm: float
    """the same over text positions where a head has none"""
    added_key_norm: float
    """mean length of the added sinks' key vectors; NaN without any, or where key_norm was not recorded"""
    sink_key_norm: float
    """the same over text positions where a head has a sink"""
    rest_key_norm: float
    """the same over text positions where a head has none"""
    events: int
    """number of (sample, step, head, key) that are sinks"""
    added_events: int
    """those of them that are added sink columns"""
    sinks: float
    """mean number of sinks of a head at a step"""
    score: float
    """mean score of a sink, as a multiple of an even share; NaN without any"""
    mains: int
    """number of (sample, step, head) that exist"""
    added_mains: int
    """those of them whose greatest key is an added sink"""
    moves: int
    """changes of the greatest key from one recorded step to the next, added sinks included"""
    text_moves: int
    """the same among text positions alone"""
    transitions: int
    """pairs of successive recorded steps: the most that either can be"""
    main_share_H: np.ndarray
    """mean attention weight on the greatest key, per recorded head"""


class Means:
    """Running weighted means; numbers that are NaN do not count."""

    def __init__(self) -> None:
        self._total: defaultdict[str, float] = defaultdict(float)
        self._weight: defaultdict[str, float] = defaultdict(float)

    def add(self, name: str, values: np.ndarray, weights: np.ndarray | None = None) -> None:
        """Add every number of ``values``, once or ``weights`` times."""
        here = ~np.isnan(values)
        counts = here.astype(np.float64) if weights is None else np.where(here, weights, 0).astype(np.float64)
        self._total[name] += float((np.where(here, values, 0) * counts).sum())
        self._weight[name] += float(counts.sum())

    @property
    def names(self) -> list[str]:
        """What was added so far."""
        return list(self._weight)

    def mean(self, name: str) -> float:
        """The mean so far; NaN when nothing was added."""
        weight = self._weight.get(name, 0.0)
        return self._total[name] / weight if weight else float("nan")


class LayerCount:
    """Adds samples up to one LayerFacts."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.means = Means()
        self.counts: defaultdict[str, int] = defaultdict(int)
        self._share_H: np.ndarray | int = 0
        self._steps = 0

    def add(self, sample: Sample, place: int) -> None:
        """Count one sample; ``place`` is where the layer stands among the recorded ones."""
        added, sinks_THK, share_THK = sample.added, sample.sinks_TLHK[:, place], sample.share_TLHK[:, place]
        main_TH, exists_TK = sample.main_TLH[:, place], sample.exists_TK
        greatest_TH = np.fmax.reduce(share_THK, axis=-1)
        if added:
            self.means.add("added_share", share_THK[..., :added].sum(-1))
        self.means.add("text_share", np.fmax.reduce(share_THK[..., added:], axis=-1) if added else greatest_TH)
        received_THK = np.where(exists_TK[:, None], sample.received_TLHK[:, place], 0)
        taken_TH = np.where(sinks_THK, received_THK, 0).sum(-1)
        all_TH = received_THK.sum(-1)
        here_TH = main_TH >= 0
        self.means.add("absorbed", (taken_TH / np.where(all_TH > 0, all_TH, np.nan))[here_TH])
        self.means.add("sinks", np.where(here_TH, sinks_THK.sum(-1), np.nan))
        self.means.add("score", (share_THK * sample.positions_T[:, None, None])[sinks_THK])
        self._count(sinks_THK, main_TH, share_THK, added)
        self._norms(sample, place, sinks_THK.sum(1), here_TH.sum(1))
        self._share_H = self._share_H + np.nansum(greatest_TH, axis=0)
        self._steps += int(here_TH.any(1).sum())

    def _count(self, sinks_THK: np.ndarray, main_TH: np.ndarray, share_THK: np.ndarray, added: int) -> None:
        text_TH = main_sink(share_THK[..., added:]) if added else main_TH
        pairs = (main_TH[1:] >= 0) & (main_TH[:-1] >= 0)
        text_pairs = (text_TH[1:] >= 0) & (text_TH[:-1] >= 0)
        for name, count in {
            "events": sinks_THK.sum(),
            "added_events": sinks_THK[..., :added].sum(),
            "mains": (main_TH >= 0).sum(),
            "added_mains": ((main_TH >= 0) & (main_TH < added)).sum(),
            "moves": (pairs & (main_TH[1:] != main_TH[:-1])).sum(),
            "text_moves": (text_pairs & (text_TH[1:] != text_TH[:-1])).sum(),
            "transitions": pairs.sum(),
        }.items():
            self.counts[name] += int(count)

    def _norms(self, sample: Sample, place: int, events_TK: np.ndarray, heads_T: np.ndarray) -> None:
        for suffix, norm_TLK in (("norm", sample.value_norm_TLK), ("key_norm", sample.key_norm_TLK)):
            if norm_TLK is None:
                continue
            norm_TK = np.where(sample.exists_TK, norm_TLK[:, place], np.nan)
            text_TR, events_TR = norm_TK[:, sample.added :], events_TK[:, sample.added :]
            self.means.add(f"added_{suffix}", norm_TK[:, : sample.added])
            self.means.add(f"text_{suffix}", text_TR)
            self.means.add(f"sink_{suffix}", text_TR, events_TR)
            self.means.add(f"rest_{suffix}", text_TR, heads_T[:, None] - events_TR)

    def facts(self) -> LayerFacts:
        """The sums as means."""
        kinds = {"float": self.means.mean, "int": self.counts.__getitem__}
        own: dict[str, Any] = {
            field.name: kinds[field.type](field.name) for field in fields(LayerFacts) if field.type in kinds
        }
        share_H = np.asarray(self._share_H / max(self._steps, 1), dtype=np.float64)
        return LayerFacts(**own | {"layer": self.layer, "main_share_H": share_H})


MOST_NORMS = 10_000
MOST_BOUNDS = 6_000


def drawn_norms(sample: Sample, samples: int) -> pd.DataFrame:
    """Tokens with the length of their value vectors: at most 10,000 of a kind over all ``samples``.

    Columns: place (of the layer), kind (0 other text, 1 text with a sink of some head, 2 added sinks), score (mean over
    heads, multiples of an even share), norm. Empty when value norms were not recorded.
    """
    norm_TLK = sample.value_norm_TLK
    if norm_TLK is None:
        return pd.DataFrame()
    exists_TLK = np.broadcast_to(sample.exists_TK[:, None], norm_TLK.shape) & ~np.isnan(norm_TLK)
    sinks_TLK = sample.sinks_TLHK.any(2)
    text_TLK = np.broadcast_to(np.arange(norm_TLK.shape[-1]) >= sample.added, norm_TLK.shape)
    frames = []
    for kind, among in enumerate((text_TLK & ~sinks_TLK, text_TLK & sinks_TLK, ~text_TLK)):
        cells = _some(np.flatnonzero(among & exists_TLK), MOST_NORMS // samples + 1, sample.index)
        step, place, key = np.unravel_index(cells, norm_TLK.shape)
        score = sample.share_TLHK[step, place, :, key].mean(-1) * sample.positions_T[step]
        columns = {"place": place, "kind": kind, "score": score, "norm": norm_TLK[step, place, key]}
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def drawn_bounds(sample: Sample, samples: int) -> pd.DataFrame:
    """Mean output norm and no-op bound per step, state, layer and head: at most 6,000 over all ``samples``.

    Columns: state, output, bound. Empty when either was not recorded.
    """
    output, bound = sample.output_norm_TGLH, sample.noop_bound_TGLH
    if output is None or bound is None:
        return pd.DataFrame()
    cells = _some(np.flatnonzero(~np.isnan(output) & ~np.isnan(bound)), MOST_BOUNDS // samples + 1, sample.index)
    state = np.unravel_index(cells, output.shape)[1]
    return pd.DataFrame({"state": state, "output": output.ravel()[cells], "bound": bound.ravel()[cells]})


def _some(cells: np.ndarray, most: int, seed: int) -> np.ndarray:
    if len(cells) <= most:
        return cells
    return np.sort(np.random.default_rng(seed).choice(cells, most, replace=False))


MOTION_FIELDS = (
    "steps", "strength", "mobility", "moves", "transitions", "jumps", "mean_jump", "births", "deaths", "lasting",
    "mean_lifetime", "expected_lifetime", "drift", "drift_low", "drift_high", "drift_relative",
)  # fmt: skip


class Measured:
    """The numbers of a study that need its arrays. None, or empty, where no sample recorded what a number needs."""

    def __init__(self, samples: Sequence[Sample], layers: Sequence[int], heads: Sequence[int]) -> None:
        self._layers, self._heads = np.asarray(layers, dtype=int), np.asarray(heads, dtype=int)
        counts = [LayerCount(layer) for layer in layers]
        self._labels: dict[str, list[np.ndarray]] = {"text": [], "class": [], "age": []}
        self._events: list[np.ndarray] = []
        self._means = Means()
        self._paths: list[MotionSummary] = []
        self._text_paths: list[MotionSummary] = []
        self.curve: thresholds.EpsilonCurve | None = None
        self.histogram: thresholds.ScoreHistogram | None = None
        self.layer_sinks: overlap.LayerSinks | None = None
        self.rules: list[thresholds.RuleRow] = []
        self.explained: Explained | None = None
        self.split: overlap.SplitSinks | None = None
        self.blocks: list[overlap.BlockEffects] = []
        self.events_by_position = np.zeros(0)
        self._thresholds: list[np.ndarray] = []
        frames: dict[str, list[pd.DataFrame]] = {"scatter": [], "bounds": [], "motions": []}
        for sample in samples:
            for place, count in enumerate(counts):
                count.add(sample, place)
            self._scores(sample)
            self._overlap(sample)
            self._tokens(sample)
            frames["motions"].append(self._motion(sample))
            frames["scatter"].append(drawn_norms(sample, len(samples)))
            frames["bounds"].append(drawn_bounds(sample, len(samples)))
        self.facts = [count.facts() for count in counts]
        self.scatter, self.bounds, self.motions = (
            pd.concat(frames[name], ignore_index=True) if frames[name] else pd.DataFrame()
            for name in ("scatter", "bounds", "motions")
        )

    def _scores(self, sample: Sample) -> None:
        arrays = _scaled(sample)
        self.curve = _added(self.curve, thresholds.epsilon_curve(*arrays))
        self.histogram = _added(self.histogram, thresholds.score_histogram(*arrays, log=True, bins=80))
        self.layer_sinks = _added(self.layer_sinks, overlap.sinks_per_layer(sample.sinks_TLHK, *arrays))
        self._thresholds.append(sample.threshold_T)
        first = next(iter(thresholds.DEFAULT_RULES.values()))
        own = {} if sample.rule == first else {rule_name(sample.rule): sample.rule}
        rows = thresholds.compare_rules(*arrays, rules={**own, **thresholds.DEFAULT_RULES})
        self.rules = [one + other for one, other in zip(self.rules, rows, strict=True)] if self.rules else rows
        events_S = sample.events_TK[:, sample.added :].sum(0).astype(float)
        total = np.zeros(max(len(self.events_by_position), len(events_S)))
        total[: len(self.events_by_position)] += self.events_by_position
        total[: len(events_S)] += events_S
        self.events_by_position = total

    def _motion(self, sample: Sample) -> pd.DataFrame:
        received, visible, positions = _scaled(sample)
        found = motion(received, visible, positions, added=sample.added, rule=sample.rule)
        self._paths.append(found.overall)
        if sample.added:
            text = motion(received[..., sample.added :], visible[..., sample.added :], positions, rule=sample.rule)
            self._text_paths.append(text.overall)
        self._borders(sample, found)
        shape = (len(self._layers), len(self._heads))
        columns: dict[str, Any] = {
            "sample": sample.index,
            "layer": np.broadcast_to(self._layers[:, None], shape).ravel(),
            "head": np.broadcast_to(self._heads, shape).ravel(),
        }
        return pd.DataFrame(columns | {name: getattr(found, name).ravel() for name in MOTION_FIELDS})

    def _borders(self, sample: Sample, found: Motion) -> None:
        if (sample.blocks_T >= 0).all():
            effects = [
                overlap.block_effects(found.main[:, [place]], sample.blocks_T, found.counted[:, [place]])
                for place in range(len(self._layers))
            ]
            before = self.blocks or [overlap.BlockEffects(0, 0, 0, 0)] * len(effects)
            self.blocks = [one + other for one, other in zip(before, effects, strict=True)]
        if sample.main_by_state_TGLH is not None:
            # the least weight that makes a key a sink of all queries together
            floor_T = np.nan_to_num(sample.threshold_T / sample.positions_T)
            states = (sample.main_by_state_TGLH, sample.share_by_state_TGLH)
            self.split = _added(self.split, overlap.split_sinks(*states, floor_T[:, None, None, None]))

    def _overlap(self, sample: Sample) -> None:
        for step, shared_LH in zip(sample.step_numbers_T[:-1], overlap.overlap_by_step(sample.sinks_TLHK), strict=True):
            self._means.add(f"step {step}", shared_LH)
        for place, shared_T in enumerate(overlap.overlap_by_head(sample.sinks_TLHK).T):
            self._means.add(f"heads {place}", shared_T)
        for (one, other), shared in np.ndenumerate(overlap.overlap_by_layer(sample.sinks_TLHK)):
            self._means.add(f"layers {one} {other}", np.array(shared))

    def _tokens(self, sample: Sample) -> None:
        if not sample.has_tokens:
            return
        self._events.append(sample.events_TK.ravel())
        for name, labels_TK in (("text", sample.labels_TK), ("class", sample.classes_TK), ("age", sample.ages_TK)):
            self._labels[name].append(labels_TK.ravel())
        # a head's share counts alike however long the sequence is
        score_TK = sample.mean_share_TK * sample.positions_T[:, None]
        text_TS, classes_TS = score_TK[:, sample.added :], sample.classes_TK[:, sample.added :]
        self.explained = _added(self.explained, explained_mass(text_TS, classes_TS))

    @property
    def threshold(self) -> float:
        """The received attention that makes a sink, median over steps; NaN for a rule that is no such bound."""
        return float(np.median(np.concatenate(self._thresholds))) if self._thresholds else float("nan")

    @property
    def motion(self) -> MotionSummary | None:
        """Motion of the main sinks of all heads and samples; None without attention."""
        return MotionSummary.pooled(self._paths) if self._paths else None

    @property
    def text_motion(self) -> MotionSummary | None:
        """The same among text positions alone; None without added sinks."""
        return MotionSummary.pooled(self._text_paths) if self._text_paths else None

    @property
    def overlap_by_step(self) -> dict[int, float]:
        """Step number -> mean Jaccard overlap of a head's sinks with those of the next recorded step."""
        names = sorted((int(name[5:]), name) for name in self._means.names if name.startswith("step "))
        return {step: self._means.mean(name) for step, name in names}

    @property
    def overlap_by_head_L(self) -> np.ndarray:
        """Mean Jaccard overlap of the sinks of two heads of a layer."""
        return np.array([self._means.mean(f"heads {place}") for place in range(len(self._layers))])

    @property
    def overlap_by_layer_LL(self) -> np.ndarray:
        """Mean overlap of the sinks of two layers."""
        count = range(len(self._layers))
        return np.array([[self._means.mean(f"layers {one} {other}") for other in count] for one in count])

    def enriched(self, labels: str) -> Enrichment | None:
        """Frequency of sinks against occupancy by "text", "class" or "age"; None without tokens."""
        if not self._events:
            return None
        return enrichment(np.concatenate(self._labels[labels]), np.concatenate(self._events))


def _scaled(sample: Sample) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """received, visible and positions of all layers and heads, as the functions of ``sinks`` take them."""
    return sample.received_TLHK, sample.visible_TK[:, None, None], sample.positions_T[:, None, None]


def _added(total: Any, more: Any) -> Any:
    return more if total is None else total + more
