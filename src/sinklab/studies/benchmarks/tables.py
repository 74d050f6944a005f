"""lm-eval's results as tables of a run folder, and as lines to print."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sinklab.records.reading import Run, open_run
from sinklab.records.writing import RunWriter
from sinklab.studies.base import columns_of
from sinklab.studies.benchmarks.code import NO_ANSWER

Told = Mapping[tuple[str, int, int], Mapping[str, Any]]
"""(task, document, number of the request) -> what the model answered."""


def rows_of(results: Mapping[str, Any], told: Told) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of the tables ``scores`` and ``samples`` from lm-eval's results, samples included."""
    samples = [row for task, rows in results["samples"].items() for row in _samples(task, rows, results, told)]
    return _scores(results, samples), samples


def write(run: RunWriter, scores: list[dict[str, Any]], samples: list[dict[str, Any]], told: Told) -> None:
    """Write the tables ``scores``, ``samples`` and ``sinks`` (where something was watched)."""
    samples = sorted(samples, key=lambda row: (row["task"], row["filter"], row["doc_id"]))
    sinks = [
        {"task": task, "doc_id": document, "request": number}
        | {name: math.nan if value is None else value for name, value in facts.items()}
        for (task, document, number), answer in sorted(told.items())
        for facts in answer.get("sinks", ())
    ]
    for name, rows in (("scores", scores), ("samples", samples), ("sinks", sinks)):
        if rows:
            run.table(name, columns_of(rows))


def _scores(results: Mapping[str, Any], samples: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row per task (or group), metric and filter; no_answer is NaN where no pattern is looked for."""
    rows = []
    for task, metrics in results["results"].items():
        effective = results["n-samples"].get(task, {}).get("effective", metrics.get("sample_len", 0))
        for name, value in metrics.items():
            metric, comma, filtered = name.partition(",")
            if not comma or metric.endswith("_stderr"):
                continue
            named = [row["no_answer"] for row in samples if (row["task"], row["filter"]) == (task, filtered)]
            missing = [flag for flag in named if flag is not None]
            row = {"task": task, "metric": metric, "filter": filtered, "value": float(value)}
            row |= {"stderr": _number(metrics.get(f"{metric}_stderr,{filtered}")), "samples": int(effective)}
            row |= {"higher_is_better": results["higher_is_better"].get(task, {}).get(metric)}
            rows.append(row | {"no_answer": sum(missing) / len(missing) if missing else math.nan})
    return rows


def _number(value: Any) -> float:
    """A number as a float; NaN for anything else, such as lm-eval's "N/A"."""
    return float(value) if isinstance(value, numbers.Real | np.bool_) else math.nan


def _samples(task: str, rows: list[Any], results: Mapping[str, Any], told: Told) -> list[dict[str, Any]]:
    config = results["configs"].get(task, {})
    filters = {part["name"]: part["filter"] for part in config.get("filter_list") or ()}
    patterns = {name for name, steps in filters.items() if any("regex" in str(step.get("function")) for step in steps)}
    found = []
    for row in rows:
        document = int(row["doc_id"])
        answers = [told.get((task, document, number), {}) for number in range(len(row["arguments"]))]
        logprobs = [float(answer["logprob"]) for answer in answers if "logprob" in answer]
        text = "" if logprobs else _text(row["resps"][0][0])
        about = {"task": task, "filter": row["filter"], "doc_id": document, "prompt": str(row["arguments"][0][0])}
        about |= {"response": text, "answer": _answer(row, config.get("output_type"), logprobs)}
        about |= {"target": _text(row["target"]), "right": _right(row, results["higher_is_better"].get(task, {}))}
        about["metrics"] = json.dumps({name: row[name] for name in row["metrics"]}, default=str)
        about["no_answer"] = _text(row["filtered_resps"][0]) == NO_ANSWER if row["filter"] in patterns else None
        about["logprobs"] = logprobs
        about["stderrs"] = [float(answer["stderr"]) for answer in answers if "stderr" in answer]
        counts = {name: sum(answer.get(name, 0) for answer in answers) for name in ("tokens", "steps", "cut")}
        found.append(about | counts)
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def _answer(row: Mapping[str, Any], kind: str | None, logprobs: list[float]) -> str:
    """What was filtered out of a text; of several continuations the likeliest."""
    if not logprobs:
        return _text(row["filtered_resps"][0])
    if kind != "multiple_choice":
        return ""
    best = logprobs.index(max(logprobs))
    pair = row["arguments"][best]
    # some tasks put the choices into the context
    several = len({arguments[1] for arguments in row["arguments"]}) > 1
    return str(pair[1] if several else pair[0]).strip()


def _right(row: Mapping[str, Any], higher_is_better: Mapping[str, Any]) -> float:
    """The first of the metrics that is a number: 1 where the answer is right, for those that say so.

    One of which less is better, such as LAMBADA's perplexity, does not say so; NaN where there is no other.
    """
    known = (_number(row[name]) for name in row["metrics"] if higher_is_better.get(name, True))
    return next((number for number in known if not math.isnan(number)), math.nan)


def score_lines(run: Run | str | Path) -> list[str]:
    """The scores of a run folder of kind "benchmark", a line each."""
    opened = run if isinstance(run, Run) else open_run(run)
    lines = []
    for row in opened.table("scores").to_dict("records"):
        filtered = "" if row["filter"] == "none" else f" ({row['filter']})"
        spread = "" if math.isnan(row["stderr"]) else f" ± {row['stderr']:.4f}"
        missing = row["no_answer"]
        noted = "" if math.isnan(missing) or not missing else f"; no answer found in {missing:.0%}"
        number = f"{row['metric']}{filtered} {row['value']:.4f}{spread}"
        lines.append(f"{row['task']}: {number} on {row['samples']} documents{noted}")
    samples = opened.table("samples")
    for task, rows in samples.groupby("task", sort=False):
        one = rows[rows["filter"] == rows["filter"].iloc[0]]
        if cut := int((one["cut"] > 0).sum()):
            lines.append(f"{task}: {cut} of {len(one)} prompts were longer than the context and lost their left end")
    return lines
