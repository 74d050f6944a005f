"""The canvases of a text once more, read by controls."""

# T steps, S canvas positions, M masks
import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sinklab.core.attention import decoding
from sinklab.core.instrument import intervene
from sinklab.core.sinks import STATES
from sinklab.core.subject import Evaluation
from sinklab.core.subject.canvas import Places, numbered_blocks
from sinklab.lab.analysis.counts import ratio
from sinklab.lab.analysis.facts import FACTS, facts
from sinklab.lab.checkpoints import Loaded
from sinklab.lab.checkpoints.controls import shuffled
from sinklab.lab.records import Run, open_run
from sinklab.lab.scoring import Task
from sinklab.lab.scoring.writing import Moment, needs_clean_pass
from sinklab.lab.studies import Tick, Work, nothing, write_twins
from sinklab.lab.studies.trace.recording import Recorder, Selection
from sinklab.lab.studies.trace.study import STATISTICS

CANVASES = 16
"""Canvases of a text that run at once, if none depends on another."""
_NO_ID = -1


EVERY = 8
"""The cheap control reads one canvas of so many."""


def finish(work: Work) -> None:
    """Trace controls on the run's canvases once all samples are there.

    If they are asked for, each has arrays and tables of its own, such as ``attention-permuted``;
    the table ``twins``, written last, says which there are, or why not. If nothing is said about
    them, the table ``control`` has what the first question needs of one (`_write_control`).
    """
    done = open_run(work.run.path)
    is_recorded = FACTS in done.array_files
    if work.settings.twin is None and is_recorded and "control" not in done.tables:
        _write_control(work, done)
    if not work.settings.twin:
        return
    run = work.run

    def write(twin: Loaded, kind: str) -> None:
        texts = range(len(work.plan.tasks))
        steps = sum(done.table("tokens", sample=sample)["step"].nunique() for sample in texts)
        count = work.progress.counter(steps)
        for part in run.info.parts:
            made = {}
            for sample in run.info.part(part):
                tokens = done.table("tokens", sample=sample)
                task = replace(work.plan.tasks[sample], loaded=twin)
                again = retraced(task, tokens, work.plan.selection, progress=count)
                made[sample] = again.contents(sample, kind)
            run.write(part, made)

    if is_recorded:
        write_twins(work, write, 0)


def _write_control(work: Work, done: Run) -> None:
    """The share of the strongest key of a head with shuffled weights, on a few canvases of each
    sample.

    Table ``control``, a row a sample: steps, how many canvases were read; strongest, the share of
    the model itself there, mean over steps and heads; control, that with shuffled weights (NaN if
    there is none, and why not); seed of the order of the weights.
    """
    seed = work.settings.seed or 0
    texts = [done.table("tokens", sample=sample) for sample in range(len(work.plan.tasks))]
    chosen = [_few(task, text) for task, text in zip(work.plan.tasks, texts, strict=True)]
    rows = [
        {
            "sample": sample,
            "steps": text["step"].nunique(),
            "strongest": _strongest(
                done.array(FACTS, "sum_strongest", sample),
                done.array(FACTS, "step_number", sample),
                text,
            ),
            "control": math.nan,
            "seed": seed,
            "why": "",
        }
        for sample, text in enumerate(chosen)
    ]
    work.progress.stage("a control (shuffled weights) reads some of the canvases")
    count = work.progress.counter(sum(row["steps"] for row in rows))
    try:
        work.settings.check_controls()
        with shuffled(work.loaded, seed):
            for task, text, row in zip(work.plan.tasks, chosen, rows, strict=True):
                if len(text):
                    again = replace(task, settings=replace(task.settings, statistics=("received",)))
                    arrays = retraced(again, text, work.plan.selection, progress=count).arrays()
                    found = facts(arrays, added=task.loaded.added_sinks)
                    row["control"] = _strongest(found["sum_strongest"], arrays["step_number"], text)
    except ValueError as error:
        why = str(error)
        work.progress.note(f"no control: {why}")
        rows = [row | {"control": math.nan, "why": why} for row in rows]
    work.run.table("control", rows)


def _few(task: Task, tokens: pd.DataFrame) -> pd.DataFrame:
    """The canvases of a sample that the cheap control reads: of an autoregressive text the last
    one, which holds all before it; of others the last of every `EVERY`. Under edits or a cache,
    which follow a text from its first step, so many at its beginning.
    """
    steps = tokens["step"].unique()
    chosen = steps[::-EVERY]
    if task.edits or task.settings.values()["cache"] is not None:
        chosen = steps[: len(chosen)]
    elif not task.is_diffusion:
        chosen = steps[-1:]
    return tokens[tokens["step"].isin(chosen)]


def _strongest(sums_2T: np.ndarray, step_T: np.ndarray, text: pd.DataFrame) -> float:
    """Share of attention of the strongest key of a head, mean over these steps and heads; NaN if no
    key is defined.
    """
    return float(ratio(*sums_2T[:, np.isin(step_T, text["step"])].sum(1)))


def retraced(
    task: Task,
    tokens: pd.DataFrame,
    selection: Selection,
    *,
    progress: Tick = nothing,
) -> Recorder:
    """Trace the task's model on canvases that are there: nothing is chosen or written.

    Args:
        tokens: table of that name of one sample, of the steps to run.
        progress: called after every step.
    """
    every = replace(task.settings, maps=(), every=1)
    recorder = Recorder(replace(task, settings=every), selection)
    moments = []
    for step, rows in tokens.groupby("step"):
        ids_S, state_S = rows["token_id"].to_numpy(), pd.Index(STATES).get_indexer(rows["state"])
        moments.append(Moment(int(step), 0, ids_S, state_S, 0, ids_S[:0]))
    size = CANVASES
    if (
        task.edits
        or task.settings.full_forward
        or task.settings.values()["cache"] is not None
        # others may compare a step with the one before
        or not {*task.settings.statistics} <= {*STATISTICS}
    ):
        size = 1
    run = _continuing(task)
    if task.is_diffusion:
        run = _denoising(task)
    under: Any = nullcontext()
    if task.edits:
        under = intervene(task.loaded.model, *task.edits, measure=False, allow_idle=True)
    # edits ask it for the states of positions, and run on one canvas at a time
    text = SimpleNamespace(canvas=_canvases(task, 1))
    with under as log:
        for start in range(0, len(moments), size):
            some = moments[start : start + size]
            rows = [torch.tensor(moment.ids_S) for moment in some]
            ids_BS = pad_sequence(rows, batch_first=True, padding_value=_NO_ID).to(
                task.loaded.model.device
            )
            with decoding(text):
                if log is not None and needs_clean_pass(task.edits):
                    with log.probing():
                        run(ids_BS)
                with recorder.watching(some[0].index, _canvases(task, len(some))) as recording:
                    run(ids_BS)
            for row, moment in enumerate(some):
                recorder.add(recording, moment, row)
                progress()
    return recorder


def _canvases(task: Task, rows: int) -> Any:
    """So many canvases of the task; None for an autoregressive model."""
    if not task.is_diffusion:
        return None
    canvas = task.canvas()
    open_BS, attention_BS = (one.expand(rows, -1) for one in (canvas.open_BS, canvas.attention_BS))
    return SimpleNamespace(open_BS=open_BS, attention_BS=attention_BS, mask_id=canvas.mask_id)


def _denoising(task: Task) -> Callable[[Tensor], object]:
    """One evaluation of canvases, under the cache of the task, which follows those of a text one by
    one.
    """
    model: Any = task.loaded.model
    denoiser = model.denoiser()
    settings = task.settings
    canvas = denoiser.in_blocks(task.canvas().to(model.device), settings.block_length)
    block_BS = numbered_blocks(canvas, settings.block_length)[1]
    evaluate = Evaluation(denoiser, settings.values()["cache"], block_BS)
    before = [0, -1]

    def run(ids_BS: Tensor) -> None:
        masked_BS = canvas.open_BS & (ids_BS == canvas.mask_id)
        left_M = block_BS.expand_as(ids_BS)[masked_BS]
        # if written tokens are edited, the last canvases have no masks
        block = int(block_BS.max())
        if len(left_M):
            block = int(left_M.min())
        before[1] += 1
        if block != before[0]:
            before[:] = block, 0
        evaluate(ids_BS, Places.of(masked_BS & (block_BS == block)), *before)

    return run


def _continuing(task: Task) -> Callable[[Tensor], object]:
    """A forward over whole texts, without the model's cache: its attention is that of all queries
    of each so far.
    """

    @torch.inference_mode()
    def run(ids_BS: Tensor) -> None:
        real_BS = ids_BS != _NO_ID
        options: dict[str, Any] = {"use_cache": False, "logits_to_keep": 1}
        if not real_BS.all():
            options["attention_mask"] = real_BS.long()
        task.loaded.model(ids_BS.clamp_min(0), **options)

    return run
