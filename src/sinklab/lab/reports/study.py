"""A study run folder, read sample by sample and measured: the numbers of figures, tables and
sentences.
"""

# N samples, T steps, L layers, H heads, K keys (added sinks first, then canvas positions)
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import attrgetter
from typing import Any, ClassVar, Self

import numpy as np
import pandas as pd

from sinklab.core.sinks import DEFAULT, Rule
from sinklab.lab.analysis import (
    Answers,
    Verdict,
    holm,
    masking_cost,
    mean_over,
    ninety_six,
    start_only,
)
from sinklab.lab.files import counted
from sinklab.lab.records.info import REMEDY, SO_FAR, of_twin, reading_of
from sinklab.lab.records.reading import Run
from sinklab.lab.reports.answered import answers_of, blocked_at, heldout_of
from sinklab.lab.reports.measured import Measured, found_of
from sinklab.lab.reports.samples import Reader, Sample, rule_name, whole_table


def of_measured(name: str) -> Any:
    """A number that a study has as `Measured` has it."""
    return property(attrgetter(f"measured.{name}"))


@dataclass(frozen=True)
class ChosenKeys:
    """Keys that were blocked in a run."""

    by: str
    """the queries that chose them, in words"""
    share: float
    """share of them that are sinks of the page, at the step at which they were blocked; NaN if it
    is not known
    """


def chosen_share(study: "Study") -> float:
    """Share of the keys blocked at recorded steps that are sinks of the page at the recorded step
    before; NaN if none was.
    """
    are_sinks = [np.zeros(0)]
    for sample in map(study.sample, study.recorded):
        flags_TLHK = np.concatenate([one.flags(study.rule) for one in sample.scored()], axis=1)
        layer_N, head_N, step_N, key_N = study.blocked_keys(sample, sample.step_numbers_T + 1)
        there_N = key_N < flags_TLHK.shape[-1]
        places = (one_N[there_N] for one_N in (step_N, layer_N, head_N, key_N))
        are_sinks.append(flags_TLHK[*places])
    return float(pd.Series(np.concatenate(are_sinks)).mean())


@dataclass(frozen=True, eq=False)
class Study(Reader):
    """One run of kind "study".

    What is measured is pooled from the facts of the samples when the first such number is asked
    for; arrays are not kept.
    """

    rule: Rule = DEFAULT
    """definition of a sink"""
    received: str = "received"
    """statistic that the rule reads ("received" or "received_from_masked")"""
    twin: str = ""
    """model of these numbers: the run's own if empty, else this control on the same canvases"""
    beside: Mapping[str, Run] = field(default_factory=dict)
    """runs about the same model, by kind (`runs.BESIDE`): a "curve" has the cost of blocking keys,
    if the run did not measure it itself
    """

    kind: ClassVar[str] = "study"
    origin: ClassVar[str] = "a study"
    columns: ClassVar[dict[str, set[str]]] = {
        "tokens": {"sample", "step", "position", "text", "state"},
        "generations": {"sample", "prompt", "completion"},
        "heldout": {"k", "control", "loss", "stderr"},
    }

    @cached_property
    def family(self) -> str:
        """ "diffusion" or "autoregressive"."""
        return str(self.run.info.model.get("family", "diffusion"))

    @cached_property
    def reading(self) -> str:
        """Queries whose attention it has: "all queries", or "all queries so far" of an
        autoregressive text.
        """
        return reading_of(self.run.info)

    @cached_property
    def chosen_keys(self) -> "ChosenKeys | None":
        """The reading by which an autoregressive model's blocked keys were chosen; None if none
        were.
        """
        settings = self.run.info.settings
        masking = [
            str(text) for text in settings.get("edits") or () if str(text).startswith("block_keys")
        ]
        if self.family == "diffusion" or not (masking or settings.get("mask_sinks")):
            return None
        # texts that are written again with sinks blocked (mask_sinks) are always chosen by the last
        # query
        by_last = all("=last_row" in text for text in masking)
        by = "the queries that ran at the step before"
        if by_last:
            by = "the last query of the step before"
        return ChosenKeys(by, chosen_share(self) if masking else math.nan)

    def blocked_keys(self, sample: Sample, steps: Any) -> np.ndarray:
        """Keys that edits blocked in a sample, (4, N): places of their layers, heads and steps
        among the recorded layers and heads and these steps, and their numbers. None if they were
        not written down, or for a control.
        """
        rows = self.removals
        if self.twin or rows is None or "key_list" not in rows:
            return np.zeros((4, 0), int)
        rows = rows[rows["sample"] == sample.index].explode("key_list").dropna(subset="key_list")
        # under guidance the first of two forwards a step was watched
        step = rows["forward"] / (2 if self.run.info.settings.get("cfg_scale") else 1)
        axes = ((self.layers, rows["layer"]), (self.heads, rows["head"]), (steps, step))
        places = [pd.Index(there).get_indexer(numbers) for there, numbers in axes]
        found_4N = np.array([*places, rows["key_list"].astype(int)])
        return found_4N[:, (found_4N >= 0).all(0)]

    @property
    def rule_words(self) -> str:
        """The sink rule in words."""
        words = rule_name(self.rule)
        if self.rule == DEFAULT:
            words = "received attention above 1 + 3 (S−1)/S"
            if self.reading == SO_FAR:
                words = "S (w − e) above 3 (S−1)/S, w the mean weight of a key and e its even share"
        return words if self.received == "received" else f"{words}, of masked queries alone"

    def table(self, name: str) -> pd.DataFrame | None:
        """A table of the run, or of its twin; ``heldout`` of the masking curve if the run itself
        has none.
        """
        found = super().table(of_twin(name, self.twin))
        if found is None and name == "heldout" and "curve" in self.beside:
            return heldout_of(self.beside["curve"], self.twin)
        return found

    @cached_property
    def twins(self) -> dict[str, Self]:
        """The controls of the run, by name, as studies of their own on the same canvases."""
        made = super().table("twins")
        names = [] if made is None or self.twin else made.loc[made["made"], "twin"]
        return {name: replace(self, twin=name) for name in names}

    answers = cached_property[Answers](answers_of)
    """Answers of the study to the three questions of its page."""

    @property
    def samples(self) -> list[Sample]:
        """The samples, new ones at each access, so that arrays that one has read are freed when it
        is let go.
        """
        how = (self.sink_count, self.rule, self.received, self.twin)
        return [Sample(self.run, number, *how) for number in self.run.samples]

    @cached_property
    def recorded(self) -> tuple[int, ...]:
        """Indices in ``samples`` of the samples with attention."""
        places = tuple(place for place, one in enumerate(self.samples) if one.has_facts)
        if places and self.received not in (*self.samples[places[0]].dims, "received"):
            raise ValueError(
                f"the sink rule is to read {self.received}, which {self.run.path} did not record; "
                "add it to the setting `statistics` of the trace of a diffusion model"
            )
        return places

    @cached_property
    def _first(self) -> Sample:
        return self.samples[self.recorded[0]]

    def sample(self, place: int) -> Sample:
        """One of ``samples``; that which figures show is kept."""
        return self._first if place in self.recorded[:1] else self.samples[place]

    @cached_property
    def layers(self) -> list[int]:
        """Numbers of the recorded layers, in the order of the layer axis; empty without
        attention.
        """
        return self._numbers(1, "recorded_layers")

    @cached_property
    def heads(self) -> list[int]:
        """Numbers of the recorded heads, in the order of the head axis; empty without attention."""
        return self._numbers(2, "recorded_heads")

    def _numbers(self, axis: int, name: str) -> list[int]:
        if not self.recorded:
            return []
        count = self._first.shape[axis]
        numbers = [int(number) for number in self.run.info.model.get(name) or range(count)]
        if len(numbers) != count:
            raise ValueError(
                f"{self.run.path} does not fit itself: run.json names {len(numbers)} "
                f"{name.replace('_', ' ')}, the arrays of sample {self._first.index} hold {count}."
            )
        return numbers

    def over(self, axis: str) -> pd.DataFrame:
        """By layer and by step: the columns of `Measured.by_layer` and `Measured.by_step`."""
        if axis == "layer":
            return self.measured.by_layer
        if axis == "step":
            return self.measured.by_step
        return super().over(axis)

    def each(self, axis: str) -> pd.DataFrame:
        """The facts by axis of each sample."""
        return self.measured.each[axis] if axis in self.measured.each else super().each(axis)

    @cached_property
    def generations(self) -> pd.DataFrame | None:
        """Columns sample, prompt, completion, and others that the run noted. ValueError for a table
        without texts.
        """
        if self.twin or "generations" not in self.run.tables:
            return None
        frame = self.table("generations")
        if frame is None or frame[["prompt", "completion"]].isna().any(axis=None):
            raise ValueError(
                f"{self.run.path}: the table generations lacks texts, which a trace always "
                f"writes. {REMEDY}"
            )
        return frame

    massive = whole_table("massive_activations")
    """The greatest hidden states by step and layer, and the heads that have sinks at their
    positions.
    """
    removals = whole_table("removals")
    """Removals by the edits of the run: removed columns, their attention, the overlap with the step
    before.
    """

    @cached_property
    def heldout(self) -> pd.DataFrame | None:
        """Loss over blocked sinks: k, control, loss, stderr, and ``losses`` of the rows of text if
        they were kept; ``delta`` against k = 0 is added if it is missing, and ``delta_low`` and
        ``delta_high``, the ends of its 95 % interval over rows, NaN without their losses. Raises
        ValueError for one without k = 0.
        """
        frame = self.table("heldout")
        if frame is None:
            return None
        if not (frame["k"] == 0).any():
            raise ValueError(
                f"{self.run.path}: the table heldout lacks k = 0, the loss with nothing blocked, "
                f"which a trace always writes. {REMEDY}"
            )
        base, _ = blocked_at(frame)
        if "delta" not in frame:
            error = np.hypot(frame["stderr"], base["stderr"])
            frame = frame.assign(delta=frame["loss"] - base["loss"], delta_stderr=error)
        apart = [(math.nan, math.nan)] * len(frame)
        if "losses" in frame:
            gaps = (np.subtract(losses, base["losses"]) for losses in frame["losses"])
            apart = [mean_over(gap).interval for gap in gaps]
        frame[["delta_low", "delta_high"]] = apart
        return frame

    @cached_property
    def measured(self) -> Measured:
        """The facts of the samples, pooled."""
        found = [
            found_of(self.sample(place), self.layers, self.heads)
            for place in counted("reading samples", self.recorded, len(self.recorded))
        ]
        return Measured(found, self.layers, self.heads, self.rule)

    curve = of_measured("curve")
    """Share of tokens that are no sinks over the threshold, an `EpsilonCurve`; None without
    attention.
    """
    motion = of_measured("motion")
    """How the main sinks move, all heads and samples together, a `MotionSummary`; None without
    attention.
    """
    text_motion = of_measured("text_motion")
    """Motion among text positions alone; None without added sinks."""
    explained = of_measured("explained")
    """How much of received attention the class and the position of tokens explain; None without
    tokens.
    """

    @cached_property
    def sink_tokens(self) -> Any:
        """The `enrichment` of tokens among the sinks under the rule, over all layers, heads, steps
        and samples; None without tokens.
        """
        return self.measured.enriched("text")

    @cached_property
    def classes(self) -> Any:
        """Enrichment of classes of tokens among the sinks."""
        return self.measured.enriched("class")

    @cached_property
    def ages(self) -> Any:
        """States of the positions of sinks: masked, just committed, committed, prompt."""
        return self.measured.enriched("age")

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """The failure signatures and the 96 % statement; those not measured hold None.

        They are corrected for their number (``holm``). The cost of blocking keys is that of the
        fewest blocked sinks (one, in a study with the usual settings), over rows of held-out text.
        """
        filtered_N = self.measured.filtered_N
        found = [start_only(self.measured.events_NS), self._masking]
        return holm(found + ([ninety_six(filtered_N)] if filtered_N else []))

    @property
    def _masking(self) -> Verdict:
        if self.heldout is None:
            return masking_cost([], [])
        clean, arms = blocked_at(self.heldout)
        if arms.empty or "losses" not in arms:
            return masking_cost([], [])
        return masking_cost(clean["losses"], arms["losses"]["sinks"])
