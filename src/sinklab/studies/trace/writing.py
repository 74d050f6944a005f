"""One sample of a study: traced as it is written, then written again with sinks or context hidden; all of it stored."""

# T recorded steps, L layers, H heads, K keys, S canvas positions
from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sinklab.probing.intervention import InterventionLog
from sinklab.probing.interventions.mask_sinks import MaskSinks
from sinklab.probing.statistics import STATES
from sinklab.records.writing import RunWriter
from sinklab.registry import interventions
from sinklab.scoring.task import Task
from sinklab.scoring.writing import Moment
from sinklab.sinks.rules import DEFAULT
from sinklab.studies.base import columns_of, text_of
from sinklab.studies.processes import Meter
from sinklab.studies.trace.recording import DTYPES, Recorder, Selection


@dataclass(frozen=True)
class Truncation:
    """Positions [start, stop) are hidden from step `step` on; `prefix` added sink columns stand before position 0."""

    start: int
    stop: int
    step: int
    prefix: int
    steps: int
    """The most steps the text may take."""

    @property
    def edit(self) -> Any:
        """The intervention."""
        return interventions.make("truncate_context", start=self.start, stop=self.stop, step=self.step)

    def task(self, task: Task) -> Task:
        """The same text, watched from the last whole step on."""
        steps = tuple(range(self.step - 1, self.steps))
        settings = replace(task.settings, statistics=("received",), every=1, only_steps=steps, maps=())
        return replace(task, settings=settings)

    def table(self, arrays: dict[str, np.ndarray], selection: Selection, sample: int) -> dict[str, np.ndarray]:
        """One row per (step since the cut, layer, head).

        Columns: hidden_share_before, the share of attention that the hidden keys held at the last whole step;
        main_before, main_after: the key that receives most, there and at this step; score_before, score_after: what it
        receives as a multiple of an even share; lost: main_before was a sink (the default rule) and is hidden now;
        recovered: main_after is a sink. Keys count the added sink columns first.
        """
        scale_T = arrays["positions"] / np.nanmax(arrays["visible"], axis=-1)
        score_TLHK = arrays["received"].astype(np.float32) * scale_T[:, None, None, None]
        score_TLHK = np.where(np.isnan(score_TLHK), -1.0, score_TLHK)
        limit_T = DEFAULT.threshold(arrays["positions"])
        main_TLH, best_TLH = score_TLHK.argmax(-1), score_TLHK.max(-1)
        hidden = slice(self.prefix + self.start, self.prefix + self.stop)
        before_LHK = np.maximum(score_TLHK[0], 0)
        hidden_LH = before_LHK[..., hidden].sum(-1) / before_LHK.sum(-1)
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
            "main_after": main_TLH[1:],
            "score_after": best_TLH[1:],
            "recovered": best_TLH[1:] > limit_T[1:, None, None],
        }
        return {name: np.broadcast_to(values, main_TLH[1:].shape).reshape(-1) for name, values in columns.items()}


def truncated(task: Task, steps: int) -> Truncation:
    """Hide the middle quarter of the positions from half of the steps on.

    Args:
        task: the text.
        steps: that the text took when it was written whole.
    """
    cut = max(steps // 2, 1)
    config: Any = task.loaded.model.config
    prefix = getattr(config, "sink_count", 0)
    # a causal model has only read so many positions when the middle is hidden
    length = task.positions if task.is_diffusion else len(task.started()) + cut
    start = length * 3 // 8
    stop = max(length * 5 // 8, start + 1)
    return Truncation(start, stop, cut, prefix, max(steps, task.most_steps))


def follow(
    task: Task, meter: Meter, recorder: Recorder | None = None, *more_edits: Any
) -> tuple[list[Moment], InterventionLog]:
    """Write a text, step by step, under its edits; the steps that are to be recorded run under a trace."""
    moments: list[Moment] = []

    def watch(index: int) -> Any:
        return recorder.watching(index) if recorder and task.settings.records(index) else nullcontext()

    with task.writing(*more_edits) as writer:
        for step in writer.steps(watch):
            moments.append(step.moment())
            if recorder is not None and step.seen is not None:
                recorder.add(step.seen, moments[-1])
            meter.step()
        meter.end()
    return moments, writer.log


def write_sample(
    run: RunWriter, task: Task, sample: int, selection: Selection, roles: Mapping[int, str], meter: Meter
) -> None:
    """Write everything about one sample as part `sample` of the run; its texts last, so that they mark the end."""
    recorder = Recorder(task, selection)
    moments, log = follow(task, meter, recorder)
    if arrays := recorder.arrays():
        dims = {name: recorder.dims(name) for name in arrays}
        run.arrays("attention", arrays, dims, dtype=DTYPES, part=sample)
    if recorder.maps:
        # each map has axes of its own: their sizes differ
        axes = {name: (f"query_{name}", f"key_{name}") for name in recorder.maps}
        run.arrays("maps", recorder.maps, axes, part=sample)
    run.table("tokens", _tokens(task, moments, sample, roles), part=sample)
    run.table("steps", _steps(moments, recorder.queries, sample), part=sample)
    if task.edits:
        removals = log.table(keys=True)
        run.table("removals", {"sample": np.full(len(removals["forward"]), sample), **removals}, part=sample)
    generations = [_generation(task, sample, moments, 0, log)]
    for k in task.settings.mask_sinks:
        meter.stage(f"writing sample {sample + 1} again with {k} sinks hidden")
        selector = "received" if task.is_diffusion else "last_row"
        edited, edited_log = follow(task, meter, None, MaskSinks(k=k, selector=selector))
        generations.append(_generation(task, sample, edited, k, edited_log))
    if task.settings.truncate:
        meter.stage(f"writing sample {sample + 1} again with the middle of its context hidden")
        _write_truncated(run, task, sample, selection, moments, meter)
    run.table("generations", columns_of(generations), part=sample)


def _write_truncated(
    run: RunWriter, task: Task, sample: int, selection: Selection, whole: list[Moment], meter: Meter
) -> None:
    plan = truncated(task, len(whole))
    recorder = Recorder(plan.task(task), selection)
    moments, log = follow(plan.task(task), meter, recorder, plan.edit)
    run.table("truncation", plan.table(recorder.arrays(), selection, sample), part=sample)
    written = moments[-1].written
    text = {"sample": sample, "prompt": task.prompt.text, "completion": text_of(task.loaded, written)}
    text |= {"token_ids": written.tolist(), "agreement": agreement(whole[-1].written, written)}
    text |= {"start": plan.start, "stop": plan.stop, "step": plan.step, "idle": " ".join(log.idle)}
    run.table("truncated", columns_of([text]), part=sample)


def agreement(one: np.ndarray, other: np.ndarray) -> float:
    """The share of positions at which two completions hold the same token; the longer one counts."""
    same = sum(mine == theirs for mine, theirs in zip(one, other, strict=False))
    longer = max(len(one), len(other))
    return float(same / longer) if longer else 1.0


def _generation(task: Task, sample: int, moments: list[Moment], k: int, log: InterventionLog) -> dict[str, Any]:
    written = moments[-1].written
    return {
        "sample": sample,
        "prompt": task.prompt.text,
        "completion": text_of(task.loaded, written),
        "rule": task.settings.rule if task.is_diffusion else "next_token",
        "masked_sinks": k,
        "edits": " ".join(map(interventions.as_text, task.settings.edits)),
        "idle": " ".join(log.idle),
        "token_ids": written.tolist(),
        "steps": len(moments),
        "seed": task.seed,
    }


def _tokens(task: Task, moments: list[Moment], sample: int, roles: Mapping[int, str]) -> dict[str, Any]:
    """What stood at each position before each recorded step."""
    kept = [moment for moment in moments if task.settings.records(moment.index)]
    lengths = [len(moment.ids_S) for moment in kept]
    ids = np.concatenate([np.empty(0, np.int64), *(moment.ids_S for moment in kept)])
    states = np.concatenate([np.empty(0, np.int8), *(moment.state_S for moment in kept)])
    positions = np.concatenate([np.empty(0, np.int32), *(np.arange(length, dtype=np.int32) for length in lengths)])
    different, number = np.unique(ids, return_inverse=True)
    tokenizer = task.loaded.tokenizer
    texts = [str(tokenizer.decode([one])) if tokenizer else f"⟨{one}⟩" for one in different.tolist()]
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


def _steps(moments: list[Moment], queries: Mapping[int, int], sample: int) -> dict[str, list[Any]]:
    return {
        "sample": [sample] * len(moments),
        "step": [moment.index for moment in moments],
        "block": [moment.block for moment in moments],
        "masked": [int((moment.state_S == 0).sum()) for moment in moments],
        "committed": [moment.committed for moment in moments],
        "queries": [queries.get(moment.index) for moment in moments],
    }
