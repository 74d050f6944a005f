"""Training run folders, read for reports: losses, and what the sink monitor saw."""

# L layers
from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from sinklab.records.reading import Run
from sinklab.registry import sinks
from sinklab.reports.study import Study, as_studies, labels

# Settings that may differ between repeats: the seed, and how a run runs and what it tells.
FREE = frozenset({
    "seed", "out", "resume", "threads", "compile", "gradient_checkpointing", "head_chunk", "liger", "micro_batch",
    "workers", "log_every", "eval_every", "save_every", "keep", "spike", "log_to", "monitor_every", "monitor_rows",
})  # fmt: skip


def variant(model: Mapping[str, Any]) -> str:
    """The variant of a model in words: plain, sink, 2 sinks, zero-value sink, sink at the end, gate, sink and gate."""
    count = int(model.get("sink_count") or 0)
    words = []
    if count:
        name = str(model.get("sink_kind", "token")).partition(":")[0]
        label = sinks[name].label if name in sinks else None  # type: ignore[attr-defined]
        kind = f"{name if label is None else label} ".lstrip()
        place = " at the end" if model.get("sink_side") == "end" else ""
        words.append(f"{count} {kind}sinks{place}" if count > 1 else f"{kind}sink{place}")
    if model.get("gate", "none") != "none":
        words.append("gate")
    return " and ".join(words) or "plain"


def repeats(runs: list[Run], names: list[str]) -> list[str]:
    """For each run what it has in common with its repeats, which differ in their seed alone.

    That is the variant, where it says which runs are repeats, and else the name of each run.
    """
    settings = [{key: value for key, value in run.info.settings.items() if key not in FREE} for run in runs]
    keys = [json.dumps(each, sort_keys=True) for each in settings]
    words = [variant(run.info.model) for run in runs]
    of_word = {word: {key for key, other in zip(keys, words, strict=True) if other == word} for word in words}
    return words if len(set(keys)) < len(keys) and all(len(same) == 1 for same in of_word.values()) else names


OVER_EVEN = 2.0
"""times an even share above which added sinks count as having taken over"""

_COLUMNS = {
    "history": {"step", "tokens", "loss", "heldout_loss", "lr", "grad_norm"},
    "heldout": {"loss"},
    "heldout_rows": {"row", "loss"},
    "monitor": {
        "step", "causal", "layer", "added", "even_share", "sink_share", "top_text_share", "sinks", "text_sinks",
        "main_added", "main_first", "main_early", "main_other", "main_none", "mobility", "text_mobility",
        "value_added", "value_sink", "value_other", "activation_added", "activation_first", "activation_other",
        "activation_median", "activation_ratio",
    },
}  # fmt: skip


@dataclass(frozen=True)
class HeldoutLoss:
    """Loss on held-out text in nats per token."""

    mean: float
    low: float
    """lower end of the 95 % interval over rows of text; NaN where the rows were not kept"""
    high: float
    """upper end"""
    rows: int
    """rows of text; 0 where they were not kept"""
    is_final: bool
    """False for a run that did not end: the last one that was measured"""


@dataclass(frozen=True, eq=False)
class Training:
    """One run of kind "training"; what the run did not get to write is None."""

    run: Run
    label: str
    repeats: str
    """what runs that differ in their seed alone have in common"""

    def table(self, name: str) -> pd.DataFrame | None:
        """A table of the run, None when it was not written or is empty. ValueError when columns are missing."""
        if name not in self.run.tables:
            return None
        frame = self.run.table(name)
        if missing := _COLUMNS[name] - set(frame.columns):
            raise ValueError(
                f"{self.run.path}: table {name} is not that of a training run: it lacks {', '.join(sorted(missing))}."
            )
        return None if frame.empty else frame

    @cached_property
    def history(self) -> pd.DataFrame | None:
        """step, tokens, loss, heldout_loss, lr, grad_norm, …; NaN where a row has only the other loss."""
        return self.table("history")

    @cached_property
    def monitor(self) -> pd.DataFrame | None:
        """What the sink monitor saw: a row per look and layer, layer -1 for the whole model."""
        return self.table("monitor")

    @cached_property
    def looks(self) -> pd.DataFrame:
        """The rows of the whole model, one a look; empty without a monitor."""
        frame = self.monitor
        return pd.DataFrame() if frame is None else frame[frame["layer"] == -1].sort_values("step", ignore_index=True)

    @cached_property
    def last_layers(self) -> pd.DataFrame:
        """The rows of the layers at the last look; empty without a monitor."""
        frame = self.monitor
        if frame is None:
            return pd.DataFrame()
        last = frame[(frame["step"] == frame["step"].max()) & (frame["layer"] >= 0)]
        return last.sort_values("layer", ignore_index=True)

    def by_layer(self, measure: str) -> pd.DataFrame:
        """A measure with a row per layer and a column per look. Empty without a monitor."""
        frame = self.monitor
        if frame is None:
            return pd.DataFrame()
        return frame[frame["layer"] >= 0].pivot(index="layer", columns="step", values=measure)

    @property
    def variant(self) -> str:
        """What the model is: plain, sink, 2 sinks, gate, …"""
        return variant(self.run.info.model)

    @property
    def added(self) -> int:
        """Added sinks."""
        return int(self.run.info.model.get("sink_count") or 0)

    @property
    def causal_steps(self) -> int:
        """Steps of the causal warm start; 0 without one."""
        settings = self.run.info.settings
        return round(float(settings.get("causal_start") or 0) * int(settings.get("steps") or 0))

    @cached_property
    def heldout_rows(self) -> pd.DataFrame | None:
        """Loss of every held-out row of text at the end."""
        return self.table("heldout_rows")

    @cached_property
    def loss(self) -> HeldoutLoss | None:
        """The held-out loss at the end, or the last one that was measured."""
        rows = self.heldout_rows
        if rows is not None and len(rows) > 1:
            mean, reach = _interval(rows["loss"].to_numpy(float))
            return HeldoutLoss(mean, mean - reach, mean + reach, len(rows), True)
        final = self.table("heldout")
        if final is not None:
            return HeldoutLoss(float(final["loss"].iloc[-1]), math.nan, math.nan, 0, True)
        known = pd.DataFrame() if self.history is None else self.history.dropna(subset=["heldout_loss"])
        if known.empty:
            return None
        return HeldoutLoss(float(known["heldout_loss"].iloc[-1]), math.nan, math.nan, 0, False)

    def against(self, other: Training) -> tuple[float, float] | None:
        """Held-out loss less that of another run and half of its 95 % interval, paired by rows of text.

        None where the rows were not kept or are of other text.
        """
        mine, theirs = self.heldout_rows, other.heldout_rows
        data = [run.info.model.get("data_sha256") for run in (self.run, other.run)]
        if mine is None or theirs is None or data[0] != data[1] or len(mine) < 2:
            return None
        both = mine.merge(theirs, on="row", suffixes=("", "_other"))
        if len(both) != len(mine) or len(both) != len(theirs):
            return None
        return _interval((both["loss"] - both["loss_other"]).to_numpy(float))

    @cached_property
    def takeover(self) -> int | None:
        """First looked-at step from which the added sinks draw more than twice an even share to the end, or None."""
        looks = self.looks
        if looks.empty or not self.added:
            return None
        return first_for_good(looks["step"], looks["sink_share"] > OVER_EVEN * looks["even_share"])

    @cached_property
    def emergence(self) -> int | None:
        """First looked-at step from which more than half of all heads have a sink to the end, or None."""
        looks = self.looks
        return None if looks.empty else first_for_good(looks["step"], looks["main_none"] < 0.5)


def first_for_good(steps: pd.Series, holds: pd.Series) -> int | None:
    """The first of the steps from which it holds at every later one; None when it does not hold at the last."""
    if not holds.iloc[-1]:
        return None
    broken = np.flatnonzero(~holds.to_numpy(bool))
    return int(steps.iloc[broken[-1] + 1 if len(broken) else 0])


def _interval(values: np.ndarray) -> tuple[float, float]:
    """Mean and half of its 95 % interval."""
    return float(values.mean()), float(1.96 * values.std(ddof=1) / math.sqrt(len(values)))


def as_shown(
    sources: Iterable[Run | Study | Training] | Run | Study | Training,
) -> tuple[list[Study], list[Training]]:
    """Several runs of one kind with labels that tell them apart: as studies, or as trainings; the other list is empty.

    Raises:
        ValueError: without a run, for another kind, and for runs of both kinds.
    """
    sources = [sources] if isinstance(sources, Run | Study | Training) else list(sources)
    runs = [source if isinstance(source, Run) else source.run for source in sources]
    of_training = [run for run in runs if run.info.kind == "training"]
    if not of_training:
        return as_studies([source for source in sources if not isinstance(source, Training)]), []
    if len(of_training) < len(runs):
        other = next(run for run in runs if run.info.kind != "training")
        raise ValueError(
            f"A report shows runs of one kind: {of_training[0].path} is of kind 'training', {other.path} of kind "
            f"{other.info.kind!r}. Make a report of each kind."
        )
    return [], as_trainings([source for source in sources if not isinstance(source, Study)])


def as_trainings(sources: Iterable[Run | Training] | Run | Training) -> list[Training]:
    """Several training runs with labels that tell them apart. Raises ValueError without a run, or for another kind."""
    sources = [sources] if isinstance(sources, Run | Training) else list(sources)
    runs = [source if isinstance(source, Run) else source.run for source in sources]
    if not runs:
        raise ValueError("A report needs at least one run: got none. Pass open_run(folder).")
    for run in runs:
        if run.info.kind != "training":
            raise ValueError(
                f"Training curves read runs of kind 'training': {run.path} is of kind {run.info.kind!r}. "
                "Make one with sinklab.training.train or `sinklab train`."
            )
    names = labels(runs)
    made = zip(sources, runs, names, repeats(runs, names), strict=True)
    return [source if isinstance(source, Training) else Training(run, name, alike) for source, run, name, alike in made]
