"""Figures over layers, over steps and of scores: most declared over the table of facts, the others
prepared charts.
"""

from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from sinklab.lab.reports import style
from sinklab.lab.reports.charts import Axis, Chart, Line, Mark
from sinklab.lab.reports.drawing import Curve, drawn_as, figure, intervals, warm_starts
from sinklab.lab.reports.samples import ADDED, MASK, STATES, NotRecorded
from sinklab.lab.reports.study import Study
from sinklab.lab.reports.style import Theme
from sinklab.lab.reports.training import Training

WARM_UP = 0.05
"""part of a training run whose training loss does not set the scale"""
SHARES = (
    Curve("100 * added_share", "added sink", added=True),
    Curve("100 * text_share", "greatest text position", "--"),
)
VALUE_NORMS = "value norms, and {path} recorded none. Trace with the statistic value_norm."
"""needs of several figures"""
DASHES = dict(zip(STATES, ("-", "--", ":"), strict=True))
"""state of queries, or of keys -> kind of line"""
HOLDERS = {
    "main_added": "added sink",
    "main_first": "first token",
    "main_early": "tokens 2 to 4",
    "main_other": "later tokens",
    "main_none": "no sink",
}
"""columns of the monitor that add up to 1, from the bottom of the figure"""


over_training = partial(figure, kind="training", x="step", needs="monitor")


@figure("sink_share", x="layer", y=SHARES, label="share of attention, %")
def sink_share(axes: Axes, look: Theme) -> None:
    """Share of attention per layer (sink-token paper, Fig. 3b and 3d).

    On the added sink token (full line) and on the text position that receives most (dashed), which
    is determined separately for every head and step; mean weight over all queries, heads, recorded
    steps and samples.
    """


@figure(
    "sink_share_by_state",
    x="layer",
    y=tuple(
        Curve(f"100 * share_{state}", f"{state} queries", dashes)
        for state, dashes in DASHES.items()
    ),
    label="share of attention, %",
    needs="main sinks by state, and {path} recorded none. Trace a diffusion model with the "
    "statistic main_by_state.",
)
def sink_share_by_state(axes: Axes, look: Theme) -> None:
    """Share of attention that masked, committed and prompt queries give to the key that they attend
    to most, per layer.

    Mean weight over heads, recorded steps and samples. Each state has a key of its own, which few
    queries make stronger by chance. Statements without a state are about all queries.
    """


@figure(
    "trained_share",
    kind="training",
    x="layer",
    y=SHARES,
    label="share of attention, %",
    needs="monitor",
)
def trained_share(axes: Axes, look: Theme) -> None:
    """Share of attention by layer at the last measurement: added sinks, dashed the most attended
    text token (as Fig. 3b, 3d); mean over heads, queries, rows of text and mask ratios.
    """


@over_training(
    "sink_emergence",
    y=SHARES,
    label="share of attention, %",
)
def sink_emergence(axes: Axes, look: Theme) -> None:
    """Share of attention over steps: of the added sinks (full line), of the greatest text token of
    a head (dashed), determined separately for every head and mask ratio.

    Mean over layers, heads, queries, rows of text and mask ratios. Up to a dotted line, where there
    is one, the model is the causal one of the warm start, and is measured as one.
    """


@figure(
    "sinks_per_layer",
    x="layer",
    label="sinks per head and step",
    y=(
        Curve("sinks", "all"),
        Curve("(events - added_events) / mains", "on text", "--", added=True),
    ),
)
def sinks_per_layer(axes: Axes, look: Theme) -> None:
    """Mean number of sinks of a head at a step, per layer (analysis paper, Sec. 4.2: LLaDA's falls
    with depth).

    Full line: all sinks; dashed: those on text positions, drawn if an added sink makes them differ.
    """


@figure(
    "mobility_by_layer",
    x="layer",
    y=("mobility",),
    label="mobility of main sinks",
    ends=(-0.02, 1.02),
)
def mobility_by_layer(axes: Axes, look: Theme) -> None:
    """Chance that two steps have the main sink of a head at different places, 0 static to 1 moving,
    per layer.

    Mean over heads, weighted by the strength of their main sinks.
    """


@over_training(
    "sinks_over_training",
    label="sinks per head",
    y=(Curve("sinks", "all"), Curve("text_sinks", "on text", "--", added=True)),
)
def sinks_over_training(axes: Axes, look: Theme) -> None:
    """Keys of a head above 1 + 3 (S−1)/S times an even share, over steps, per mask ratio: all (full
    line), and those among the text if added ones make these differ.
    """


@over_training(
    "mobility_over_training",
    label="mobility of main sinks",
    y=(Curve("mobility", "all"), Curve("text_mobility", "on text", "--", added=True)),
    ends=(-0.02, 1.02),
)
def mobility_over_training(axes: Axes, look: Theme) -> None:
    """Mobility of main sinks over training: the chance that two mask ratios have that of a head at
    different positions, 0 static to 1; dashed: among the text alone.

    The text is read with 90, 70, 50, 30 and 10 % of it masked, a token once unmasked staying so.
    Heads are weighted by the strength of their main sinks.
    """


@over_training(
    "massive_activations",
    label="greatest |x|",
    y=(
        Curve("activation_text", "in the text"),
        Curve("activation_added", "at the added sink", "--", added=True),
    ),
)
def massive_activations(axes: Axes, look: Theme) -> None:
    """Greatest absolute number of the residual stream after any layer, over steps: in the text,
    dashed at the added sinks.
    """


@figure(
    "trained_norms",
    kind="training",
    x="layer",
    label="norm of values / other text",
    needs="monitor",
    y=(
        Curve("added_norm / rest_norm", "added sink", added=True),
        Curve("sink_norm / rest_norm", "text sinks", "--"),
    ),
    marks=(Mark("y", 1),),
)
def trained_norms(axes: Axes, look: Theme) -> None:
    """Norm of values by layer at the end, relative to that of other text: added sinks, dashed text
    sinks (as Fig. 3a).

    Mean over heads at the last measurement. Both of visible text (if the monitor has no
    value_masked, masks are among the other text). Runs of other widths and layers of other scales
    share one axis so; 1 is like any other token.
    """


@figure(
    "overlap_by_step",
    x="step",
    y=("overlap",),
    label="overlap with the next step",
    ends=(0, 1.03),
    needs="recorded attention of two steps with sinks",
)
def overlap_by_step(axes: Axes, look: Theme) -> None:
    """Sinks that stay from one recorded step to the next: Jaccard overlap, mean over layers, heads
    and samples.

    1 if the same keys are sinks at both, 0 if none is.
    """


@figure(
    "value_norms",
    x="layer",
    label="length of value vectors",
    needs=VALUE_NORMS,
    y=(
        Curve("rest_norm", "other text"),
        Curve("sink_norm", "text sinks", "--"),
        Curve("mask_norm", "masks", ":"),
        Curve("added_norm", "added sink", "-.", added=True),
    ),
)
def value_norms(axes: Axes, look: Theme) -> None:
    """Mean length (L2 norm) of value vectors per layer, over heads (sink-token paper, Fig. 3a, 3c).

    Added sink, visible text that is a sink (counted once for each head that has a sink there),
    other visible text in the same state, committed or prompt, and masks, which stand apart: they
    differ from text in everything.
    """


@figure(
    "value_norms_by_state",
    x="layer",
    label="norm of sinks / of others",
    needs=VALUE_NORMS,
    y=tuple(
        Curve(f"sink_norm_{state} / rest_norm_{state}", state, dashes)
        for state, dashes in DASHES.items()
    ),
    marks=(Mark("y", 1),),
)
def value_norms_by_state(axes: Axes, look: Theme) -> None:
    """Length of value vectors of sinks over that of other positions in the same state, by layer and
    state.

    Norms of layers differ tenfold and masks differ from text in everything, so that each is
    compared with its own kind: below 1 a sink carries less than its like (sink-token paper, Fig. 1
    and 3a).
    """


BLOCKED = {
    "sinks": "sinks blocked",
    "random": "random keys blocked",
    "equal_mass": "non-sinks of equal mass",
}
"""Name of a control in a table of held-out losses -> its entry in a legend."""


@figure("heldout_loss", needs="heldout", prepared=True)
def heldout_loss(runs: list[Study]) -> Chart:
    """Change of held-out loss when the K columns that receive most are blocked for every query of a
    head (full line), and when as many random ones are (dotted).

    The analysis paper's Table 1 in terms of loss. Same text and noise throughout; bars are 95 %
    intervals of the paired differences over rows of text.
    """
    frames = {one: one.run.heldout.astype({"k": int}).sort_values("k") for one in drawn_as(runs)}
    ks = sorted({k for frame in frames.values() for k in frame["k"]})
    lines = []
    for one, frame in frames.items():
        controls = [name for name in one.run.heldout["control"].unique() if name != "none"]
        for nth, (control, dashes) in enumerate(
            zip(controls, ("-", ":", "--", "-."), strict=False)
        ):
            rows = frame[frame["control"].isin(["none", control])]
            y, low, high = rows[["delta", "delta_low", "delta_high"]].to_numpy(float).T
            how: dict[str, Any] = {"low": low, "high": high, "style": dashes, "kind": "bars"}
            how["words"] = BLOCKED.get(control, f"{control} keys blocked")
            if len(runs) == 1:
                how["colour"] = nth
            lines.append(one.line([ks.index(k) for k in rows["k"]], y, **how))
    x = Axis("keys blocked per layer and head", names=tuple(map(str, ks)))
    return Chart(x, Axis("change of loss, nats per token"), lines, [Mark("y", 0)])


@figure("training_loss", kind="training", needs="history", prepared=True)
def training_loss(runs: list[Training]) -> Chart:
    """Held-out loss over steps (full line) and loss of the training batches (faint), in nats per
    token.

    A dotted line marks the end of a causal warm start.
    """
    lines, ends = [], []
    for one in drawn_as(runs):
        history = one.run.history
        losses, held = (history.dropna(subset=[name]) for name in ("loss", "heldout_loss"))
        lines.append(one.line(losses["step"], losses["loss"], kind="faint"))
        lines.append(one.line(held["step"], held["heldout_loss"]))
        seen = losses["loss"][losses["step"] > WARM_UP * history["step"].max()]
        seen = pd.concat([seen, held["heldout_loss"]]) if len(seen) else losses["loss"]
        ends.append((seen.min(), seen.quantile(0.98)))
    y = Axis("loss")
    if np.isfinite(ends).any():
        low, high = np.nanmin(ends), np.nanmax(ends)
        room = 0.05 * (high - low) + 1e-3
        y = Axis("loss, nats per token", low=low - room, high=high + room)
    return Chart(Axis("step"), y, lines, warm_starts(runs, "step"))


@figure(
    "optimization",
    kind="training",
    needs="history",
    prepared=True,
    columns=1,
    share="x",
    size=(4.6, 1.35),
)
def optimization(runs: list[Training]) -> list[Chart]:
    """Learning rate, norm of the gradient before clipping and tokens per second over steps, those
    of them that were logged.
    """
    panels = {
        "lr": "learning rate",
        "grad_norm": "gradient norm",
        "tokens_per_second": "tokens per second",
    }
    charts = []
    for name, words in panels.items():
        logged = [
            (one, one.run.history.reindex(columns=["step", name]).dropna())
            for one in drawn_as(runs)
        ]
        if lines := [one.line(rows["step"], rows[name]) for one, rows in logged if len(rows)]:
            charts.append(Chart(Axis("step"), Axis(words, low=0), lines, warm_starts(runs, "step")))
    if not charts:
        raise NotRecorded(
            f"This figure needs a learning rate in the history, and {runs[0].run.path} logged none."
        )
    return charts


@figure("main_holders", kind="training", alone=True, needs="monitor")
def main_holders(run: Training, axes: Axes | None = None, *, look: Theme) -> Axes:
    """Shares of the keys that hold the main sinks of all heads over steps; they add up."""
    table, plot = run.over("step"), style.own_axes(axes, 4.6, 2.6)
    colours = (look.added, look.states["committed"], look.runs[0], look.states["masked"], look.line)
    kept = {
        name: colour
        for name, colour in zip(HOLDERS, colours, strict=True)
        if run.sink_count or name != "main_added"
    }
    plot.stackplot(
        table["step"],
        [100 * table[name] for name in kept],
        labels=[HOLDERS[name] for name in kept],
        colors=list(kept.values()),
        edgecolor=look.surface,
        linewidth=0.5,
    )
    plot.set(
        xlabel="step",
        ylabel="heads, %",
        ylim=(0, 100),
        xlim=(table["step"].min(), max(table["step"].max(), 1)),
    )
    for mark in warm_starts([run], "step"):
        plot.axvline(mark.at, color=look.muted, linestyle=":", linewidth=1)
    style.legend_above(plot, 3, grow=axes is None)
    return plot


@figure("score_histogram", needs="attention", prepared=True)
def score_histogram(runs: list[Study]) -> Chart:
    """How received attention is spread over tokens, layers, heads and steps (analysis paper, Fig. 3
    and 9).

    Both axes are logarithmic; scores are multiples of an even share, and the line is the threshold
    of the sink rule. Scores below the lowest bin are counted in it.
    """
    # The line at the threshold and its label are always inside.
    low, high, lines = 1.0, 16.0, []
    for index, one in enumerate(drawn_as(runs)):
        edges, shares = one.run.measured.scores
        full = np.flatnonzero(shares)
        low, high = min(low, edges[full[0]], edges[-1]), max(high, edges[full[-1] + 1])
        dashes = ("-", "--", ":", "-.")[index % 4]
        lines.append(
            one.line(edges, np.where(shares > 0, 100 * shares, np.nan), style=dashes, kind="steps")
        )
    threshold = runs[0].measured.threshold
    marks = [Mark("x", threshold, "sinks →")] if low < threshold < high else []
    x = Axis("received attention, × even share", "×", "log", low=low, high=high)
    return Chart(x, Axis("% of tokens", scale="log"), lines, marks)


@figure("epsilon_curve", needs="attention", prepared=True)
def epsilon_curve(runs: list[Study]) -> Chart:
    """Share of tokens that are no sinks over the threshold ε (analysis paper, Fig. 10).

    The lines mark ε = 3 and the 96 % stated for it.
    """
    lines, lowest = [], 100.0
    for one in drawn_as(runs):
        curve, each_NE = one.run.curve, 100 * one.run.measured.filtered_NE
        low, high = intervals(each_NE.ravel(), np.tile(curve.epsilon, len(each_NE)), curve.epsilon)
        words = f"{one.run.label}: {100 * curve.at(3.0):.1f} % at 3"
        lowest = min(lowest, float(np.nanmin(100 * curve.filtered)))
        lines.append(one.line(curve.epsilon, 100 * curve.filtered, name=words, low=low, high=high))
    marks = [Mark("x", 3, "ε = 3"), Mark("y", 96, "96 %")]
    return Chart(
        Axis("ε"),
        Axis("tokens that are no sinks, %", low=min(80.0, lowest - 1), high=100.4),
        lines,
        marks,
    )


@figure(
    "output_norm_against_bound",
    alone=True,
    needs=("attention", "bounds"),
    prepared=True,
    size=(4.2, 3.5),
)
def output_norm_against_bound(run: Study) -> Chart:
    """Length of a head's output against its no-op bound Σ a‖v‖ (sink-token paper, Eq. 20 to 22).

    A dot per recorded step, layer, head and state of the query (means over the queries; a random
    draw of at most 6,000 with a fixed seed). No dot can lie above the line of equality.
    """
    drawn = run.measured.bounds
    top = float(drawn["bound"].max()) * 1.05
    lines = [Line([0, top], [0, top], kind="faint", colour=1)]
    for code, state in enumerate(STATES):
        rows = drawn[drawn["state"] == code]
        about = (run.label, "", f"{state} queries", code, code)
        lines += [Line(rows["bound"], rows["output"], *about, kind="dots")] if len(rows) else []
    ends: Any = {"low": 0.0, "high": top}
    x, y = (
        Axis("bound: Σ weight × length of value", **ends),
        Axis("length of a head's output", **ends),
    )
    return Chart(x, y, lines)


@figure("sink_tokens", alone=True, needs="tokens")
def sink_tokens(run: Study, axes: Axes | None = None, *, count: int = 8, look: Theme) -> Axes:
    """The tokens that are sinks most often (analysis paper, Table 2), with the frequency that
    occupancy alone would give.

    Bars for the frequency among sink events, a tick for the share of positions, enrichment (their
    ratio) as a number.
    """
    found = run.sink_tokens.query("events > 0").head(count)
    axes = style.own_axes(axes, 4.6, 0.9 + 0.3 * max(len(found), 2))
    rows, colours = np.arange(len(found)), {ADDED: look.added, MASK: look.states["masked"]}
    axes.barh(
        rows,
        100 * found["frequency"],
        color=[colours.get(label, look.muted) for label in found["label"]],
        height=0.66,
    )
    axes.plot(
        100 * found["occupancy"],
        rows,
        linestyle="",
        marker="|",
        markersize=13,
        markeredgewidth=2.2,
        color=look.ink,
    )
    ends = 100 * found[["frequency", "occupancy"]].max(axis=1)
    room = max(ends, default=1.0)
    for row, (end, ratio) in enumerate(zip(ends, found["enrichment"], strict=True)):
        axes.text(float(end + 0.025 * room), row, f"{ratio:.1f}×", va="center", fontsize=8.5)
    axes.set_yticks(
        rows, [label if label in colours else style.printable(label) for label in found["label"]]
    )
    axes.tick_params(axis="y", length=0, labelcolor=look.ink)
    # in two lines: one would be cut in a narrow column of a paper
    axes.set(xlabel="% of sink events (bar)\nand of positions (tick)", xlim=(0, 1.22 * room))
    axes.spines["left"].set_visible(False)
    axes.invert_yaxis()
    if not len(found):
        axes.text(
            0.5, 0.5, "no sink events", transform=axes.transAxes, ha="center", color=look.muted
        )
    return axes
