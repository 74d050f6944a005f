"""Figures of motion: where the main sink is at each step."""

# T steps, L layers, H heads, K keys (added sinks first), S positions
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sinklab.reports.drawing import NEW, drawn_as, figure
from sinklab.reports.maps import place_of, recorded_sample
from sinklab.reports.samples import STATES, Sample
from sinklab.reports.study import Study
from sinklab.reports.style import Theme, legend_of_dots

if TYPE_CHECKING:
    from matplotlib.axes import Axes


@figure("sink_path", alone=True, needs="attention", size=(4.6, 3.4))
def sink_path(run: Study, axes: Axes = NEW, *, sample: int = 0, look: Theme) -> None:
    """Where the main sink is at each step: a dot per position, its area the share of (layer, head) pairs that have it.

    The analysis paper's Fig. 7 for all heads at once. The colour says what the position held; dots on the strip below
    zero are the added sink token; thin lines are block borders. Raises ValueError for an unknown sample.
    """
    watched = recorded_sample(run, sample)
    share_TK = main_shares(watched)
    offset, steps, numbers = watched.added, len(share_TK), watched.step_numbers_T
    length = share_TK.shape[1] - offset
    states = watched.states_TS if watched.has_tokens else np.full((steps, length), 1)
    strip = -0.09 * length
    for code, state in enumerate(STATES):
        row, position = np.nonzero((share_TK[:, offset:] > 0) & (states == code))
        area = 110 * share_TK[row, position + offset]
        axes.scatter(numbers[row], position, s=area, color=look.states[state], linewidths=0, label=state, alpha=0.9)
    if offset:
        added_T = share_TK[:, :offset].sum(1)
        at = np.flatnonzero(added_T)
        axes.axhline(strip / 2, color=look.line, linewidth=0.8)
        places = np.full(len(at), strip)
        axes.scatter(numbers[at], places, s=110 * added_T[at], color=look.added, linewidths=0, label="added sink")
    _borders(axes, watched, look.line)
    room = 0.02 * (numbers[-1] - numbers[0]) + 1
    axes.set(xlabel="step", ylabel="position", xlim=(numbers[0] - room, numbers[-1] + room))
    axes.set_ylim(1.7 * strip if offset else -2, length + 1)
    axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= length])
    legend_of_dots(axes, 4)


@figure("sink_path_of_head", needs="attention", size=(4.6, 3.0), legend=1)
def sink_path_of_head(
    runs: list[Study],
    layer: int | None = None,
    head: int | None = None,
    axes: Axes = NEW,
    *,
    sample: int = 0,
    look: Theme,
) -> None:
    """Position of the main sink of one head over steps, a line per run (analysis paper, Fig. 7).

    layer, head: numbers of the model; None takes the head whose main text position receives most. Dots on the strip
    below zero are the added sink token. Raises ValueError for unknown numbers.
    """
    length, added = 0, False
    for index, one in enumerate(drawn_as(runs, look)):
        watched = recorded_sample(one.run, sample)
        place = _chosen(one.run, watched, layer, head)
        main_T = watched.main_TLH[:, place[0], place[1]].astype(float) - watched.added
        length, added = max(length, int(watched.positions_T.max())), added or bool((main_T < 0).any())
        label = f"{one.run.label}: layer {one.run.layers[place[0]]}, head {one.run.heads[place[1]]}"
        drawn_T = np.where(main_T < 0, np.nan, main_T)
        style: dict[str, Any] = {"color": one.colour, "marker": one.marker, "markersize": 3.2}
        axes.plot(watched.step_numbers_T, drawn_T, drawstyle="steps-mid", linewidth=1.2, label=label, **style)
        # the added sink has no position of its own
        on_added = np.flatnonzero(main_T < 0)
        level = np.full(len(on_added), -0.06 * (index + 1))
        axes.plot(watched.step_numbers_T[on_added], level * length, linestyle="", **style)
        if index == 0:
            _borders(axes, watched, look.line)
    strip = 0.06 * (len(runs) + 1) * length if added else 2
    axes.set(xlabel="step", ylabel="position of the main sink", ylim=(-strip, length + 1))
    ticks = [tick for tick in axes.get_yticks() if 0 <= tick <= length]
    axes.set_yticks(ticks)
    if added:
        axes.axhline(-0.03 * length, color=look.line, linewidth=0.8)
        axes.set_yticks([-strip / 2, *ticks], ["sink", *(f"{tick:g}" for tick in ticks)])


def main_shares(sample: Sample) -> np.ndarray:
    """(step, key) share of (layer, head) pairs whose main sink is the key."""
    keys = np.arange(sample.visible_TK.shape[1])
    return np.stack([(main_LH[..., None] == keys).mean((0, 1)) for main_LH in sample.main_TLH])


def _chosen(study: Study, sample: Sample, layer: int | None, head: int | None) -> tuple[int, int]:
    """Places of the layer and head that are drawn."""
    text_TLH = np.fmax.reduce(sample.share_TLHK[..., sample.added :], axis=-1)
    strength_LH = np.nansum(text_TLH, axis=0)
    if layer is not None:
        strength_LH[np.arange(len(study.layers)) != place_of(study, "layer", layer)] = -1
    if head is not None:
        strength_LH[:, np.arange(len(study.heads)) != place_of(study, "head", head)] = -1
    found = np.unravel_index(int(strength_LH.argmax()), strength_LH.shape)
    return int(found[0]), int(found[1])


def _borders(axes: Axes, sample: Sample, colour: str) -> None:
    for border in sample.borders:
        axes.axvline(float(sample.step_numbers_T[border]) - 0.5, color=colour, linewidth=0.8, zorder=0)
