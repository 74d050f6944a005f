"""A study run folder, read and measured: the numbers that figures and sentences are made of."""

# N samples, T steps, H heads, K keys (added sinks first, then canvas positions), C added sink columns, P positions
from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pandas as pd

from sinklab.records import Run
from sinklab.sinks import Enrichment, Excess, enrichment, find_sinks, trajectories

MASK = "[MASK]"
ADDED = "added sink"
RULE = Excess(3.0)

_COLUMNS = {
    "tokens": {"sample", "step", "position", "text", "state"},
    "generations": {"sample", "prompt", "completion"},
    "heldout": {"k", "control", "loss", "stderr"},
}
_AXES = {
    "received": ("sample", "step", "layer", "head", "key"),
    "visible": ("sample", "step", "key"),
    "value_norm": ("sample", "step", "layer", "key"),
}


@dataclass(frozen=True)
class LayerFacts:
    """What one layer did, over all samples, steps and heads."""

    added_share: float
    """mean attention weight on the added sink columns together; NaN without any"""
    text_share: float
    """mean attention weight on the one text position that receives most, per head and step"""
    added_norm: float
    """mean length of the added sinks' value vectors; NaN without any"""
    text_norm: float
    """the same over all text positions"""
    sink_norm: float
    """the same over text positions where a head has a sink, each head counting once; NaN without any"""
    rest_norm: float
    """the same over text positions where a head has none"""
    events_NTK: np.ndarray
    """number of heads that have a sink at the key"""
    main_NTH: np.ndarray
    """key that receives most, -1 where the step does not exist"""
    moves: int
    """changes of the greatest key from one step to the next, added sinks included"""
    text_moves: int
    """the same among text positions alone"""
    transitions: int
    """pairs of successive steps: the most that either can be"""


@dataclass(frozen=True)
class Study:
    """One run of kind "study"; what the run did not get to write is None."""

    run: Run
    label: str

    @property
    def sink_count(self) -> int:
        """Number of added sink columns in front of the keys."""
        return int(self.run.info.model.get("sink_count", 0))

    @cached_property
    def attention(self) -> dict[str, np.ndarray] | None:
        """received, visible, value_norm as stored (float16, NaN where a sample has no such step or key).

        Under a cache fewer queries run than there are positions: those steps are scaled up to all positions, so that an
        even share is the same number at every step.
        """
        if "attention" not in self.run.array_files:
            return None
        dims = self.run.dims("attention")
        if wrong := [key for key, axes in _AXES.items() if dims.get(key) != axes]:
            raise ValueError(
                f"{self.run.path / 'attention.safetensors'} is not that of a study: {wrong[0]!r} has axes "
                f"{dims.get(wrong[0])}, expected {_AXES[wrong[0]]}."
            )
        return _as_if_all_ran(self.run.arrays("attention"), self.sink_count)

    @cached_property
    def layers(self) -> list[LayerFacts]:
        """One entry per layer; empty when no attention was recorded."""
        arrays = self.attention
        if arrays is None or not arrays["received"].size:
            return []
        visible_NTK = arrays["visible"].astype(np.float32)
        return [
            _layer_facts(
                arrays["received"][:, :, layer].astype(np.float32),
                visible_NTK,
                arrays["value_norm"][:, :, layer].astype(np.float32),
                self.sink_count,
            )
            for layer in range(arrays["received"].shape[2])
        ]

    def table(self, name: str) -> pd.DataFrame | None:
        """A table of the run, None when it was not written or is empty. ValueError when columns are missing."""
        if name not in self.run.tables:
            return None
        frame = self.run.table(name)
        if missing := _COLUMNS[name] - set(frame.columns):
            raise ValueError(
                f"{self.run.path / f'{name}.parquet'} is not that of a study: it lacks {', '.join(sorted(missing))}."
            )
        return None if frame.empty else frame

    @cached_property
    def tokens(self) -> pd.DataFrame | None:
        """What each forward saw: sample, step, position, text, state (prompt, masked, committed)."""
        return self.table("tokens")

    @cached_property
    def generations(self) -> pd.DataFrame | None:
        """sample, prompt, completion, and what else the run noted."""
        return self.table("generations")

    @cached_property
    def heldout(self) -> pd.DataFrame | None:
        """Loss over hidden sinks: k, control, loss, stderr; ``delta`` against k = 0 is added where it is missing."""
        frame = self.table("heldout")
        if frame is None or "delta" in frame:
            return frame
        base = frame[frame["k"] == 0]
        loss, error = (base["loss"].iloc[0], base["stderr"].iloc[0]) if len(base) else (np.nan, np.nan)
        return frame.assign(delta=frame["loss"] - loss, delta_stderr=np.hypot(frame["stderr"], error))

    @cached_property
    def sink_tokens(self) -> Enrichment | None:
        """Which tokens the sinks are (rule: Excess(3)), all layers, heads, steps and samples together."""
        tokens, layers = self.tokens, self.layers
        if tokens is None or not layers:
            return None
        events_NTK = np.sum([layer.events_NTK for layer in layers], axis=0)
        labels_NTK = np.full(events_NTK.shape, None, dtype=object)
        where = (tokens["sample"], tokens["step"], tokens["position"] + self.sink_count)
        if any(index.max() >= size or index.min() < 0 for index, size in zip(where, labels_NTK.shape, strict=True)):
            raise ValueError(
                f"{self.run.path / 'tokens.parquet'} does not fit attention.safetensors: a sample, step or position "
                f"lies outside {labels_NTK.shape}."
            )
        labels_NTK[tuple(index.to_numpy() for index in where)] = np.where(
            tokens["state"] == "masked", MASK, tokens["text"]
        )
        # The added sink is there at every step that exists.
        labels_NTK[..., : self.sink_count][(layers[0].main_NTH >= 0).any(-1)] = ADDED
        return enrichment(labels_NTK, events_NTK)


def as_study(source: Run | Study) -> Study:
    """``source`` as a Study. Raises ValueError when the run is of another kind."""
    return source if isinstance(source, Study) else as_studies([source])[0]


def as_studies(sources: Iterable[Run | Study] | Run | Study) -> list[Study]:
    """Several runs with labels that tell them apart: the model's name, and the folder where names repeat."""
    sources = [sources] if isinstance(sources, Run | Study) else list(sources)
    if not sources:
        raise ValueError("A report needs at least one run: got none. Pass open_run(folder).")
    runs = [source.run if isinstance(source, Study) else source for source in sources]
    for run in runs:
        if run.info.kind != "study":
            raise ValueError(
                f"Reports read runs of kind 'study': {run.path} is of kind {run.info.kind!r}. "
                "Make one with sinklab.evaluation.study or `sinklab trace`."
            )
    names = [str(run.info.model.get("name", run.path.name)) for run in runs]
    names = [
        f"{name} ({run.path.name})" if names.count(name) > 1 else name for name, run in zip(names, runs, strict=True)
    ]
    names = [f"{name} [{index + 1}]" if names.count(name) > 1 else name for index, name in enumerate(names)]
    return [
        source if isinstance(source, Study) else Study(run, name)
        for source, run, name in zip(sources, runs, names, strict=True)
    ]


def _as_if_all_ran(arrays: dict[str, np.ndarray], added: int) -> dict[str, np.ndarray]:
    visible_NTK = arrays["visible"].astype(np.float32)
    if not visible_NTK.size:
        return arrays
    positions_NT = (~np.isnan(visible_NTK[..., added:])).sum(-1)
    ran_NT = np.nan_to_num(visible_NTK).max(-1)
    partial_NT = (ran_NT > 0) & (ran_NT < positions_NT)
    if not partial_NT.any():
        return arrays
    factor_NT = np.where(partial_NT, positions_NT / np.where(ran_NT > 0, ran_NT, 1), 1).astype(np.float32)
    received = arrays["received"].astype(np.float32) * factor_NT[:, :, None, None, None]
    return {**arrays, "received": received, "visible": visible_NTK * factor_NT[:, :, None]}


def mean_of(values: np.ndarray, weights: np.ndarray | None = None) -> float:
    """Mean of the numbers in ``values`` that are not NaN; NaN when there is none."""
    here = ~np.isnan(values)
    weights = here.astype(np.float64) if weights is None else np.where(here, weights, 0).astype(np.float64)
    total = weights.sum()
    return float((np.where(here, values, 0) * weights).sum() / total) if total else float("nan")


def _layer_facts(received_NTHK: np.ndarray, visible_NTK: np.ndarray, norm_NTK: np.ndarray, added: int) -> LayerFacts:
    visible_NT1K = visible_NTK[:, :, None]
    counted = visible_NT1K > 0
    share_NTHK = np.where(counted, received_NTHK / np.where(counted, visible_NT1K, 1), np.nan)
    sinks_NTHK = find_sinks(received_NTHK, RULE, visible_NT1K)
    events_NTK = sinks_NTHK.sum(2)
    exists_NTK = (~np.isnan(share_NTHK)).any(2)
    norm_NTK = np.where(exists_NTK, norm_NTK, np.nan)
    text_events, text_norms = events_NTK[..., added:], norm_NTK[..., added:]
    # An axis of length one: trajectories wants (sample, step, layer, head, key).
    paths = trajectories(share_NTHK[:, :, None])
    text_paths = trajectories(share_NTHK[:, :, None, :, added:])
    text_share_NTH = np.where(np.isnan(share_NTHK[..., added:]), -1, share_NTHK[..., added:]).max(-1)
    return LayerFacts(
        added_share=mean_of(share_NTHK[..., :added].sum(-1)) if added else float("nan"),
        text_share=mean_of(np.where(text_share_NTH < 0, np.nan, text_share_NTH)),
        added_norm=mean_of(norm_NTK[..., :added]),
        text_norm=mean_of(text_norms),
        sink_norm=mean_of(text_norms, text_events),
        rest_norm=mean_of(text_norms, received_NTHK.shape[2] - text_events),
        events_NTK=events_NTK,
        main_NTH=paths.position[:, :, 0],
        moves=int(paths.moves.sum()),
        text_moves=int(text_paths.moves.sum()),
        transitions=int(paths.transitions.sum()),
    )
