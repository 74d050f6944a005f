"""From run folders to report.html: content of the page, as data; page.jinja makes its markup."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FunctionLoader, StrictUndefined

from sinklab.core.sinks import Rule
from sinklab.lab.analysis import Answers, holm, mean_over
from sinklab.lab.analysis.answers import CONTROLS
from sinklab.lab.files import counted
from sinklab.lab.records.reading import Run
from sinklab.lab.records.storage import remove_half_written, write_text
from sinklab.lab.registry import figures as registered
from sinklab.lab.reports import sentences as say
from sinklab.lab.reports.answered import contrast_of
from sinklab.lab.reports.drawing import Figure, printed
from sinklab.lab.reports.inline import Picture, picture
from sinklab.lab.reports.payload import data_block, payload, script, script_hash
from sinklab.lab.reports.recorded import recorded_statistics, words_of_statistic
from sinklab.lab.reports.runs import Runs, as_shown
from sinklab.lab.reports.samples import ADDED, MASK
from sinklab.lab.reports.study import Study
from sinklab.lab.reports.style import asset, printable
from sinklab.lab.reports.tables import (
    compare,
    rules_table,
    twins_table,
    write_tables,
)
from sinklab.lab.reports.training import Training
from sinklab.lab.reports.words import coded, interval, number, percent, tipped, words_of

SHOWN_TOKENS = 15
# The rest of a page is its script, figures, sentences and tables.
ARRAYS = 0.89
SMALL = 500_000
"""characters of the arrays of a study below which a page leaves out pictures of single
statistics
"""
MOST = 12
"""samples whose texts are shown; more stand behind a line"""


@dataclass(frozen=True)
class Share:
    """A cell with a share as a bar behind the text."""

    of: float

    def __html__(self) -> str:
        part = f"--part:{100 * self.of:.1f}%"
        return f'<span class="share" style="{part}">{percent(self.of)}</span>'


@dataclass(frozen=True)
class Table:
    """A table; one with a summary is folded behind that line."""

    frame: pd.DataFrame
    """its cells as they are written; the index stands in front, and without a name of it there is
    no heading
    """
    summary: str = ""


@dataclass(frozen=True)
class Card:
    """One finding: its pictures, its sentences, and its numbers."""

    title: str
    anchor: str = ""
    how: str = ""
    sentences: Sequence[str] = ()
    tables: Sequence[Table] = ()
    pictures: Sequence[Picture] = ()
    texts: Sequence[Any] | None = None
    """the texts written, a list of rows per sample; empty if none was kept"""


Part = dict[str, Any]
"""A part of the page below the findings: anchor, cards, title, how, sentences."""


def _measure(value: float) -> str:
    if math.isnan(value):
        return ""
    return f"{value:,.0f}" if value == int(value) else number(value)


def _token(label: str) -> str:
    return label if label in (MASK, ADDED) else printable(label, 40)


def named_part(anchor: str, cards: list[Card], sentences: Sequence[str] = ()) -> Part:
    """The part of the page with this name in cards.toml, which has its title."""
    return {"anchor": anchor, "cards": cards, "sentences": sentences, "how": ""} | words_of(
        "parts", anchor
    )


def what_was_run(runs: dict[str, Run]) -> Part:
    """The part with the facts of runs, by their labels."""
    cards = []
    for label, run in runs.items():
        info = run.info
        of_run: dict[str, Any] = {
            "folder": run.path.name,
            "created": info.created,
            "status": info.status,
        }
        of_run |= {"seed": info.seed, "versions": info.versions}
        tables = [
            _facts(info.model),
            _facts(info.settings, "settings"),
            _facts(of_run, "run"),
        ]
        cards.append(Card(label, tables=tables))
    return named_part("runs", cards)


def _facts(facts: dict[str, Any], summary: str = "") -> Table:
    known = {name: _shown(value) for name, value in facts.items() if value is not None}
    return Table(pd.Series(known).to_frame(), summary)


def measured(kind: str, runs: list[Any]) -> Part:
    """The cards of cards.toml, of the runs that have the data they show."""
    # One part, so that the style packs short and tall cards below each other.
    rows = words_of("cards", kind).items()
    found = [_card(kind, name, row, runs) for name, row in counted("drawing", rows, len(rows))]
    return named_part("measured", [card for card in found if card is not None])


def _card(kind: str, name: str, row: dict[str, Any], runs: list[Any]) -> Card | None:
    """The card of a figure; None without sentences and figure (for training runs, without a
    figure).
    """
    title = row["title"]
    figure: Figure = registered[name]
    if kind == "study":
        runs = [run for run in runs if say.has_data(run, name)]
    pictures = picture(name, runs, title, name) if runs else []
    sentences = say.told_of(runs, *row.get("told", ()))
    sentences += [text for name in row.get("together", ()) for text in say.told(name, runs)]
    if not pictures and (kind == "training" or not sentences):
        return None
    tables = []
    if pictures and row.get("numbers", True):
        tables.append(Table(printed(pictures[0].numbers), "numbers"))
    return Card(title, name, figure.words, sentences, tables, pictures)


def judged(studies: list[Study]) -> list[tuple[str, bool | None, str]]:
    """The verdicts: each statement with its run and its answer, whether it holds, the sentence.

    They are corrected for the number of all on the page.
    """
    found = [(study, verdict) for study in studies if study.layers for verdict in study.verdicts]
    corrected = holm([verdict for _, verdict in found])
    return [
        (
            say.told("answer", study, verdict, len(studies) == 1)[0],
            verdict.holds,
            " ".join([verdict.sentence, *say.told("beside", study, verdict.name)]),
        )
        for (study, _), verdict in zip(found, corrected, strict=True)
    ]


def parts_of(runs: list[Any], *, is_small: bool = False) -> list[Part]:
    """Everything below the findings, in reading order; the facts of the runs close the page. A
    small one has fewer pictures.
    """
    if isinstance(runs[0], Training):
        parts = _of_trainings(runs)
    else:
        parts = _of_studies(runs, is_small=is_small)
    parts.append(what_was_run({run.label: run.run for run in runs}))
    return [part for part in parts if part["cards"]]


def _of_studies(studies: list[Study], *, is_small: bool) -> list[Part]:
    recorded = [study for study in studies if study.layers]
    known = [study for study in recorded if study.sink_tokens is not None]
    side_by_side, others = [], list[Card]()
    if len(recorded) == 2:
        side_by_side.append(Card("", tables=[_measures(compare(*recorded))]))
    if not is_small:
        others = _recorded_cards(recorded)
    beside = [
        Card(
            run.label,
            tables=[_measures(twins_table(run).rename(columns=CONTROLS))],
        )
        for run in recorded
        if run.twins
    ]
    rules = [Card(run.label, tables=[_rules(run)]) for run in recorded]
    tokens = [Card(run.label, tables=_token_tables(run)) for run in known]
    return [
        measured("study", studies),
        named_part("compared", side_by_side),
        named_part("twins", beside),
        named_part("tokens", tokens, say.told_of(known, "tokens", "explained")),
        named_part("rules", rules),
        named_part("statistics", others),
        named_part("text", [Card(run.label, texts=_texts(run)) for run in studies]),
    ]


def _recorded_cards(studies: list[Study]) -> list[Card]:
    """A card for every recorded statistic that no figure of its own shows, those of plug-ins among
    them.
    """
    cards: list[Card] = []
    for study in studies:
        for name in recorded_statistics(study):
            title = f"{study.label}: {name}" if len(studies) > 1 else name
            place = f"statistic-{len(cards) + 1}"
            drawn = picture("statistics", study, f"{title} by layer and step", place, only=name)
            cards.append(Card(title, place, words_of_statistic(name), pictures=drawn))
    return cards


def _measures(frame: pd.DataFrame) -> Table:
    """A table of `sinklab.lab.reports.tables.measures`, without columns that are empty."""
    return Table(frame.set_index("measure").dropna(axis=1, how="all").map(_measure))


def _rules(study: Study) -> Table:
    rules = rules_table(study).set_index("rule")
    cells = {
        "sinks per head": rules["sinks_per_head"].map(number),
        "tokens that are none": rules["filtered"].map(percent),
        "attention on them": rules["absorbed"].map(percent),
        "agreement": rules["agreement"].map(percent),
    }
    return Table(pd.DataFrame(cells))


def _token_tables(study: Study) -> list[Table]:
    tables = []
    counted = {"token": study.sink_tokens, "class": study.classes, "age": study.ages}
    for name, found in counted.items():
        frame = found.head(SHOWN_TOKENS)
        labels = frame["label"].rename(name)
        if name == "token":
            labels = labels.map(_token)
        cells = {
            "events": frame["events"].map("{:,.0f}".format),
            "frequency": frame["frequency"].map(Share),
            "occupancy": frame["occupancy"].map(Share),
            "enrichment": frame["enrichment"].map(lambda value: f"{number(value)}×"),
        }
        tables.append(Table(pd.DataFrame(cells).set_index(labels)))
    return tables


def _texts(study: Study) -> list[list[dict[str, Any]]]:
    """Texts written for every prompt, under each number of blocked sinks: a list of rows per
    sample.
    """
    frame = study.generations
    if frame is None:
        return []
    frame = frame.reindex(columns=["sample", "prompt", "completion", "masked_sinks", "idle"])
    frame = frame.astype(object).where(frame.notna(), "")
    return [rows.to_dict("records") for _, rows in frame.groupby("sample", sort=True)]


def _of_trainings(trainings: list[Training]) -> list[Part]:
    column = "added_share" if any(run.sink_count for run in trainings) else "text_share"
    shares = [100 * run.facts[column].max() for run in trainings if len(run.facts)]
    top = max(shares, default=None)
    cards = []
    for place, run in enumerate(trainings):
        # all maps of the page have one scale
        pictures = []
        for name, row in words_of("cards", "each").items():
            scale = {"top": top} if name == "emergence_map" else {}
            title, anchor = f"{row['title']}, {run.label}", f"{name}-{place + 1}"
            pictures += picture(name, run, title, anchor, **scale)
        if pictures:
            cards.append(Card(run.label, f"run-{place + 1}", pictures=pictures))
    outcome = named_part("outcome", [Card("", tables=[_outcome(trainings)])])
    return [outcome, measured("training", trainings), named_part("each", cards)]


def _outcome(trainings: list[Training]) -> Table:
    rows = []
    for run in trainings:
        loss = run.loss or mean_over([])
        row: dict[str, Any] = {"run": run.label, "variant": run.variant, "seed": run.run.info.seed}
        row |= {"held-out loss": number(loss.value, 4), "95 % interval": interval(loss)}
        row |= {"against plain": "", "share of added sinks": "", "from step": ""}
        _, gap = say.beside_plain(run, trainings)
        if gap is not None:
            row["against plain"] = say.signed(gap)
        # NaN if no sink monitor measured it
        last = run.over("step").reindex(columns=["added_share", "mobility", "text_sinks"]).tail(1)
        share, *others = last.mean()
        if run.sink_count:
            row["share of added sinks"] = percent(share)
        if run.sink_count and not run.facts.empty:
            row["from step"] = "never" if run.takeover is None else str(run.takeover)
        row |= zip(("mobility", "sinks in the text"), map(number, others), strict=True)
        rows.append(row)
    return Table(pd.DataFrame(rows).set_index("run"))


def report(
    runs: Runs,
    out: str | Path,
    *,
    rule: Rule | str | None = None,
    received: str = "",
    tables: Sequence[str] = ("parquet", "csv", "md"),
    megabytes: float = 3.0,
) -> Path:
    """Write ``report.html`` (one file that loads nothing) into the folder ``out``; returns its
    path.

    Studies make a page that explores what they recorded, training runs one of curves: losses, and
    how sinks emerged. Several runs of one kind are shown side by side in the order given. Results
    that a run did not get to write are left out, and the page says so. Files of figures are drawn
    by `sinklab.lab.reports.draw_all`.

    Args:
        runs: run folders that were opened, of one kind.
        out: folder, made if it does not exist.
        rule: the definition of a sink in studies, or its text such as "excess:epsilon=5"; None for
            `sinklab.core.sinks.DEFAULT`.
        received: the statistic that the rule reads: "received" (if empty), from all queries, or
            "received_from_masked", if the runs recorded it: from the masked queries, which decide
            the tokens. Steps with fewer than 8 of them count as if they had not been recorded.
        tables: formats of the tables in the folder of this name; empty writes none.
        megabytes: how large the part of each study on the page may be. A larger page holds more
            samples, and more keys of every head; it states its extent. One of less than half a
            megabyte leaves out the pictures of statistics that have no figure of their own.

    Raises:
        ValueError: when there is no run, for runs of another kind, and for studies and training
            runs together.
    """
    if not megabytes > 0:
        raise ValueError(
            f"megabytes says how large the part of each run may be, above 0: got {megabytes}."
        )
    readers = as_shown(runs, rule=rule, received=received)
    # The runs are read first: damaged ones leave no folder behind.
    content = _content(readers, int(ARRAYS * megabytes * 1e6))
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for place in (folder, folder / "tables"):
        remove_half_written(place)
    written = write_tables(readers, folder / "tables", tables) if tables else []
    return plain_page(folder / "report.html", **content, written=len(written))


def plain_page(
    path: Path, *, title: str, lead: str, parts: Sequence[Part], version: str = "", **more: Any
) -> Path:
    """Write a page that loads nothing, without a script unless ``more`` has one. Returns its path.

    Args:
        path: of the file.
        title: of the page.
        lead: a summary of the page, below the title.
        parts: the sections below that, in reading order.
        version: of sinklab.
        more: what pages of runs have besides, by its name in page.jinja.
    """
    nothing = ("sentences", "story", "verdicts", "status", "contrast", "explored", "script")
    content = dict.fromkeys(nothing, "") | {"allowed": "'none'", "written": 0} | more
    page = _templates().get_template("page.jinja")
    text = page.render(content, title=title, lead=lead, parts=parts, version=version).lstrip()
    write_text(path, text)
    return path


def summary(runs: Runs, *, rule: Rule | str | None = None) -> list[str]:
    """The findings of the page below its answers, a sentence each. Raises ValueError like
    ``report``.
    """
    return say.in_short(as_shown(runs, rule=rule))


def answers(runs: Runs, *, rule: Rule | None = None) -> tuple[list[Answers], str]:
    """The answers to the three questions about the model of each run, and how the models differ; ""
    for one model.

    Raises ValueError like ``report``, and for runs that are no studies.
    """
    studies = as_shown(runs, "study", rule=rule)
    return [study.answers for study in studies], contrast_of(studies)


def _content(runs: list[Any], budget: int) -> dict[str, Any]:
    """The content of page.jinja except the parts beside it; ``budget``: characters of the arrays of
    each study.
    """
    words = words_of("page", runs[0].kind)
    names = " and ".join(run.label for run in runs) if len(runs) < 3 else f"{len(runs)} runs"
    about = ["status", "edited"]
    if isinstance(runs[0], Study):
        about += ["reading", "chosen"]
        content = _explored(runs, budget)
    else:
        content = {"parts": parts_of(runs)}
    return content | {
        "title": words["title"].replace("{names}", names),
        "lead": words["lead"].replace("{names}", names),
        "sentences": say.in_short(runs),
        "status": [line for run in runs for name in about for line in say.told(name, run)],
        "version": runs[0].run.info.versions.get("sinklab", ""),
    }


def _explored(studies: list[Study], budget: int) -> dict[str, Any]:
    """The content of a page that studies alone have, and their parts."""
    parts, data = parts_of(studies, is_small=budget < SMALL), payload(studies, budget)
    explored = {run["label"]: run["shown"] for run in data["runs"] if run["samples"]}
    shown = list(explored.values())
    if len(studies) > 1:
        shown = [f"{label}: {words}" for label, words in explored.items()]
    return {
        "parts": parts,
        "story": _story(studies, list(explored), parts),
        "contrast": contrast_of(studies),
        "verdicts": judged(studies),
        "explored": " ".join(shown),
        "allowed": f"'sha256-{script_hash()}'",
        "script": f"{data_block(data)}\n<script>{script()}</script>",
    }


def _story(studies: list[Study], shown: list[str], parts: list[Part]) -> list[dict[str, Any]]:
    """The opening of the page, with pictures: those of cards below are drawn once."""
    cards = [card for part in parts for card in part["cards"]]
    drawn = {one.figure: one for card in cards for one in card.pictures}
    story = say.story_of(studies, shown)
    for one in story:
        found = drawn.get(one["figure"])
        one["picture"] = None
        if found is not None:
            one["picture"] = replace(found, place=one["anchor"], words=one["title"])
        elif one["runs"]:
            for new in picture(one["figure"], one["runs"], one["title"], one["anchor"]):
                one["picture"] = new
    return story


@lru_cache(maxsize=1)
def _templates() -> Environment:
    """The pages of this folder, with their filters and style."""
    pages = Environment(
        loader=FunctionLoader(asset),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    pages.filters |= {"coded": coded, "tipped": tipped}
    pages.globals |= {"most": MOST, "style": asset("style.css"), "explorer": asset("explorer.html")}
    return pages


def _shown(value: Any) -> str:
    if isinstance(value, list):
        if any(isinstance(item, str) for item in value):
            return " · ".join(value)
        return ", ".join(map(_shown, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items())
    if isinstance(value, int) and value >= 10_000:
        return f"{value:,}"
    return str(value)
