"""One sample of a study: written under observation, then again with sinks or context taken away; all of it stored."""

# T recorded steps, L layers, H heads, K keys
# T steps, S canvas positions
from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sinklab.checkpoints.loading import Loaded
from sinklab.probing.intervention import intervene
from sinklab.probing.interventions.mask_sinks import MaskSinks
from sinklab.probing.log import InterventionLog
from sinklab.probing.statistics import STATES
from sinklab.records.writing import RunWriter
from sinklab.registry import interventions
from sinklab.scoring.decoding import Moment, Task
from sinklab.studies.processes import Meter
from sinklab.studies.trace.recording import DTYPES, Recorder, Selection, dims_of, dims_of_maps

EPSILON = 3.0
"""A key is a sink above 1 + EPSILON (S - 1) / S times an even share (arXiv 2510.15731, Eq. 3, in sums)."""


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
        receives as a multiple of an even share; lost: main_before was a sink (see EPSILON) and is hidden now;
        recovered: main_after is a sink. Keys count the added sink columns first.
        """
        scale_T = arrays["positions"] / np.nanmax(arrays["visible"], axis=-1)
        score_TLHK = arrays["received"].astype(np.float32) * scale_T[:, None, None, None]
        score_TLHK = np.where(np.isnan(score_TLHK), -1.0, score_TLHK)
        limit_T = 1 + EPSILON * (arrays["positions"] - 1) / arrays["positions"]
        main_TLH, best_TLH = score_TLHK.argmax(-1), score_TLHK.max(-1)
        hidden = slice(self.prefix + self.start, self.prefix + self.stop)
        before_LHK = np.maximum(score_TLHK[0], 0)
        hidden_LH = before_LHK[..., hidden].sum(-1) / before_LHK.sum(-1)
        inside_LH = (main_TLH[0] >= hidden.start) & (main_TLH[0] < hidden.stop)
        lost_LH = inside_LH & (best_TLH[0] > limit_T[0])
        after = slice(1, None)
        shape = main_TLH[after].shape
        steps_T = arrays["step_number"][after]

        def rows(values: Any) -> np.ndarray:
            return np.broadcast_to(values, shape).reshape(-1)

        return {
            "sample": np.full(int(np.prod(shape)), sample),
            "step": rows(steps_T[:, None, None]),
            "layer": rows(np.array(selection.layers)[None, :, None]),
            "head": rows(np.array(selection.heads)[None, None, :]),
            "hidden_share_before": rows(hidden_LH[None]),
            "main_before": rows(main_TLH[:1]),
            "score_before": rows(best_TLH[:1]),
            "lost": rows(lost_LH[None]),
            "main_after": rows(main_TLH[after]),
            "score_after": rows(best_TLH[after]),
            "recovered": rows(best_TLH[after] > limit_T[after, None, None]),
        }


def truncated(task: Task, steps: int) -> Truncation:
    """Hide the middle quarter of the positions from half of the steps on.

    Args:
        task: the text.
        steps: that the text took when it was written whole.
    """
    cut = max(steps // 2, 1)
    config: Any = task.loaded.model.config
    prefix = getattr(config, "sink_count", 0)
    # a causal model has only read so many positions when the middle is taken away
    length = task.positions if task.is_diffusion else len(task.started()) + cut
    start = length * 3 // 8
    stop = max(length * 5 // 8, start + 1)
    return Truncation(start, stop, cut, prefix, max(steps, task.most_steps))


class _Over(Exception):
    """The text is written: there is no further step."""


def sample_seed(seed: int, sample: int) -> int:
    """The seed of one sample: the same whether it is written first, after an interruption or by another process."""
    return int(np.random.SeedSequence([seed, sample]).generate_state(1, np.uint64)[0] >> 2)


def seeded(edits: tuple[Any, ...], sample: int) -> tuple[Any, ...]:
    """The edits with a seed of this sample, so that a random control draws other columns for every sample."""
    return tuple(
        dataclasses.replace(edit, seed=sample_seed(edit.seed, sample)) if hasattr(edit, "seed") else edit
        for edit in edits
    )


def follow(
    task: Task, meter: Meter, recorder: Recorder | None = None, *more_edits: Any
) -> tuple[list[Moment], InterventionLog]:
    """Write a text, step by step, under its edits; the steps that are to be recorded run under a trace."""
    moments: list[Moment] = []
    settings = task.settings
    forwards = 2 if settings.cfg_scale else 1
    # a text may end before an edit gets to act: the run's tables name such edits ("idle")
    with intervene(task.loaded.model, *task.edits, *more_edits, forwards_per_step=forwards, allow_idle=True) as log:
        steps = task.moments(log)
        try:
            while True:
                watched = recorder is not None and settings.records(len(moments))
                with recorder.watching(len(moments)) if recorder and watched else nullcontext() as recording:
                    moment = next(steps, None)
                    if moment is None:
                        # raised through the trace, which refuses a block in which no model ran
                        raise _Over
                if recorder is not None and recording is not None:
                    recorder.add(recording, moment)
                moments.append(moment)
                meter.step()
        except _Over:
            meter.end()
    return moments, log


def write_sample(
    run: RunWriter, task: Task, sample: int, selection: Selection, roles: Mapping[int, str], meter: Meter
) -> None:
    """Write everything about one sample as part `sample` of the run; its texts last, so that they mark the end."""
    recorder = Recorder(task, selection)
    moments, log = follow(task, meter, recorder)
    arrays = recorder.arrays()
    if arrays:
        run.arrays("attention", arrays, dims_of(arrays), dtype=DTYPES, part=sample)
    if recorder.maps:
        run.arrays("maps", recorder.maps, dims_of_maps(recorder.maps), part=sample)
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
    run.table("generations", {key: [row[key] for row in generations] for key in generations[0]}, part=sample)


def _write_truncated(
    run: RunWriter, task: Task, sample: int, selection: Selection, whole: list[Moment], meter: Meter
) -> None:
    plan = truncated(task, len(whole))
    recorder = Recorder(plan.task(task), selection)
    moments, log = follow(plan.task(task), meter, recorder, plan.edit)
    run.table("truncation", plan.table(recorder.arrays(), selection, sample), part=sample)
    texts = {
        "sample": [sample],
        "prompt": [task.prompt.text],
        "completion": [text_of(task.loaded, moments[-1].written)],
        "token_ids": [moments[-1].written.tolist()],
        "agreement": [agreement(whole[-1].written, moments[-1].written)],
        "start": [plan.start],
        "stop": [plan.stop],
        "step": [plan.step],
        "idle": [" ".join(log.idle)],
    }
    run.table("truncated", texts, part=sample)


def agreement(one: np.ndarray, other: np.ndarray) -> float:
    """The share of positions at which two completions hold the same token; the longer one counts."""
    length = max(len(one), len(other))
    common = min(len(one), len(other))
    return float((np.asarray(one)[:common] == np.asarray(other)[:common]).sum() / length) if length else 1.0


def text_of(loaded: Loaded, ids: np.ndarray) -> str:
    """A completion as text; where there is no tokenizer, its ids."""
    if loaded.tokenizer is None:
        return " ".join(map(str, ids.tolist()))
    return str(loaded.tokenizer.decode(ids.tolist(), skip_special_tokens=True))


def _generation(task: Task, sample: int, moments: list[Moment], k: int, log: InterventionLog) -> dict[str, Any]:
    written = moments[-1].written
    return {
        "sample": sample,
        "prompt": task.prompt.text,
        "completion": text_of(task.loaded, written),
        "rule": task.settings.rule if task.is_diffusion else "next_token",
        "masked_sinks": k,
        "edits": " ".join(task.settings.edits),
        "idle": " ".join(log.idle),
        "token_ids": written.tolist(),
        "steps": len(moments),
        "seed": task.seed,
    }


def _tokens(task: Task, moments: list[Moment], sample: int, roles: Mapping[int, str]) -> dict[str, Any]:
    """What stood at each position before each recorded step."""
    kept = [moment for moment in moments if task.settings.records(moment.index)]
    lengths = [len(moment.ids_S) for moment in kept]
    ids = np.concatenate([moment.ids_S for moment in kept]) if kept else np.empty(0, np.int64)
    states = np.concatenate([moment.state_S for moment in kept]) if kept else np.empty(0, np.int8)
    positions = np.concatenate([np.arange(length) for length in lengths]) if kept else np.empty(0, np.int64)
    different, place = np.unique(ids, return_inverse=True)
    loaded = task.loaded
    if loaded.tokenizer is None:
        texts = [f"⟨{token_id}⟩" for token_id in different.tolist()]
    else:
        texts = [str(loaded.tokenizer.decode([token_id])) for token_id in different.tolist()]
    special = [roles.get(token_id, "") for token_id in different.tolist()]
    template_S = np.zeros(int(positions.max(initial=-1)) + 1, dtype=bool)
    flags = task.prompt.template[: len(template_S)]
    template_S[: len(flags)] = flags
    return {
        "sample": np.full(len(ids), sample),
        "step": np.repeat([moment.index for moment in kept], lengths).astype(np.int64),
        "position": positions.astype(np.int32),
        "token_id": ids,
        "text": np.array(texts, dtype=object)[place],
        "state": np.array(STATES, dtype=object)[states],
        "special": np.array(special, dtype=object)[place],
        "template": template_S[positions],
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
