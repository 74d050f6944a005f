"""Contents of the sinks of a run of kind "contents": a figure a place, and the findings in
sentences.
"""

# one line a population over layers; bands are 95 % intervals over texts
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from sinklab.lab.records import Run, of_twin
from sinklab.lab.reports import (
    Axis,
    Chart,
    Line,
    NotRecorded,
    Reader,
    as_shown,
    figure,
    save_figure,
    statements,
)
from sinklab.lab.studies import labels_of, no_twins, of_each, shown_by, twins_of

PLACES, LENS, PROBES = (labels_of("contents")[name] for name in ("places", "lens", "probes"))
LEAST = -0.5
"""Scores below are drawn here: how much worse than a constant says nothing more."""
CLIPPED = ("low", "value", "high", "shuffled", "other_text")
CONTROLS = (("shuffled", "of shuffled targets", ":"), ("other_text", "of another text", "--"))


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


@figure(
    "contents", kind="contents", alone=True, prepared=True, columns=3, share="x", size=(3.4, 2.1)
)
def contents_figure(one: Reader, place: str = "future") -> list[Chart]:
    """Lens (two rows) and probes (two rows) at the sinks of a place and at matched positions, by
    layer.

    Full lines: sinks and matched positions with 95 % intervals over texts; dotted: probes of
    shuffled targets; dashed: probes of another text's targets at that step.

    Raises:
        NotRecorded: if there were no sinks at the place.
        ValueError: for a run of another kind.
    """
    run = one.run
    if place not in contents_places(run):
        raise NotRecorded(
            f"This figure needs sinks at the place {place!r}, and {run.path} has some at "
            f"{', '.join(contents_places(run)) or 'none'}. Choose another place, or --choose "
            "strongest."
        )
    x = Axis(
        f"{_label(run)}, {PLACES[place]}: layer that the state enters (the last one: leaves)",
        whole=True,
    )
    charts = []
    for table, column, titles in (("lens", "measure", LENS), ("probes", "target", PROBES)):
        frame = pd.DataFrame({"place": [], column: []})
        if table in run.tables:
            frame = run.table(table)
        for name, title in titles.items():
            shown = frame[(frame["place"] == place) & (frame[column] == name)]
            if name == "kl":
                # the input of layer 0, the bare embedding, is tens of nats away
                shown = shown[shown["layer"] > 0]
            lines = []
            up = Axis()
            if len(shown):
                lines = _lines(shown, run.info.settings["choose"] == "strongest")
                if table == "probes" and shown["high"].max() < 0.1:
                    # a score of nothing looks like nothing
                    up = Axis(high=0.1)
            charts.append(Chart(x, up, lines, title=title))
    return charts


def _lines(shown: pd.DataFrame, is_strongest: bool) -> list[Line]:
    found = []
    names = {"matched": "matched positions", "sink": "sinks"}
    if is_strongest:
        names["sink"] = "strongest keys"
    for colour, (population, name) in enumerate(names.items()):
        rows = shown[shown["population"] == population].sort_values("layer")
        how: dict[str, Any] = {"run": name, "colour": colour, "marker": colour}
        controls = []
        if "target" in rows:
            rows = rows.assign(**rows[[*CLIPPED]].clip(lower=LEAST))
            for control, words, style in CONTROLS:
                line = Line(rows["layer"], rows[control], words=words, style=style, **how)
                controls.append(line)
        line = Line(rows["layer"], rows["value"], low=rows["low"], high=rows["high"], **how)
        found += [line, *controls]
    return found


def save_contents_figures(
    run: Run,
    folder: str | Path,
    places: Iterable[str] | None = None,
    *,
    prefix: str = "",
    theme: str = "light",
) -> list[Path]:
    """The figure of each place as PREFIXcontents-PLACE.png; of all places with sinks when `places`
    is None.
    """
    written = []
    if places is None:
        places = contents_places(run)
    for place in places:
        draw = partial(contents_figure, run, place, theme=theme)
        written += save_figure(draw, Path(folder) / f"{prefix}contents-{place}", theme=theme)
    return written


@of_each
def draw_contents(run: Run, out: Path, options: object) -> list[Path]:
    """A figure a place, in the run folder."""
    return save_contents_figures(run, out)


@of_each
def contents_sentences(run: Run) -> list[str]:
    """Findings in each run, a sentence a place and one about the added sinks.

    Raises:
        ValueError: for a run of another kind.
    """
    looks = run.table("looks").groupby("place")[["sinks", "positions", "pairs"]].sum()
    found = {place: _differences(run, place) for place in contents_places(run)}
    told = statements("sinklab.lab.studies.contents", (), places=PLACES)
    lines = told("page", _label(run), run.info, len(run.table("texts")), looks, found)
    if "added_sinks" in run.tables:
        lines += told("added", run.table("added_sinks"))
    return lines + no_twins({_label(run): run})


def _differences(run: Run, place: str) -> dict[str, Any]:
    """Arguments of `differences` in sentences.jinja."""
    told = _told(run, place)
    beside = {kind: _told(run, place, kind) for kind in twins_of(run)}
    largest = told[told["low"] > 0].nlargest(1, "value").assign(word="largest")
    lowest = told[told["high"] < 0].nsmallest(1, "value").assign(word="lowest")
    extremes = []
    for row in pd.concat([largest, lowest]).itertuples():
        texts = dict.fromkeys(beside, "")
        for kind, one in beside.items():
            for same in one[(one["target"] == row.target) & (one["layer"] == row.layer)]["value"]:
                texts[kind] = f"{same:+.2f}"
        extremes.append((row.word, row, shown_by(texts)))
    # differences with an interval that excludes 0
    clear = {kind: ((one["low"] > 0) | (one["high"] < 0)).sum() for kind, one in beside.items()}
    texts = {kind: f"{clear[kind]} of {len(one)}" for kind, one in beside.items()}
    return {"told": told, "controls": shown_by(texts), "extremes": extremes}


def _told(run: Run, place: str, kind: str = "") -> pd.DataFrame:
    """Differences of probes at a place, of the model or its twin of a kind."""
    name = of_twin("probes", kind)
    if name not in run.tables:
        return pd.DataFrame({"target": [], "layer": [], "value": [], "low": [], "high": []})
    frame = run.table(name)
    frame = frame[(frame["place"] == place) & (frame["population"] == "difference")]
    # embeddings of masks are all alike: nothing can differ there
    return frame[frame["low"] < frame["high"]]


def _label(run: Run) -> str:
    return Path(str(run.info.model.get("name", run.path.name))).name
