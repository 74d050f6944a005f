"""Untrained twins of a traced model, teacher-forced on the canvases that the run stepped
through.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sinklab.core.attention.context import decoding
from sinklab.core.probing import STATES, intervene
from sinklab.core.sampling.canvas import Places, numbered_blocks
from sinklab.core.sampling.denoisers import Evaluation
from sinklab.lab.checkpoints.loading import Loaded
from sinklab.lab.measures import TruncateContext
from sinklab.lab.records.info import of_twin
from sinklab.lab.records.reading import Run, open_run
from sinklab.lab.scoring.task import Task
from sinklab.lab.scoring.writing import Moment, needs_clean_pass
from sinklab.lab.studies.base import Work
from sinklab.lab.studies.processes import nothing
from sinklab.lab.studies.scored import write_twins
from sinklab.lab.studies.trace.recording import Recorder, Selection
from sinklab.lab.studies.trace.truncation import Stretch, token_costs, truncation_table

CANVASES = 16
"""Canvases of a text that run at once, if none depends on another."""
_NO_ID = -1


def finish(work: Work) -> None:
    """Trace untrained twins on the run's canvases, if asked for, once all samples are there.

    Each has arrays and tables of its own, such as ``attention-permuted``; the table ``twins``,
    written last, says which there are, or why not.
    """
    done = open_run(work.run.path)
    if "attention" in done.array_files:
        write_twins(work, lambda: 0.0, lambda twin, kind: _write_twin(work, twin, done, kind))


def _write_twin(work: Work, twin: Loaded, done: Run, kind: str) -> None:
    run = work.run
    selection = work.plan.selection
    settings = work.settings
    texts = range(len(work.plan.tasks))
    steps = sum(done.table("tokens", part=sample)["step"].nunique() for sample in texts)
    count = work.progress.counter(steps)
    for sample, task in enumerate(work.plan.tasks):
        tokens = done.table("tokens", part=sample)
        task = replace(task, loaded=twin)
        retraced(task, tokens, selection, progress=count).write(run, sample, kind)
        if settings.truncate and len(tokens):
            _write_truncated(work, task, done, sample, kind)


def _write_truncated(work: Work, task: Task, done: Run, sample: int, kind: str) -> None:
    """Effect on the twin of blocking the run's own stretches; nothing if steps that this takes were
    not recorded.
    """
    tokens = done.table("tokens", part=sample)
    texts = done.table("truncated", part=sample)
    hidden = [
        Stretch(row.arm, row.start, row.stop, row.held, row.sinks) for row in texts.itertuples()
    ]
    cut = int(texts["step"].iloc[0])
    steps = int(tokens["step"].max()) + 1
    rest = tokens[tokens["step"] >= cut - 1]
    # the first of these canvases is whole; without all of them there is no telling when a sink
    # comes back
    if rest["step"].nunique() < steps - cut + 1:
        return
    added = getattr(task.loaded.model.config, "sink_count", 0)
    keys = slice(added + hidden[0].start, added + hidden[0].stop)
    edit = TruncateContext(hidden[0].start, hidden[0].stop, step=1)
    arrays = retraced(task, rest, work.plan.selection, edit, last_row=True).arrays()
    table = truncation_table(arrays, keys, work.plan.selection, sample)
    work.run.table(of_twin("truncation", kind), table, part=sample)
    if (
        len(hidden) == 2
        and hidden[0].sinks
        and not task.edits
        and tokens["step"].nunique() == steps > cut
    ):
        whole = [_moment(int(step), rows) for step, rows in tokens.groupby("step")]
        texts = done.table("generations", part=sample).query("masked_sinks == 0")
        whole[-1] = replace(whole[-1], written=np.asarray(texts["token_ids"].iloc[0]))
        columns = token_costs(task, whole, cut, hidden, sample)
        work.run.table(of_twin("recovery", kind), columns, part=sample)


def retraced(
    task: Task,
    tokens: pd.DataFrame,
    selection: Selection,
    *more_edits: Any,
    last_row: bool = False,
    progress: Callable[[], object] = nothing,
) -> Recorder:
    """Trace the task's model on canvases that are there: nothing is chosen or written.

    Args:
        tokens: table of that name of one sample, of the steps to run.
        more_edits: besides those of the task.
        last_row: of an autoregressive model read the last query alone (`Recorder`).
        progress: called after every step.
    """
    recorder = Recorder(
        replace(task, settings=replace(task.settings, maps=())), selection, last_row=last_row
    )
    edits = *task.edits, *more_edits
    moments = [_moment(int(step), rows) for step, rows in tokens.groupby("step")]
    size = CANVASES
    if edits or task.settings.full_forward or task.settings.values()["cache"] is not None:
        size = 1
    run = _continuing(task)
    if task.is_diffusion:
        run = _denoising(task)
    under: Any = nullcontext()
    if edits:
        under = intervene(task.loaded.model, *edits, measure=False, allow_idle=True)
    with under as log:
        for start in range(0, len(moments), size):
            some = moments[start : start + size]
            rows = [torch.tensor(moment.ids_S) for moment in some]
            ids_BS = pad_sequence(rows, batch_first=True, padding_value=_NO_ID).to(
                task.loaded.model.device
            )
            with decoding(recorder):
                if log is not None and needs_clean_pass(edits):
                    with log.probing():
                        run(ids_BS)
                with recorder.watching(some[0].index, len(some)) as recording:
                    run(ids_BS)
            for row, moment in enumerate(some):
                recorder.add(recording, moment, row)
                progress()
    return recorder


def _moment(step: int, rows: pd.DataFrame) -> Moment:
    ids_S = rows["token_id"].to_numpy()
    state_S = pd.Index(STATES).get_indexer(rows["state"])
    return Moment(step, 0, ids_S, state_S, 0, ids_S[:0])


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
