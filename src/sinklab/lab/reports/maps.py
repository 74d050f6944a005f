"""Heat maps and paths: attention in a study and the positions of its main sinks; layer by step of
training.
"""

# T steps, L layers, H heads, Q queries, K keys (added sinks first)
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sinklab.core.errors import near
from sinklab.lab.reports.charts import Axis, Chart, Map, Mark
from sinklab.lab.reports.drawing import Look, drawn_as, figure
from sinklab.lab.reports.figures import heldout_loss, mobility_by_layer, sink_share
from sinklab.lab.reports.recorded import recorded_statistics, statistics_table, words_of_statistic
from sinklab.lab.reports.samples import NotRecorded, Sample
from sinklab.lab.reports.study import Study
from sinklab.lab.reports.training import Training

Number = int | None
"""of a layer or head of the model"""
MOST_LAYERS, MOST_PATHS = 12, 8
RECEIVED = "received attention, × even share"


@figure("received_map", alone=True, needs="attention", prepared=True, size=(4.6, 3.2))
def received_map(
    run: Study, layer: int | None = None, *, head: int | None = None, sample: int = 0
) -> Map:
    """Heat map position × step of received attention, as multiples of an even share (analysis
    paper, Fig. 1).

    Mean over layers and heads if ``layer`` or ``head`` (numbers of the model) is None. The colour
    scale is logarithmic, from 0.5 (nothing) to ``top`` (default: the greatest value drawn). Added
    sink columns are drawn wide, left of the text; thin lines are block borders. Raises ValueError
    for an unknown layer, head or sample.
    """
    return _map_of(run, recorded_sample(run, sample), layer, head)


@figure("received_maps", alone=True, needs="attention", prepared=True, columns=2, size=(2.6, 1.35))
def received_maps(run: Study, *, sample: int = 0) -> list[Map]:
    """The heat maps of all recorded layers (at most 12, evenly spaced) on one figure of two
    columns.
    """
    places = np.unique(
        np.linspace(0, len(run.layers) - 1, min(len(run.layers), MOST_LAYERS)).round().astype(int)
    )
    watched = recorded_sample(run, sample)
    return [
        _map_of(run, watched, run.layers[place], title=f"layer {run.layers[place]}")
        for place in places
    ]


@figure("attention_map", alone=True, needs="attention", prepared=True, size=(4.6, 3.9))
def attention_map(
    run: Study,
    step: int | None = None,
    layer: int | None = None,
    head: int | None = None,
    *,
    sample: int = 0,
) -> Map:
    """One whole attention map, query × key, as multiples of an even share (analysis paper, Fig. 4,
    6 and 8).

    step, layer, head: numbers of one of the maps that the run kept; None takes the first kept one
    that fits the others. Raises ValueError naming the maps there are when it is none of them.
    """
    watched = recorded_sample(run, sample)
    name = watched.map_name(step, layer, head)
    weight_QK = watched.map(*name)
    rows, columns = (
        Axis(words, names=_numbers(size))
        for words, size in (
            ("query", len(weight_QK)),
            ("key position", weight_QK.shape[1] - watched.added),
        )
    )
    drawn, title = weight_QK * weight_QK.shape[1], "step {}, layer {}, head {}".format(*name)
    return Map(
        drawn,
        "attention weight, × even share",
        rows,
        columns,
        log=True,
        added=watched.added,
        title=title,
    )


@figure("layer_head_map", alone=True, needs="attention", prepared=True, size=(4.6, 3.6))
def layer_head_map(run: Study) -> Map:
    """Layer × head: attention weight on the main sink of a head, mean over steps and samples
    (analysis paper, Fig. 5).

    In percent, on a linear scale from 0; the main sink is determined separately for every step.
    """
    axes = Axis("layer", names=_numbers(run.layers)), Axis("head", names=_numbers(run.heads))
    return Map(100 * run.measured.main_share_LH, "attention on the main sink, %", *axes)


@figure(
    "emergence_map", kind="training", alone=True, needs="monitor", prepared=True, size=(4.6, 2.6)
)
def emergence_map(run: Training) -> Map:
    """Share of attention on the added sinks (without any: on the greatest text token) by step and
    layer, in percent.
    """
    share, words = (
        ("added_share", "added sinks") if run.sink_count else ("text_share", "greatest text token")
    )
    share_LT = 100 * run.facts[run.facts["layer"] >= 0].pivot(
        index="layer", columns="step", values=share
    )
    axes = (
        Axis("layer", names=_numbers(share_LT.index)),
        Axis("step", names=_numbers(share_LT.columns)),
    )
    causal = run.causal_steps
    marks = [Mark("x", float(np.searchsorted(share_LT.columns, causal)))] if causal else []
    return Map(share_LT.to_numpy(), "share of attention, %", *axes, marks=marks, title=words)


@figure(
    "statistics",
    alone=True,
    needs="attention",
    prepared=True,
    columns=2,
    share="own",
    size=(2.75, 1.9),
)
def statistics_maps(run: Study, *, only: str | None = None) -> list[Map]:
    """Recorded statistics that have no figure of their own, by layer and step.

    Means over samples and all other axes that a statistic has.

    Args:
        only: the name of one of them.
    """
    axes_of = recorded_statistics(run)
    names = [name for name in axes_of if only in (None, name)]
    if not names:
        raise NotRecorded(
            f"This figure needs a statistic without a figure of its own, and {run.run.path} "
            "recorded none. The setting `statistics` of a trace names them: key_norm, row_entropy, "
            "or one of a plug-in."
        )
    return [_statistic_map(run, name, axes_of[name]) for name in names]


def _statistic_map(run: Study, name: str, dims: tuple[str, ...]) -> Map:
    rows = statistics_table(run).query("statistic == @name")
    found = rows.pivot(index="layer", columns="step", values="mean")
    over = [f"{axis}s" for axis in dims if axis not in ("step", "layer")]
    *others, last = ["samples", *over]
    scale = f"mean over {', '.join(others)} and {last}" if others else f"mean over {last}"
    axes = Axis("layer", names=_numbers(found.index)), Axis("step", names=_numbers(found.columns))
    values_LT = found.to_numpy()
    is_signed = bool((np.nan_to_num(values_LT) < 0).any())
    words = words_of_statistic(name)
    caption = f"{name}: {words}" if words else ""
    return Map(values_LT, scale, *axes, both=is_signed, title=name, words=caption)


def _numbers(of: Any) -> list[str]:
    return [str(number) for number in (range(of) if isinstance(of, int) else of)]


def _map_of(run: Study, sample: Sample, layer: Number, head: Number = None, title: str = "") -> Map:
    received_TK = received_mean(run, sample, layer, head)
    axes = (
        Axis("step", names=_numbers(sample.step_numbers_T)),
        Axis("position", names=_numbers(received_TK.shape[1] - sample.added)),
    )
    marks = [Mark("y", float(border)) for border in sample.borders]
    return Map(received_TK, RECEIVED, *axes, log=True, added=sample.added, marks=marks, title=title)


def recorded_sample(study: Study, sample: int) -> Sample:
    """The sample of this number. ValueError naming those with attention."""
    return study.sample(study.recorded[place_of(study, "sample", sample)])


def place_of(study: Study, what: str, number: int) -> int:
    """Index of this "layer" or "head" of the model, or this "sample", on its axis.

    ValueError naming the recorded ones.
    """
    samples = [study.samples.numbers[place] for place in study.recorded]
    known = {"layer": study.layers, "head": study.heads, "sample": samples}[what]
    if number not in known:
        hint = near(number, known) if len(known) > 1 else ""
        raise ValueError(
            f"{study.run.path} has {what}s {spoken(known)}: got {what}={number}. {hint}".rstrip()
        )
    return known.index(number)


def spoken(numbers: list[int]) -> str:
    """Numbers as "0 to 7" or "0, 4, 9"."""
    whole = len(numbers) > 1 and numbers == list(range(numbers[0], numbers[0] + len(numbers)))
    return f"{numbers[0]} to {numbers[-1]}" if whole else ", ".join(map(str, numbers))


def received_mean(
    study: Study, sample: Sample, layer: int | None, head: int | None = None
) -> np.ndarray:
    """(step, key) received attention of one layer and head, or the mean over them; NaN if the key
    does not exist.
    """
    layers = slice(None) if layer is None else [place_of(study, "layer", layer)]
    if not sample.shape[0]:
        raise NotRecorded(f"{study.run.path} recorded no step of sample {sample.index}.")
    if head is None:
        received_TLK = sample.seen.received_TLK
    else:
        place = place_of(study, "head", head)
        received_TLK = np.concatenate([slab.score[:, :, place] for slab in sample.slabs()])
    return np.where(sample.exists_TK, received_TLK[:, layers].mean(1), np.nan)


@figure("sink_paths", alone=True, needs="attention", prepared=True, columns=2, size=(2.6, 1.35))
def sink_paths(run: Study, *, sample: int = 0) -> list[Chart]:
    """Position of the main sink of a head at each step, for the 8 heads whose strong sinks move
    most (as Fig. 7).

    Titles have the mobility; heads are ordered by it times the weight of the main sink, means over
    samples. The paths are those of one sample. Below zero: on the added sink. Dotted lines are
    block borders.
    """
    watched, (one,) = recorded_sample(run, sample), drawn_as([run])
    return [
        _paths([(one, watched, place)], f"{_named(run, *place)}, mobility {mobility:.2f}")
        for place, mobility in most_mobile(run)[:MOST_PATHS]
    ]


@figure(
    "figure_1",
    alone=True,
    needs="attention",
    prepared=True,
    columns=2,
    share="own",
    size=(2.75, 2.1),
)
def figure_1(run: Study, *, sample: int = 0) -> list[Chart | Map]:
    """Overview of a run, in four panels.

    (a) Received attention in the head whose strong sink moves most. (b) Main sinks of the three
    such heads over steps. (c) Share of attention by layer.

    Args:
        sample: number of the sample in (a) and (b). (d) is the cost of blocking keys, or how much
            main sinks move if that was not measured.
    """
    watched, ((layer, head), _), (one,) = (
        recorded_sample(run, sample),
        most_mobile(run)[0],
        drawn_as([run]),
    )
    moving = [
        (replace(one, colour=nth, marker=nth), watched, place)
        for nth, (place, _) in enumerate(most_mobile(run)[:3])
    ]
    title, last = "how much they move", mobility_by_layer
    words = "(d) How much main sinks move, by layer: 0 static to 1 moving."
    if run.heldout is not None:
        title, last = "what blocking them costs", heldout_loss
        words = "(d) What blocking the most attended keys costs, beside as many random ones."
    shown = {
        f"received in {_named(run, layer, head)}": _map_of(
            run, watched, run.layers[layer], run.heads[head]
        ),
        "where main sinks are": _paths(moving),
        "how much they take": sink_share.prepare(run),
        title: replace(last.prepare(run), words=words),
    }
    named = zip("abcd", shown.items(), strict=True)
    return [replace(panel, title=f"({letter}) {title}") for letter, (title, panel) in named]


@figure("sink_path_of_head", needs="attention", prepared=True, size=(4.6, 3.0))
def sink_path_of_head(
    runs: list[Study], layer: Number = None, head: Number = None, *, sample: int = 0
) -> Chart:
    """Position of the main sink of one head over steps, a line per run (analysis paper, Fig. 7).

    layer, head: numbers of the model; None takes a typical head, of median mobility. Below zero: on
    the added sink token. Raises ValueError for unknown numbers.
    """
    chosen = []
    for one in drawn_as(runs):
        places = [place for place, _ in most_mobile(one.run)]
        if layer is None and head is None:
            places = [typical_head(one.run)]
        for axis, (what, number) in enumerate((("layer", layer), ("head", head))):
            if number is not None:
                at = place_of(one.run, what, number)
                places = [place for place in places if place[axis] == at]
        chosen.append((one, recorded_sample(one.run, sample), places[0]))
    return _paths(chosen)


def most_mobile(run: Study) -> list[tuple[tuple[int, int], float]]:
    """Indices of all layers and heads with their mobility, by falling mobility of strong main
    sinks.
    """
    motions = run.measured.motions.assign(
        weight=lambda table: table["strength"] * table["mobility"]
    )
    means = motions.groupby(["layer", "head"])[["weight", "strength", "mobility"]].mean()
    ranked = means.fillna({"weight": -1.0}).sort_values(
        ["weight", "strength"], ascending=False, kind="stable"
    )
    found = zip(ranked.index, ranked["mobility"], strict=True)
    return [
        ((run.layers.index(layer), run.heads.index(head)), float(mobility))
        for (layer, head), mobility in found
    ]


def _named(run: Study, layer: int, head: int) -> str:
    return f"layer {run.layers[layer]}, head {run.heads[head]}"


def _paths(chosen: Sequence[tuple[Look, Sample, tuple[int, int]]], title: str = "") -> Chart:
    """The main sinks of a layer and head of some runs, by their places."""
    length, lines = max(int(sample.positions_T.max()) for _, sample, _ in chosen), []
    for one, sample, (layer, head) in chosen:
        main_T = sample.main_TLH[:, layer, head]
        # the added sink has no position of its own
        at_T = np.where(
            main_T < 0,
            np.nan,
            np.where(main_T < sample.added, -0.07 * length, main_T - sample.added),
        )
        words = "" if title else _named(one.run, layer, head)
        lines.append(one.line(sample.step_numbers_T, at_T, words=words, kind="path"))
    has_added = any(sample.added for _, sample, _ in chosen)
    y = Axis(
        "position of the main sink",
        low=-0.12 * length if has_added else -1,
        high=length,
        below="sink" * has_added,
    )
    first = chosen[0][1]
    marks = [Mark("x", float(first.step_numbers_T[border]) - 0.5) for border in first.borders]
    return Chart(Axis("step", whole=True), y, lines, marks, title)


def typical_head(run: Study) -> tuple[int, int]:
    """Indices of the layer and head of median mobility, heads weighted by the strength of their
    main sinks.
    """
    motions = run.measured.motions.groupby(["layer", "head"])[["strength", "mobility"]].mean()
    means = motions.dropna().sort_values("mobility", kind="stable")
    if means.empty:
        return most_mobile(run)[0][0]
    held = means["strength"].cumsum()
    layer, head = means.index[int(np.searchsorted(held, held.iloc[-1] / 2))]
    return run.layers.index(layer), run.heads.index(head)
