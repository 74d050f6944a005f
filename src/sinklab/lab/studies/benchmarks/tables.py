"""Run folders of kind "benchmark": their tables from lm-eval's results, read again beside the
numbers that the two papers print.
"""

import json
import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sinklab.core.instrument import DOSE_COLUMNS, Dose
from sinklab.lab.files import toml_of
from sinklab.lab.records import Run, open_run
from sinklab.lab.studies import Row
from sinklab.lab.studies.benchmarks.offline import RUNS_CODE
from sinklab.lab.studies.benchmarks.study import MASKING, NO_ANSWER


def rows_of(results: Mapping[str, Any], told: Mapping[Any, Row]) -> tuple[list[Row], list[Row]]:
    """Rows of the tables ``scores`` and ``samples`` from lm-eval's results, samples included.

    Scores: a row per task (or group), metric and filter; no_answer is NaN of likelihoods. Of a task
    that runs programs it says how many were kept, and not run.

    Args:
        results: of lm-eval.
        told: (task, document, number of the request) -> the model's answer.
    """
    samples = [
        _sample(task, row, results["higher_is_better"].get(task, {}), told)
        for task, rows in results["samples"].items()
        for row in rows
    ]
    scores = []
    for task, metrics in results["results"].items():
        effective = (
            results["n-samples"].get(task, {}).get("effective", metrics.get("sample_len", 0))
        )
        for name, value in metrics.items():
            metric, comma, filtered = name.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            of_task = [row for row in samples if (row["task"], row["filter"]) == (task, filtered)]
            row = {
                "task": task,
                "metric": metric,
                "filter": filtered,
                "value": float(value),
                "stderr": _number(metrics.get(f"{metric}_stderr,{filtered}")),
                "samples": int(effective),
                "higher_is_better": results["higher_is_better"].get(task, {}).get(metric),
                "no_answer": float(
                    pd.Series([row["no_answer"] for row in of_task], dtype=float).mean()
                ),
            }
            if task in RUNS_CODE:
                row["kept"] = sum(math.isnan(row["right"]) for row in of_task)
            scores.append(row)
    return scores, samples


def _number(value: Any) -> float:
    """A number as a float; NaN for anything else, such as lm-eval's "N/A"."""
    if isinstance(value, numbers.Real | np.bool_):
        return float(value)
    return math.nan


def _sample(task: str, row: Row, higher_is_better: Row, told: Mapping[Any, Row]) -> Row:
    document = int(row["doc_id"])
    answers = [told.get((task, document, place), {}) for place in range(len(row["arguments"]))]
    # less is better of some metrics, such as LAMBADA's perplexity
    values = [_number(row[name]) for name in row["metrics"] if higher_is_better.get(name, True)]
    about = {
        "task": task,
        "filter": row["filter"],
        "doc_id": document,
        "prompt": str(row["arguments"][0][0]),
        "response": "",
        "answer": "",
        "target": _text(row["target"]),
        "right": next((number for number in values if not math.isnan(number)), math.nan),
        "metrics": json.dumps({name: row[name] for name in row["metrics"]}, default=str),
        "no_answer": None,
        "logprobs": [float(answer["logprob"]) for answer in answers if "logprob" in answer],
        "stderrs": [float(answer["stderr"]) for answer in answers if "stderr" in answer],
    }
    if len(about["logprobs"]) > 1:
        best = int(np.argmax(about["logprobs"]))
        about["answer"] = str(row["arguments"][best][1]).strip()
    elif not about["logprobs"]:
        about["response"] = _text(row["resps"][0][0])
        about["answer"] = _text(row["filtered_resps"][0])
        about["no_answer"] = about["answer"] == NO_ANSWER
    for name in ("tokens", "steps", "cut"):
        about[name] = sum(answer.get(name, 0) for answer in answers)
    about["new_tokens"] = max((answer.get("new_tokens", 0) for answer in answers), default=0)
    return about


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value, default=str, ensure_ascii=False)


def score_sentences(run: Run) -> list[str]:
    """The scores of a benchmark run, a line each; then its doses, and prompts that were too
    long.
    """
    said = []
    for row in run.table("scores").to_dict("records"):
        task = row["task"]
        if row.get("kept", 0) > 0:
            said.append(
                f"{task}: {row['kept']:.0f} programs are kept and were not run, because bubblewrap "
                "cannot be had: where it can, sinklab score RUN"
            )
            continue
        parts = [f"{task}: {row['metric']}"]
        if row["filter"] != "none":
            parts.append(f"({row['filter']})")
        parts.append(f"{row['value']:.4f}")
        if not math.isnan(row["stderr"]):
            parts.append(f"± {row['stderr']:.4f}")
        line = f"{' '.join(parts)} on {row['samples']} documents"
        if row["no_answer"] > 0:
            line += f"; no answer found in {row['no_answer']:.0%}"
        said.append(line)
    doses: list[Row] = []
    if "doses" in run.tables:
        doses = run.table("doses").to_dict("records")
    for row in doses:
        how = row["edits"]
        if row["protocol"]:
            how = f"protocol {row['protocol']} ({KEYS[Benchmark(run).control]})"
        line = f"{row['task']}: blocked by {how}: {from_row(row)}, on {row['documents']}"
        line += " documents"
        if row["measured"] < row["documents"]:
            line += f" (what was removed: on {row['measured']})"
        said.append(line)
    for task, rows in run.table("samples").groupby("task", sort=False):
        first = rows[rows["filter"] == rows["filter"].iloc[0]]
        cut = (first["cut"] > 0).sum()
        if cut:
            said.append(
                f"{task}: {cut} of {len(first)} prompts were longer than the context and lost "
                "their left end"
            )
    return said


KEYS = {
    "sinks": "most attended keys",
    "random": "random keys",
    "matched": "most attended keys in heads with a control of equal mass",
    "equal_mass": "other keys of equal mass",
}
"""Name of the keys that a control blocks: those that no rule has chosen are not called sinks."""


def from_row(row: Mapping[str, Any]) -> Dose:
    """A dose from the means in a table (`Dose.row`), as one entry, for display. Missing columns are
    unknown.
    """
    known = {name: float(row[name]) for name in DOSE_COLUMNS if row.get(name) is not None}
    return Dose({name: (value, 1.0) for name, value in known.items() if not math.isnan(value)})


def as_printed(
    cells: pd.DataFrame, rows: list[str], columns: Iterable[str] | None = None
) -> pd.DataFrame:
    """A paper's table: a line per row of these names, and in each column the text of its cell; – is
    missing.
    """
    wide = cells.set_index([*rows, "column"])["text"].unstack(fill_value="–", sort=False)
    if columns is not None:
        wide = wide[[*columns]]
    return wide.reset_index().rename_axis(columns=None)


_PRINTED = toml_of(__package__, "published.toml")

KS = tuple(_PRINTED["masked_sinks"]["ks"])
"""Numbers of blocked sinks in the analysis paper's Table 1; 0 is its row «unmasked»."""
TABLE1 = _PRINTED["masked_sinks"]["cells"]
"""Task -> model -> by number of blocked sinks the share of right answers and the number printed
behind ±.
"""
TABLE1_NOTES = _PRINTED["masked_sinks"]["notes"]
TITLES = _PRINTED["masked_sinks"]["titles"]
FORMS = {"humaneval_instruct": "humaneval", "gsm8k_cot": "gsm8k", "gsm8k_cot_zeroshot": "gsm8k"}
"""Tasks of lm-eval that ask a benchmark of the paper in another form."""


ONE_TOKEN = _PRINTED["one_token"]
"""Tables 1 to 5 of the sink-token paper, and their notes, recipes, variants and columns."""

# What a task is worth: its metric and, where there are several, its filter. Others: the first of
# `_COMMON` there is.
HEADLINE = {"gsm8k": ("exact_match", "flexible-extract"), "humaneval": ("pass@1", None)}
_COMMON = ("acc", "exact_match", "pass@1", "accuracy")


@dataclass(frozen=True, eq=False)
class Benchmark:
    """One run of kind "benchmark" that came to its end."""

    run: Run

    @property
    def model(self) -> dict[str, Any]:
        return self.run.info.model

    @property
    def is_diffusion(self) -> bool:
        return self.model.get("family") == "diffusion"

    @property
    def k(self) -> int:
        """Blocked keys; 0 for none."""
        return int(self.run.info.settings.get("mask_sinks") or 0)

    @property
    def control(self) -> str:
        """Keys that were masked: sinks (the keys that the protocol names), or others."""
        return str(self.run.info.settings.get("control") or "sinks")

    @property
    def alike(self) -> str:
        """Weights and settings that runs which differ in masking alone have in common."""
        # answers of a task have a length of their own, and some are programs
        free = (*MASKING, "tasks", "record_sinks", "new_tokens", "run_code")
        settings = {key: value for key, value in self.run.info.settings.items() if key not in free}
        return json.dumps(
            [self.model.get("name"), self.model.get("weights_sha256"), settings], sort_keys=True
        )

    @cached_property
    def scores(self) -> pd.DataFrame:
        """The table ``scores``."""
        return self.run.table("scores")

    @property
    def tasks(self) -> list[str]:
        """Tasks that were scored."""
        return list(dict.fromkeys(self.scores["task"]))

    def score(self, task: str, metric: str | None = None) -> pd.Series | None:
        """The row of this metric, else of the task's headline; None if it was not scored.

        Its stderr is binomial for shares, sqrt(p (1 - p) / n), and else lm-eval's.
        """
        rows = self.scores[self.scores["task"] == task]
        if rows.empty:
            return None
        headline, filtered = HEADLINE.get(task, ("", None))
        order = [metric, headline, *_COMMON, *rows["metric"]]
        name = next(name for name in order if name in set(rows["metric"]))
        rows = rows[rows["metric"] == name]
        if name != metric and (rows["filter"] == filtered).any():
            rows = rows[rows["filter"] == filtered]
        row = rows.iloc[0].copy()
        share = float(row["value"])
        if 0 <= share <= 1 and name in (*_COMMON, "acc_norm"):
            row["stderr"] = math.sqrt(share * (1 - share) / (row["samples"] or math.nan))
        return row


def found_in(folders: Iterable[str | Path]) -> tuple[list[Benchmark], list[Run]]:
    """Benchmarks and training runs, at or below these folders; runs of other kinds, and benchmarks
    that did not come to their end, are passed over.

    Raises:
        ValueError: for a folder that does not exist, a damaged run, and if there is no run at all.
    """
    benchmarks, trainings = [], []
    for folder in map(Path, folders):
        if not folder.is_dir():
            raise ValueError(f"tables are read from run folders, but {folder} is not a folder")
        for path in sorted({path.parent for path in folder.rglob("run.json")}):
            run = open_run(path)
            if run.info.kind == "training":
                trainings.append(run)
            elif run.info.kind == "benchmark" and run.info.status == "complete":
                benchmarks.append(Benchmark(run))
    if not (benchmarks or trainings):
        raise ValueError(
            "tables are read from finished run folders of `sinklab eval`, `sinklab table1` and "
            f"`sinklab train`, but there is none below {', '.join(map(str, folders))}"
        )
    return benchmarks, trainings
