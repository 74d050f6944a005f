"""The sink-token paper's GSM8K protocol inside a benchmark run: the same cache, the same tables."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.studies.benchmarks.code import marked_answer, same_answer
from sinklab.studies.benchmarks.gsm8k_two_stage import TwoStageAnswer, two_stage
from sinklab.studies.benchmarks.offline import hub_failure, needs_lm_eval, source_of
from sinklab.studies.benchmarks.requests import is_watched
from sinklab.studies.benchmarks.rows import rows_of
from sinklab.studies.benchmarks.settings import BATCH, TWO_STAGE, two_stage_settings
from sinklab.studies.request_cache import request_key

if TYPE_CHECKING:
    from sinklab.studies.benchmarks.gsm8k_two_stage import TwoStageAnswer
if TYPE_CHECKING:
    from sinklab.studies.benchmarks.harness_model import SinklabLM


@dataclass(frozen=True)
class TwoStageScore:
    """How many answers are right."""

    accuracy: float
    stderr: float
    """Binomial standard error, sqrt(p (1 - p) / n)."""
    samples: int
    unanswered: int
    """Answers without ####."""
    too_long: int
    """Questions without room for an answer, among the unanswered."""
    right: tuple[bool, ...] = field(repr=False)


def two_stage_documents(data: str | Path | None, limit: int | None = None) -> list[dict[str, Any]]:
    """GSM8K's test questions and answers, the first `limit` of them.

    Args:
        data: folder of benchmark files; None for the Hub.
        limit: how many; all when left out.

    Raises:
        ValueError: for files that are not there or cannot be read, and a data set that cannot be had from the Hub.
    """
    if data is not None:
        return rows_of("gsm8k", source_of("gsm8k").needed(Path(data), "test"))[:limit]
    needs_lm_eval()
    import datasets

    try:
        found = datasets.load_dataset("openai/gsm8k", "main", split="test")
    except Exception as error:
        # data sets, the Hub and their clients fail in dozens of ways
        raise ValueError(hub_failure("gsm8k", error)) from error
    return [dict(row) for row in found][:limit]


def scored(answers: Sequence[TwoStageAnswer], targets: Sequence[str], *, published: bool = False) -> TwoStageScore:
    """The share of right answers; those without ``####`` are wrong and counted.

    Args:
        answers: in the order of their targets.
        targets: GSM8K's answers, with their steps, or the numbers alone.
        published: compare as text, as the released code does without antlr4.

    Raises:
        ValueError: for no answers, or another number of targets.
    """
    if not answers or len(answers) != len(targets):
        raise ValueError(f"a score needs a target for each answer, got {len(answers)} answers, {len(targets)} targets")
    wanted = [marked_answer(target) or target for target in targets]
    right = tuple(
        one.answer is not None and same_answer(one.answer, other, published=published)
        for one, other in zip(answers, wanted, strict=True)
    )
    share = sum(right) / len(right)
    return TwoStageScore(
        share,
        math.sqrt(share * (1 - share) / len(right)),
        len(right),
        sum(answer.answer is None for answer in answers),
        sum(not answer.fits for answer in answers),
        right,
    )


def answer_all(model: SinklabLM, documents: list[dict[str, Any]]) -> None:
    """Answer this process's share of the questions; every answer is told to the model, as those of lm-eval are.

    As published, answers depend on their batch of 64: such a batch is done by one process, and as a whole.

    Raises:
        ValueError: as :func:`~sinklab.studies.benchmarks.gsm8k_two_stage.two_stage` does.
    """
    settings = model.settings
    unit = BATCH if settings.published else 1
    numbers = [number for number in range(len(documents)) if number // unit % model.world_size == model.rank]
    keys = {number: request_key(TWO_STAGE, number, documents[number]["question"]) for number in numbers}
    open_units = {number // unit for number in numbers if model.cache.get(keys[number]) is None}
    todo = [number for number in numbers if number // unit in open_units]
    done = len(numbers) - len(todo)
    there = f", {done} of them there already" if done else ""
    model.teller.stage(f"{TWO_STAGE}: answering {len(numbers)} questions{there}")
    model.teller.count(done, len(numbers))
    answers = two_stage(
        model.loaded,
        [documents[number]["question"] for number in todo],
        settings=two_stage_settings(settings, published=settings.published),
        published=settings.published,
        edits=model.edits,
        numbers=todo,
        batch=settings.batch,
        watch=lambda number: not settings.published and is_watched(settings, number),
    )
    for answer in answers if todo else ():
        model.cache.add({keys[answer.number]: _kept(answer)})
        done += 1
        model.teller.count(done, len(numbers))
    for number, key in keys.items():
        model.tell((TWO_STAGE, number), 0, model.cache.get(key) or {})


def _kept(answer: TwoStageAnswer) -> dict[str, Any]:
    return {
        "text": answer.text,
        "answer": answer.answer,
        "fits": answer.fits,
        "steps": answer.steps,
        "sinks": list(answer.sinks),
    }


def rows(
    documents: list[dict[str, Any]], told: dict[tuple[str, int, int], dict[str, Any]], *, published: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of the tables ``scores`` and ``samples``."""
    kept = [told[TWO_STAGE, number, 0] for number in range(len(documents))]
    answers = [
        TwoStageAnswer(number, given["text"], given["answer"], given["fits"], given["steps"])
        for number, given in enumerate(kept)
    ]
    score = scored(answers, [row["answer"] for row in documents], published=published)
    scores = {
        "task": TWO_STAGE,
        "metric": "exact_match",
        "filter": "none",
        "value": score.accuracy,
        "stderr": score.stderr,
        "samples": score.samples,
        "higher_is_better": True,
        "no_answer": score.unanswered / score.samples,
    }
    samples = [
        {
            "task": TWO_STAGE,
            "filter": "none",
            "doc_id": answer.number,
            "prompt": document["question"],
            "response": answer.text,
            "answer": answer.answer or "",
            "target": document["answer"],
            "right": float(right),
            "metrics": json.dumps({"exact_match": float(right)}),
            "no_answer": answer.answer is None,
            "logprobs": [],
            "stderrs": [],
            "tokens": 0,
            "steps": answer.steps,
            "cut": 0,
        }
        for answer, document, right in zip(answers, documents, score.right, strict=True)
    ]
    return [scores], samples
