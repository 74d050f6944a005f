"""Which trained models belong into which row of the sink-token paper's tables, and what they score."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from .benchmarks import Benchmark, Score
from .training import Training, as_trainings
from .variants import FREE, variant

# lm-eval's tasks for a column, the paper's own first.
TASKS = {
    "ARC-e": ("arc_easy",),
    "ARC-c": ("arc_challenge",),
    "HellaSwag": ("hellaswag",),
    "PIQA": ("piqa",),
    "RACE": ("race",),
    "SIQA": ("social_iqa",),
    "LAMBADA": ("lambada_standard", "lambada_openai"),
    "GSM8K": ("gsm8k_two_stage", "gsm8k"),
}
# What makes a variant, and what follows from it: runs of one experiment may differ in these.
_OF_VARIANT = frozenset({"sink_kind", "sink_count", "sink_side", "gate", "gate_bias", "init_from", "reproduce"})


@dataclass(frozen=True)
class Cell:
    """A number of a group of runs that differ in their seed alone."""

    value: float
    stderr: float
    runs: int
    samples: int = 0
    task: str = ""
    metric: str = ""


@dataclass(eq=False)
class Experiment:
    """Models that differ in their variant and their seed alone: a block of a table."""

    start: str
    """"autoregressive", "scratch", "retrofit" (the backbone was frozen), or "unknown" without the training run."""
    label: str
    trainings: list[Training] = field(default_factory=list)
    benchmarks: list[Benchmark] = field(default_factory=list)

    @cached_property
    def variants(self) -> set[str]:
        """What there is."""
        return {one.variant for one in self.trainings} | {variant(one.model) for one in self.benchmarks}

    def score(self, name: str, column: str, metric: str | None = None) -> Cell | None:
        """A benchmark of a variant in percent, mean over its runs; of several tasks for it the paper's own."""
        for task in TASKS[column]:
            scores: list[Score] = []
            for one in self.benchmarks:
                if variant(one.model) == name and one.k == 0 and not one.run.info.settings.get("edits"):
                    found = one.score(task, metric) or one.score(task)
                    scores += [found] if found else []
            if scores:
                # a first try with a limit does not count beside the whole benchmark
                scores = [one for one in scores if one.samples == max(one.samples for one in scores)]
                value, stderr = _mean([100 * one.value for one in scores], [100 * one.stderr for one in scores])
                return Cell(value, stderr, len(scores), scores[0].samples, task, scores[0].metric)
        return None

    def loss(self, name: str) -> Cell | None:
        """Held-out loss of a variant in nats per token, mean over its runs, ± one standard error over rows of text."""
        losses = [one.loss for one in self.trainings if one.variant == name and not _is_tuned(one)]
        known = [loss for loss in losses if loss is not None]
        if not known:
            return None
        value, stderr = _mean([one.mean for one in known], [(one.high - one.mean) / 1.96 for one in known])
        return Cell(value, stderr, len(known))

    def less(self, name: str, other: str) -> Cell | None:
        """Held-out loss less that of another variant of the same seed, paired by row of text; mean over seeds."""
        if name == other:
            return None
        mine = [one for one in self.trainings if one.variant == name and not _is_tuned(one)]
        theirs = {one.run.info.seed: one for one in self.trainings if one.variant == other and not _is_tuned(one)}
        pairs = [one.against(theirs[one.run.info.seed]) for one in mine if one.run.info.seed in theirs]
        known = [pair for pair in pairs if pair is not None]
        if not known:
            return None
        value, stderr = _mean([pair[0] for pair in known], [pair[1] / 1.96 for pair in known])
        return Cell(value, stderr, len(known))

    def share(self, name: str) -> Cell | None:
        """Percent of attention on the added sinks at the last look of the monitor, mean over runs."""
        looks = [one.looks for one in self.trainings if one.variant == name and one.added and not _is_tuned(one)]
        shares = [100 * float(table.iloc[-1]["sink_share"]) for table in looks if not table.empty]
        return Cell(float(np.mean(shares)), math.nan, len(shares)) if shares else None

    def model_of(self, name: str, *, tuned: bool = False) -> str | None:
        """Folder or name of the first model of a variant; `tuned`: the one fine-tuned on questions."""
        for one in self.trainings:
            if one.variant == name and _is_tuned(one) == tuned:
                return str(one.run.path / "model")
        names = [str(one.model.get("name")) for one in self.benchmarks if variant(one.model) == name]
        return None if tuned or not names else names[0]


def experiments(benchmarks: Sequence[Benchmark], trainings: Sequence[Any]) -> list[Experiment]:
    """The runs as blocks: by how they were trained; benchmarks join the training run whose model they scored."""
    runs = as_trainings(trainings) if trainings else []
    homes = {(one.run.path / "model").resolve(): one for one in runs}
    blocks: dict[str, Experiment] = {}
    for one in runs:
        if one.run.info.settings.get("objective") == "autoregressive":
            continue
        base = _base(one, homes)
        block = blocks.setdefault(_key(base), Experiment(_start(base), _label(base)))
        block.trainings.append(one)
    for bench in benchmarks:
        if bench.model.get("family") != "diffusion":
            continue
        home = homes.get(Path(str(bench.model.get("name"))).resolve()) or _by_weights(bench, runs)
        if home is not None:
            base = _base(home, homes)
            key, start, label = _key(base), _start(base), _label(base)
        else:
            sizes = [bench.model.get(name) for name in ("hidden_size", "layers", "heads")]
            key, start = json.dumps(["unknown", sizes]), "unknown"
            label = f"{sizes[1]} layers of {sizes[0]}, trained elsewhere"
        blocks.setdefault(key, Experiment(start, label)).benchmarks.append(bench)
    return list(blocks.values())


def _by_weights(bench: Benchmark, runs: Sequence[Training]) -> Training | None:
    """The training run that left these very weights, where the folder was moved since."""
    for one in runs:
        noted = one.run.path / "model" / "weights.sha256"
        if noted.is_file() and noted.read_text().strip() == bench.model.get("weights_sha256"):
            return one
    return None


def _is_tuned(one: Training) -> bool:
    return one.run.info.settings.get("pairs", "none") != "none"


def _base(one: Training, homes: dict[Path, Training]) -> Training:
    """The run that made the model which was fine-tuned; the run itself where it was not, or that one is not there."""
    if not _is_tuned(one):
        return one
    before = homes.get(Path(str(one.run.info.settings.get("init_from"))).resolve())
    return _base(before, homes) if before is not None and before is not one else one


def _start(base: Training) -> str:
    if _is_tuned(base):
        return "unknown"
    if base.run.info.settings.get("train_only", "all") != "all":
        return "retrofit"
    return "autoregressive" if base.run.info.settings.get("init_from") else "scratch"


def _key(base: Training) -> str:
    settings = {key: value for key, value in base.run.info.settings.items() if key not in FREE | _OF_VARIANT}
    return json.dumps([_start(base), settings], sort_keys=True)


def _label(base: Training) -> str:
    """In words: where it began, how large it is, what it has read."""
    settings = base.run.info.settings
    tokens = int(settings.get("steps") or 0) * int(settings.get("batch") or 0) * int(settings.get("length") or 0)
    size = base.run.info.model.get("parameters")
    parts = [f"{_short(size)} parameters"] if size else []
    parts += [f"{_short(tokens)} tokens"] if tokens and not settings.get("epochs") else []
    start = settings.get("init_from")
    return ", ".join([f"from {Path(str(start)).parent.name or start}" if start else "from scratch", *parts])


def _short(count: float) -> str:
    for size, letter in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= size:
            return f"{count / size:.3g}{letter}"
    return str(count)


def _mean(values: list[float], errors: list[float]) -> tuple[float, float]:
    """Mean over runs, and its standard error from those of the runs: seeds beyond that are not in it."""
    return float(np.mean(values)), float(np.sqrt(np.sum(np.square(errors))) / len(errors))
