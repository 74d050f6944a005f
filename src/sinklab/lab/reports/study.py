"""Run folders as reports read them, and the three answers about the model of a study."""

# N samples, R rows of held-out text, L layers, H heads
import json
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import pandas as pd

from sinklab.core.sinks import DEFAULT, Rule
from sinklab.lab.analysis.answers import (
    Answer,
    Answers,
    costs,
    exists,
    fewest,
    stays,
)
from sinklab.lab.records.info import SO_FAR, of_twin, reading_of
from sinklab.lab.records.reading import Run
from sinklab.lab.reports.measured import Measured, found_of
from sinklab.lab.reports.samples import FIRST, OTHER, Sample, rule_name
from sinklab.lab.reports.words import quoted

MOST_HOLDERS = 4
TRACE = ("trace", 'lm.watch("The house stood", new_tokens=32)')
CURVE = (
    "curve",
    'from sinklab.lab.studies.curve.study import masking_curve; masking_curve(lm, "runs/curve")',
)
"""what measures an answer: a command, and Python"""
ARMS = ("none", "top", "random", "equal_mass")
"""arms of a masking curve that reports read"""
MEAN = ("mean", "low", "high")


@dataclass(frozen=True, eq=False)
class Reader:
    """One run as reports read it: its tables, and its facts by layer and by step. None for a table
    that was not written.
    """

    run: Run
    label: str
    repeats: str
    """common name of runs that differ in their seed alone; the label of a run without repeats"""

    @cached_property
    def sink_count(self) -> int:
        """Number of added sinks: columns in front of the keys."""
        return int(self.run.info.model.get("sink_count") or 0)

    @property
    def causal_steps(self) -> int:
        """Steps of a causal warm start; 0 without one."""
        return 0

    def table(self, name: str) -> pd.DataFrame | None:
        """A table of the run, None when it was not written or is empty."""
        if name not in self.run.tables:
            return None
        frame = self.run.table(name)
        return None if frame.empty else frame

    def over(self, axis: str) -> pd.DataFrame:
        """The facts by "layer" or by "step", a row each, under one name in runs of every kind
        (``added_share``, …).

        Empty if nothing was recorded.
        """
        frame = self.table(axis)
        return pd.DataFrame() if frame is None else frame

    def each(self, axis: str) -> pd.DataFrame:
        """The facts by axis of each sample, a row a sample and place; empty if a run has no
        samples.
        """
        return pd.DataFrame()


@dataclass(frozen=True, eq=False)
class Study(Reader):
    """One run of kind "study".

    What is measured is pooled from the facts of the samples when the first such number is asked
    for; arrays are not kept.
    """

    rule: Rule = DEFAULT
    """definition of a sink"""
    twin: str = ""
    """model of these numbers: the run's own if empty, else this control on the same canvases"""
    beside: Mapping[str, Run] = field(default_factory=dict)
    """runs about the same model, by kind (`runs.BESIDE`): a "curve" has the cost of blocking
    keys
    """

    @cached_property
    def reading(self) -> str:
        """Queries whose attention it has: "all queries", or "all queries so far" of an
        autoregressive text.
        """
        return reading_of(self.run.info)

    @property
    def rule_words(self) -> str:
        """The sink rule in words."""
        if self.rule != DEFAULT:
            return rule_name(self.rule)
        if self.reading == SO_FAR:
            return "S (w − e) above 3 (S−1)/S, w the mean weight of a key and e its even share"
        return "received attention above 1 + 3 (S−1)/S"

    @cached_property
    def twins(self) -> dict[str, Self]:
        """The controls of the run, by name, as studies of their own on the same canvases."""
        made = self.table("twins")
        names = [] if made is None or self.twin else made.loc[made["made"], "twin"]
        return {name: replace(self, twin=name) for name in names}

    @property
    def samples(self) -> list[Sample]:
        """The samples, new ones at each access, so that arrays that one has read are freed when it
        is let go.
        """
        how = (self.sink_count, self.rule, self.twin)
        return [Sample(self.run, number, *how) for number in self.run.samples]

    @cached_property
    def recorded(self) -> tuple[int, ...]:
        """Indices in ``samples`` of the samples with attention."""
        return tuple(place for place, one in enumerate(self.samples) if one.has_facts)

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
        """By layer: `Measured.by_layer`."""
        return self.measured.by_layer if axis == "layer" else super().over(axis)

    def each(self, axis: str) -> pd.DataFrame:
        """The facts by layer of each sample."""
        return self.measured.each if axis == "layer" else super().each(axis)

    @cached_property
    def cost(self) -> pd.DataFrame | None:
        """Cost of blocked keys, of the masking curve beside the run; None without one.

        A row for each number of keys k and arm of `ARMS`, control: loss, mean, low and high of its
        change, and lists with a number a row of text: losses, grown, the share of heads in which a
        sink grew, and grown_at, the place of most of these.
        """
        names = of_twin("curve", self.twin), of_twin("curve_rows", self.twin)
        curve = self.beside.get("curve")
        if curve is None or not {*names} <= {*curve.tables}:
            return None
        table, rows = (curve.table(name) for name in names)
        lists = {"loss": "losses", "regrown": "grown", "grown_at": "grown_at"}
        by_row = rows.rename(columns=lists).groupby(["k", "control"])[[*lists.values()]].agg(list)
        table = table.loc[table["control"].isin(ARMS), ["k", "control", "loss", *MEAN]]
        return table.merge(by_row, how="left", on=["k", "control"])

    @cached_property
    def measured(self) -> Measured:
        """The facts of the samples, pooled."""
        found = [found_of(self.sample(place), self.layers, self.heads) for place in self.recorded]
        return Measured(found, self.layers, self.heads, self.rule)

    @cached_property
    def answers(self) -> Answers:
        """The three answers about its model, with the controls of its run."""
        if self.layers:
            found = [_exists(self), _stays(self)]
        else:
            said = f"Not measured; this measures it: `{command_of(self, *TRACE)}`."
            found = [Answer(question, "not measured", said) for question in ("exist", "stay")]
        return Answers(self.label, (*found, _costs(self)))


def _exists(study: Study) -> Answer:
    """The first question; its control is that of a few canvases, if no others were run."""
    found = {kind: one.measured.strongest_keys["strongest"] for kind, one in study.twins.items()}
    how: dict[str, Any] = {"heads": len(study.layers) * len(study.heads)}
    few = study.table("control")
    if not found and few is not None:
        why = few["why"][few["why"] != ""].unique()
        how["lack"] = "; ".join(why) or "too few queries see any key"
        if few["control"].notna().any():
            found["permuted"], how["own_S"] = few["control"], few["strongest"]
    return exists(study.measured.strongest_keys, found, **how)


def _stays(study: Study) -> Answer:
    """The paths of the sinks: of more texts, if a run of these stands beside the study."""
    how = {"compared": "windows" if study.reading == SO_FAR else "steps"}
    table, origin = _paths(study)
    held: Counter[str] = Counter()
    for holders in table["holders"]:
        held.update(json.loads(holders))
    total = max(held.total(), 1)
    names = {FIRST: f"the {FIRST}", OTHER: "other tokens"}
    named = [
        (names.get(label) or quoted(label), count / total)
        for label, count in held.most_common(MOST_HOLDERS)
    ]
    controls = {kind: _paths(twin)[0]["mobility"] for kind, twin in study.twins.items()}
    return stays(table["mobility"], controls, named, origin=origin, **how)


def _paths(study: Study) -> tuple[pd.DataFrame, str]:
    """`staying_table`, and its origin if it is not from the samples of the study."""
    more, name = study.beside.get("texts"), of_twin("staying", study.twin)
    if more is not None and name in more.tables:
        return more.table(name), "measured beforehand"
    return staying_table(study), ""


def staying_table(study: Study) -> pd.DataFrame:
    """A row a sample: its mobility, and how often each token is strongest in a head (JSON)."""
    assert study.measured.motion is not None
    held = study.measured.strongest_keys["holders"].map(json.dumps)
    return pd.DataFrame({"mobility": study.measured.motion.mobility_S, "holders": held})


def _costs(study: Study) -> Answer:
    tables = {kind: one.cost for kind, one in (study.twins | {"": study}).items()}
    tops = {kind: fewest(one)[1].loc["top"] for kind, one in tables.items() if one is not None}
    alone = _alone(study, tops.pop("")) if "" in tops else None
    controls = {kind: float(top["mean"]) for kind, top in tops.items()}
    return costs(study.cost, controls, command_of(study, *CURVE), alone)


def _alone(study: Study, top: pd.Series) -> tuple[str, float] | None:
    """The head whose own strongest key costs more than half of that of all heads, by the whole
    interval, and its cost; from a map by head beside the study.
    """
    run = study.beside.get("map")
    if run is None or study.twin or run.info.settings["by"] != "head" or top["k"] != 1:
        return None
    cells = run.table("curve")
    cells = cells[(cells["control"] == "top") & (cells["k"] == 1)]
    if cells.empty:
        return None
    most = cells.loc[cells["mean"].idxmax()]
    if not most["low"] > top["mean"] / 2:
        return None
    return f"head {most['head']:.0f} of layer {most['layer']:.0f}", float(most["mean"])


def _has_top(run: Run) -> bool:
    return "curve" not in run.tables or (run.table("curve")["control"] == "top").any()


def command_of(study: Study, command: str, python: str) -> str:
    """The command that measures something of the model of a run, or Python if none can load it."""
    model = study.run.info.model
    if model.get("wrapped"):
        return python
    return f"sinklab {command} {reading_words(model)}"


def reading_words(model: Mapping[str, Any]) -> str:
    """The options that read the model of a run again, for a shell; a sink that was attached and
    how layers were spread are not among them.
    """
    words = ["--model", str(model.get("name", "MODEL"))]
    for name, usual in {"dtype": "float32", "device": "cpu", "revision": None}.items():
        if model.get(name, usual) != usual:
            words += [f"--{name}", str(model[name])]
    return shlex.join(words)


def beside_of(study: Run, runs: Sequence[Run]) -> dict[str, Run]:
    """The first run of each kind about the same model: of its name, and of its weights if both
    runs noted them; a curve by layer or head is of kind "map". A curve of some layers, by degree,
    or without the most attended keys does not say what these cost.
    """
    found: dict[str, Run] = {}
    for run in runs:
        one, other = study.info.model, run.info.model
        weights = one.get("weights_sha256"), other.get("weights_sha256")
        if one.get("name") == other.get("name") and (None in weights or weights[0] == weights[1]):
            kind = run.info.kind
            how = run.info.settings
            if kind == "curve" and how.get("by", "model") != "model":
                kind = "map"
            elif kind == "curve" and (how.get("beta") or how.get("layers") or not _has_top(run)):
                continue
            found.setdefault(kind, run)
    return found
