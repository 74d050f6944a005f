"""Figures over layers, and the cost of hidden sinks: each takes a run or several and draws on matplotlib axes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sinklab.records.reading import Run
from sinklab.reports.paths import Runs
from sinklab.reports.samples import NotRecorded
from sinklab.reports.study import ADDED, Study, as_studies
from sinklab.reports.style import MARKERS, from_zero, legend_above, own_axes, theme_named, themed

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def sink_share(runs: Runs, axes: Axes | None = None, *, theme: str = "light") -> Axes:
    """Share of attention per layer (sink-token paper, Fig. 3b and 3d).

    On the added sink token (full line) and on the text position that receives most (dashed), mean over all queries,
    heads, recorded steps and samples. Raises NotRecorded without attention.
    """
    studies, look = recorded(runs), theme_named(theme)
    with themed(look):
        own, axes = axes is None, own_axes(axes, 4.6, 2.8)
        for index, study in enumerate(studies):
            colour, marker = look.runs[index % len(look.runs)], MARKERS[index % len(MARKERS)]
            if study.sink_count:
                added = [100 * facts.added_share for facts in study.facts]
                axes.plot(study.layers, added, color=colour, marker=marker, label=f"{study.label}: added sink")
            text = [100 * facts.text_share for facts in study.facts]
            axes.plot(
                study.layers, text, color=colour, marker=marker, markerfacecolor=look.surface, linestyle="--",
                label=f"{study.label}: greatest text position",
            )  # fmt: skip
        over_layers(axes, "share of attention, %")
        from_zero(axes)
        legend_above(axes, grow=own)
    return axes


def value_norms(run: Run | Study, axes: Axes | None = None, *, top: float | None = None, theme: str = "light") -> Axes:
    """Mean length of value vectors per layer (sink-token paper, Fig. 3a and 3c).

    Added sink, text positions that are sinks, and all other text positions. Raises NotRecorded when value norms were
    not recorded.
    """
    study, look = recorded(run)[0], theme_named(theme)
    rest = [facts.rest_norm for facts in study.facts]
    if np.isnan(rest).all():
        raise NotRecorded(
            f"This figure needs value norms, and {study.run.path} recorded none. Trace with the statistic value_norm."
        )
    with themed(look):
        axes = own_axes(axes, 4.6, 3.0)
        axes.plot(study.layers, rest, color=look.muted, marker="o", label="other text")
        sinks = [facts.sink_norm for facts in study.facts]
        axes.plot(study.layers, sinks, color=look.runs[0], marker="s", linestyle="--", label="text sinks")
        if study.sink_count:
            added = [facts.added_norm for facts in study.facts]
            axes.plot(study.layers, added, color=look.added, marker="D", label=ADDED)
        over_layers(axes, "length of value vectors")
        from_zero(axes)
        axes.set_ylim(top=top)
        axes.legend(ncols=3, loc="lower left", bbox_to_anchor=(0, 1), borderaxespad=0.2, columnspacing=1.2)
    return axes


def sinks_per_layer(runs: Runs, axes: Axes | None = None, *, theme: str = "light") -> Axes:
    """Mean number of sinks of a head at a step, per layer (analysis paper, Sec. 4.2: LLaDA's falls with depth).

    Full line: all sinks; dashed: those on text positions, drawn where an added sink makes them differ. Raises
    ValueError without attention.
    """
    studies, look = recorded(runs), theme_named(theme)
    with themed(look):
        own, axes = axes is None, own_axes(axes, 4.6, 2.8)
        for index, study in enumerate(studies):
            colour, marker = look.runs[index % len(look.runs)], MARKERS[index % len(MARKERS)]
            axes.plot(
                study.layers, [facts.sinks for facts in study.facts], color=colour, marker=marker, label=study.label
            )
            if study.sink_count:
                text = [(facts.events - facts.added_events) / max(facts.mains, 1) for facts in study.facts]
                axes.plot(
                    study.layers, text, color=colour, marker=marker, markerfacecolor=look.surface, linestyle="--",
                    label=f"{study.label}: on text",
                )  # fmt: skip
        over_layers(axes, "sinks per head and step")
        from_zero(axes)
        legend_above(axes, grow=own)
    return axes


def split_sinks(runs: Runs, axes: Axes | None = None, *, theme: str = "light") -> Axes:
    """Share of heads whose masked and unmasked queries have different main sinks, per layer (analysis paper, Fig. 6a).

    Of the (sample, recorded step, head) in which both have a main sink that passes the rule. Raises NotRecorded when
    main sinks by state of the query were not recorded.
    """
    studies, look = recorded(runs), theme_named(theme)
    kept = [(index, study, study.measured.split) for index, study in enumerate(studies)]
    kept = [(index, study, split) for index, study, split in kept if split is not None and split.pairs_L.any()]
    if not kept:
        raise NotRecorded(
            f"This figure needs main sinks by state of the query, and {studies[0].run.path} recorded none. Trace a "
            "diffusion model with the statistic main_by_state."
        )
    with themed(look):
        own, axes = axes is None, own_axes(axes, 4.6, 2.8)
        for index, study, split in kept:
            assert split is not None
            axes.plot(
                study.layers, 100 * split.share_by_layer, color=look.runs[index % len(look.runs)],
                marker=MARKERS[index % len(MARKERS)], label=study.label,
            )  # fmt: skip
        over_layers(axes, "heads with split sinks, %")
        from_zero(axes, 5.0)
        legend_above(axes, 2, grow=own)
    return axes


def block_moves(runs: Runs, axes: Axes | None = None, *, theme: str = "light") -> Axes:
    """How often main sinks move where a new block begins (full line) and inside blocks (dotted), per layer.

    The analysis paper's Fig. 6b as a rate, in percent of the successive recorded steps at which the head has a main
    sink that passes the rule. Raises NotRecorded when no run was written in several blocks.
    """
    studies, look = recorded(runs), theme_named(theme)
    kept = [(index, study, study.measured.blocks) for index, study in enumerate(studies)]
    kept = [(index, study, blocks) for index, study, blocks in kept if any(layer.border_pairs for layer in blocks)]
    if not kept:
        raise NotRecorded(
            f"This figure needs a run in several blocks, with sinks at their borders: {studies[0].run.path} has none."
        )
    with themed(look):
        own, axes = axes is None, own_axes(axes, 4.6, 2.8)
        for index, study, blocks in kept:
            colour, marker = look.runs[index % len(look.runs)], MARKERS[index % len(MARKERS)]
            for name, style, label in (("border_rate", "-", "at block borders"), ("inside_rate", ":", "inside blocks")):
                axes.plot(
                    study.layers, [100 * getattr(layer, name) for layer in blocks], color=colour, marker=marker,
                    linestyle=style, markerfacecolor=colour if style == "-" else look.surface,
                    label=f"{study.label}: {label}",
                )  # fmt: skip
        over_layers(axes, "moves of the main sink, % of steps")
        from_zero(axes, 5.0)
        legend_above(axes, grow=own)
    return axes


def heldout_loss(runs: Runs, axes: Axes | None = None, *, theme: str = "light") -> Axes:
    """Change of held-out loss over the number of hidden columns: sinks (full line), random ones (dotted), ± one s.e.

    The analysis paper's Table 1 in terms of loss. The differences are paired, so their errors are small beside those of
    the losses themselves. Raises ValueError when no run has the table heldout.
    """
    studies, look = as_studies(runs), theme_named(theme)
    scored = [(index, study, study.heldout) for index, study in enumerate(studies) if study.heldout is not None]
    if not scored:
        raise NotRecorded(f"This figure needs the table heldout: {studies[0].run.path} has none.")
    ks = sorted({int(k) for _, _, frame in scored for k in frame["k"]})
    with themed(look):
        own, axes = axes is None, own_axes(axes, 4.6, 2.8)
        for index, study, frame in scored:
            colour, marker = look.runs[index % len(look.runs)], MARKERS[index % len(MARKERS)]
            for control, style, nudge in (("sinks", "-", 0.0), ("random", ":", 0.06)):
                rows = frame[frame["control"].isin(["none", control])].sort_values("k")
                if not (rows["control"] == control).any():
                    continue
                change, error = (rows[key].to_numpy(float) for key in ("delta", "delta_stderr"))
                places = [ks.index(int(k)) + nudge + 0.02 * index for k in rows["k"]]
                axes.errorbar(
                    places, change, np.nan_to_num(error), color=colour, marker=marker, linestyle=style,
                    markerfacecolor=colour if control == "sinks" else look.surface, capsize=2.5, elinewidth=1,
                    label=f"{study.label}: {'sinks' if control == 'sinks' else 'random columns'} hidden",
                )  # fmt: skip
        axes.set_xticks(range(len(ks)), [str(k) for k in ks])
        axes.set(xlabel="columns hidden per layer and head", ylabel="change of loss, nats per token")
        axes.grid(axis="y")
        legend_above(axes, grow=own)
    return axes


def recorded(runs: Runs) -> list[Study]:
    """Those of ``runs`` that recorded attention. ValueError when there is none."""
    studies = as_studies(runs)
    found = [study for study in studies if study.layers]
    if not found:
        raise NotRecorded(f"This figure needs recorded attention: {studies[0].run.path} has none.")
    return found


def over_layers(axes: Axes, label: str) -> None:
    """The axis of layers, with whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.set(xlabel="layer", ylabel=label)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
