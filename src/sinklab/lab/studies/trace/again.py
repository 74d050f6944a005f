"""A text once more: written with the stretch around its sink blocked, or, as the control, one in
which few heads have a sink; and its canvases, read by controls.
"""

# T steps, L layers, H heads, K keys, S canvas positions, M tokens that count, N tokens after the
# cut, V vocabulary
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sinklab.core.attention import decoding
from sinklab.core.probing import STATES, intervene
from sinklab.core.sampling import Evaluation
from sinklab.core.sampling.canvas import Places, numbered_blocks
from sinklab.core.sinks import DEFAULT
from sinklab.lab.analysis.counts import mean_weight
from sinklab.lab.checkpoints import Loaded
from sinklab.lab.checkpoints.controls import shuffled
from sinklab.lab.measures import MaskPositions
from sinklab.lab.records import Run, of_twin, open_run
from sinklab.lab.scoring import Task
from sinklab.lab.scoring.writing import Moment, needs_clean_pass, stop_ids
from sinklab.lab.studies import Tick, Work, nothing, write_twins
from sinklab.lab.studies.trace.recording import Recorder, Selection

BATCH = 16
PART = 16
"""one position in so many is blocked"""
FEW = 0.25
"""of the heads that have a sink in the one stretch, as many may have one in the control"""


@dataclass(frozen=True)
class Stretch:
    """Neighbouring canvas positions that are blocked."""

    arm: str
    """ "sink" or "control"."""
    start: int
    stop: int
    held: float
    """Share of attention that they receive at the last whole step, mean over layers and heads,
    added sinks included.
    """
    sinks: float
    """Share of heads that have a sink there (the default rule)."""

    @property
    def place(self) -> slice:
        """Slice of an axis of canvas positions."""
        return slice(self.start, self.stop)


def scores_of(arrays: dict[str, np.ndarray]) -> np.ndarray:
    """Received attention (T, L, H, K) as a multiple of an even share; −1 if a step has no such
    key.
    """
    scale_T = arrays["positions"] / np.nanmax(arrays["visible"], axis=-1)
    score_TLHK = arrays["received"].astype(np.float32) * scale_T[:, None, None, None]
    return np.where(np.isnan(score_TLHK), -1.0, score_TLHK)


def stretches(score_LHK: np.ndarray, written_S: np.ndarray) -> list[Stretch]:
    """The stretch around the main sink, and if there is one an equally long control in which few
    heads have any.

    The main sink is the position that draws most attention from heads in which it is a sink by the
    default rule; if no head has one, the position that draws most. A control lies elsewhere, holds
    as much written text (masks differ from text in everything) and at most a quarter as many sinks;
    if several do, the one with the nearest attention.

    Args:
        score_LHK: attention received, as a multiple of an even share, added sink columns first.
        written_S: the position holds no mask, bool.
    """
    length = len(written_S)
    width = max(length // PART, 1)
    text_LHS = np.maximum(score_LHK[..., -length:], 0)
    sinks_LHS = text_LHS > DEFAULT.threshold(np.array([length]))
    drawn_S = np.where(sinks_LHS, text_LHS, 0).sum((0, 1))
    if not drawn_S.any():
        drawn_S = text_LHS.sum((0, 1))
    main = int(drawn_S.argmax())
    share_S = (text_LHS / np.maximum(score_LHK, 0).sum(-1, keepdims=True)).mean((0, 1))

    def stretch(arm: str, start: int) -> Stretch:
        place = slice(start, start + width)
        share = float(share_S[place].sum())
        return Stretch(arm, start, place.stop, share, float(sinks_LHS[..., place].any(-1).mean()))

    def written(one: Stretch) -> float:
        return float(written_S[one.place].mean())

    sink = stretch("sink", min(max(main - width // 2, 0), length - width))
    others = [
        stretch("control", at) for at in range(length - width + 1) if abs(at - sink.start) >= width
    ]
    alike = [
        one
        for one in others
        if one.sinks <= FEW * sink.sinks and abs(written(one) - written(sink)) <= FEW
    ]
    return [sink, *sorted(alike, key=lambda one: abs(one.held - sink.held))[:1]]


def truncation_table(
    arrays: dict[str, np.ndarray], hidden: slice, selection: Selection, sample: int
) -> dict[str, np.ndarray]:
    """One row per (step since some keys are blocked, layer, head); the first step of the arrays is
    the last whole one.

    Columns: hidden_share_before, the share of attention that the blocked keys held at the last
    whole step; main_before, main_after: the key that receives most, there and at this step;
    score_before, score_after: its attention as a multiple of an even share; lost: main_before was a
    sink (the default rule) and is blocked now; renormalised: one of the other keys was a sink if
    their attention is divided by the share that was not blocked; recovered: main_after is a sink.
    Keys count the added sink columns first.
    """
    score_TLHK = scores_of(arrays)
    limit_T = DEFAULT.threshold(arrays["positions"])
    main_TLH = score_TLHK.argmax(-1)
    best_TLH = score_TLHK.max(-1)
    before_LHK = np.maximum(score_TLHK[0], 0)
    hidden_LH = before_LHK[..., hidden].sum(-1) / before_LHK.sum(-1)
    left_LH = np.delete(before_LHK, hidden, axis=-1).max(-1) / np.maximum(1 - hidden_LH, 1e-9)
    inside_LH = (main_TLH[0] >= hidden.start) & (main_TLH[0] < hidden.stop)
    columns = {
        "sample": sample,
        "step": arrays["step_number"][1:, None, None],
        "layer": np.array(selection.layers)[:, None],
        "head": np.array(selection.heads),
        "hidden_share_before": hidden_LH,
        "main_before": main_TLH[0],
        "score_before": best_TLH[0],
        "lost": inside_LH & (best_TLH[0] > limit_T[0]),
        "renormalised": left_LH > limit_T[0],
        "main_after": main_TLH[1:],
        "score_after": best_TLH[1:],
        "recovered": best_TLH[1:] > limit_T[1:, None, None],
    }
    return {
        name: np.broadcast_to(values, main_TLH[1:].shape).reshape(-1)
        for name, values in columns.items()
    }


def looked_at(task: Task, selection: Selection, moment: Moment) -> np.ndarray:
    """Attention that the keys of one step receive in a forward by itself, (L, H, K) as a multiple
    of an even share.

    For an autoregressive model, from its last query alone: rows of before a cut would keep the keys
    that it blocks.
    """
    settings = replace(task.settings, statistics=("received",), every=1, only_steps=(), maps=())
    recorder = Recorder(replace(task, settings=settings), selection, last_row=True)
    model = cast(Any, task.loaded.model)
    ids_1S = _on(model, moment.ids_S[None])
    with torch.inference_mode(), recorder.watching(moment.index) as seen:
        if task.is_diffusion:
            model.denoiser()(ids_1S, _on(model, moment.state_S[None] == 0))
        else:
            model(ids_1S, use_cache=False, logits_to_keep=1)
    recorder.add(seen, moment)
    return scores_of(recorder.arrays())[0]


def token_costs(
    task: Task, whole: list[Moment], cut: int, hidden: list[Stretch], sample: int
) -> dict[str, np.ndarray]:
    """The tokens that a text gets from step ``cut`` on, and how likely the model finds them as it
    is and with less.

    The model reads the uncut text as it was at each step, so that all are asked the same; without
    cache and guidance. Tokens behind an end of text, and those inside of a stretch, do not count.

    Returns:
        columns sample, step, position, token_id; logprob, in nats; and logprob_sink,
        logprob_control with a stretch blocked.
    """
    model: Any = task.loaded.model
    states_S = whole[-1].state_S
    ids_S = whole[-1].ids_S
    read = [moment.ids_S for moment in whole[cut:]]

    # logits (M, V) of the tokens that the steps write, in order
    @torch.inference_mode()
    def denoised(gone: Stretch | None) -> Iterator[Tensor]:
        denoiser = model.denoiser(plain=True)
        for first in range(0, len(read), BATCH):
            part = slice(first, first + BATCH)
            with _without(model, gone, 0):
                yield denoiser(_on(model, np.stack(read[part])), _on(model, new_TS[part]))

    @torch.inference_mode()
    def continued(gone: Stretch | None) -> Iterator[Tensor]:
        # the text before the cut is read whole, as it was when it was written, and the rest on
        # top of it
        before = len(read[0]) - 1
        with _without(model, gone, 1):
            past = model(_on(model, text[None, :before]), use_cache=True).past_key_values
            rest = _on(model, text[None, before:-1])
            logits_NV = model(rest, past_key_values=past, use_cache=True).logits[0]
        yield logits_NV[new_TS.nonzero()[1] - before - 1]

    if task.is_diffusion:
        logits_of = denoised
        started = int((states_S == 2).sum())
        text = np.concatenate([ids_S[:started], whole[-1].written])
        after = [*read[1:], text]
        new = [(one != other) & (other == text) for one, other in zip(read, after, strict=True)]
    else:
        logits_of = continued
        started = len(task.started())
        text = np.concatenate([ids_S[:started], whole[-1].written])
        new = [np.arange(len(text)) == len(one) for one in read]
    counts_S = np.ones(len(text), bool)
    for end in np.flatnonzero(np.isin(text[started:], [*stop_ids(task.loaded)]))[:1]:
        counts_S[started + end + 1 :] = False
    for stretch in hidden:
        counts_S[stretch.place] = False
    new_TS = np.stack(new) & counts_S
    step_M, position_M = new_TS.nonzero()
    columns = {
        "sample": np.full(len(step_M), sample),
        "step": step_M + cut,
        "position": position_M,
        "token_id": text[position_M],
    }
    arms = [("", None), *((f"_{one.arm}", one) for one in hidden)]
    for name, gone in arms:
        found = [part_MV.float().log_softmax(-1).cpu().numpy() for part_MV in logits_of(gone)]
        columns[f"logprob{name}"] = np.concatenate(found)[
            np.arange(len(position_M)), text[position_M]
        ]
    return columns


def _without(model: Any, gone: Stretch | None, step: int) -> Any:
    """The model with the stretch blocked from this forward on."""
    if gone is None:
        return nullcontext()
    edit = MaskPositions(range(gone.start, gone.stop), steps=(step, None))
    return intervene(model, edit, measure=False)


def _on(model: Any, array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(model.device)


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
    is_recorded = "attention" in done.array_files
    if work.settings.twin is None and is_recorded and "control" not in done.tables:
        _write_control(work, done)
    if not work.settings.twin:
        return
    run = work.run

    def write(twin: Loaded, kind: str) -> None:
        texts = range(len(work.plan.tasks))
        steps = sum(done.table("tokens", part=sample)["step"].nunique() for sample in texts)
        count = work.progress.counter(steps)
        for sample, task in enumerate(work.plan.tasks):
            tokens = done.table("tokens", part=sample)
            task = replace(task, loaded=twin)
            retraced(task, tokens, work.plan.selection, progress=count).write(run, sample, kind)
            if work.settings.truncate and len(tokens):
                _write_truncated(work, task, done, sample, kind)

    if is_recorded:
        write_twins(work, lambda: 0.0, write)


def _write_control(work: Work, done: Run) -> None:
    """The share of the strongest key of a head with shuffled weights, on a few canvases of each
    sample.

    Table ``control``, a row a sample: steps, how many canvases were read; strongest, the share of
    the model itself there, mean over steps and heads; control, that with shuffled weights (NaN if
    there is none, and why not); seed of the order of the weights.
    """
    seed = work.settings.seed or 0
    texts = [done.table("tokens", part=sample) for sample in range(len(work.plan.tasks))]
    chosen = [_few(task, text) for task, text in zip(work.plan.tasks, texts, strict=True)]
    rows = [
        {
            "sample": sample,
            "steps": text["step"].nunique(),
            "strongest": _strongest(_at(done, sample, text["step"].unique())),
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
                    settings = replace(task.settings, statistics=("received",))
                    again = replace(task, settings=settings)
                    recorder = retraced(again, text, work.plan.selection, progress=count)
                    row["control"] = _strongest(recorder.arrays())
    except ValueError as error:
        why = str(error)
        work.progress.stage(f"no control: {why}")
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


def _at(done: Run, sample: int, steps: np.ndarray) -> dict[str, np.ndarray]:
    """Received attention of some steps of a sample, and the queries that see each key."""
    recorded = done.array("attention", "step_number", part=sample)
    spans = [slice(at, at + 1) for at in np.flatnonzero(np.isin(recorded, steps)).tolist()]
    return {
        name: np.concatenate([*done.rows("attention", name, sample, spans)])
        for name in ("received", "visible")
        if spans
    }


def _strongest(arrays: Mapping[str, np.ndarray]) -> float:
    """Share of attention of the strongest key of a head, mean over steps and heads; NaN if no key
    is defined.
    """
    if not arrays:
        return math.nan
    weight_TLHK = mean_weight(arrays["received"], arrays["visible"][:, None, None])
    share_TLH = np.fmax.reduce(weight_TLHK, -1)
    known = share_TLH[~np.isnan(share_TLH)]
    if not len(known):
        return math.nan
    return float(known.mean())


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
    added = task.loaded.added_sinks
    keys = slice(added + hidden[0].start, added + hidden[0].stop)
    edit = MaskPositions(range(hidden[0].start, hidden[0].stop), steps=(1, None))
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
    progress: Tick = nothing,
) -> Recorder:
    """Trace the task's model on canvases that are there: nothing is chosen or written.

    Args:
        tokens: table of that name of one sample, of the steps to run.
        more_edits: besides those of the task.
        last_row: of an autoregressive model read the last query alone (`Recorder`).
        progress: called after every step.
    """
    every = replace(task.settings, maps=(), every=1, only_steps=())
    recorder = Recorder(replace(task, settings=every), selection, last_row=last_row)
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
