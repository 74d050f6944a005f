"""Answers that are written together, each up to its end, with the dose of its edits and facts of
its sinks while it was written.
"""

# B batch rows, L layers, H heads, K keys (added sinks first), S positions
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinklab.core.instrument import Recording, trace
from sinklab.core.subject import DecodingSettings
from sinklab.lab.analysis.facts import PLACES, sink_columns
from sinklab.lab.checkpoints import Loaded
from sinklab.lab.scoring import Writing, WritingRequest, ended, seeded
from sinklab.lab.scoring.writing import Writer, is_random, taken, totals
from sinklab.lab.studies import Row, Tick, nothing

Columns = dict[str, np.ndarray]
"""Facts of a step, each (L,); see `sink_columns`."""


def columns_of(
    recording: Recording, statistic: str, forward: int, row: int, state_S: Tensor, prefix: int
) -> Columns:
    """Facts of one row in one forward of a recording.

    Args:
        recording: of the forward.
        statistic: "received" or "last_row".
        forward: its number in the recording.
        row: of the batch.
        state_S: state of each position, a number in `PLACES`.
        prefix: added sinks, in front of the keys.
    """
    received_LHK = recording.values(statistic)[forward][row].float().cpu().numpy()
    seen_K = recording.visible[forward][row].cpu().numpy() > 0
    added_N = np.full(prefix, PLACES.index("sink"))
    return sink_columns(received_LHK, seen_K, np.concatenate([added_N, state_S.cpu().numpy()]))


def sink_rows(steps: Sequence[Columns]) -> list[Row]:
    """Means over the steps of an answer, a row a layer; none without steps."""
    if not steps:
        return []
    means = {name: np.mean([step[name] for step in steps], axis=0) for name in steps[0]}
    layers = range(len(means["share"]))
    return [
        {"layer": layer, "steps": len(steps)}
        | {name: float(mean_L[layer]) for name, mean_L in means.items()}
        for layer in layers
    ]


def needs_own_batch(settings: DecodingSettings, edits: Sequence[Any]) -> bool:
    """Whether an answer would depend on the other rows of its batch, so that it is written alone.

    True if random numbers are drawn (for the tokens, the positions or a random control), and if
    rows wait for one another under something that counts forwards.
    """
    chosen = settings.values()
    rule, schedule = chosen["rule"], chosen["schedule"]
    draws = settings.temperature > 0 or rule.draws or schedule.pooled or is_random(edits)
    return draws or (not schedule.fixed and (bool(edits) or chosen["cache"] is not None))


def followed(writer: Writer, *, watch: bool = False, tick: Tick = nothing) -> list[Row]:
    """Write everything, and return what is known of each row: ``steps``, evaluations that it took
    part in; ``sinks``, rows of facts if they are watched; ``dose``, the totals of a `Dose`.
    """
    model: Any = writer.loaded.model
    watched: list[list[Columns]] = [[] for _ in writer.over_B]
    steps_B = torch.zeros(len(watched), dtype=torch.int64)
    watching: Callable[[int], Any] | None = None
    if watch:
        watching = partial(_traced, model, writer.statistic)
    taken_BN2: Any = 0
    for step in writer.steps(watching):
        steps_B += step.active_B
        taken_BN2 = taken_BN2 + taken(writer.log, step.active_B)
        # unread entries would fill the memory of a long run
        writer.log.removals.clear()
        if watch:
            how = partial(columns_of, step.seen, writer.statistic, 0)
            for row in step.active_B.nonzero()[:, 0].tolist():
                watched[row].append(how(row, step.state_BS[row], writer.loaded.added_sinks))
        tick()
    if not isinstance(taken_BN2, Tensor):
        taken_BN2 = [0] * len(watched)
    return [
        {"steps": steps, "sinks": sink_rows(some), "dose": totals(taken_N2)}
        for steps, some, taken_N2 in zip(steps_B.tolist(), watched, taken_BN2, strict=True)
    ]


def _traced(model: Any, statistic: str, index: int) -> Any:
    return trace(model, (statistic,), steps=(0,))


def write_batch(
    loaded: Loaded,
    requests: Sequence[WritingRequest],
    settings: DecodingSettings,
    new_tokens: int,
    edits: Sequence[Any] = (),
    *,
    watch: bool = False,
    tick: Tick = nothing,
) -> list[Row]:
    """Write the answers to several prompts of any lengths: ``text``, ``tokens`` up to the end of
    text (those after an `until` text included), and what `followed` knows.

    A row is what it would be alone, up to rounding; see `needs_own_batch` for answers that must be
    written alone (the seed of the first request is used). Writing ends when every row has met its
    end.

    Args:
        loaded: the model.
        requests: the prompts.
        settings: of decoding.
        new_tokens: to write, for each.
        edits: interventions they are written under.
        watch: trace every step, and give facts about sinks.
        tick: called after every step.

    Raises:
        ValueError: for settings that the decoder, the model or the interventions refuse, and NaN
            logits.
    """
    seed = requests[0].seed
    texts = Writing(loaded, requests, replace(settings, seed=seed), new_tokens, seeded(edits, seed))
    with texts.begin(measure=watch) as writer:
        rows = followed(writer, watch=watch, tick=tick)
    answers = []
    for row, (request, found) in enumerate(zip(requests, rows, strict=True)):
        ids, text = ended(loaded, writer.row(row), request.until, request.ids[-1:])
        answers.append({"text": text, "tokens": len(ids), **found})
    return answers
