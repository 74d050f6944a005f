"""What one pass over the samples of a study leaves behind: sums and small tables, no arrays of the run."""

# T steps, L layers, H heads, K keys (added sinks first), S positions, G states of queries
from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from sinklab.sinks import (
    BlockEffects,
    Enrichment,
    EpsilonCurve,
    Explained,
    LayerSinks,
    Motion,
    MotionSummary,
    RuleRow,
    ScoreHistogram,
    SplitSinks,
    block_effects,
    compare_rules,
    enrichment,
    epsilon_curve,
    explained_mass,
    motion,
    overlap_by_head,
    overlap_by_layer,
    overlap_by_step,
    score_histogram,
    sinks_per_layer,
    split_sinks,
)

from .dots import drawn_bounds, drawn_norms
from .facts import LayerCount, Means
from .recorded import RULE
from .samples import Sample

MOTION_FIELDS = (
    "steps", "strength", "mobility", "moves", "transitions", "jumps", "mean_jump", "births", "deaths", "lasting",
    "mean_lifetime", "expected_lifetime", "drift", "drift_low", "drift_high", "drift_relative",
)  # fmt: skip
_Sum = TypeVar("_Sum", EpsilonCurve, ScoreHistogram, LayerSinks, BlockEffects, SplitSinks, Explained)


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
        self.curve: EpsilonCurve | None = None
        self.histogram: ScoreHistogram | None = None
        self.layer_sinks: LayerSinks | None = None
        self.rules: list[RuleRow] = []
        self.explained: Explained | None = None
        self.split: SplitSinks | None = None
        self.blocks: list[BlockEffects] = []
        self.events_by_position = np.zeros(0)
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
        self.curve = _added(self.curve, epsilon_curve(*arrays))
        self.histogram = _added(self.histogram, score_histogram(*arrays, log=True, bins=80))
        self.layer_sinks = _added(self.layer_sinks, sinks_per_layer(sample.sinks_TLHK, *arrays))
        rows = compare_rules(*arrays)
        self.rules = [one + other for one, other in zip(self.rules, rows, strict=True)] if self.rules else rows
        events_S = sample.events_TK[:, sample.added :].sum(0).astype(float)
        total = np.zeros(max(len(self.events_by_position), len(events_S)))
        total[: len(self.events_by_position)] += self.events_by_position
        total[: len(events_S)] += events_S
        self.events_by_position = total

    def _motion(self, sample: Sample) -> pd.DataFrame:
        received, visible, positions = _scaled(sample)
        found = motion(received, visible, positions, added=sample.added)
        self._paths.append(found.overall)
        if sample.added:
            text = motion(received[..., sample.added :], visible[..., sample.added :], positions)
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
                block_effects(found.main[:, [place]], sample.blocks_T, found.counted[:, [place]])
                for place in range(len(self._layers))
            ]
            before = self.blocks or [BlockEffects(0, 0, 0, 0)] * len(effects)
            self.blocks = [one + other for one, other in zip(before, effects, strict=True)]
        if sample.main_by_state_TGLH is not None:
            # the least weight that makes a key a sink of all queries together
            floor_T = RULE.threshold(sample.positions_T) / sample.positions_T
            floor = floor_T[:, None, None, None]
            split = split_sinks(sample.main_by_state_TGLH, sample.share_by_state_TGLH, floor)
            self.split = _added(self.split, split)

    def _overlap(self, sample: Sample) -> None:
        for step, overlap_LH in zip(sample.step_numbers_T[:-1], overlap_by_step(sample.sinks_TLHK), strict=True):
            self._means.add(f"step {step}", overlap_LH)
        for place, overlap_T in enumerate(overlap_by_head(sample.sinks_TLHK).T):
            self._means.add(f"heads {place}", overlap_T)
        for (one, other), overlap in np.ndenumerate(overlap_by_layer(sample.sinks_TLHK)):
            self._means.add(f"layers {one} {other}", np.array(overlap))

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


def _added(total: _Sum | None, more: _Sum) -> _Sum:
    return more if total is None else total + more
