"""What stands on a page, as data from the runs and the words of cards.toml; page.jinja makes markup of it."""

from __future__ import annotations

import base64
import io
import math
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import pandas as pd

from sinklab.records.reading import Run
from sinklab.registry import figures
from sinklab.reports import sentences as say
from sinklab.reports.comparison import compare
from sinklab.reports.drawing import figure_of, save
from sinklab.reports.samples import ADDED, MASK, NotRecorded
from sinklab.reports.study import Study
from sinklab.reports.style import THEMES, asset, printable, themed
from sinklab.reports.tables import enrichment_table, rules_table
from sinklab.reports.training import Training
from sinklab.reports.words import number, percent

SHOWN_TOKENS = 15


@dataclass(frozen=True)
class Share:
    """A cell with a share as a bar behind the text."""

    of: float

    @property
    def percent(self) -> str:
        """The length of the bar."""
        return f"{100 * min(max(self.of, 0), 1):.1f}"

    def __str__(self) -> str:
        return percent(self.of)


@dataclass(frozen=True)
class Table:
    """A table; one with a summary stands behind that line."""

    head: Sequence[Any]
    rows: Sequence[Sequence[Any]]
    summary: str = ""


@dataclass(frozen=True)
class Picture:
    """A figure as addresses that hold it whole, in both themes."""

    light: str
    dark: str
    words: str
    """what stands in its place where it is not seen"""


@dataclass(frozen=True)
class Card:
    """One finding: its pictures, or a chart that the script draws, its sentences, and its numbers."""

    title: str
    anchor: str = ""
    how: str = ""
    sentences: Sequence[str] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    chart: bool = False
    texts: Sequence[Any] | None = None
    """what was written, a list of rows per sample; empty where none was kept"""
    run: Run | None = None
    """what was run"""


Part = dict[str, Any]
"""A part of the page below the findings: anchor, cards, title, how, sentences."""
FORMS: dict[str, Callable[[Any], Any]] = {
    "text": str,
    "number": number,
    "percent": percent,
    "share": Share,
    "whole": "{:,.0f}".format,
    "times": lambda value: f"{number(value)}×",
    "token": lambda label: label if label in (MASK, ADDED) else printable(label, 40),
    "measure": lambda value: "" if math.isnan(value) else FORMS["whole" if value == int(value) else "number"](value),
}
"""how cells are written"""


@lru_cache(maxsize=1)
def _words() -> dict[str, dict[str, Any]]:
    return tomllib.loads(asset("cards.toml"))


def words_of(what: str, name: str) -> Any:
    """What cards.toml says of the "page" of a kind, of its "cards", of one of the "parts" or "tables" of a page."""
    return _words()[what][name]


def _part(anchor: str, cards: list[Card], sentences: Sequence[str] = ()) -> Part:
    return {"anchor": anchor, "cards": cards, "sentences": sentences, "how": ""} | words_of("parts", anchor)


def picture(draw: Callable[..., Any], words: str) -> Picture | None:
    """What ``draw(theme=…)`` draws; None where the runs did not record enough for it."""
    import matplotlib

    addresses = []
    for name, theme in THEMES.items():
        written = io.BytesIO()
        # Letters stay letters: a tenth of the size of their outlines.
        with themed(theme), matplotlib.rc_context({"svg.fonttype": "none"}):
            try:
                save(figure_of(draw(theme=name)), "svg", written)
            except NotRecorded:
                return None
        addresses.append(f"data:image/svg+xml;base64,{base64.b64encode(written.getvalue()).decode('ascii')}")
    return Picture(*addresses, words)


def pictures_of(names: dict[str, str], runs: Any) -> list[Picture]:
    """Those of the figures that the runs recorded enough for."""
    drawn = [picture(partial(figures[name], runs), words) for name, words in names.items()]
    return [one for one in drawn if one]


def table_of(name: str, frame: pd.DataFrame, summary: str = "") -> Table:
    """Facts as cards.toml says: of each column the heading and the form of its numbers; the index stands in front."""
    columns = words_of("tables", name)
    cells = [frame[column].map(FORMS[form]) for column, (_, form) in columns.items()]
    rows = list(zip(frame.index, *cells, strict=True))
    return Table([frame.index.name, *(head for head, _ in columns.values())], rows, summary)


def as_it_is(frame: pd.DataFrame, summary: str = "") -> Table:
    """A table whose cells are written already."""
    return Table([frame.index.name, *frame.columns], list(frame.itertuples(name=None)), summary)


def facts_over(row: dict[str, Any], runs: list[Any]) -> list[Table]:
    """A table of facts of all runs beside each other; columns that a run has nothing for are left out."""
    axis, form = row.get("over", ""), FORMS[row.get("shown", "number")]
    shown = {
        f"{run.label}: {words}": run.over(axis).set_index(axis)[name].map(form)
        for run in runs
        for name, words in row.get("columns", {}).items()
        if name in (table := run.over(axis)) and table[name].notna().any() and (run.sink_count or "added" not in name)
    }
    return [as_it_is(pd.DataFrame(shown).sort_index().fillna("").rename_axis(axis), "numbers")] if shown else []


def curve_numbers(studies: list[Study]) -> list[Table]:
    """Share of tokens that are no sinks, by threshold."""
    curves = {study.label: study.curve for study in studies if study.curve is not None}
    rows = [f"{epsilon:g}" for epsilon in next(iter(curves.values())).epsilon]
    shares = {label: curve.filtered for label, curve in curves.items()}
    return [as_it_is(pd.DataFrame(shares, pd.Index(rows, name="ε")).map(percent), "numbers")]


def heldout_numbers(studies: list[Study]) -> list[Table]:
    """Every row of the table heldout."""
    frames = [study.heldout.assign(run=study.label) for study in studies if study.heldout is not None]
    return [table_of("heldout", pd.concat(frames).set_index("run"), "numbers")]


DETAILS = {"curve": curve_numbers, "heldout": heldout_numbers}
"""card of studies -> its numbers, where these are not facts over an axis"""


def measured(kind: str, runs: list[Any]) -> list[Part]:
    """The cards of cards.toml, of the runs that have what they show."""
    # One part, so that the style packs short and tall cards below each other.
    cards = [card for row in words_of("cards", kind) if (card := _card(kind, row, runs))]
    return [_part("measured", cards)] if cards else []


def _card(kind: str, row: dict[str, Any], runs: list[Any]) -> Card | None:
    """One card; None without a run that has anything to show, and without a picture where it has some."""
    anchor, title, how = row["anchor"], row["title"], row["how"]
    if kind == "study":
        runs = [run for run in runs if (run.layers if anchor != "heldout" else run.heldout is not None)]
        how = how.replace("{rule}", runs[0].rule_words if runs else "")
    pictures = pictures_of(row.get("figures", {}), runs) if runs else []
    tables = DETAILS[anchor](runs) if kind == "study" and anchor in DETAILS and runs else facts_over(row, runs)
    if not runs or ("figures" in row and not pictures) or ("figures" not in row and "over" in row and not tables):
        return None
    sentences = say.told_of(runs, *row.get("told", ()))
    sentences += [text for name in row.get("together", ()) for text in say.told(name, runs)]
    return Card(title, anchor, how, sentences, tables, pictures, chart="figures" not in row)


def judged(studies: list[Study]) -> list[tuple[str, bool | None, str]]:
    """The verdicts: which statement was held against which run and its answer, whether it holds, the sentence."""
    return [
        (*say.told("answer", study, verdict, len(studies) == 1), verdict.holds, verdict.sentence)
        for study in studies
        if study.layers
        for verdict in study.verdicts
    ]


def parts_of(runs: list[Any]) -> list[Part]:
    """Everything below the findings, in reading order; what was run closes the page."""
    middle = _of_trainings(runs) if isinstance(runs[0], Training) else _of_studies(runs)
    return [*middle, _part("runs", [Card(run.label, run=run.run) for run in runs])]


def _of_studies(studies: list[Study]) -> list[Part]:
    recorded = [study for study in studies if study.layers]
    found = measured("study", studies)
    if len(recorded) == 2:
        frame = compare(*recorded).set_index("measure").map(FORMS["measure"])
        found.append(_part("compared", [Card("", tables=[as_it_is(frame)])]))
    if known := [study for study in recorded if study.sink_tokens is not None]:
        cards = [Card(study.label, tables=_token_tables(study)) for study in known]
        found.append(_part("tokens", cards, say.told_of(known, "tokens", "explained")))
    if recorded:
        rules = [table_of("rules", rules_table(study).set_index("rule")) for study in recorded]
        cards = [Card(study.label, tables=[table]) for study, table in zip(recorded, rules, strict=True)]
        found.append(_part("rules", cards))
    return [*found, _part("text", [Card(study.label, texts=_texts(study)) for study in studies])]


def _token_tables(study: Study) -> list[Table]:
    found = {"token": study.sink_tokens, "class": study.classes, "age": study.ages}
    frames = [enrichment_table(each, name).head(SHOWN_TOKENS) for name, each in found.items()]
    frames[0] = frames[0].assign(token=frames[0]["token"].map(FORMS["token"]))
    return [table_of("tokens", frame.set_index(name)) for name, frame in zip(found, frames, strict=True)]


def _texts(study: Study) -> list[list[dict[str, Any]]]:
    """What was written for every prompt, under each number of hidden sinks: a list of rows per sample."""
    frame = study.generations
    if frame is None:
        return []
    frame = frame.reindex(columns=frame.columns.union(["masked_sinks", "idle"], sort=False))
    frame = frame.assign(masked_sinks=frame["masked_sinks"].fillna(0))
    texts = ["prompt", "completion", "idle"]
    frame = frame.astype({name: object for name in texts}).fillna(dict.fromkeys(texts, ""))
    return [rows.to_dict("records") for _, rows in frame.groupby("sample", sort=True)]


def _of_trainings(trainings: list[Training]) -> list[Part]:
    found = [_part("outcome", [Card("", tables=[_outcome(trainings)])]), *measured("training", trainings)]
    words = words_of("each", "run")
    cards = []
    for place, run in enumerate(trainings):
        names = {name: f"{text}, {run.label}" for name, text in words["figures"].items()}
        if pictures := pictures_of(names, run):
            cards.append(Card(run.label, f"run-{place + 1}", words["how"], pictures=pictures))
    return [*found, _part("each", cards)] if cards else found


def _outcome(trainings: list[Training]) -> Table:
    rows = []
    for run in trainings:
        loss, other = run.loss, say.compared_with(run, trainings)
        gap = None if other is None else run.against(other)
        last = pd.Series(dtype=float) if run.facts.empty else run.over("step").iloc[-1]
        start = "never" if run.takeover is None else str(run.takeover)
        rows.append({
            "run": run.label,
            "variant": run.variant,
            "seed": run.run.info.seed,
            "held-out loss": "–" if loss is None else number(loss.mean, 4),
            "95 % interval": "" if loss is None else loss.interval,
            "against plain": "" if gap is None else say.signed(*gap),
            "share of added sinks": percent(float(last.get("added_share", math.nan))) if run.sink_count else "",
            "from step": start if run.sink_count and len(last) else "",
            "mobility": number(float(last.get("mobility", math.nan))),
            "sinks in the text": number(float(last.get("text_sinks", math.nan))),
        })  # fmt: skip
    return as_it_is(pd.DataFrame(rows).set_index("run"))
