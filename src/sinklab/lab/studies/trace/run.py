"""A trace, run: texts written under observation, then with sinks blocked."""

# T recorded steps, L layers, H heads, K keys, S canvas positions
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from sinklab.core.instrument import BlockKeys, InterventionLog
from sinklab.core.registry import interventions
from sinklab.core.sinks import STATES
from sinklab.core.subject import DecodingSettings
from sinklab.lab.checkpoints import Loaded, special_roles, token_text
from sinklab.lab.measures import Random
from sinklab.lab.records import Arrays, Contents
from sinklab.lab.scoring import (
    Moment,
    Task,
    Writing,
    WritingRequest,
    encode,
    removal_table,
    sample_seed,
    seeded,
    state_records,
)
from sinklab.lab.studies import Row, Tick, Work, text_of
from sinklab.lab.studies.trace.recording import Recorder, Selection
from sinklab.lab.studies.trace.study import STATISTICS, StudySettings

POSITIONS = 512
"""Canvas positions of texts that are written in one batch, at most."""
SAMPLES, BYTES = 16, 1 << 26
"""Samples of a part, and bytes of received attention in it, at most."""


# a text that was written under observation
Followed = tuple[Recorder, list[Moment], InterventionLog]


def in_one_batch(tasks: list[Task]) -> bool:
    """Whether these samples are written in one batch.

    Short texts take most of their time to read the weights, which a batch reads once. Its rows are
    what they would be alone, up to rounding; bit for bit they depend on the batch, which is
    therefore the same whatever is missing when a run is resumed or shared.
    """
    task = tasks[0]
    settings = task.settings
    usual = DecodingSettings(
        steps=settings.steps, block_length=settings.block_length, seed=settings.seed
    )
    model = task.loaded.model
    stands_alone = (
        len(tasks) == 1
        or not vars(usual).items() <= vars(settings).items()
        or settings.maps
        or not settings.new_tokens
        or not {*settings.statistics} <= {*STATISTICS}
        # masks alone are all alike: a tie, which rounding would decide
        or not all(one.prompt.ids for one in tasks)
        or len(tasks) * max(one.positions for one in tasks) > POSITIONS
        or not task.is_fast
        or model.config.block_length
    )
    return not stands_alone


def part_size(plan: "Plan") -> int:
    """Samples of a part: `SAMPLES`, or half as many as often as it takes to have less than `BYTES`
    of received attention.
    """
    settings = plan.tasks[0].settings
    cells = 2 * len(plan.selection.layers) * len(plan.selection.heads)
    if "received_by_state" in settings.statistics:
        cells *= 1 + len(STATES)
    largest = max(
        cells * math.ceil(task.most_steps / settings.every) * task.positions for task in plan.tasks
    )
    count = SAMPLES
    while settings.keep_arrays and count > 1 and count * largest > BYTES:
        count //= 2
    return count


def follow(tasks: list[Task], selection: Selection, tick: Tick) -> list[Followed]:
    """Write these samples, several in one batch, each with a recorder of its own; the steps that
    are to be recorded run under a trace.
    """
    task = tasks[0]
    texts = Writing(
        task.loaded,
        [WritingRequest(one.started()) for one in tasks],
        replace(task.settings, seed=task.seed),
        task.settings.new_tokens,
        task.edits,
        ends=False,
        full_forward=task.settings.full_forward,
    )
    followed: list[Followed] = []
    writer: Any
    with texts.begin() as writer:
        for one, pad in zip(tasks, writer.pad_B.tolist(), strict=True):
            followed.append((Recorder(one, selection, pad=pad), [], writer.log))
        canvas = writer.canvas if task.is_diffusion else None
        for step in writer.steps(partial(followed[0][0].watching, canvas=canvas)):
            for row, (recorder, moments, _) in enumerate(followed):
                moments.append(step.moment(row))
                if step.seen is not None:
                    recorder.add(step.seen, moments[-1], row)
                tick()
    return followed


def _generation(task: Task, sample: int, moments: list[Moment], log: InterventionLog) -> Row:
    last = moments[-1]
    written = last.written
    prompt = task.prompt.text
    completion = text_of(task.loaded, written)
    if task.settings.new_tokens == 0:
        # the masks stood in the prompt: the text is whole with the tokens that fill them
        prompt = ""
        whole_S = last.ids_S.copy()
        whole_S[last.state_S != STATES.index("prompt")] = written
        completion = text_of(task.loaded, whole_S)
    else:
        if getattr(task.loaded.config, "opening_ids", ()):
            # the tokenizer of a masked language model writes the space between words, and none
            # before the first
            given_P = np.array(task.prompt.ids)
            whole = text_of(task.loaded, np.concatenate([given_P, written]))
            completion = whole.removeprefix(text_of(task.loaded, given_P))
        if task.loaded.tokenizer is None and not completion.startswith(" "):
            # ids, which stand apart from those of the prompt
            completion = f" {completion}"
    return {
        "sample": sample,
        "prompt": prompt,
        "completion": completion,
        "rule": task.settings.rule if task.is_diffusion else "next_token",
        "edits": " ".join(map(interventions.as_text, task.settings.edits)),
        "idle": " ".join(log.idle),
        "token_ids": written.tolist(),
        "steps": len(moments),
        "seed": task.seed,
    }


def _tokens(
    task: Task, moments: list[Moment], sample: int, roles: Mapping[int, str]
) -> dict[str, Any]:
    """The token at each position before each recorded step."""
    lengths = [len(moment.ids_S) for moment in moments]
    ids = np.concatenate([np.empty(0, np.int64), *(moment.ids_S for moment in moments)])
    states = np.concatenate([np.empty(0, np.int8), *(moment.state_S for moment in moments)])
    positions = np.concatenate([np.empty(0, np.int32), *map(np.arange, lengths)], dtype=np.int32)
    different, number = np.unique(ids, return_inverse=True)
    texts = [token_text(task.loaded.tokenizer, one) for one in different.tolist()]
    special = [roles.get(one, "") for one in different.tolist()]
    return {
        "sample": np.full(len(ids), sample),
        "step": np.repeat([moment.index for moment in moments], lengths).astype(np.int64),
        "position": positions,
        "token_id": ids,
        "text": np.array(texts, dtype=object)[number],
        "state": np.array(STATES, dtype=object)[states],
        "special": np.array(special, dtype=object)[number],
        "template": np.isin(positions, np.flatnonzero(task.prompt.template)),
    }


@dataclass(frozen=True)
class Plan:
    """Texts to write, known before a folder is taken."""

    selection: Selection
    tasks: list[Task]


def prepare(loaded: Loaded, settings: StudySettings) -> Plan:
    """The texts to write. Raises ValueError for anything that can be refused without running the
    model.
    """
    selection = Selection.of(loaded.config, settings)
    if settings.twin:
        settings.check_controls()
    if not settings.prompts:
        raise ValueError(
            "a study needs at least one prompt; an empty string is allowed and lets the model "
            "start by itself"
        )
    seed = settings.seed or 0
    tasks = []
    for sample, text in enumerate(settings.prompts):
        prompt = encode(loaded, text, settings.chat)
        task = Task(
            loaded, prompt, settings, sample_seed(seed, sample), seeded(settings.edits, sample)
        )
        task.check()
        _check_hidden(task, text)
        last = task.most_steps - 1
        late = [key for key in settings.map_keys if key[0] > last]
        if late:
            raise ValueError(
                f"maps are recorded of steps 0 to {last}, but {':'.join(map(str, late[0]))} names "
                f"step {late[0][0]}"
            )
        tasks.append(task)
    return Plan(selection, tasks)


def _check_hidden(task: Task, text: str) -> None:
    """Refuse to block as many keys as there are: for a causal model, as many as its first step
    reads.
    """
    settings = task.settings
    if task.is_diffusion:
        keys = task.positions + task.loaded.added_sinks
        when = f"with {settings.new_tokens} new tokens"
    else:
        keys = len(task.started())
        when = "at the first step"
    for edit in settings.edits:
        if not isinstance(edit, BlockKeys) or edit.keys.max_count is None:
            continue
        # as many other columns must be left to be the controls
        shares = 2 if isinstance(edit.keys, Random) else 1
        k = shares * edit.keys.max_count
        if k >= keys:
            raise ValueError(
                f"{interventions.as_text(edit)} blocks fewer than all keys, but is to block {k} of "
                f"the {keys} keys of {text!r} {when}; choose smaller numbers"
            )


def make(work: Work, samples: Sequence[int]) -> dict[int, Contents]:
    """Write these samples, and note what was seen."""
    plan = work.plan
    tasks, each = [plan.tasks[sample] for sample in samples], 1
    if in_one_batch(tasks):
        each = len(tasks)
    contents = {}
    tick = work.progress.counter(sum(task.most_steps for task in tasks))
    for first in range(0, len(tasks), each):
        some = samples[first : first + each]
        named = f"sample {some[0] + 1}"
        if each > 1:
            named = f"samples {some[0] + 1} to {some[-1] + 1}"
        work.progress.stage(f"writing {named} of {len(plan.tasks)}")
        found = follow(tasks[first : first + each], plan.selection, tick)
        for sample, followed in zip(some, found, strict=True):
            contents[sample] = _contents(plan.tasks[sample], sample, followed)
    return contents


def _contents(task: Task, sample: int, followed: Followed) -> Contents:
    """Tables and arrays of a sample that was written."""
    recorder, moments, log = followed
    tables, arrays = recorder.contents(sample)
    roles = special_roles(task.loaded)
    found = {**tables, "tokens": _tokens(task, recorder.moments, sample, roles)}
    found["steps"] = [
        {
            "sample": sample,
            "step": moment.index,
            "block": moment.block,
            "masked": int((moment.state_S == 0).sum()),
            "committed": moment.committed,
            "queries": recorder.queries.get(moment.index),
        }
        for moment in moments
    ]
    if task.edits:
        clipped = [{"sample": sample, **record._asdict()} for record in state_records(log)]
        if clipped:
            found["clipped"] = clipped
        removals = removal_table(log)
        found["removals"] = {"sample": np.full(len(removals["forward"]), sample), **removals}
    found["generations"] = [_generation(task, sample, moments, log)]
    if recorder.maps:
        # each map has axes of its own: their sizes differ
        axes = {name: (f"query_{name}", f"key_{name}") for name in recorder.maps}
        arrays = {**arrays, "maps": Arrays(recorder.maps, axes)}
    return Contents(found, arrays)
