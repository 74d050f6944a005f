"""The truncation experiment: hide the middle of the context half-way, and see whether heads find another sink."""

# T recorded steps, L layers, H heads, K keys
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sinklab.evaluation.decoding import Task
from sinklab.evaluation.recording import Selection
from sinklab.probing import edit_by_name

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
        return edit_by_name("truncate_context", start=self.start, stop=self.stop, step=self.step)

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
