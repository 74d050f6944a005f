"""Heat maps and paths: where attention goes in a study, and where its main sinks are; layer by step of training."""

# T steps, L layers, H heads, Q queries, K keys (added sinks first), S positions
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure as Canvas
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter, MaxNLocator

from sinklab.errors import near
from sinklab.reports.drawing import NEW, drawn_as, figure, finish
from sinklab.reports.samples import STATES, NotRecorded, Sample
from sinklab.reports.study import Study
from sinklab.reports.style import Theme, colormap, legend_of_dots, own_axes, whole_numbers
from sinklab.reports.training import Training

Number = int | None
"""of a layer or head of the model"""
MOST_LAYERS = 12
FLOOR = 0.5
RASTERED = 1500
"""dots above which they are drawn as pixels"""
_TICKS = (0.5, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


@figure("received_map", alone=True, needs="attention")
def received_map(
    run: Study,
    layer: int | None = None,
    axes: Axes | None = None,
    *,
    head: int | None = None,
    sample: int = 0,
    top: float | None = None,
    look: Theme,
) -> Axes:
    """Heat map position × step of received attention, as multiples of an even share (analysis paper, Fig. 1).

    Mean over layers and heads where ``layer`` or ``head`` (numbers of the model) is None. The colour scale is
    logarithmic, from 0.5 (nothing) to ``top`` (default: the greatest value drawn). Added sink columns are drawn wide,
    left of the text; thin lines are block borders. Raises ValueError for an unknown layer, head or sample.
    """
    watched = recorded_sample(run, sample)
    received_TK = received_mean(run, watched, layer, head)
    own, axes = axes is None, own_axes(axes, 4.6, 3.4)
    image = _draw_map(axes, received_TK, watched, look, top or float(np.nanmax(received_TK)))
    axes.set(xlabel="position", ylabel="step")
    if own:
        _scale_bar(image, axes)
    return axes


@figure("received_maps", alone=True, needs="attention")
def received_maps(run: Study, *, sample: int = 0, top: float | None = None, look: Theme) -> Canvas:
    """The heat maps of all recorded layers (at most 12, evenly spaced) on one figure of two columns."""
    watched = recorded_sample(run, sample)
    places = np.unique(np.linspace(0, len(run.layers) - 1, min(len(run.layers), MOST_LAYERS)).round().astype(int))
    shown = [run.layers[place] for place in places]
    maps = [received_mean(run, watched, layer) for layer in shown]
    top = top or max(float(np.nanmax(values)) for values in maps)
    rows = (len(shown) + 1) // 2
    canvas = Canvas(figsize=(4.6, 0.75 + 1.3 * rows), layout="constrained")
    grid = canvas.subplots(rows, 2, sharex=True, sharey=True, squeeze=False)
    for axes, layer, received_TK in zip(grid.flat, shown, maps, strict=False):
        image = _draw_map(axes, received_TK, watched, look, top)
        axes.set_title(f"layer {layer}")
    for axes in list(grid.flat)[len(shown) :]:
        axes.axis("off")
    canvas.supxlabel("position", fontsize=9, color=look.muted)
    canvas.supylabel("step", fontsize=9, color=look.muted)
    _scale_bar(image, grid, aspect=50, shrink=0.75)
    return canvas


@figure("attention_map", alone=True, needs="attention")
def attention_map(
    run: Study,
    step: int | None = None,
    layer: int | None = None,
    head: int | None = None,
    axes: Axes | None = None,
    *,
    sample: int = 0,
    look: Theme,
) -> Axes:
    """One whole attention map, query × key, as multiples of an even share (analysis paper, Fig. 4, 6 and 8).

    step, layer, head: numbers of one of the maps that the run kept; None takes the first kept one that fits the others.
    Raises ValueError naming the maps there are when it is none of them.
    """
    watched = recorded_sample(run, sample)
    name = watched.map_name(step, layer, head)
    weight_QK = watched.map(*name)
    own, axes = axes is None, own_axes(axes, 4.2, 4.0)
    drawn = weight_QK * weight_QK.shape[1]
    image = _draw_image(axes, drawn, watched.added, look, float(np.nanmax(drawn)))
    axes.set(xlabel="key position", ylabel="query", title="step {}, layer {}, head {}".format(*name))
    if own:
        _scale_bar(image, axes)
    return axes


@figure("layer_head_map", alone=True, needs="attention")
def layer_head_map(run: Study, axes: Axes | None = None, *, look: Theme) -> Axes:
    """Layer × head: attention weight on the main sink of a head, mean over steps and samples (analysis paper, Fig. 5).

    In percent, on a linear scale from 0; the main sink is determined separately for every step.
    """
    share_LH = 100 * run.measured.main_share_LH
    layers, heads = share_LH.shape
    axes = own_axes(axes, 4.6, min(6.0, max(2.2, 1.1 + 0.9 * layers / max(heads, 1) * 3.6)))
    top = max(float(np.nanmax(share_LH)), 1e-9)
    image = axes.imshow(share_LH, cmap=colormap(look), aspect="auto", interpolation="nearest", vmin=0, vmax=top)
    axes.set(xlabel="head", ylabel="layer")
    for axis, numbers in ((axes.xaxis, run.heads), (axes.yaxis, run.layers)):
        every = max(1, -(-len(numbers) // 16))
        axis.set_ticks(range(0, len(numbers), every), [str(number) for number in numbers[::every]])
    _bare(axes)
    bar = _colour_bar(image, axes, aspect=28)
    bar.ax.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    return axes


@figure("emergence_map", kind="training", alone=True, needs="monitor", size=(4.6, 2.6), legend=1)
def emergence_map(run: Training, axes: Axes = NEW, *, top: float | None = None, look: Theme) -> None:
    """Share of attention on the added sinks (without any: on the greatest text token) by step and layer, in percent.

    top: the share that has the strongest colour, for figures that are to compare.
    """
    share = "added_share" if run.sink_count else "text_share"
    share_LT = 100 * run.facts[run.facts["layer"] >= 0].pivot(index="layer", columns="step", values=share)
    values = share_LT.to_numpy()
    greatest = max(float(np.nan_to_num(values).max(initial=0)), 1e-3)
    edges = [_edges(numbers.to_numpy(float)) for numbers in (share_LT.columns, share_LT.index)]
    mesh = axes.pcolormesh(*edges, values, cmap=colormap(look), vmin=0, vmax=top or greatest, rasterized=True)
    axes.set(xlabel="step", ylabel="layer")
    axes.set_title("added sinks" if run.sink_count else "greatest text token")
    whole_numbers(axes.yaxis)
    _colour_bar(mesh, axes).set_label("share of attention, %")
    finish(axes, [run], "step")
    axes.grid(visible=False)


def _edges(middles: np.ndarray) -> np.ndarray:
    """Borders of cells around these middles."""
    if len(middles) == 1:
        return np.array([middles[0] - 0.5, middles[0] + 0.5])
    between = (middles[1:] + middles[:-1]) / 2
    return np.concatenate([[2 * middles[0] - between[0]], between, [2 * middles[-1] - between[-1]]])


def recorded_sample(study: Study, sample: int) -> Sample:
    """The sample of this number. ValueError naming those with attention."""
    return study.sample(study.recorded[place_of(study, "sample", sample)])


def place_of(study: Study, what: str, number: int) -> int:
    """Where this "layer" or "head" of the model, or this "sample", stands on its axis.

    ValueError naming the recorded ones.
    """
    samples = [study.samples.numbers[place] for place in study.recorded]
    known = {"layer": study.layers, "head": study.heads, "sample": samples}[what]
    if number not in known:
        hint = near(number, known) if len(known) > 1 else ""
        raise ValueError(f"{study.run.path} has {what}s {spoken(known)}: got {what}={number}. {hint}".rstrip())
    return known.index(number)


def spoken(numbers: list[int]) -> str:
    """Numbers as "0 to 7" or "0, 4, 9"."""
    whole = len(numbers) > 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return f"{numbers[0]} to {numbers[-1]}" if whole else ", ".join(map(str, numbers))


def received_mean(study: Study, sample: Sample, layer: int | None, head: int | None = None) -> np.ndarray:
    """(step, key) received attention of one layer and head, or the mean over them; NaN where the key is not there."""
    layers = slice(None) if layer is None else [place_of(study, "layer", layer)]
    if not sample.shape[0]:
        raise NotRecorded(f"{study.run.path} recorded no step of sample {sample.index}.")
    if head is None:
        received_TLK = sample.seen.received_TLK
    else:
        place = place_of(study, "head", head)
        received_TLK = np.stack([slab.received[:, place] for slab in sample.slabs()])
    return np.where(sample.exists_TK, received_TLK[:, layers].mean(1), np.nan)


def _draw_map(axes: Axes, received_TK: np.ndarray, sample: Sample, look: Theme, top: float) -> AxesImage:
    image = _draw_image(axes, received_TK, sample.added, look, top)
    numbers = sample.step_numbers_T
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    # Rows are recorded steps, which need not be every step.
    axes.yaxis.set_major_formatter(FuncFormatter(lambda row, _: str(numbers[int(row)]) if row < len(numbers) else ""))
    for border in sample.borders:
        axes.axhline(float(border), color=look.muted, linewidth=0.5, alpha=0.7)
    return image


def _draw_image(axes: Axes, values: np.ndarray, added: int, look: Theme, top: float) -> AxesImage:
    rows, length = len(values), values.shape[1] - added
    drawn, norm = np.clip(values, FLOOR, None), LogNorm(FLOOR, max(top, 4 * FLOOR))
    style: dict[str, Any] = {"cmap": colormap(look), "norm": norm, "aspect": "auto", "interpolation": "nearest"}
    # Some room keeps the strip of the added sink apart from the text.
    width = 0.05 * length * added
    image = axes.imshow(drawn[:, added:], extent=(0, length, rows, 0), **style)
    if added:
        axes.imshow(drawn[:, :added], extent=(-1.4 * width, -0.4 * width, rows, 0), **style)
    ticks = [int(tick) for tick in MaxNLocator(4, integer=True).tick_values(0, length) if 0 < tick < 0.9 * length]
    axes.set_xlim(-1.4 * width, length)
    axes.set_xticks([-0.9 * width if added else 0, *ticks], ["sink" if added else "0", *map(str, ticks)])
    axes.set_ylim(rows, 0)
    _bare(axes)
    return image


def _bare(axes: Axes) -> None:
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(length=0)


def _colour_bar(image: Any, axes: Any, **where: Any) -> Any:
    bar = image.figure.colorbar(image, ax=axes, **({"pad": 0.02} | where))
    bar.outline.set_visible(False)
    return bar


def _scale_bar(image: AxesImage, axes: Any, **where: Any) -> None:
    bar = _colour_bar(image, axes, location="top", **({"aspect": 40, "shrink": 0.8} | where))
    bar.set_ticks([tick for tick in _TICKS if tick <= image.norm.vmax])  # type: ignore[operator]
    bar.ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    bar.ax.minorticks_off()


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
        dots: dict[str, Any] = {"linewidths": 0, "label": state, "alpha": 0.9, "rasterized": len(row) > RASTERED}
        axes.scatter(numbers[row], position, s=area, color=look.states[state], **dots)
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
    runs: list[Study], layer: Number = None, head: Number = None, axes: Axes = NEW, *, sample: int = 0, look: Theme
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
    keys = sample.visible_TK.shape[1]
    # a key of -1 is none, and falls into a bin of its own
    counts = [np.bincount(main_LH.ravel() + 1, minlength=keys + 1)[1:] for main_LH in sample.main_TLH]
    return np.stack(counts) / max(sample.main_TLH[0].size, 1)


def _chosen(study: Study, sample: Sample, layer: int | None, head: int | None) -> tuple[int, int]:
    """Places of the layer and head that are drawn."""
    strength_LH = np.nansum(sample.seen.text_share_TLH, axis=0)
    if layer is not None:
        strength_LH[np.arange(len(study.layers)) != place_of(study, "layer", layer)] = -1
    if head is not None:
        strength_LH[:, np.arange(len(study.heads)) != place_of(study, "head", head)] = -1
    found = np.unravel_index(int(strength_LH.argmax()), strength_LH.shape)
    return int(found[0]), int(found[1])


def _borders(axes: Axes, sample: Sample, colour: str) -> None:
    for border in sample.borders:
        axes.axvline(float(sample.step_numbers_T[border]) - 0.5, color=colour, linewidth=0.8, zorder=0)
