"""Answers to several prompts at once, each up to its end, and what sinks did while they were written."""

# B batch rows
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sinklab.checkpoints.loading import Loaded
from sinklab.probing.tracing import trace
from sinklab.sampling.settings import DecodingSettings
from sinklab.scoring.sink_facts import SinkFacts
from sinklab.scoring.text_ends import ended
from sinklab.scoring.writing import Writer, Writing, WritingRequest, is_random, seeded

DRAWING_RULES = ("random", "positional", "origin")
DYNAMIC_SCHEDULES = ("threshold", "factor", "entropy_bound")


def needs_own_batch(settings: DecodingSettings, edits: Sequence[Any]) -> bool:
    """Whether an answer would depend on the other rows of its batch, so that it is written alone.

    True where random numbers are drawn (for the tokens, the positions or a random control), and where rows wait for one
    another under something that counts forwards.
    """
    draws = settings.temperature > 0 or bool(settings.alg_temp) or settings.rule in DRAWING_RULES
    draws = draws or settings.pooled or is_random(edits)
    return draws or (settings.schedule in DYNAMIC_SCHEDULES and (bool(edits) or settings.cache != "none"))


@dataclass(frozen=True)
class Answer:
    """What was written, up to its end."""

    text: str
    ids: tuple[int, ...]
    """Tokens up to the end of text; those after an `until` text included."""
    steps: int
    """Model evaluations that the row took part in; where it is 1, a closed loop took nothing away."""
    sinks: tuple[dict[str, Any], ...] = ()
    """Facts of `SinkFacts.row`; empty where the run was not watched."""


def followed(writer: Writer, *, watch: bool) -> tuple[Tensor, SinkFacts | None]:
    """Write everything: the evaluations that each row took part in, (B,), and what sinks did where that is watched."""
    model: Any = writer.loaded.model
    counts_B = torch.zeros(len(writer.over_B), dtype=torch.int64)
    facts = SinkFacts(writer.pad_B, getattr(model.config, "sink_count", 0)) if watch else None
    for step in writer.steps((lambda index: trace(model, (writer.statistic,), steps=(0,))) if watch else None):
        counts_B += step.active_B
        if facts is not None:
            facts.add(step.seen, writer.statistic, step.state_BS, step.active_B, writer.log)
        # what is not read would fill the memory of a long run
        writer.log.removals.clear()
    return counts_B, facts


def write_batch(
    loaded: Loaded,
    requests: Sequence[WritingRequest],
    settings: DecodingSettings,
    new_tokens: int,
    edits: Sequence[Any] = (),
    *,
    watch: bool = False,
) -> list[Answer]:
    """Write the answers to several prompts of any lengths.

    A row is what it would be alone, up to rounding; see `needs_own_batch` for what must be written alone (the seed of
    the first request is taken). Writing ends when every row has met its end.

    Args:
        watch: trace every step, and say what sinks did (`Answer.sinks`).

    Raises:
        ValueError: for what the decoder, the model or the interventions refuse, and NaN logits.
    """
    seed = requests[0].seed
    texts = Writing(loaded, requests, replace(settings, seed=seed), new_tokens, seeded(edits, seed))
    with texts.begin(measure=watch) as writer:
        counts_B, facts = followed(writer, watch=watch)
    answers = []
    for row, request in enumerate(requests):
        ids, text = ended(loaded, writer.row(row), request.until, request.ids[-1:])
        sinks = () if facts is None else tuple(facts.row(row))
        answers.append(Answer(text, tuple(ids), int(counts_B[row]), sinks))
    return answers
