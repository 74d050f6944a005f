"""The sink-token paper's GSM8K protocol inside a benchmark run: the same cache, the same tables."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from sinklab.evaluation import two_stage_scores
from sinklab.evaluation.benchmark_settings import TWO_STAGE
from sinklab.evaluation.gsm8k_two_stage import TwoStageAnswer, two_stage
from sinklab.evaluation.request_cache import request_key
from sinklab.evaluation.two_stage_settings import BATCH, two_stage_settings
from sinklab.evaluation.writing_requests import is_watched

if TYPE_CHECKING:
    from sinklab.evaluation.harness_model import SinklabLM


def answer_all(model: SinklabLM, documents: list[dict[str, Any]]) -> None:
    """Answer this process's share of the questions; every answer is told to the model, as those of lm-eval are.

    As published, answers depend on their batch of 64: such a batch is done by one process, and as a whole.

    Raises:
        ValueError: as :func:`~sinklab.evaluation.gsm8k_two_stage.two_stage` does.
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
    score = two_stage_scores.scored(answers, [row["answer"] for row in documents], published=published)
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
