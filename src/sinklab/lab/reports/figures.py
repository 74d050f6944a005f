"""The figures of both papers and of training: functions that draw runs on axes and return the
numbers.
"""

# T steps, L layers, H heads, N samples, E thresholds, Q queries, K keys (added sinks first)
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from sinklab.core.errors import one_of
from sinklab.lab.analysis.estimates import mean_over
from sinklab.lab.reports.drawing import (
    NEEDS,
    STYLES,
    THIN,
    draw_lines,
    draw_map,
    figure,
    lacking,
    mark_place,
)
from sinklab.lab.reports.samples import ADDED, MASK, Sample
from sinklab.lab.reports.study import ARMS, Reader, Study
from sinklab.lab.reports.style import LOOK, printable
from sinklab.lab.reports.training import Training

SHARES = {"added sink": "100 * added_share", "greatest text position": "100 * text_share"}
NORMS = "value norms (trace with the statistic value_norm)"
RECEIVED = "received attention, × even share"
MOST_TOKENS = 8
BLOCKED = {
    "none": "nothing",
    "top": "most attended keys",
    "sinks": "sinks",
    "random": "random keys",
    "equal_mass": "no sinks, equal mass",
    "matched": "chosen keys, matched heads",
}
"""arm of a masking curve -> the keys that it blocks, in words"""


def lines(
    readers: Sequence[Reader],
    ax: Axes,
    x: str,
    curves: Mapping[str, str],
    label: str,
    *,
    added: Sequence[str] = (),
    needs: str = "",
) -> pd.DataFrame:
    """Draw columns of the facts over layers, steps or a column of a table of the run.

    Args:
        readers: the runs; one without numbers is left out.
        ax: where to draw.
        x: "layer", "step", or a table of the run that has a column of that name.
        curves: words of each curve -> its column, or an expression: ``100 * text_share``.
        label: of the vertical axis, which begins at 0.
        added: curves of runs with an added sink alone.
        needs: what a run lacks that has none of these numbers, in words.

    Returns:
        Their table, with 95 % intervals over samples.
    """
    parts = []
    for one in readers:
        table, each = one.over(x), one.each(x)
        for words, column in curves.items():
            values = _values(table, column)
            if np.isfinite(values).any() and (one.sink_count or words not in added):
                low, high = intervals(_values(each, column), each.get(x), table[x])
                about = {"run": one.label, "line": words, x: table[x]}
                parts.append(pd.DataFrame(about | {"value": values, "low": low, "high": high}))
    if not parts:
        first = readers[0].over(x)
        asked = f"{', '.join(curves.values())} (by {x} there are {', '.join(first)})"
        if first.empty:
            needs = NEEDS["monitor" if readers[0].run.info.kind == "training" else "layers"]
        raise lacking(readers[0].run.path, needs or asked)
    frame = pd.concat(parts, ignore_index=True)
    draw_lines(ax, frame, alike(readers), styles=dict(zip(curves, STYLES, strict=False)))
    ax.set(xlabel=x, ylabel=label)
    ax.set_ylim(bottom=0)
    if x == "layer":
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if x == "step":
        mark_warm_starts(ax, readers)
    return frame


def _values(table: pd.DataFrame, column: str) -> np.ndarray:
    """The numbers of a column or an expression; none where a column is missing."""
    try:
        return np.asarray(table.eval(column), dtype=float)
    except pd.errors.UndefinedVariableError:
        return np.zeros(0)


def intervals(values: np.ndarray, at: Any, places: Any) -> tuple[Any, Any]:
    """Ends of the 95 % intervals over samples at each place, NaN without any.

    values: one a sample and place. at: the place of each.
    """
    if not len(values):
        return np.nan, np.nan
    at = np.asarray(at)
    low, high = np.array([mean_over(values[at == place]).interval for place in places]).T
    return low, high


def alike(readers: Sequence[Reader]) -> dict[str, str]:
    """The name that runs of one colour share, by their labels."""
    return {one.label: one.repeats for one in readers}


def mark_warm_starts(ax: Axes, readers: Sequence[Reader]) -> None:
    """Mark the ends of causal warm starts."""
    for step in sorted({run.causal_steps for run in readers} - {0}):
        mark_place(ax, step, "diffusion from here")


@figure("sink_share", kind="study training")
def sink_share(runs: list[Reader], ax: Axes) -> pd.DataFrame:
    """Share of attention per layer (sink-token paper, Fig. 3b and 3d).

    On the added sink token and on the text position that receives most, which is determined
    separately for every head and step; mean weight over all queries, heads, recorded steps and
    samples, or, of a training run, over mask ratios at its last measurement.
    """
    return lines(runs, ax, "layer", SHARES, "share of attention, %", added=["added sink"])


@figure("sinks_per_layer")
def sinks_per_layer(runs: list[Reader], ax: Axes) -> pd.DataFrame:
    """Mean number of sinks of a head at a step, per layer (analysis paper, Sec. 4.2: LLaDA's falls
    with depth); those on text positions apart if an added sink makes them differ.
    """
    curves = {"all": "sinks", "on text": "(events - added_events) / mains"}
    return lines(runs, ax, "layer", curves, "sinks per head and step", added=["on text"])


@figure("mobility_by_layer")
def mobility_by_layer(runs: list[Reader], ax: Axes) -> pd.DataFrame:
    """Chance that two steps have the main sink of a head at different places, 0 static to 1 moving,
    per layer.

    Mean over heads, weighted by the strength of their main sinks.
    """
    frame = lines(runs, ax, "layer", {"": "mobility"}, "mobility of main sinks")
    ax.set_ylim(-0.02, 1.02)
    return frame


@figure("value_norms", kind="study training")
def value_norms(runs: list[Reader], ax: Axes) -> pd.DataFrame:
    """Mean length (L2 norm) of value vectors per layer, over heads (sink-token paper, Fig. 1 and
    3).

    Added sink, visible text that is a sink (counted once for each head that has a sink there),
    other visible text in the same state, committed or prompt, and masks, which stand apart: they
    differ from text in everything.
    """
    curves = {"other text": "rest_norm", "text sinks": "sink_norm", "masks": "mask_norm"}
    curves |= {"added sink": "added_norm"}
    label = "length of value vectors"
    return lines(runs, ax, "layer", curves, label, added=["added sink"], needs=NORMS)


@figure("heldout_loss", needs="cost")
def heldout_loss(runs: list[Study], ax: Axes) -> pd.DataFrame:
    """Change of held-out loss when the K columns that receive most are blocked for every query of a
    head, and when others are.

    The analysis paper's Table 1 in terms of loss. Same text and noise throughout; bars are 95 %
    intervals of the paired differences over rows of text.
    """
    parts = []
    for one in runs:
        cost: Any = one.cost
        for control in ARMS[1:]:
            rows = cost[cost["control"].isin(["none", control])].sort_values("k")
            about = {"run": one.label, "line": BLOCKED[control], "keys blocked": rows["k"]}
            about |= {"value": rows["mean"], "low": rows["low"], "high": rows["high"]}
            if control in cost["control"].to_numpy():
                parts.append(pd.DataFrame(about))
    frame = pd.concat(parts, ignore_index=True)
    # the numbers of keys stand at even distances
    ks = sorted(frame["keys blocked"].unique())
    places = frame["keys blocked"].map(ks.index)
    draw_lines(ax, frame.assign(**{"keys blocked": places}), alike(runs), bars=True)
    ax.axhline(0, **THIN)
    ax.set_xticks(range(len(ks)), map(str, ks))
    ax.set(xlabel="keys blocked per layer and head", ylabel="change of loss, nats per token")
    return frame


@figure("score_histogram", needs="layers")
def score_histogram(runs: list[Study], ax: Axes) -> pd.DataFrame:
    """How received attention is spread over tokens, layers, heads and steps (analysis paper, Fig. 3
    and 9).

    Both axes are logarithmic; scores are multiples of an even share, and the line is the threshold
    of the sink rule. Scores below the lowest bin are counted in it.
    """
    # the threshold and its words are always inside
    low, high, parts = 1.0, 16.0, []
    for nth, one in enumerate(runs):
        edges, shares = one.measured.scores
        full = np.flatnonzero(shares)
        if not len(full):
            continue
        low, high = min(low, edges[full[0]], edges[-1]), max(high, edges[full[-1] + 1])
        percents = np.where(shares > 0, 100 * shares, np.nan)
        ax.stairs(percents, edges, color=LOOK.lines[nth % 7], linewidth=1.6, label=one.label)
        bins = {"run": one.label, "from": edges[:-1], "to": edges[1:], "percent": percents}
        parts.append(pd.DataFrame(bins))
    if not parts:
        raise lacking(runs[0].run.path, "keys that enough queries see (longer texts)")
    threshold = runs[0].measured.threshold
    if low < threshold < high:
        mark_place(ax, threshold, "sinks →")
    ax.set_xscale("log", base=2)
    ax.set(xlim=(low, high), yscale="log", xlabel=RECEIVED, ylabel="% of tokens")
    ax.xaxis.set_major_formatter("{x:g}×")
    ax.yaxis.set_major_formatter("{x:g}")
    return pd.concat(parts, ignore_index=True)


@figure("epsilon_curve", needs="layers")
def epsilon_curve(runs: list[Study], ax: Axes) -> pd.DataFrame:
    """Share of tokens that are no sinks over the threshold ε (analysis paper, Fig. 10).

    The lines mark ε = 3 and the 96 % stated for it.
    """
    parts = []
    for one in runs:
        curve, each_NE = one.measured.curve, 100 * one.measured.filtered_NE
        at = curve["epsilon"]
        low, high = intervals(each_NE.ravel(), np.tile(at, len(each_NE)), at)
        about = {"run": one.label, "line": "", "ε": at, "value": 100 * curve["filtered"]}
        parts.append(pd.DataFrame(about | {"low": low, "high": high}))
    frame = pd.concat(parts, ignore_index=True)
    draw_lines(ax, frame, alike(runs))
    ax.axhline(96, **THIN)
    mark_place(ax, 3, "ε = 3")
    ax.set(xlabel="ε", ylabel="tokens that are no sinks, %")
    ax.set_ylim(min(80.0, frame["value"].min() - 1), 100.4)
    return frame


@figure("sink_tokens", needs="layers", alone=True, size=(4.6, 3.3))
def sink_tokens(run: Study, ax: Axes) -> pd.DataFrame:
    """The tokens that are sinks most often (analysis paper, Table 2), with the frequency that
    occupancy alone would give.

    Bars for the frequency among sink events, a tick for the share of positions, enrichment (their
    ratio) as a number.
    """
    every = run.measured.enriched.get("token")
    if every is None:
        raise lacking(run.run.path, "the table tokens")
    found = every.query("events > 0").head(MOST_TOKENS)
    colours = {ADDED: LOOK.added, MASK: LOOK.states["masked"]}
    shown = [name if name in colours else printable(name) for name in found["label"]]
    rows, percent = range(len(found)), 100 * found[["frequency", "occupancy"]]
    colour = [colours.get(name, LOOK.muted) for name in found["label"]]
    ax.barh(rows, percent["frequency"], color=colour, height=0.66)
    tick: dict[str, Any] = {"marker": "|", "markersize": 13, "markeredgewidth": 2.2}
    ax.plot(percent["occupancy"], rows, linestyle="", color=LOOK.ink, **tick)
    ends = percent.max(axis=1)
    room = max(ends, default=1.0)
    for row, end, ratio in zip(rows, ends, found["enrichment"], strict=True):
        ax.text(end + 0.025 * room, row, f"{ratio:.1f}×", va="center", fontsize=8.5)
    ax.set_yticks(rows, shown)
    ax.tick_params(axis="y", length=0, labelcolor=LOOK.ink)
    # in two lines: one would be cut in a narrow column of a paper
    ax.set(xlabel="% of sink events (bar)\nand of positions (tick)", xlim=(0, 1.22 * room))
    ax.set_ylim(max(len(found), 2) - 0.5, -0.5)
    return found


@figure("received_map", needs="layers", alone=True, size=(4.6, 3.2))
def received_map(
    run: Study,
    ax: Axes,
    layer: int | None = None,
    head: int | None = None,
    sample: int = 0,
) -> pd.DataFrame:
    """Heat map position × step of received attention, as multiples of an even share (analysis
    paper, Fig. 1).

    Mean over layers and heads unless they are given. The colour scale is logarithmic, from 0.5. The
    column of an added sink is drawn wide, left of the text; thin lines are block borders.

    Args:
        run: the run.
        ax: where to draw.
        layer: number of the model.
        head: number of the model.
        sample: number of the sample.
    """
    watched = recorded_sample(run, sample)
    layers, heads = (
        slice(None) if number is None else [place_of(run, what, number)]
        for what, number in (("layer", layer), ("head", head))
    )
    score_TLHK = watched.score_TLHK[:, layers][:, :, heads]
    received_TK = np.where(watched.exists_TK, score_TLHK.mean((1, 2)), np.nan)
    positions = pd.RangeIndex(-watched.added, received_TK.shape[1] - watched.added, name="position")
    steps = pd.Index(watched.step_numbers_T, name="step")
    frame = draw_map(ax, pd.DataFrame(received_TK, steps, positions), RECEIVED, log=True)
    for border in watched.borders:
        ax.axhline(border, color=LOOK.muted, linewidth=0.6, alpha=0.8)
    return frame


@figure("attention_map", needs="layers", alone=True, size=(4.6, 3.9))
def attention_map(
    run: Study,
    ax: Axes,
    step: int | None = None,
    layer: int | None = None,
    head: int | None = None,
    sample: int = 0,
) -> pd.DataFrame:
    """One whole attention map, query × key, as multiples of an even share (analysis paper, Fig. 4,
    6 and 8).

    Args:
        run: the run.
        ax: where to draw.
        step: of one of the maps that the run kept; the first that fits when left out.
        layer: of the map.
        head: of the map.
        sample: number of the sample.
    """
    watched = recorded_sample(run, sample)
    name, weight_QK = watched.map(step, layer, head)
    queries = pd.RangeIndex(len(weight_QK), name="query")
    keys = pd.RangeIndex(-watched.added, weight_QK.shape[1] - watched.added, name="key position")
    ax.set_title("step {}, layer {}, head {}".format(*name))
    table = pd.DataFrame(weight_QK * weight_QK.shape[1], queries, keys)
    return draw_map(ax, table, "attention weight, × even share", log=True)


@figure("layer_head_map", needs="layers", alone=True, size=(4.6, 3.6))
def layer_head_map(run: Study, ax: Axes) -> pd.DataFrame:
    """Layer × head: attention weight on the main sink of a head, mean over steps and samples
    (analysis paper, Fig. 5).

    In percent, on a linear scale from 0; the main sink is determined separately for every step.
    """
    layers, heads = pd.Index(run.layers, name="layer"), pd.Index(run.heads, name="head")
    table = pd.DataFrame(100 * run.measured.main_share_LH, layers, heads)
    return draw_map(ax, table, "attention on the main sink, %")


@figure("sink_paths", needs="layers", size=(4.6, 3.0))
def sink_paths(
    runs: list[Study],
    ax: Axes,
    layer: int | None = None,
    head: int | None = None,
    sample: int = 0,
) -> pd.DataFrame:
    """Position of the main sink of a head over steps, a line per run (analysis paper, Fig. 7).

    Unless one is given it is a typical head: of median mobility, heads weighted by their main
    sinks. At −1: on the added sink. Dotted lines are block borders.

    Args:
        runs: the runs.
        ax: where to draw.
        layer: number of the model.
        head: number of the model.
        sample: number of the sample.
    """
    parts = []
    for one in runs:
        row, column = typical_head(one, layer, head)
        watched = recorded_sample(one, sample)
        main_T = watched.facts["main"][:, row, column]
        at_T = np.where(main_T < 0, np.nan, np.maximum(main_T - watched.added, -1))
        name = f"{one.label}: layer {one.layers[row]}, head {one.heads[column]}"
        about = {"run": name, "line": "", "step": watched.step_numbers_T, "value": at_T}
        parts.append(pd.DataFrame(about | {"low": np.nan, "high": np.nan}))
        ax.set_ylim(-2, max(ax.get_ylim()[1], watched.positions_T.max()))
    for border in watched.borders:
        ax.axvline(watched.step_numbers_T[border] - 0.5, **THIN)
    frame = pd.concat(parts, ignore_index=True)
    draw_lines(ax, frame, drawstyle="steps-mid", markersize=3, markevery=1)
    ax.set(xlabel="step", ylabel="position of the main sink")
    if (frame["value"] < 0).any():
        ticks = [int(tick) for tick in ax.get_yticks() if 0 <= tick < ax.get_ylim()[1]]
        ax.set_yticks([-1, *ticks], ["sink", *map(str, ticks)])
    return frame


@figure("statistics", alone=True)
def statistics(run: Study, ax: Axes, *, only: str | None = None) -> pd.DataFrame:
    """A recorded statistic that has no figure of its own, by layer and step: mean over samples and
    all other axes that it has.

    Args:
        run: the run.
        ax: where to draw.
        only: its name; the first when left out.
    """
    rows = run.measured.statistics
    names = [name for name in rows["statistic"].unique() if only in (None, name)]
    if not names:
        needs = "a statistic without a figure of its own (key_norm, row_entropy, one of a plug-in)"
        raise lacking(run.run.path, needs)
    rows = rows[rows["statistic"] == names[0]]
    ax.set_title(names[0])
    return draw_map(ax, rows.pivot(index="layer", columns="step", values="mean"), "mean")


@figure("training_loss", kind="training", needs="history")
def training_loss(runs: list[Training], ax: Axes) -> pd.DataFrame:
    """Held-out loss over steps and loss of the training batches (dotted), in nats per token.

    A dotted line marks the end of a causal warm start.
    """
    parts = []
    for one in runs:
        for name, words in (("heldout_loss", "held-out text"), ("loss", "training batches")):
            assert one.history is not None
            rows = one.history.dropna(subset=[name])
            about = {"run": one.label, "line": words, "step": rows["step"], "value": rows[name]}
            parts.append(pd.DataFrame(about | {"low": np.nan, "high": np.nan}))
    frame = pd.concat(parts, ignore_index=True)
    draw_lines(ax, frame, alike(runs), styles={"held-out text": "-", "training batches": ":"})
    # the first losses do not set the scale
    late = frame.loc[frame["step"] > 0.05 * frame["step"].max(), "value"]
    if len(late):
        low, high = late.min(), late.quantile(0.98)
        ax.set_ylim(low - 0.05 * (high - low) - 1e-3, high + 0.05 * (high - low) + 1e-3)
    ax.set(xlabel="step", ylabel="loss, nats per token")
    mark_warm_starts(ax, runs)
    return frame


@figure("sink_emergence", kind="training")
def sink_emergence(runs: list[Reader], ax: Axes) -> pd.DataFrame:
    """Share of attention over steps: of the added sinks, and of the greatest text token of a head,
    determined separately for every head and mask ratio.

    Mean over layers, heads, queries, rows of text and mask ratios. Up to a dotted line, where there
    is one, the model is the causal one of the warm start, and is measured as one.
    """
    return lines(runs, ax, "step", SHARES, "share of attention, %", added=["added sink"])


def recorded_sample(study: Study, sample: int) -> Sample:
    """The sample of this number. ValueError naming those with attention."""
    return study.sample(study.recorded[place_of(study, "sample", sample)])


def place_of(study: Study, what: str, number: int) -> int:
    """Index of this "layer" or "head" of the model, or this "sample", on its axis.

    ValueError naming the recorded ones.
    """
    samples = [study.run.samples[place] for place in study.recorded]
    known = {"layer": study.layers, "head": study.heads, "sample": samples}[what]
    one_of(f"the {what} of {study.run.path}", number, known)
    return known.index(number)


def typical_head(run: Study, layer: int | None = None, head: int | None = None) -> tuple[int, int]:
    """Indices of the layer and head of median mobility, heads weighted by the strength of their
    main sinks; among those of a layer or a head, if it is given.
    """
    motions = run.measured.motions
    for what, number in (("layer", layer), ("head", head)):
        if number is not None:
            place_of(run, what, number)
            motions = motions[motions[what] == number]
    means = motions.groupby(["layer", "head"])[["strength", "mobility"]].mean()
    means = means.sort_values("mobility", kind="stable").fillna({"strength": 0.0})
    held = means["strength"].cumsum()
    row, column = means.index[int(np.searchsorted(held, held.iloc[-1] / 2))]
    return run.layers.index(row), run.heads.index(column)
