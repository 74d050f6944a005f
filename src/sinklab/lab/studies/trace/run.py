"""A trace, run: texts written under observation, then with sinks blocked."""

# T recorded steps, L layers, H heads, K keys, S canvas positions
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from sinklab.core.instrument import BlockKeys, InterventionLog
from sinklab.core.registry import interventions
from sinklab.core.sinks import STATES
from sinklab.core.subject import DecodingSettings
from sinklab.lab.checkpoints import Loaded, special_roles, token_text
from sinklab.lab.measures import MaskSinks, Random
from sinklab.lab.scoring import (
    Moment,
    Task,
    Writing,
    WritingRequest,
    encode,
    sample_seed,
    seeded,
    state_records,
)
from sinklab.lab.studies import Meter, Progress, Row, Work, text_of
from sinklab.lab.studies.trace.recording import Recorder, Selection
from sinklab.lab.studies.trace.study import STATISTICS, StudySettings, Trace

TOGETHER = Trace.together
# canvas positions of texts that are written in one batch, at most
POSITIONS = 512


def follow(
    task: Task, meter: Meter, recorder: Recorder | None = None, *more_edits: Any
) -> tuple[list[Moment], InterventionLog]:
    """Write a text, step by step, under its edits; the steps that are to be recorded run under a
    trace.
    """
    moments = []
    watch = None
    if recorder is not None:
        watch = recorder.watching
    with task.writing(*more_edits) as writer:
        for step in writer.steps(watch):
            moments.append(step.moment())
            if recorder is not None and step.seen is not None:
                recorder.add(step.seen, moments[-1])
            meter.step()
        meter.end()
    return moments, writer.log


# a text that was written under observation
Followed = tuple[Recorder, list[Moment], InterventionLog]


def companions(tasks: list[Task], sample: int) -> list[int]:
    """Samples to write in one batch with this one, itself among them.

    Short texts take most of their time to read the weights, which a batch reads once. Its rows are
    what they would be alone, up to rounding; bit for bit they depend on the batch, which is
    therefore the same whatever is missing when a run is resumed or shared.
    """
    task = tasks[sample]
    settings = task.settings
    usual = DecodingSettings(
        steps=settings.steps, block_length=settings.block_length, seed=settings.seed
    )
    some = [one for one in range(len(tasks)) if one // TOGETHER == sample // TOGETHER]
    model = task.loaded.model
    stands_alone = (
        not vars(usual).items() <= vars(settings).items()
        or settings.maps
        or not settings.new_tokens
        or not {*settings.statistics} <= {*STATISTICS}
        # masks alone are all alike: a tie, which rounding would decide
        or not all(tasks[one].prompt.ids for one in some)
        or len(some) * max(tasks[one].positions for one in some) > POSITIONS
        or not task.is_fast
        or model.config.block_length
    )
    if stands_alone:
        return [sample]
    return some


def follow_together(
    tasks: list[Task], some: list[int], selection: Selection, meter: Meter
) -> dict[int, Followed]:
    """Write these samples, several of them in one batch, each with a recorder of its own."""
    task = tasks[some[0]]
    if len(some) == 1:
        recorder = Recorder(task, selection)
        return {some[0]: (recorder, *follow(task, meter, recorder))}
    requests = [WritingRequest(tasks[one].prompt.ids) for one in some]
    texts = Writing(task.loaded, requests, task.settings, task.settings.new_tokens, ends=False)
    followed: dict[int, Followed] = {}
    writer: Any
    with texts.begin() as writer:
        for one, pad in zip(some, writer.pad_B.tolist(), strict=True):
            followed[one] = Recorder(tasks[one], selection, pad=pad), [], writer.log
        first = followed[some[0]][0]
        for step in writer.steps(partial(first.watching, canvas=writer.canvas)):
            for row, (recorder, moments, _) in enumerate(followed.values()):
                moments.append(step.moment(row))
                if step.seen is not None:
                    recorder.add(step.seen, moments[-1], row)
                meter.step()
    return followed


def _generation(
    task: Task, sample: int, moments: list[Moment], k: int, log: InterventionLog
) -> Row:
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
        "masked_sinks": k,
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
    kept = [moment for moment in moments if task.settings.records(moment.index)]
    lengths = [len(moment.ids_S) for moment in kept]
    ids = np.concatenate([np.empty(0, np.int64), *(moment.ids_S for moment in kept)])
    states = np.concatenate([np.empty(0, np.int8), *(moment.state_S for moment in kept)])
    positions = np.concatenate([np.empty(0, np.int32), *map(np.arange, lengths)], dtype=np.int32)
    different, number = np.unique(ids, return_inverse=True)
    texts = [token_text(task.loaded.tokenizer, one) for one in different.tolist()]
    special = [roles.get(one, "") for one in different.tolist()]
    return {
        "sample": np.full(len(ids), sample),
        "step": np.repeat([moment.index for moment in kept], lengths).astype(np.int64),
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


def prepare(loaded: Loaded, settings: StudySettings, progress: Progress) -> Plan:
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
        if settings.only_steps and max(settings.only_steps) > last:
            raise ValueError(
                f"only_steps are steps 0 to {last} of this run, but {max(settings.only_steps)} is "
                "none"
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
    named = [("mask_sinks", k) for k in settings.mask_sinks]
    for edit in settings.edits:
        if isinstance(edit, BlockKeys) and edit.keys.max_count is not None:
            # as many other columns must be left to be the controls
            shares = 2 if isinstance(edit.keys, Random) else 1
            named.append((interventions.as_text(edit), shares * edit.keys.max_count))
    for name, k in named:
        if not 1 <= k < keys:
            raise ValueError(
                f"{name} blocks at least 1 and fewer than all keys, but is to block {k} of the "
                f"{keys} keys of {text!r} {when}; choose smaller numbers, or none at all"
            )


def write_samples(work: Work) -> None:
    """Write the missing samples, each as its part of the run; its texts last, so that they mark
    the end.
    """
    run, settings, tasks = work.run, work.settings, work.plan.tasks
    roles = special_roles(work.loaded)
    texts = len(work.samples) * (1 + len(settings.mask_sinks))
    meter = Meter(work.progress, texts, settings.steps or max(task.most_steps for task in tasks))
    selection = work.plan.selection
    written = {}
    for sample in work.samples:
        meter.stage(f"writing sample {sample + 1} of {len(tasks)} under observation")
        if sample not in written:
            written = follow_together(tasks, companions(tasks, sample), selection, meter)
        recorder, moments, log = written.pop(sample)
        task = tasks[sample]
        run.table("tokens", _tokens(task, moments, sample, roles), part=sample)
        steps = [
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
        run.table("steps", steps, part=sample)
        recorder.write(run, sample)
        if recorder.maps:
            # each map has axes of its own: their sizes differ
            axes = {name: (f"query_{name}", f"key_{name}") for name in recorder.maps}
            run.arrays("maps", recorder.maps, axes, part=sample)
        if task.edits:
            clipped = [{"sample": sample, **record._asdict()} for record in state_records(log)]
            if clipped:
                run.table("clipped", clipped, part=sample)
            removals = log.table(keys=True)
            samples = np.full(len(removals["forward"]), sample)
            run.table("removals", {"sample": samples, **removals}, part=sample)
        generations = [_generation(task, sample, moments, 0, log)]
        selector = None
        if not task.is_diffusion:
            selector = "last_row"
        for k in task.settings.mask_sinks:
            meter.stage(f"writing sample {sample + 1} again with {k} sinks blocked")
            edited, edited_log = follow(task, meter, None, MaskSinks(k=k, scores=selector))
            generations.append(_generation(task, sample, edited, k, edited_log))
        run.table("generations", generations, part=sample)
