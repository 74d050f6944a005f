"""Figures over positions: heat maps of received attention and of whole attention maps, paths of the main sink."""

# T steps, L layers, H heads, Q queries, K keys (added sinks first), S positions
from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Any

import numpy as np

from sinklab.records.reading import Run
from sinklab.reports.samples import NotRecorded, Sample
from sinklab.reports.study import Study, as_study
from sinklab.reports.style import Theme, colormap, own_axes, theme_named, themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage


MOST_LAYERS = 12
FLOOR = 0.5
_TICKS = (0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


def received_map(
    run: Run | Study,
    layer: int | None = None,
    axes: Axes | None = None,
    *,
    head: int | None = None,
    sample: int = 0,
    top: float | None = None,
    theme: str = "light",
) -> Axes:
    """Heat map position × step of received attention, as multiples of an even share (analysis paper, Fig. 1).

    Mean over layers and heads where ``layer`` or ``head`` (numbers of the model) is None. The colour scale is
    logarithmic, from 0.5 (nothing) to ``top`` (default: the greatest value drawn). Added sink columns are drawn wide,
    left of the text; thin lines are block borders. Raises ValueError for an unknown layer, head or sample, or without
    attention.
    """
    study, look = as_study(run), theme_named(theme)
    watched = recorded_sample(study, sample)
    received_TK = received_mean(study, watched, layer, head)
    with themed(look):
        fresh = axes is None
        axes = own_axes(axes, 4.6, 3.4)
        image = _draw_map(axes, received_TK, watched, look, top or float(np.nanmax(received_TK)))
        axes.set(xlabel="position", ylabel="step")
        if fresh:
            _scale_bar(image, axes)
    return axes


def received_maps(study: Study, *, sample: int = 0, top: float | None = None, theme: str = "light") -> Figure:
    """The heat maps of all recorded layers (at most 12, evenly spaced) on one figure of two columns."""
    from matplotlib.figure import Figure

    look, shown = theme_named(theme), shown_layers(study)
    watched = recorded_sample(study, sample)
    maps = [received_mean(study, watched, layer) for layer in shown]
    top = top or max(float(np.nanmax(values)) for values in maps)
    rows = (len(shown) + 1) // 2
    with themed(look):
        figure = Figure(figsize=(4.6, 0.75 + 1.3 * rows), layout="constrained")
        grid = figure.subplots(rows, 2, sharex=True, sharey=True, squeeze=False)
        for axes, layer, received_TK in zip(grid.flat, shown, maps, strict=False):
            image = _draw_map(axes, received_TK, watched, look, top)
            axes.set_title(f"layer {layer}")
        for axes in list(grid.flat)[len(shown) :]:
            axes.axis("off")
        figure.supxlabel("position", fontsize=9, color=look.muted)
        figure.supylabel("step", fontsize=9, color=look.muted)
        _scale_bar(image, grid, aspect=50, shrink=0.75, pad=0.02)
    return figure


def attention_map(
    run: Run | Study,
    step: int | None = None,
    layer: int | None = None,
    head: int | None = None,
    axes: Axes | None = None,
    *,
    sample: int = 0,
    theme: str = "light",
) -> Axes:
    """One whole attention map, query × key, as multiples of an even share (analysis paper, Fig. 4, 6 and 8).

    step, layer, head: numbers of one of the maps that the run kept; None takes the first kept one that fits the others.
    Raises ValueError naming the maps there are when it is none of them.
    """
    study, look = as_study(run), theme_named(theme)
    watched = recorded_sample(study, sample)
    asked = (step, layer, head)
    fits = [
        name for name in watched.map_names if all(given in (None, has) for given, has in zip(asked, name, strict=True))
    ]
    if not watched.map_names:
        raise NotRecorded(
            f"This figure needs whole attention maps, and {study.run.path} kept none of sample {watched.index}. Ask "
            "for them when tracing, as step:layer:head: `sinklab trace --maps 3:5:2`."
        )
    if not fits:
        given = ", ".join("any" if number is None else str(number) for number in asked)
        kept = ", ".join(map(str, watched.map_names))
        raise NotRecorded(
            f"{study.run.path} kept no map of (step, layer, head) ({given}) of sample {watched.index}: it has {kept}."
        )
    weight_QK = watched.map(*fits[0])
    with themed(look):
        fresh = axes is None
        axes = own_axes(axes, 4.2, 4.0)
        drawn = weight_QK * weight_QK.shape[1]
        image = _draw_image(axes, drawn, watched.added, look, float(np.nanmax(drawn)))
        axes.set(xlabel="key position", ylabel="query", title="step {}, layer {}, head {}".format(*fits[0]))
        if fresh:
            _scale_bar(image, axes)
    return axes


def layer_head_map(run: Run | Study, axes: Axes | None = None, *, theme: str = "light") -> Axes:
    """Layer × head: attention weight on the main sink of a head, mean over steps and samples (analysis paper, Fig. 5).

    In percent, on a linear scale from 0; the main sink is looked up anew at every step. Raises ValueError without
    attention.
    """
    study, look = as_study(run), theme_named(theme)
    recorded_sample(study, None)
    share_LH = 100 * np.stack([facts.main_share_H for facts in study.facts])
    layers, heads = share_LH.shape
    with themed(look):
        axes = own_axes(axes, 4.6, min(6.0, max(2.2, 1.1 + 0.9 * layers / max(heads, 1) * 3.6)))
        image = axes.imshow(
            share_LH, cmap=colormap(look), aspect="auto", interpolation="nearest", vmin=0,
            vmax=max(float(np.nanmax(share_LH)), 1e-9),
        )  # fmt: skip
        axes.set(xlabel="head", ylabel="layer")
        _numbered(axes.xaxis, study.heads, 16)
        _numbered(axes.yaxis, study.layers, 16)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.tick_params(length=0)
        bar = axes.figure.colorbar(image, ax=axes, pad=0.02, aspect=28)
        bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
        bar.outline.set_visible(False)
    return axes


def recorded_sample(study: Study, sample: int | None) -> Sample:
    """The sample numbered ``sample`` (None: the first one with attention). ValueError naming those there are."""
    if not study.recorded:
        raise NotRecorded(f"This figure needs recorded attention: {study.run.path} has none.")
    numbers = [study.samples.numbers[place] for place in study.recorded]
    if sample is None:
        return study.samples[study.recorded[0]]
    if sample not in numbers:
        raise ValueError(f"{study.run.path} has samples {spoken(numbers)}: got sample={sample}.")
    return study.samples[study.recorded[numbers.index(sample)]]


def place_of(study: Study, what: str, number: int) -> int:
    """Where layer or head ``number`` of the model stands on its axis. ValueError naming the recorded ones."""
    known = study.layers if what == "layer" else study.heads
    if number not in known:
        near = difflib.get_close_matches(str(number), map(str, known), n=1)
        hint = f" Did you mean {near[0]}?" if near and len(known) > 1 else ""
        raise ValueError(f"{study.run.path} has {what}s {spoken(known)}: got {what}={number}.{hint}")
    return known.index(number)


def spoken(numbers: list[int]) -> str:
    """Numbers as "0 to 7" or "0, 4, 9"."""
    whole = len(numbers) > 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return f"{numbers[0]} to {numbers[-1]}" if whole else ", ".join(map(str, numbers))


def shown_layers(study: Study) -> list[int]:
    """Numbers of the layers that are drawn: all recorded ones, or 12 evenly spaced ones."""
    count = len(study.layers)
    return [
        study.layers[place] for place in sorted({round(i) for i in np.linspace(0, count - 1, min(count, MOST_LAYERS))})
    ]


def received_mean(study: Study, sample: Sample, layer: int | None, head: int | None = None) -> np.ndarray:
    """(step, key) received attention of one layer and head, or the mean over them; NaN where the key is not there."""
    received = sample.received_TLHK
    if layer is not None:
        received = received[:, [place_of(study, "layer", layer)]]
    if head is not None:
        received = received[:, :, [place_of(study, "head", head)]]
    if not received.size:
        raise NotRecorded(f"{study.run.path} recorded no step of sample {sample.index}.")
    return np.where(sample.exists_TK, np.where(sample.exists_TK[:, None, None], received, 0).mean((1, 2)), np.nan)


def _draw_map(axes: Axes, received_TK: np.ndarray, sample: Sample, look: Theme, top: float) -> AxesImage:
    image = _draw_image(axes, received_TK, sample.added, look, top)
    numbers, blocks = sample.step_numbers_T, sample.blocks_T
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    # Rows are recorded steps, which need not be every step.
    axes.yaxis.set_major_formatter(FuncFormatter(lambda row, _: str(numbers[int(row)]) if row < len(numbers) else ""))
    for border in np.flatnonzero(blocks[1:] != blocks[:-1]) + 1:
        axes.axhline(float(border), color=look.muted, linewidth=0.5, alpha=0.7)
    return image


def _draw_image(axes: Axes, values: np.ndarray, added: int, look: Theme, top: float) -> AxesImage:
    from matplotlib.colors import LogNorm
    from matplotlib.ticker import MaxNLocator

    rows, length = len(values), values.shape[1] - added
    drawn = np.clip(values, FLOOR, None)
    style: dict[str, Any] = {
        "cmap": colormap(look),
        "norm": LogNorm(FLOOR, max(top, 4 * FLOOR)),
        "aspect": "auto",
        "interpolation": "nearest",
    }
    # Some room keeps the strip of the added sink apart from the text.
    width = 0.05 * length * added
    image = axes.imshow(drawn[:, added:], extent=(0, length, rows, 0), **style)
    if added:
        axes.imshow(drawn[:, :added], extent=(-1.4 * width, -0.4 * width, rows, 0), **style)
    ticks = [int(tick) for tick in MaxNLocator(4, integer=True).tick_values(0, length) if 0 < tick < 0.9 * length]
    axes.set_xlim(-1.4 * width, length)
    axes.set_xticks([*([-0.9 * width] if added else [0]), *ticks], [*(["sink"] if added else ["0"]), *map(str, ticks)])
    axes.set_ylim(rows, 0)
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)
    return image


def _scale_bar(image: AxesImage, axes: Any, **where: Any) -> None:
    bar = image.figure.colorbar(image, ax=axes, location="top", **({"aspect": 40, "shrink": 0.8, "pad": 0.02} | where))
    bar.set_ticks([tick for tick in _TICKS if tick <= image.norm.vmax])  # type: ignore[operator]
    bar.ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    bar.ax.minorticks_off()
    bar.outline.set_visible(False)


def _numbered(axis: Any, numbers: list[int], most: int) -> None:
    """Ticks at every ``len // most``-th place, labelled with the numbers of the model."""
    every = max(1, -(-len(numbers) // most))
    axis.set_ticks(range(0, len(numbers), every), [str(number) for number in numbers[::every]])
