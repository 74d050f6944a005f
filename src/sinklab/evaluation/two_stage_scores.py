"""What two-stage answers are worth, and the questions they answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.evaluation.answers import marked_answer, same_answer
from sinklab.evaluation.benchmark_rows import rows_of
from sinklab.evaluation.offline import hub_failure, needs_lm_eval
from sinklab.evaluation.task_files import source_of

if TYPE_CHECKING:
    from sinklab.evaluation.gsm8k_two_stage import TwoStageAnswer


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
