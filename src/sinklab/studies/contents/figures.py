"""What the sinks of a run of kind "contents" carry: a figure a place, and the findings in words."""

# one line a population over layers; bands are 95 % intervals over texts
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sinklab.records.info import of_twin
from sinklab.records.reading import Run
from sinklab.reports.printed import save_figure
from sinklab.reports.runs import as_shown
from sinklab.reports.samples import NotRecorded
from sinklab.reports.style import theme_named, themed, whole_numbers
from sinklab.studies.base import labels_of
from sinklab.studies.twins import no_twins, shared, twins_of

PLACES, LENS, PROBES = (labels_of("contents")[name] for name in ("places", "lens", "probes"))
LEAST = -0.5
"""Scores below are drawn here: how much worse than a constant says nothing more."""


def contents_places(run: Run) -> list[str]:
    """Places at which sinks and matched positions were found, in the order of `PLACES`.

    Raises:
        ValueError: for a run of another kind.
    """
    as_shown(run, "contents")
    if "lens" not in run.tables:
        return []
    there = set(run.table("lens")["place"])
    return [place for place in PLACES if place in there]


def contents_figure(run: Run, place: str = "future", *, theme: str = "light") -> Figure:
    """What the lens (two rows) and the probes (two rows) read at the sinks of a place and at matched positions, by
    layer.

    Full lines: sinks and matched positions with 95 % intervals over texts; dotted: probes of shuffled targets;
    dashed: of what another text held at that step.

    Raises:
        NotRecorded: where there were no sinks at the place.
        ValueError: for a run of another kind.
    """
    if place not in contents_places(run):
        raise NotRecorded(
            f"This figure needs sinks at the place {place!r}, and {run.path} has some at "
            f"{', '.join(contents_places(run)) or 'none'}. Choose another place, or --choose strongest."
        )
    look = theme_named(theme)
    with themed(look):
        # fixed margins: the same panels always, and no search for a layout
        figure = Figure(figsize=(10.5, 9.6))
        grid = figure.subplots(4, 3, sharex=True)
        figure.subplots_adjust(left=0.055, right=0.99, bottom=0.05, top=0.93, hspace=0.22, wspace=0.16)
        for table, column, titles, rows in (
            ("lens", "measure", LENS, grid[:2]),
            ("probes", "target", PROBES, grid[2:]),
        ):
            frame = run.table(table) if table in run.tables else pd.DataFrame({"place": [], column: []})
            for axes, (name, title) in zip(rows.flat, titles.items(), strict=True):
                axes.set_title(title)
                axes.grid(axis="y")
                shown = frame[(frame["place"] == place) & (frame[column] == name)]
                if name == "kl":
                    # what enters layer 0, the bare embedding, is tens of nats away
                    shown = shown[shown["layer"] > 0]
                if shown.empty:
                    axes.text(0.5, 0.5, "not enough was seen", transform=axes.transAxes, ha="center", color=look.muted)
                    continue
                _draw(axes, shown, look.runs[1], look.runs[0], look.surface, table == "probes")
                if table == "probes" and axes.get_ylim()[1] < 0.1:
                    # a score of nothing looks like nothing
                    axes.set_ylim(min(axes.get_ylim()[0], -0.02), 0.1)
        for axes in grid[-1]:
            whole_numbers(axes.xaxis)
            axes.set_xlabel("layer that the state enters (the last one: leaves)")
        figure.suptitle(f"{_label(run)}: {PLACES[place]}", x=0.05, y=0.985, ha="left", fontsize=11)
        handles, labels = grid[0, 0].get_legend_handles_labels()
        if run.info.settings["choose"] == "strongest":
            labels = [label.replace("sinks", "strongest keys") for label in labels]
        figure.legend(handles, labels, loc="upper right", bbox_to_anchor=(0.99, 0.995), ncols=2)
    return figure


def _draw(axes: Axes, shown: pd.DataFrame, sink: str, matched: str, surface: str, is_probe: bool) -> None:
    styles = {"sink": (sink, "o", "sinks"), "matched": (matched, "s", "matched positions")}
    for population, (colour, marker, label) in styles.items():
        rows = shown[shown["population"] == population].sort_values("layer")
        low, value, high = (rows[name].clip(lower=LEAST if is_probe else None) for name in ("low", "value", "high"))
        axes.fill_between(rows["layer"], low, high, color=colour, alpha=0.18, linewidth=0)
        fill = colour if population == "sink" else surface
        axes.plot(rows["layer"], value, color=colour, marker=marker, markerfacecolor=fill, label=label)
        for control, line in (("shuffled", ":"), ("other_text", "--")) if is_probe else ():
            axes.plot(rows["layer"], rows[control].clip(lower=LEAST), color=colour, linestyle=line, linewidth=1)


def save_contents_figures(
    run: Run, folder: str | Path, places: Iterable[str] | None = None, *, prefix: str = "", theme: str = "light"
) -> list[Path]:
    """The figure of each place as PREFIXcontents-PLACE.png; of all places with sinks when `places` is None."""
    written = []
    for place in contents_places(run) if places is None else places:
        draw = partial(contents_figure, run, place, theme=theme)
        written += save_figure(draw, Path(folder) / f"{prefix}contents-{place}", theme=theme)
    return written


def draw_contents(runs: list[Run], out: Path, options: object) -> list[Path]:
    """A figure a place, in the run folder."""
    return save_contents_figures(runs[0], out)


def contents_sentences(runs: list[Run]) -> list[str]:
    """What was found in the first run, a sentence a place and one about the added sinks.

    Raises:
        ValueError: for a run of another kind.
    """
    run = runs[0]
    there, settings = contents_places(run), run.info.settings
    names = {
        "excess": f"sinks by ε = {settings['epsilon']:g}",
        "strongest": "the strongest keys of each head, sinks or not",
    }
    rule = names.get(settings["choose"], f"sinks by {settings['choose']}")
    lines = [f"{_label(run)}: {rule}, in {len(run.table('texts'))} texts."]
    if run.info.status != "complete":
        lines[0] += " The run is not complete; --resume goes on with it."
    looks = run.table("looks")
    for place, name in PLACES.items():
        here = looks[looks["place"] == place]
        if here.empty:
            lines.append(f"{place} ({name}): no such positions.")
            continue
        seen = f"{100 * here['sinks'].sum() / here['positions'].sum():.2g} % of the positions of a layer"
        counted = f"{place} ({name}): {seen} are chosen, {here['pairs'].sum()} pairs sampled"
        lines.append(counted + (f". {_differences(run, place)}" if place in there else "; nothing to compare."))
    if "added_sinks" in run.tables:
        lines.append(_added(run.table("added_sinks")))
    return lines + no_twins({_label(run): run})


def _differences(run: Run, place: str) -> str:
    frame = _told(run, place)
    if frame.empty:
        return "Too little for a probe."
    beside = [_told(run, place, kind) for kind in twins_of(run)]
    more, less = frame[frame["low"] > 0], frame[frame["high"] < 0]
    text = (
        f"Of {len(frame)} differences between what probes read at sinks and beside them, {len(more)} are above 0 and "
        f"{len(less)} below it at 95 % (some {0.05 * len(frame):.0f} would be where there is none)"
    )
    text += shared(_clear(frame), map(_clear, beside))
    for rows, word in ((more.nlargest(1, "value"), "largest"), (less.nsmallest(1, "value"), "lowest")):
        for row in rows.itertuples():
            text += f"; the {word} is {row.target} at layer {row.layer}, {row.value:+.2f}"
            text += f" [{row.low:+.2f}, {row.high:+.2f}]"
            same = [one[(one["target"] == row.target) & (one["layer"] == row.layer)]["value"] for one in beside]
            text += shared(row.value, [value for values in same for value in values])
    return text + "."


def _told(run: Run, place: str, kind: str = "") -> pd.DataFrame:
    """Differences of probes at a place, of the model or its twin of a kind."""
    name = of_twin("probes", kind)
    if name not in run.tables:
        return pd.DataFrame({"target": [], "layer": [], "value": [], "low": [], "high": []})
    frame = run.table(name)
    frame = frame[(frame["place"] == place) & (frame["population"] == "difference")]
    # embeddings of masks are all alike: nothing can differ there
    return frame[frame["low"] < frame["high"]]


def _clear(frame: pd.DataFrame) -> float:
    """The share of differences that are told from 0."""
    return float(((frame["low"] > 0) | (frame["high"] < 0)).mean())


def _added(frame: pd.DataFrame) -> str:
    share = f"{frame['share'].mean():.1%} of the attention on average over layers ({frame['share'].max():.1%} at most)"
    spread = frame["spread"].max()
    if pd.isna(spread):
        return f"Added sinks: {share}; they are keys and values, and have no states to read."
    if spread == 0:
        return f"Added sinks: {share}; their states are the same to the last bit in every text: a constant."
    return f"Added sinks: {share}; their states differ by up to {spread:.2g} between texts."


def _label(run: Run) -> str:
    return Path(str(run.info.model.get("name", run.path.name))).name
