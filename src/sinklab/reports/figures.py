"""Figures over layers and over steps, most of them declared over the table of facts, and figures of scores."""

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.ticker import LogLocator

from sinklab.reports import style
from sinklab.reports.drawing import NEW, Curve, drawn_as, figure, finish, line
from sinklab.reports.maps import RASTERED, place_of
from sinklab.reports.samples import ADDED, MASK, STATES, NotRecorded
from sinklab.reports.study import Study
from sinklab.reports.style import Theme
from sinklab.reports.training import Training
from sinklab.reports.words import words_of

WARM_UP = 0.05
"""part of a training run whose training loss does not set the scale"""
SHARES = (
    Curve("100 * added_share", "added sink", added=True),
    Curve("100 * text_share", "greatest text position", "--"),
)
HOLDERS: dict[str, str] = words_of("figures", "main_holders")
"""columns of the monitor that add up to 1, from the bottom of the figure"""


@figure("sink_share", x="layer", y=SHARES, label="share of attention, %")
def sink_share(axes: Axes, look: Theme) -> None:
    """Share of attention per layer (sink-token paper, Fig. 3b and 3d).

    On the added sink token (full line) and on the text position that receives most (dashed), mean over all queries,
    heads, recorded steps and samples.
    """


@figure("trained_share", kind="training", x="layer", y=SHARES, label="share of attention, %", needs="monitor")
def trained_share(axes: Axes, look: Theme) -> None:
    """Share of attention by layer at the end: added sinks, dashed the most attended text token (as Fig. 3b, 3d)."""


@figure("sink_emergence", kind="training", x="step", y=SHARES, label="share of attention, %", needs="monitor")
def sink_emergence(axes: Axes, look: Theme) -> None:
    """Share of attention over steps: of the added sinks (full line), of the greatest text token of a head (dashed)."""


@figure(
    "sinks_per_layer", x="layer", label="sinks per head and step",
    y=("sinks", Curve("(events - added_events) / mains", "on text", "--", added=True)),
)  # fmt: skip
def sinks_per_layer(axes: Axes, look: Theme) -> None:
    """Mean number of sinks of a head at a step, per layer (analysis paper, Sec. 4.2: LLaDA's falls with depth).

    Full line: all sinks; dashed: those on text positions, drawn where an added sink makes them differ.
    """


@figure(
    "sinks_over_training", kind="training", x="step", label="sinks per head", needs="monitor",
    y=("sinks", Curve("text_sinks", "on text", "--", added=True)),
)  # fmt: skip
def sinks_over_training(axes: Axes, look: Theme) -> None:
    """Sinks of a head over steps: all (full line), and those among the text where added ones make these differ."""


@figure(
    "mobility_over_training", kind="training", x="step", label="mobility of main sinks", needs="monitor",
    y=("mobility", Curve("text_mobility", "on text", "--", added=True)),
)  # fmt: skip
def mobility_over_training(axes: Axes, look: Theme) -> None:
    """How much main sinks move between mask ratios, over training, 0 static to 1; dashed: among the text alone."""
    axes.set_ylim(-0.02, 1.02)


@figure(
    "massive_activations", kind="training", x="step", label="greatest |x|", needs="monitor",
    y=("activation_text", Curve("activation_added", "at the added sink", "--", added=True)),
)  # fmt: skip
def massive_activations(axes: Axes, look: Theme) -> None:
    """Greatest |x| of the residual stream in any layer over steps: in the text, dashed at the added sinks."""


@figure(
    "trained_norms", kind="training", x="layer", label="norm of values / other text", needs="monitor",
    y=(
        Curve("added_norm / rest_norm", "added sink", added=True),
        Curve("sink_norm / rest_norm", "text sinks", "--"),
    ),
)  # fmt: skip
def trained_norms(axes: Axes, look: Theme) -> None:
    """Norm of values by layer at the end, relative to that of other text: added sinks, dashed text sinks (as Fig. 3a).

    Both of visible text (where the monitor has no value_masked, masks are among the other text). Runs of other widths
    and layers of other scales share one axis so; 1 is like any other token.
    """
    axes.axhline(1, color=look.muted, linestyle=":", linewidth=1)


@figure(
    "split_sinks", x="layer", y=("100 * split_sinks",), label="heads with split sinks, %", least=5.0,
    needs="states",
)  # fmt: skip
def split_sinks(axes: Axes, look: Theme) -> None:
    """Share of heads whose masked and unmasked queries have different main sinks, per layer (analysis paper, Fig. 6a).

    Of the (sample, recorded step, head) in which both have a main sink that passes the rule.
    """


@figure(
    "block_moves", x="layer", label="moves of the main sink, % of steps", least=5.0,
    y=(
        Curve("100 * border_moves", "at block borders", required=True),
        Curve("100 * inside_moves", "inside blocks", ":"),
    ),
    needs="a run in several blocks, with sinks at their borders",
)  # fmt: skip
def block_moves(axes: Axes, look: Theme) -> None:
    """How often main sinks move where a new block begins (full line) and inside blocks (dotted), per layer.

    The analysis paper's Fig. 6b as a rate, in percent of the successive recorded steps at which the head has a main
    sink that passes the rule.
    """


@figure(
    "overlap_by_step", x="step", y=("overlap",), label="overlap with the next step",
    needs="recorded attention of two steps with sinks",
)  # fmt: skip
def overlap_by_step(axes: Axes, look: Theme) -> None:
    """Sinks that stay from one recorded step to the next: Jaccard overlap, mean over layers, heads and samples.

    1 where the same keys are sinks at both, 0 where none is.
    """
    axes.set_ylim(0, 1.03)


@figure("value_norms", alone=True, needs=("attention", "value norms"))
def value_norms(run: Study, axes: Axes | None = None, *, top: float | None = None, look: Theme) -> Axes:
    """Mean length of value vectors per layer (sink-token paper, Fig. 3a and 3c).

    Added sink, visible text that is a sink, other visible text in the same state, and masks. ``top``: end of the
    vertical axis.
    """
    table, plot = run.over("layer"), style.own_axes(axes, 4.6, 3.0)
    for name, label, colour, marker, dashes in (
        ("rest_norm", "other text", look.muted, "o", "-"),
        ("sink_norm", "text sinks", look.runs[0], "s", "--"),
        ("mask_norm", "masks", look.states["masked"], "v", "-"),
        ("added_norm", ADDED, look.added, "D", "-"),
    ):
        if table[name].notna().any():
            plot.plot(table["layer"], table[name], color=colour, marker=marker, linestyle=dashes, label=label)
    plot.set(xlabel="layer", ylabel="length of value vectors")
    style.whole_numbers(plot.xaxis)
    style.from_zero(plot)
    plot.set_ylim(top=top)
    style.legend_above(plot, 4, grow=False)
    return plot


@figure("heldout_loss", needs="heldout", size=(4.6, 2.8), legend=0)
def heldout_loss(runs: list[Study], axes: Axes = NEW, *, look: Theme) -> None:
    """Change of held-out loss over the number of hidden columns: sinks (full line), random ones (dotted), ± one s.e.

    The analysis paper's Table 1 in terms of loss. The differences are paired, so their errors are small beside those of
    the losses themselves.
    """
    looks = drawn_as(runs, look)
    ks = sorted({int(k) for one in looks for k in one.run.heldout["k"]})
    for index, one in enumerate(looks):
        frame = one.run.heldout
        for control, dashes, words in (("sinks", "-", "sinks"), ("random", ":", "random columns")):
            rows = frame[frame["control"].isin(["none", control])].sort_values("k")
            if (rows["control"] == control).any():
                change, error = rows["delta"].to_numpy(float), rows["delta_stderr"].fillna(0).to_numpy(float)
                nudge = 0.02 * index + (0.06 if control == "random" else 0.0)
                axes.errorbar(
                    [ks.index(int(k)) + nudge for k in rows["k"]], change, error, color=one.colour,
                    marker=one.marker, linestyle=dashes, capsize=2.5, elinewidth=1,
                    markerfacecolor=one.colour if dashes == "-" else look.surface,
                    label=f"{one.name}: {words} hidden",
                )  # fmt: skip
    axes.set_xticks(range(len(ks)), [str(k) for k in ks])
    axes.set(xlabel="columns hidden per layer and head", ylabel="change of loss, nats per token")
    finish(axes, runs, "k")


@figure("training_loss", kind="training", needs="history", size=(4.6, 2.8), legend=0)
def training_loss(runs: list[Training], axes: Axes = NEW, *, look: Theme) -> None:
    """Held-out loss over steps (full line) and training loss (faint), nats per token.

    A dotted line stands where a causal warm start ends.
    """
    lows, highs = [], []
    for one in drawn_as(runs, look):
        history = one.run.history
        losses, held = (history.dropna(subset=[name]) for name in ("loss", "heldout_loss"))
        axes.plot(losses["step"], losses["loss"], color=one.colour, linewidth=0.8, alpha=0.4)
        line(axes, one, held["step"], held["heldout_loss"], label=one.name)
        late = losses["loss"][losses["step"] > WARM_UP * history["step"].max()]
        seen = np.concatenate([late, held["heldout_loss"]]) if len(late) else losses["loss"].to_numpy()
        if np.isfinite(seen).any():
            lows.append(float(np.nanmin(seen)))
            highs.append(float(np.nanquantile(seen, 0.98)))
    if lows:
        room = 0.05 * (max(highs) - min(lows)) + 1e-3
        axes.set_ylim(min(lows) - room, max(highs) + room)
    axes.set(xlabel="step", ylabel="loss, nats per token")
    finish(axes, runs, "step")


@figure("optimization", kind="training", needs="history")
def optimization(runs: list[Training], *, look: Theme) -> Canvas:
    """Learning rate, gradient norm and tokens per second over steps, those of them that were logged."""
    panels = {"lr": "learning rate", "grad_norm": "gradient norm", "tokens_per_second": "tokens per second"}
    logged = {name: [one for one in drawn_as(runs, look) if name in one.run.history] for name in panels}
    known = [name for name, looks in logged.items() if any(one.run.history[name].notna().any() for one in looks)]
    if not known:
        raise NotRecorded(f"This figure needs a learning rate in the history, and {runs[0].run.path} logged none.")
    canvas = Canvas(figsize=(4.6, 0.6 + 1.35 * len(known)), layout="constrained")
    for plot, name in zip(np.atleast_1d(canvas.subplots(len(known), 1, sharex=True)), known, strict=True):
        for one in logged[name]:
            rows = one.run.history.dropna(subset=[name])
            plot.plot(rows["step"], rows[name], color=one.colour, linewidth=1.1, label=one.name)
        plot.set_ylabel(panels[name])
        plot.grid(axis="y")
        style.from_zero(plot)
    plot.set_xlabel("step")
    handles, names = plot.get_legend_handles_labels()
    canvas.legend(handles, names, loc="outside upper left", ncols=2)
    canvas.set_figheight(canvas.get_figheight() + 0.19 * -(-len(names) // 2))
    return canvas


@figure("main_holders", kind="training", alone=True, needs="monitor", size=(4.6, 2.6), legend=3)
def main_holders(run: Training, axes: Axes = NEW, *, look: Theme) -> None:
    """Which keys hold the main sinks of all heads over steps, as shares that add up."""
    table = run.over("step")
    colours = (look.added, look.states["committed"], look.runs[0], look.states["masked"], look.line)
    kept = {
        name: colour for name, colour in zip(HOLDERS, colours, strict=True) if run.sink_count or name != "main_added"
    }
    axes.stackplot(
        table["step"], [100 * table[name] for name in kept], labels=[HOLDERS[name] for name in kept],
        colors=list(kept.values()), edgecolor=look.surface, linewidth=0.5,
    )  # fmt: skip
    axes.set(xlabel="step", ylabel="heads, %", ylim=(0, 100), xlim=(table["step"].min(), max(table["step"].max(), 1)))
    finish(axes, [run], "step")
    axes.grid(visible=False)


@figure("score_histogram", needs="attention", size=(4.6, 2.8), legend=2)
def score_histogram(runs: list[Study], axes: Axes = NEW, *, look: Theme) -> None:
    """How received attention is spread over tokens, layers, heads and steps (analysis paper, Fig. 3 and 9).

    Both axes are logarithmic; scores are multiples of an even share, and the line is the threshold of the sink rule.
    What lies below the lowest bin is counted in it.
    """
    # The line at the threshold and its label are always inside.
    low, high = 1.0, 16.0
    for index, one in enumerate(drawn_as(runs, look)):
        edges, shares = one.run.measured.scores
        full = np.flatnonzero(shares)
        low, high = min(low, edges[full[0]], edges[-1]), max(high, edges[full[-1] + 1])
        axes.stairs(
            100 * shares, edges, color=one.colour, linewidth=1.6,
            linestyle=("-", "--", ":", "-.")[index % 4], label=one.run.label,
        )  # fmt: skip
    threshold = runs[0].measured.threshold
    if low < threshold < high:
        axes.axvline(threshold, color=look.muted, linewidth=0.9)
        style.note(axes, "sinks →", (threshold, 1), ("data", "axes fraction"), (3, -2))
    axes.set(xscale="log", yscale="log", xlim=(low, high), xlabel="received attention", ylabel="% of tokens")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()


@figure("epsilon_curve", needs="attention", size=(4.6, 2.8), legend=1)
def epsilon_curve(runs: list[Study], axes: Axes = NEW, *, look: Theme) -> None:
    """Share of tokens that are no sinks over the threshold ε (analysis paper, Fig. 10).

    The lines mark ε = 3 and the 96 % stated for it.
    """
    lowest = 100.0
    for one in drawn_as(runs, look):
        curve = one.run.curve
        lowest = min(lowest, float(np.nanmin(100 * curve.filtered)))
        label = f"{one.run.label}: {100 * curve.at(3.0):.1f} % at 3"
        axes.plot(curve.epsilon, 100 * curve.filtered, color=one.colour, marker=one.marker, markevery=2, label=label)
    axes.axvline(3, color=look.muted, linewidth=0.8, linestyle=":")
    axes.axhline(96, color=look.muted, linewidth=0.8, linestyle=":")
    style.note(axes, "96 %", (1, 96), ("axes fraction", "data"), (0, -2), ha="right")
    axes.set(xlabel="ε", ylabel="tokens that are no sinks, %", ylim=(min(80.0, lowest - 1), 100.4))


@figure("value_norm_scatter", alone=True, needs=("attention", "value norms"), size=(4.6, 3.4))
def value_norm_scatter(run: Study, layer: int | None = None, axes: Axes = NEW, *, look: Theme) -> None:
    """Length of value vectors against received attention, a dot per token, layer and step (sink-token paper, Fig. 1).

    A random draw of at most 10,000 sinks, 10,000 other tokens of visible text and 10,000 masks (fixed seed), all layers
    or one of them; a token counts as a sink where at least one head has a sink on it. Received attention is the mean
    over heads, in multiples of an even share. Horizontal lines are the means of the groups. Raises ValueError for an
    unknown layer.
    """
    drawn = run.measured.scatter
    if layer is not None:
        drawn = drawn[drawn["place"] == place_of(run, "layer", layer)]
    groups = [("other text", look.muted, "o", 5), ("text sinks", look.runs[0], "s", 9), (ADDED, look.added, "D", 9)]
    groups.append(("masks", look.states["masked"], "v", 5))
    for kind, (label, colour, marker, area) in enumerate(groups):
        rows = drawn[drawn["kind"] == kind]
        if not len(rows):
            continue
        axes.scatter(
            rows["score"].clip(lower=0.01), rows["norm"], s=area, marker=marker, color=colour, linewidths=0,
            alpha=0.35 if kind == 0 else 0.55, label=label, rasterized=len(rows) > RASTERED,
        )  # fmt: skip
        axes.axhline(rows["norm"].mean(), color=colour, linewidth=1.2, linestyle="--" if kind in (1, 2) else ":")
    axes.set(xscale="log", xlabel="received attention", ylabel="length of value vectors")
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.minorticks_off()
    style.legend_of_dots(axes, 3)


@figure("output_norm_against_bound", alone=True, needs=("attention", "bounds"), size=(4.2, 3.8))
def output_norm_against_bound(run: Study, axes: Axes = NEW, *, look: Theme) -> None:
    """Length of a head's output against its no-op bound Σ a‖v‖ (sink-token paper, Eq. 20 to 22).

    A dot per recorded step, layer, head and state of the query (means over the queries; a random draw of at most 6,000
    with a fixed seed). No dot can lie above the line, where the two are equal.
    """
    drawn = run.measured.bounds
    top = float(drawn["bound"].max()) * 1.05
    axes.plot([0, top], [0, top], color=look.ink, linewidth=0.9, label="_equal")
    for code, state in enumerate(STATES):
        rows = drawn[drawn["state"] == code]
        if len(rows):
            axes.scatter(
                rows["bound"], rows["output"], s=7, marker=style.MARKERS[code], color=look.states[state], linewidths=0,
                alpha=0.5, label=state, rasterized=len(rows) > RASTERED,
            )  # fmt: skip
    axes.set(xlabel="bound: Σ weight × length of value", ylabel="length of a head's output")
    axes.set(xlim=(0, top), ylim=(0, top))
    style.legend_of_dots(axes, 3, title="queries")


@figure("sink_tokens", alone=True, needs="tokens")
def sink_tokens(run: Study, axes: Axes | None = None, *, top: int = 8, look: Theme) -> Axes:
    """The tokens that are sinks most often (analysis paper, Table 2), with what occupancy alone would give.

    Bars for the frequency among sink events, a tick for the share of positions, enrichment (their ratio) as a number.
    """
    found = run.sink_tokens
    count = min(top, int((found.events > 0).sum()))
    frequency, occupancy = 100 * found.frequency[:count], 100 * found.occupancy[:count]
    colours = {ADDED: look.added, MASK: look.states["masked"]}
    axes = style.own_axes(axes, 4.6, 0.9 + 0.3 * max(count, 2))
    rows = np.arange(count)
    axes.barh(rows, frequency, color=[colours.get(label, look.muted) for label in found.label[:count]], height=0.66)
    axes.plot(occupancy, rows, linestyle="", marker="|", markersize=13, markeredgewidth=2.2, color=look.ink)
    ends = np.maximum(frequency, occupancy)
    room = max(ends, default=1.0)
    for row, end in enumerate(ends):
        axes.text(float(end + 0.025 * room), row, f"{found.enrichment[row]:.1f}×", va="center", fontsize=8.5)
    axes.set_yticks(rows, [label if label in colours else style.printable(label) for label in found.label[:count]])
    axes.tick_params(axis="y", length=0, labelcolor=look.ink)
    axes.set(xlabel="% of sink events (bar) and of positions (tick)", xlim=(0, 1.17 * room))
    axes.spines["left"].set_visible(False)
    axes.invert_yaxis()
    if not count:
        axes.text(0.5, 0.5, "no sink events", transform=axes.transAxes, ha="center", color=look.muted)
    return axes
