"""A text written again, with the stretch around its sink blocked, or, as the control, a stretch in
which few heads have a sink.
"""

# T steps, L layers, H heads, K keys, S canvas positions, M tokens that count, N tokens after the
# cut, V vocabulary
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from sinklab.core.probing import intervene
from sinklab.core.sinks.rules import DEFAULT
from sinklab.lab.measures import TruncateContext
from sinklab.lab.scoring.task import Task
from sinklab.lab.scoring.writing import Moment, stop_ids
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
    columns: dict[str, Any] = {
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
    states_S = whole[-1].state_S
    ids_S = whole[-1].ids_S
    read = [moment.ids_S for moment in whole[cut:]]
    if task.is_diffusion:
        logits_of = _denoised
        started = int((states_S == 2).sum())
        text = np.concatenate([ids_S[:started], whole[-1].written])
        after = [*read[1:], text]
        new = [(one != other) & (other == text) for one, other in zip(read, after, strict=True)]
    else:
        logits_of = _continued
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
    arms: list[tuple[str, Stretch | None]] = [("", None), *((f"_{one.arm}", one) for one in hidden)]
    for name, gone in arms:
        found = [
            part_MV.float().log_softmax(-1).cpu().numpy()
            for part_MV in logits_of(task, read, text, new_TS, gone)
        ]
        columns[f"logprob{name}"] = np.concatenate(found)[
            np.arange(len(position_M)), text[position_M]
        ]
    return columns


Logits = Iterator[Tensor]
"""(M, V) of the tokens that the steps write, in order"""


@torch.inference_mode()
def _denoised(
    task: Task, read: list[np.ndarray], text: np.ndarray, new_TS: np.ndarray, gone: Stretch | None
) -> Logits:
    model: Any = task.loaded.model
    denoiser = model.denoiser(plain=True)
    for first in range(0, len(read), BATCH):
        part = slice(first, first + BATCH)
        with _without(model, gone, 0):
            yield denoiser(_on(model, np.stack(read[part])), _on(model, new_TS[part]))


@torch.inference_mode()
def _continued(
    task: Task, read: list[np.ndarray], text: np.ndarray, new_TS: np.ndarray, gone: Stretch | None
) -> Logits:
    """Logits with the text before the cut read whole, as it was when it was written, and the rest
    on top of it.
    """
    model = task.loaded.model
    before = len(read[0]) - 1
    with _without(model, gone, 1):
        past = model(_on(model, text[None, :before]), use_cache=True).past_key_values
        logits_NV = model(
            _on(model, text[None, before:-1]), past_key_values=past, use_cache=True
        ).logits[0]
    yield logits_NV[new_TS.nonzero()[1] - before - 1]


def _without(model: Any, gone: Stretch | None, step: int) -> Any:
    """The model with the stretch blocked from this forward on."""
    if gone is None:
        return nullcontext()
    return intervene(model, TruncateContext(gone.start, gone.stop, step), measure=False)


def _on(model: Any, array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(model.device)
