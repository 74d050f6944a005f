"""What the two papers print (published.toml), and run folders of kind "benchmark" to set beside it."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd

from sinklab.analysis.intervals import paired_share_interval
from sinklab.records.reading import Run, open_run
from sinklab.reports.samples import checked

_PRINTED: dict[str, Any] = tomllib.loads((files(__package__) / "published.toml").read_text("utf-8"))

KS: tuple[int, ...] = tuple(_PRINTED["masked_sinks"]["ks"])
"""Numbers of masked sinks in the analysis paper's Table 1; 0 is its row «unmasked»."""
TABLE1: dict[str, dict[str, list[list[float]]]] = _PRINTED["masked_sinks"]["cells"]
"""Task -> model -> by number of masked sinks the share of right answers and what is printed behind ±."""
TABLE1_NOTES: list[str] = _PRINTED["masked_sinks"]["notes"]
TITLES: dict[str, str] = _PRINTED["masked_sinks"]["titles"]
_TASKS = {"humaneval_instruct": "humaneval", "gsm8k_cot": "gsm8k", "gsm8k_cot_zeroshot": "gsm8k"}


def published_table1(task: str) -> dict[str, list[list[float]]]:
    """The paper's cells of the benchmark that this task of lm-eval asks in some form; none for another one."""
    return TABLE1.get(_TASKS.get(task, task), {})


def published_model(name: str) -> str | None:
    """The model of the analysis paper's Table 1 that a name on the Hub or a folder stands for, or None."""
    names: dict[str, str] = _PRINTED["masked_sinks"]["names"]
    return next((model for pattern, model in names.items() if re.search(pattern, name.lower())), None)


@dataclass(frozen=True)
class PaperRow:
    """One row of a table of «One Token Is Enough»."""

    name: str
    """What the paper calls it."""
    variant: str
    """The variant of the model, in the words of `sinklab.reports.training.variant`."""
    scores: tuple[float, ...]
    """Percent right, in the order of the table's benchmarks."""


@dataclass(frozen=True)
class PaperTable:
    """One table of «One Token Is Enough» (arXiv 2601.19657)."""

    number: int
    title: str
    start: str
    """How the models began: "autoregressive" or "scratch"."""
    benchmarks: tuple[str, ...]
    blocks: dict[str, tuple[PaperRow, ...]]
    """Rows by size and number of training tokens."""

    @classmethod
    def of(cls, given: dict[str, Any]) -> PaperTable:
        """From the file."""
        blocks = {
            block["models"]: tuple(PaperRow(name, variant, tuple(scores)) for name, variant, *scores in block["rows"])
            for block in given["blocks"]
        }
        return cls(**given | {"benchmarks": tuple(given["benchmarks"]), "blocks": blocks})

    @property
    def variants(self) -> tuple[tuple[str, str], ...]:
        """(name, variant) of the rows, once each."""
        return tuple(dict.fromkeys((row.name, row.variant) for rows in self.blocks.values() for row in rows))


ONE_TOKEN_FACTS: dict[str, Any] = _PRINTED["one_token"]
"""notes, recipes, variants and columns."""
ONE_TOKEN = tuple(PaperTable.of(table) for table in ONE_TOKEN_FACTS["tables"])
"""Tables 1 to 5 of the sink-token paper."""

# What a task is worth: its metric and, where there are several, its filter. Others: the first of `_COMMON` there is.
HEADLINE = {"gsm8k": ("exact_match", "flexible-extract"), "humaneval": ("pass@1", None)}
_COMMON = ("acc", "exact_match", "pass@1", "accuracy")
_COLUMNS = {
    "scores": {"task", "metric", "filter", "value", "stderr", "samples", "no_answer"},
    "samples": {"task", "filter", "doc_id", "right", "metrics"},
}
# Settings in which the masked runs of a model may differ from its unmasked one.
MASKING = ("mask_sinks", "control")


@dataclass(frozen=True, eq=False)
class Benchmark:
    """One run of kind "benchmark" that came to its end."""

    run: Run

    @property
    def model(self) -> dict[str, Any]:
        return self.run.info.model

    @property
    def k(self) -> int:
        """Masked sinks; 0 for none."""
        return int(self.run.info.settings.get("mask_sinks") or 0)

    @property
    def control(self) -> str:
        """What was masked: sinks, or as many other columns."""
        return str(self.run.info.settings.get("control") or "sinks")

    @property
    def alike(self) -> str:
        """What runs that differ in masking alone have in common: weights and settings."""
        free = (*MASKING, "tasks", "record_sinks")
        settings = {key: value for key, value in self.run.info.settings.items() if key not in free}
        return json.dumps([self.model.get("name"), self.model.get("weights_sha256"), settings], sort_keys=True)

    @cached_property
    def scores(self) -> pd.DataFrame:
        """The table ``scores``. Raises ValueError when columns are missing."""
        return checked(self.run, "scores", _COLUMNS["scores"], what="a benchmark")

    @property
    def tasks(self) -> list[str]:
        """What was scored."""
        return list(dict.fromkeys(self.scores["task"]))

    def score(self, task: str, metric: str | None = None) -> pd.Series | None:
        """The row of this metric, else of the task's headline; None where it was not scored.

        Its stderr is binomial for shares, sqrt(p (1 - p) / n), and else what lm-eval says.
        """
        rows = self.scores[self.scores["task"] == task]
        headline, filtered = HEADLINE.get(task, ("", None))
        order = [metric, headline, *_COMMON, *rows["metric"]]
        name = next((name for name in order if name in set(rows["metric"])), "")
        rows = rows[rows["metric"] == name]
        if name != metric and (rows["filter"] == filtered).any():
            rows = rows[rows["filter"] == filtered]
        if rows.empty:
            return None
        row = rows.iloc[0].copy()
        if 0 <= row["value"] <= 1 and row["metric"] in (*_COMMON, "acc_norm"):
            share, samples = float(row["value"]), int(row["samples"])
            row["stderr"] = math.sqrt(share * (1 - share) / samples) if samples else math.nan
        return row

    def right(self, task: str, score: pd.Series) -> pd.Series:
        """By number of the document, what the metric gave it; empty without the table ``samples``."""
        if "samples" not in self.run.tables:
            return pd.Series(dtype=float)
        rows = checked(self.run, "samples", _COLUMNS["samples"], what="a benchmark")
        rows = rows[(rows["task"] == task) & (rows["filter"] == score["filter"])]
        metrics = [json.loads(text) for text in rows["metrics"]]
        values = [given.get(score["metric"], first) for given, first in zip(metrics, rows["right"], strict=True)]
        return pd.Series([float(value) for value in values], index=rows["doc_id"].to_numpy(), dtype=float)


@dataclass(frozen=True)
class Found:
    """What lies in some folders."""

    benchmarks: tuple[Benchmark, ...]
    trainings: tuple[Run, ...]
    unfinished: tuple[Path, ...]
    """Runs that are running, or were interrupted."""


def found_in(folders: Iterable[str | Path]) -> Found:
    """Run folders of benchmarks and of training, at or below these folders; runs of other kinds are passed over.

    Raises:
        ValueError: for a folder that does not exist, a damaged run, and where there is no run at all.
    """
    benchmarks, trainings, unfinished = [], [], []
    for folder in (Path(folder) for folder in folders):
        if not folder.is_dir():
            raise ValueError(f"tables are read from run folders, but {folder} is not a folder")
        for path in sorted({path.parent for path in folder.rglob("run.json")}):
            run = open_run(path)
            if run.info.kind == "training":
                trainings.append(run)
            elif run.info.kind == "benchmark" and run.info.status == "complete" and "scores" in run.tables:
                benchmarks.append(Benchmark(run))
            elif run.info.kind == "benchmark":
                unfinished.append(path)
    if not (benchmarks or trainings or unfinished):
        raise ValueError(
            "tables are read from run folders of `sinklab eval`, `sinklab table1` and `sinklab train`, but there is "
            f"none below {', '.join(map(str, folders))}"
        )
    return Found(tuple(benchmarks), tuple(trainings), tuple(unfinished))


def paired_drop(before: pd.Series, after: pd.Series) -> tuple[float, float, float]:
    """How much less is right on the same questions: the drop and the ends of its 95 % interval.

    NaN without common questions, or where answers are not right or wrong. See `paired_share_interval`.
    """
    both = pd.concat([before, after], axis=1, join="inner").to_numpy(float)
    if not len(both) or not set(both.flat) <= {0.0, 1.0}:
        return math.nan, math.nan, math.nan
    lost, gained = ((both[:, 0] > both[:, 1]).sum(), (both[:, 0] < both[:, 1]).sum())
    return (lost - gained) / len(both), *paired_share_interval(lost, gained, len(both))
