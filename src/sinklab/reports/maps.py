"""Figures over positions and steps: the heat map of received attention, and the path of the main sink."""

# T steps, L layers, H heads, K keys
from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from sinklab.records import Run

from .study import Study, as_study, mean_of
from .style import Theme, colormap, own_axes, theme_named, themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

MOST_LAYERS = 12
FLOOR = 0.5


def received_map(
    run: Run | Study,
    layer: int,
    axes: Axes | None = None,
    *,
    sample: int = 0,
    top: float | None = None,
    theme: str = "light",
) -> Axes:
    """Heat map position × step of received attention in one layer, mean over heads, as multiples of an even share.

    The colour scale is logarithmic, from 0.5 (nothing) to ``top`` (default: the greatest value drawn). Added sink
    columns are drawn wide, left of the text. Raises ValueError for an unknown layer or sample, or without attention.
    """
    study, look = as_study(run), theme_named(theme)
    received_TK = _head_mean(study, layer, sample)
    with themed(look):
        axes = own_axes(axes)
        _draw_map(axes, received_TK, study, look, top or float(np.nanmax(received_TK)))
        axes.set(xlabel="position", ylabel="step")
    return axes


def received_maps(study: Study, *, sample: int = 0, top: float | None = None, theme: str = "light") -> Figure:
    """The heat maps of all layers (at most 12, evenly spaced) on one figure of two columns."""
    from matplotlib.figure import Figure

    look, shown = theme_named(theme), shown_layers(study)
    maps = [_head_mean(study, layer, sample) for layer in shown]
    top = top or max(float(np.nanmax(values)) for values in maps)
    rows = (len(shown) + 1) // 2
    with themed(look):
        figure = Figure(figsize=(4.6, 0.75 + 1.3 * rows), layout="constrained")
        grid = figure.subplots(rows, 2, sharex=True, sharey=True, squeeze=False)
        for axes, layer, received_TK in zip(grid.flat, shown, maps, strict=False):
            image = _draw_map(axes, received_TK, study, look, top)
            axes.set_title(f"layer {layer}")
        for axes in list(grid.flat)[len(shown) :]:
            axes.axis("off")
        figure.supxlabel("position", fontsize=9, color=look.muted)
        figure.supylabel("denoising step", fontsize=9, color=look.muted)
        bar = figure.colorbar(image, ax=grid, location="top", aspect=50, shrink=0.75, pad=0.02)
        bar.set_ticks([tick for tick in (0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if tick <= top])
        bar.ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        bar.ax.minorticks_off()
        bar.outline.set_visible(False)
    return figure


def sink_path(run: Run | Study, axes: Axes | None = None, *, sample: int = 0, theme: str = "light") -> Axes:
    """Where the main sink is at each step: a dot per position, its area the share of (layer, head) pairs that have it.

    The colour says what the position held; dots on the strip below zero are the added sink token.
    Raises ValueError for an unknown sample or without attention.
    """
    study, look = as_study(run), theme_named(theme)
    share_TK, steps = main_sink_shares(study, sample)
    offset = study.sink_count
    length = share_TK.shape[1] - offset
    states = _states(study, sample, steps, length)
    strip = -0.09 * length
    with themed(look):
        axes = own_axes(axes, 4.6, 3.4)
        seen = share_TK[:, offset:] > 0
        for state, colour in look.states.items():
            step, position = np.nonzero(seen & (states == state))
            area = 110 * share_TK[step, position + offset]
            axes.scatter(step, position, s=area, color=colour, linewidths=0, label=state, alpha=0.9)
        if offset:
            added_T = share_TK[:, :offset].sum(1)
            at = np.flatnonzero(added_T)
            axes.axhline(strip / 2, color=look.line, linewidth=0.8)
            axes.scatter(
                at, np.full(len(at), strip), s=110 * added_T[at], color=look.added, linewidths=0, label="added sink"
            )
        axes.set(
            xlabel="denoising step",
            ylabel="position",
            xlim=(-1, steps),
            ylim=(1.7 * strip if offset else -2, length + 1),
        )
        axes.set_yticks([tick for tick in axes.get_yticks() if 0 <= tick <= length])
        legend = axes.legend(
            ncols=4, loc="lower left", bbox_to_anchor=(-0.1, 1), borderaxespad=0.3, handletextpad=0.1, columnspacing=1
        )
        for handle in legend.legend_handles:
            handle.set_sizes([36])  # type: ignore[union-attr]
    return axes


def main_sink_shares(study: Study, sample: int) -> tuple[np.ndarray, int]:
    """(step, key) share of (layer, head) pairs whose main sink is the key, and the number of steps of the sample."""
    _checked(study, sample, 0)
    main_LTH = np.stack([facts.main_NTH[sample] for facts in study.layers])
    keys = study.layers[0].events_NTK.shape[-1]
    steps = int((main_LTH >= 0).any((0, 2)).sum())
    counts = [np.bincount(main_LTH[:, step].ravel(), minlength=keys) for step in range(steps)]
    keys = int(np.flatnonzero(~np.isnan(_head_mean(study, 0, sample)).all(0)).max()) + 1
    return np.stack(counts)[:, :keys] / main_LTH[:, 0].size, steps


def shown_layers(study: Study) -> list[int]:
    """Layers that are drawn: all, or 12 evenly spaced ones."""
    count = len(study.layers)
    return sorted({round(index) for index in np.linspace(0, count - 1, min(count, MOST_LAYERS))})


def greatest_received(study: Study, sample: int = 0) -> float:
    """The greatest head-mean received attention that ``received_maps`` draws."""
    return max(float(np.nanmax(_head_mean(study, layer, sample))) for layer in shown_layers(study))


def _checked(study: Study, sample: int, layer: int) -> np.ndarray:
    if study.attention is None or not study.layers:
        raise ValueError(f"This figure needs recorded attention: {study.run.path} has none.")
    received = study.attention["received"]
    for what, value, count in (("sample", sample, received.shape[0]), ("layer", layer, received.shape[2])):
        if not 0 <= value < count:
            raise ValueError(f"{study.run.path} has {what}s 0 to {count - 1}: got {what}={value}.")
    return received


def _head_mean(study: Study, layer: int, sample: int) -> np.ndarray:
    received = _checked(study, sample, layer)[sample, :, layer].astype(np.float32)
    exists_TK = np.asarray(~np.isnan(received).all(axis=1))
    mean_TK = np.where(exists_TK, np.nan_to_num(received).mean(1), np.nan)
    steps = int(exists_TK.any(axis=1).sum())
    keys = int(np.flatnonzero(exists_TK.any(axis=0)).max(initial=0)) + 1
    if not steps or np.isnan(mean_of(mean_TK)):
        raise ValueError(f"{study.run.path} recorded no step of sample {sample}.")
    return mean_TK[:steps, :keys]


def _draw_map(axes: Axes, received_TK: np.ndarray, study: Study, look: Theme, top: float) -> AxesImage:
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    steps, added = len(received_TK), study.sink_count
    length = received_TK.shape[1] - added
    drawn = np.clip(received_TK, FLOOR, None)
    style: dict[str, Any] = {
        "cmap": colormap(look),
        "norm": LogNorm(FLOOR, max(top, 4 * FLOOR)),
        "aspect": "auto",
        "interpolation": "nearest",
    }
    # A quarter of a step of rest keeps the strip of the added sink apart from the text.
    width = 0.05 * length * added
    image = axes.imshow(drawn[:, added:], extent=(0, length, steps, 0), **style)
    if added:
        axes.imshow(drawn[:, :added], extent=(-1.4 * width, -0.4 * width, steps, 0), **style)
    ticks = [int(tick) for tick in MaxNLocator(4, integer=True).tick_values(0, length) if 0 < tick < 0.9 * length]
    axes.set_xlim(-1.4 * width, length)
    axes.set_xticks([*([-0.9 * width] if added else [0]), *ticks], [*(["sink"] if added else ["0"]), *map(str, ticks)])
    axes.set_ylim(steps, 0)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    return image


def _states(study: Study, sample: int, steps: int, length: int) -> np.ndarray:
    """(step, position) what the position held; everything is "committed" when the run kept no tokens."""
    states = np.full((steps, length), "committed", dtype=object)
    if study.tokens is not None:
        rows = study.tokens[(study.tokens["sample"] == sample) & (study.tokens["step"] < steps)]
        rows = rows[rows["position"] < length]
        states[rows["step"].to_numpy(), rows["position"].to_numpy()] = rows["state"].to_numpy()
    return states
