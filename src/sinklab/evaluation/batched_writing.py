"""Answers to several prompts at once, by denoising or token after token, under interventions, watched or not."""

# B batch rows, S positions so far
from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from sinklab.evaluation.clean_pass import asks_clean_pass
from sinklab.evaluation.row_writers import Asked, ContinuingRows, DenoisingRows, Taken
from sinklab.evaluation.sink_facts import SinkFacts
from sinklab.evaluation.text_ends import ended
from sinklab.evaluation.writing import seeded
from sinklab.models import Loaded
from sinklab.probing import InterventionLog, Recording, intervene, trace
from sinklab.sampling import DecodingSettings

DRAWING_RULES = ("random", "positional", "origin")
DYNAMIC_SCHEDULES = ("threshold", "factor", "entropy_bound")


@dataclass(frozen=True)
class Answer:
    """What was written, up to its end."""

    text: str
    ids: tuple[int, ...]
    """Tokens up to the end of text; those after an `until` text included."""
    steps: int
    """Model evaluations that the row took part in; where it is 1, a closed loop took nothing away."""
    sinks: tuple[dict[str, Any], ...] = ()
    """Facts of `SinkFacts.row`; empty where nobody watched."""


def is_lonely(settings: DecodingSettings, edits: Sequence[Any]) -> bool:
    """Whether an answer would depend on the other rows of its batch, so that it is written alone.

    True where random numbers are drawn (for the tokens, the positions or a random control), and where rows wait for one
    another under something that counts forwards.
    """
    draws = settings.temperature > 0 or bool(settings.alg_temp) or settings.rule in DRAWING_RULES
    draws = draws or settings.pooled or any(getattr(edit, "control", None) == "random" for edit in edits)
    return draws or (settings.schedule in DYNAMIC_SCHEDULES and (bool(edits) or settings.cache != "none"))


def write_batch(
    loaded: Loaded,
    asked: Sequence[Asked],
    settings: DecodingSettings,
    new_tokens: int,
    edits: Sequence[Any] = (),
    *,
    watch: bool = False,
) -> list[Answer]:
    """Write the answers to several prompts of any lengths.

    A row is what it would be alone, up to rounding; see `is_lonely` for what must be written alone (the seed of the
    first request is taken). Writing ends when every row has met its end.

    Args:
        watch: trace every step, and say what sinks did (`Answer.sinks`).

    Raises:
        ValueError: for what the decoder, the model or the interventions refuse, and NaN logits.
    """
    seed = asked[0].seed
    settings = replace(settings, seed=seed)
    own = seeded(tuple(edits), seed)
    forwards = 2 if settings.cfg_scale and loaded.family == "diffusion" else 1
    # every row may end with its first step: `Answer.steps` tells
    options: dict[str, Any] = {"forwards_per_step": forwards, "measure": watch, "allow_idle": True}
    block = intervene(loaded.model, *own, **options) if own else nullcontext()
    kind: Any = DenoisingRows if loaded.family == "diffusion" else ContinuingRows
    with block as log:
        asking = log if asks_clean_pass(own) else None
        writing = kind(loaded, asked, settings, new_tokens, asking)
        facts = SinkFacts(writing.pad_B, getattr(loaded.model.config, "sink_count", 0)) if watch else None
        return _written(writing, facts, log, asked)


class _Over(Exception):
    """The batch is written: there is no further step."""


def _written(
    writing: Any, facts: SinkFacts | None, log: InterventionLog | None, asked: Sequence[Asked]
) -> list[Answer]:
    steps, counts_B = writing.steps(), torch.zeros(len(asked), dtype=torch.int64)
    while True:
        taken, recording = _next(steps, writing, watched=facts is not None)
        if taken is None:
            break
        active_B, state_BS = taken
        counts_B += active_B
        if facts is not None and recording is not None:
            facts.add(recording, writing.statistic, state_BS(), active_B, log)
        elif log is not None:
            # what nobody reads would fill the memory of a long run
            log.removals.clear()
    answers = []
    for row, request in enumerate(asked):
        ids, text = ended(writing.loaded, writing.row(row), request.until, request.ids[-1:])
        sinks = () if facts is None else tuple(facts.row(row))
        answers.append(Answer(text, tuple(ids), int(counts_B[row]), sinks))
    return answers


def _next(steps: Iterator[Taken], writing: Any, *, watched: bool) -> tuple[Taken | None, Recording | None]:
    if not watched:
        return next(steps, None), None
    try:
        with trace(writing.loaded.model, (writing.statistic,), steps=(0,)) as recording:
            taken = next(steps, None)
            if taken is None:
                # raised through the trace, which refuses a block in which no model ran
                raise _Over
    except _Over:
        return None, None
    return taken, recording
