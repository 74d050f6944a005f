"""A study run folder, read sample by sample and measured: the numbers of figures, tables and sentences."""

# N samples, T steps, L layers, H heads, K keys (added sinks first, then canvas positions)
from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import pandas as pd

from sinklab.analysis.movement import MotionSummary
from sinklab.analysis.thresholds import EpsilonCurve, ScoreHistogram
from sinklab.analysis.tokens import Enrichment, Explained
from sinklab.analysis.verdicts import Verdict, masking_cost, ninety_six, recovery, start_only
from sinklab.reports.measured import LayerFacts, Measured
from sinklab.reports.samples import Reader, Samples, rule_name
from sinklab.sinks.rules import DEFAULT, Rule

WITHIN = 8
"""steps that heads are given to find another sink"""


def judged(
    curve: EpsilonCurve | None,
    events_by_position: np.ndarray,
    heldout: pd.DataFrame | None,
    truncation: pd.DataFrame | None,
) -> list[Verdict]:
    """One verdict per statement; what was not measured says so and holds None.

    The cost of masking is that of the fewest sinks that were masked (one, in a study with the usual settings); its
    error is that of the paired differences.
    """
    found = [start_only(events_by_position if len(events_by_position) else np.zeros(1))]
    plain, masked, error = (math.nan, math.nan), (math.nan, math.nan), None
    if heldout is not None:
        base, hidden = heldout[heldout["k"] == 0], heldout[heldout["control"] == "sinks"].sort_values("k")
        if len(base) and len(hidden):
            one, other = base.iloc[0], hidden.iloc[0]
            plain, masked = ((float(row["loss"]), float(row["stderr"])) for row in (one, other))
            error = float(other["delta_stderr"])
    found.append(masking_cost(plain, masked, paired_error=error))
    found.append(_recovered(truncation))
    if curve is not None:
        found.append(ninety_six(curve))
    return found


def _recovered(truncation: pd.DataFrame | None) -> Verdict:
    if truncation is None:
        unknown = "No part of the context was hidden, so recovery was not measured."
        return Verdict("no recovery", None, math.nan, 0.5, unknown)
    first = truncation.groupby("sample")["step"].transform("min")
    soon = truncation[truncation["step"] < first + WITHIN]
    heads = soon.groupby(["sample", "layer", "head"])[["lost", "recovered"]].any()
    return recovery(heads["lost"].to_numpy(), heads["recovered"].to_numpy(), within=WITHIN)


def _table(name: str) -> Callable[[Reader], pd.DataFrame | None]:
    return lambda run: run.table(name)


@dataclass(frozen=True, eq=False)
class Study(Reader):
    """One run of kind "study".

    Everything measured comes from one pass over the samples, made when the first such number is asked for; arrays are
    not kept.
    """

    rule: Rule = DEFAULT
    """what counts as a sink"""

    kind: ClassVar[str] = "study"
    origin: ClassVar[str] = "a study"
    columns: ClassVar[dict[str, set[str]]] = {
        "tokens": {"sample", "step", "position", "text", "state"},
        "generations": {"sample", "prompt", "completion"},
        "heldout": {"k", "control", "loss", "stderr"},
        "truncation": {"sample", "step", "layer", "head", "lost", "recovered"},
    }

    @property
    def family(self) -> str:
        """ "diffusion" or "autoregressive"."""
        return str(self.run.info.model.get("family", "diffusion"))

    @property
    def rule_words(self) -> str:
        """The sink rule in words."""
        return "received attention above 1 + 3 (S−1)/S" if self.rule == DEFAULT else rule_name(self.rule)

    @cached_property
    def samples(self) -> Samples:
        """The samples, a new object at each access."""
        return Samples(self.run, self.sink_count, self.rule, self.generations)

    @cached_property
    def recorded(self) -> tuple[int, ...]:
        """Places in ``samples`` of those with attention."""
        return tuple(place for place, sample in enumerate(self.samples) if sample.names)

    @cached_property
    def layers(self) -> list[int]:
        """Numbers of the recorded layers, in the order of the layer axis; empty without attention."""
        return self._numbers(1, "recorded_layers")

    @cached_property
    def heads(self) -> list[int]:
        """Numbers of the recorded heads, in the order of the head axis; empty without attention."""
        return self._numbers(2, "recorded_heads")

    @cached_property
    def _shape(self) -> tuple[int, ...]:
        """(step, layer, head, key) of the first sample with attention."""
        return self.samples[self.recorded[0]].received_TLHK.shape

    def _numbers(self, axis: int, name: str) -> list[int]:
        if not self.recorded:
            return []
        count = self._shape[axis]
        numbers = [int(number) for number in self.run.info.model.get(name) or range(count)]
        if len(numbers) != count:
            raise ValueError(
                f"{self.run.path} does not fit itself: run.json names {len(numbers)} {name.replace('_', ' ')}, the "
                f"arrays of sample {self.samples[self.recorded[0]].index} hold {count}."
            )
        return numbers

    def over(self, axis: str) -> pd.DataFrame:
        """By layer: all fields of LayerFacts but those per head, motion, overlap, split sinks, moves at block borders.

        By step: ``overlap``, of a head's sinks with those of the next recorded step.
        """
        if axis == "step":
            overlap = self.measured.overlap_by_step
            return pd.DataFrame({"step": list(overlap), "overlap": list(overlap.values())})
        return self._by_layer if axis == "layer" else super().over(axis)

    @cached_property
    def _by_layer(self) -> pd.DataFrame:
        measured = self.measured
        table = pd.DataFrame([dataclasses.asdict(facts) for facts in self.facts])
        if table.empty:
            return table
        table["main_share"] = [float(share_H.mean()) for share_H in table.pop("main_share_H")]
        if measured.layer_sinks is not None:
            table["distinct_sinks"] = measured.layer_sinks.distinct
        weighted = measured.motions.dropna(subset=["mobility"])
        weighted = weighted.assign(weight=weighted["strength"] * weighted["mobility"]).groupby("layer")
        sums = weighted[["weight", "strength"]].sum().reindex(self.layers)
        table["mobility"] = (sums["weight"] / sums["strength"]).to_numpy()
        table["overlap_between_heads"] = measured.overlap_by_head_L
        table["overlap_with_next_layer"] = np.append(np.diagonal(measured.overlap_by_layer_LL, 1), np.nan)
        if measured.split is not None:
            table["split_sinks"] = measured.split.share_by_layer
        if measured.blocks:
            table["border_moves"] = [effect.border_rate for effect in measured.blocks]
            table["inside_moves"] = [effect.inside_rate for effect in measured.blocks]
        return table

    @property
    def tokens(self) -> pd.DataFrame | None:
        """What each forward saw: sample, step, position, text, state (prompt, masked, committed). Not kept."""
        return self.table("tokens")

    generations = cached_property(_table("generations"))
    """sample, prompt, completion, and what else the run noted."""

    truncation = cached_property(_table("truncation"))
    """What hiding the middle of the context did to the main sinks, per step, layer and head."""

    removals = cached_property(_table("removals"))
    """What the edits of the run took away: removed columns, their attention, the overlap with the step before."""

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
    def measured(self) -> Measured:
        """Everything that needs the arrays, from one pass over the samples."""
        return Measured(self.samples.chosen(self.recorded), self.layers, self.heads)

    @property
    def facts(self) -> list[LayerFacts]:
        """One entry per recorded layer; empty when no attention was recorded."""
        return self.measured.facts

    @property
    def curve(self) -> EpsilonCurve | None:
        """Share of tokens that are no sinks over the threshold; None without attention."""
        return self.measured.curve

    @property
    def histogram(self) -> ScoreHistogram | None:
        """How received attention is spread, in 80 logarithmic bins; None without attention."""
        return self.measured.histogram

    @property
    def motion(self) -> MotionSummary | None:
        """How the main sinks move, all heads and samples together; None without attention."""
        return self.measured.motion

    @property
    def text_motion(self) -> MotionSummary | None:
        """The same among text positions alone; None without added sinks."""
        return self.measured.text_motion

    @property
    def explained(self) -> Explained | None:
        """How much of received attention the class and the position of tokens explain; None without tokens."""
        return self.measured.explained

    @cached_property
    def sink_tokens(self) -> Enrichment | None:
        """Which tokens the sinks are under the rule, all layers, heads, steps and samples together."""
        return self.measured.enriched("text")

    @cached_property
    def classes(self) -> Enrichment | None:
        """Which classes of tokens the sinks are."""
        return self.measured.enriched("class")

    @cached_property
    def ages(self) -> Enrichment | None:
        """In which state the positions are that sinks stand on: masked, just committed, committed, prompt."""
        return self.measured.enriched("age")

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """The failure signatures and the 96 % statement, each with a sentence."""
        return judged(self.curve, self.measured.events_by_position, self.heldout, self.truncation)
