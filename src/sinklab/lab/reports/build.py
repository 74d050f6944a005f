"""From run folders to report.html: what stands on the page, as data, for page.jinja."""

import io
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup, escape

from sinklab.core.sinks import DEFAULT, Rule
from sinklab.lab.analysis import Answers
from sinklab.lab.analysis.answers import QUESTIONS
from sinklab.lab.analysis.sentences import contrast
from sinklab.lab.records.info import SO_FAR
from sinklab.lab.records.reading import Run
from sinklab.lab.records.storage import remove_half_written, write_text
from sinklab.lab.registry import figures as registered
from sinklab.lab.reports.drawing import canvas_of, save
from sinklab.lab.reports.figures import typical_head
from sinklab.lab.reports.payload import data_block, payload, script, script_hash
from sinklab.lab.reports.runs import Runs, as_shown, left_out
from sinklab.lab.reports.samples import NotRecorded
from sinklab.lab.reports.study import Reader, Study
from sinklab.lab.reports.style import THEMES, asset
from sinklab.lab.reports.tables import (
    compare,
    over_seeds,
    prompts_of,
    tables_of,
    write_tables,
)
from sinklab.lab.reports.training import Training
from sinklab.lab.reports.words import number, quoted

WORDS = tomllib.loads(asset("page.toml"))
SHOWN_TOKENS = 15
# The rest of a page is its script, figures and tables.
ARRAYS = 0.89
MOST = 12
"""samples whose texts are shown; more stand behind a line"""
PICTURES = {"exist": "sink_share", "stay": "sink_paths", "cost": "heldout_loss"}
"""question -> the figure of its card"""
OUTCOME = {
    "variant": "variant",
    "seed": "seed",
    "heldout_loss": "held-out loss",
    "low": "low",
    "high": "high",
    "takeover_step": "added sinks take over",
    "emergence_step": "half of the heads have a sink",
    "sink_share": "share of added sinks",
    "mobility": "mobility",
    "text_sinks": "sinks in the text",
}
"""columns of the outcome of training runs -> as the page has them"""
RULES = {
    "sinks_per_head": "sinks per head",
    "filtered": "tokens that are none, %",
    "absorbed": "attention on them, %",
    "agreement": "agreement, %",
}
"""columns of the table of rules -> as the page has them"""

DIGITS = re.compile(r"(\.\d\d)\d+")
"""decimals of a length: hundredths of a point are enough"""
UNUSED = re.compile(
    r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->"
    r'| xmlns[:\w]*="[^"]*"|font-family: [^;]*; |\n *',
    re.DOTALL,
)
"""parts that a page does not need: a style sheet would apply to all of it, and letters are those of
the page
"""

Tables = Mapping[str, Mapping[str, pd.DataFrame]]
"""`tables_of` the runs"""
Part = dict[str, Any]
"""A part of the page below the explorer: anchor, cards, title, how."""


@dataclass(frozen=True)
class Card:
    """One finding: its picture and its numbers."""

    title: str
    anchor: str = ""
    how: str = ""
    tables: Sequence[tuple[str, pd.DataFrame]] = ()
    """a line that each is folded behind, if any, and its cells as they are written; the index
    stands in front, and without a name of it there is no heading
    """
    picture: Markup | str = ""
    texts: Sequence[Any] | None = None
    """the texts written, a list of rows per sample; empty if none was kept"""


def report(
    runs: Runs,
    out: str | Path = "runs/report",
    *,
    rule: Rule | str | None = None,
    tables: bool = True,
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
        tables: whether tables are written too, as CSV in the folder of this name.
        megabytes: how large the part of each study on the page may be. A larger page holds more
            samples, and more keys of every head; it states its extent.

    Raises:
        ValueError: when there is no run, for runs of another kind, and for studies and training
            runs together.
    """
    if not megabytes > 0:
        raise ValueError(
            f"megabytes says how large the part of each run may be, above 0: got {megabytes}."
        )
    if not isinstance(runs, Run | Reader):
        runs = [*runs]
    readers = as_shown(runs, rule=rule)
    # The runs are read first: damaged ones leave no folder behind.
    found = tables_of(readers)
    content = _content(readers, found, int(ARRAYS * megabytes * 1e6))
    content["status"] += [
        f"{run.path} is left out: no run here is of its model (name and weights), an earlier "
        "one says the same, or it does not say what blocking the most attended keys of the whole "
        "model costs."
        for run in left_out(runs, readers)
    ]
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    for place in (folder, folder / "tables"):
        remove_half_written(place)
    written = write_tables(found, folder / "tables") if tables else []
    page = _templates().get_template("page.jinja").render(content, written=len(written))
    write_text(folder / "report.html", page.lstrip())
    return folder / "report.html"


def answers(runs: Runs, *, rule: Rule | None = None) -> tuple[list[Answers], str]:
    """The answers to the three questions about the model of each run, and how the models differ; ""
    for one model.

    Raises ValueError like ``report``, and for runs that are no studies.
    """
    studies = as_shown(runs, "study", rule=rule)
    return [study.answers for study in studies], contrast_of(studies)


def contrast_of(studies: Iterable[Study]) -> str:
    """How the models of a page differ, in one sentence; empty for one."""
    moved = [(study, study.measured.motion) for study in studies if study.layers]
    return contrast(
        [(study.answers, motion.mobility_S, prompts_of(study)) for study, motion in moved if motion]
    )


def _content(runs: list[Any], tables: Tables, budget: int) -> dict[str, Any]:
    """Everything that page.jinja shows; ``budget``: characters of the arrays of each study."""
    kind = runs[0].run.info.kind
    names = " and ".join(run.label for run in runs) if len(runs) < 3 else f"{len(runs)} runs"
    content: dict[str, Any] = dict.fromkeys(("story", "contrast", "explored", "script"), "")
    content |= {name: text.replace("{names}", names) for name, text in WORDS[kind].items()}
    content |= {"status": [*map(_status, runs)], "allowed": "'none'"}
    content["version"] = runs[0].run.info.versions.get("sinklab", "")
    is_study = isinstance(runs[0], Study)
    made = _part("runs", [_what_was_run(run) for run in runs])
    if is_study:
        parts = _parts_of_studies(runs, tables)
        parts.insert(-1, _part("statistics", _statistics(runs)))
    else:
        parts = [_part("outcome", [_outcome(runs, tables["outcome"])])]
    titles = WORDS["figures"][kind]
    shown = [*titles, *(PICTURES.values() if is_study else ())]
    drawn = {name: svg_of(name, runs) for name in shown}
    figures = [
        Card(title, name, registered[name].words, picture=placed(drawn[name], name, title))
        for name, title in titles.items()
        if drawn[name]
    ]
    parts.insert(0 if is_study else 1, _part("measured", figures))
    if is_study:
        content |= _explored(runs, budget, drawn)
    return content | {"parts": [part for part in [*parts, made] if part["cards"]]}


def _status(run: Any) -> str:
    """Facts to know of a run before anything else: whether it ended, and its edits."""
    info, said = run.run.info, []
    if info.status != "complete":
        ended = "was interrupted"
        if info.status != "interrupted":
            ended = "did not finish, or is still running"
        why = f": {info.error}" if info.error else ""
        said.append(
            f"The run of {run.label} {ended}{why}. What it had written until then is shown."
        )
    if info.settings.get("edits"):
        edits = " and ".join(info.settings["edits"])
        said.append(
            f"{run.label} was written under {edits}: its numbers are those of the edited model."
        )
    return " ".join(said)


def _notes(studies: list[Study]) -> list[str]:
    """How studies have to be read, where that is not plain."""
    said = []
    for study in studies:
        if study.layers and study.rule != DEFAULT:
            said.append(f"The sink rule of {study.label} is {study.rule_words}.")
        if study.layers and study.reading == SO_FAR:
            said.append(
                f"Attention in {study.label} is the mean weight that all queries so far give a "
                "key; keys that fewer than max(8, S/3) of the S queries see are left out."
            )
    return said


def _explored(studies: list[Study], budget: int, drawn: dict[str, str]) -> dict[str, Any]:
    """Content that a page of studies alone has: three cards, the comparison, the explorer."""
    story = [_answered(question, studies, drawn) for question in QUESTIONS]
    notes, data = _notes(studies), payload(studies, budget)
    shown = [
        f"{run['label']}: {run['shown']}" if len(studies) > 1 else run["shown"]
        for run in data["runs"]
        if run["samples"]
    ]
    return {
        "story": story,
        "contrast": contrast_of(studies),
        "explored": " ".join([*shown, *notes]) if shown else "",
        "allowed": f"'sha256-{script_hash()}'",
        "script": f"{data_block(data)}\n<script>{script()}</script>",
    }


def _answered(question: str, studies: list[Study], drawn: dict[str, str]) -> dict[str, Any]:
    """One of the three cards that open the page: the answer of each run, word for word that of
    `Study.answers`, and a picture if one can be drawn.

    Args:
        question: one of `QUESTIONS`.
        studies: the runs.
        drawn: figures as SVG, by name.
    """
    name, title = PICTURES[question], QUESTIONS[question]
    # those in the explorer
    explored = [run for run in studies if run.layers and run.sample(run.recorded[0]).has_attention][
        :2
    ]
    link = name
    if question != "cost" and explored:
        # the heads that the picture shows, or those of the strongest sinks
        views = []
        for place, run in enumerate(explored):
            head = typical_head(run) if question == "stay" else run.measured.strongest
            views.append((place, *head))
        fields = zip(("run", "layer", "head"), zip(*views, strict=True), strict=True)
        link = "&".join(f"{field}={','.join(map(str, at))}" for field, at in fields)
    said = [
        (run.label if len(studies) > 1 else "", run.answers[question].sentence) for run in studies
    ]
    picture = placed(drawn[name], f"story-{question}", title)
    return {"title": title, "sentences": said, "picture": picture, "link": f"#{link}"}


def _part(anchor: str, cards: Iterable[Card]) -> Part:
    """The part of the page with this name in page.toml, which has its title."""
    return {"anchor": anchor, "how": "", "cards": [*cards]} | WORDS["parts"][anchor]


def _parts_of_studies(studies: list[Study], tables: Tables) -> list[Part]:
    recorded = [study for study in studies if study.layers]
    numbers, tokens, rules = [], [], []
    if len(recorded) == 2:
        frame = _spans(compare(*recorded), "95 % interval of the difference")
        numbers.append(Card("Side by side", tables=[("", frame)]))
    for study in recorded:
        frame = tables["measures"][study.label]
        numbers.append(Card(study.label, tables=[("", _spans(frame))]))
        named = tables["rules"][study.label].set_index("rule")[[*RULES]].rename(columns=RULES)
        rules.append(Card(study.label, tables=[("", _cells(_percents(named)))]))
        if study.measured.enriched:
            tokens.append(Card(study.label, tables=_token_tables(study)))
    return [
        _part("numbers", numbers),
        _part("tokens", tokens),
        _part("rules", rules),
        _part("text", [Card(run.label, texts=_texts(run)) for run in studies]),
    ]


def _statistics(studies: list[Study]) -> list[Card]:
    """A card for every recorded statistic that no figure of its own shows, those of plug-ins among
    them.
    """
    cards: list[Card] = []
    for study in studies:
        for name in study.measured.statistics["statistic"].unique():
            title = f"{study.label}: {name}" if len(studies) > 1 else name
            place, svg = f"statistic-{len(cards) + 1}", svg_of("statistics", study, only=name)
            drawn = placed(svg, place, f"{title} by layer and step")
            cards.append(Card(title, place, picture=drawn))
    return cards


def _spans(frame: pd.DataFrame, title: str = "95 % interval") -> pd.DataFrame:
    """A table of measures as it is written: low and high as one column, no empty column."""
    shown = _cells(frame.set_index("measure"))
    low, high = shown.pop("low"), shown.pop("high")
    after = shown.columns.get_indexer(["value", "difference"]).max()
    shown.insert(int(after) + 1, title, (low + " … " + high).where(low != "", ""))
    return shown.loc[:, (shown != "").any()]


def _percents(frame: pd.DataFrame) -> pd.DataFrame:
    """Shares in percent, in the columns that are named so."""
    return frame.mul([100 if name.endswith("%") else 1 for name in frame])


def _cells(frame: pd.DataFrame) -> pd.DataFrame:
    """A table as it is written."""
    return frame.astype(object).map(_cell)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        plain = not any(isinstance(item, str) for item in value)
        return (", " if plain else " · ").join(map(_cell, value))
    if isinstance(value, dict):
        return ", ".join(f"{key} {_cell(item)}" for key, item in value.items())
    if isinstance(value, str | bool):
        return str(value)
    if value is None or pd.isna(value):
        return ""
    if value == int(value):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.0f}"
    return number(value, 4)


def _token_tables(study: Study) -> list[tuple[str, pd.DataFrame]]:
    tables = []
    for name, every in study.measured.enriched.items():
        frame = every.head(SHOWN_TOKENS)
        labels = frame["label"].rename(name)
        if name == "token":
            labels = labels.map(quoted)
        kept = frame[["events", "frequency", "occupancy", "enrichment"]].set_axis(labels)
        kept = kept.rename(columns={name: f"{name}, %" for name in ("frequency", "occupancy")})
        tables.append(("", _cells(_percents(kept))))
    return tables


def _texts(study: Study) -> list[list[dict[str, Any]]]:
    """Texts written for every prompt, under each number of blocked sinks: a list of rows per
    sample.
    """
    frame = study.table("generations")
    if frame is None:
        return []
    frame = frame.reindex(columns=["sample", "prompt", "completion", "idle"])
    frame = frame.astype(object).where(frame.notna(), "")
    return [rows.to_dict("records") for _, rows in frame.groupby("sample", sort=True)]


def _outcome(trainings: list[Training], outcome: Mapping[str, pd.DataFrame]) -> Card:
    rows = pd.concat(outcome, names=["run"]).droplevel(1)
    rows = rows.reindex(columns=[*OUTCOME]).rename(columns=OUTCOME)
    tables = [("", _cells(rows))]
    against = over_seeds(trainings)
    if len(against):
        tables.append(("", _cells(against.set_index("variant"))))
    return Card("", tables=tables)


def _what_was_run(run: Any) -> Card:
    """The facts of a run: its model, its settings, and when and where it was made."""
    info = run.run.info
    about = {"folder": run.run.path.name, "created": info.created, "status": info.status}
    about |= {"seed": info.seed, "versions": info.versions}
    tables = []
    for summary, facts in (("", info.model), ("settings", info.settings), ("run", about)):
        known = {name: _cell(value) for name, value in facts.items() if value is not None}
        tables.append((summary, pd.Series(known).to_frame()))
    return Card(run.label, tables=tables)


def tipped(text: str) -> Markup:
    """A sentence as HTML code: text between backticks as code, and each word of the glossary with
    its meaning at its first place outside code.
    """
    glossary, seen = WORDS["glossary"], set[str]()

    def tip(match: re.Match[str]) -> str:
        word = match[1].lower()
        if word in seen:
            return match[0]
        seen.add(word)
        return f'<abbr tabindex="0" title="{escape(glossary[word])}">{match[0]}</abbr>'

    coded = re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(text)))
    known = re.compile(rf"(?<![\w-])({'|'.join(glossary)})s?\b(?!-)", re.IGNORECASE)
    pieces = re.split("(<code>.*?</code>)", coded)
    return Markup(
        "".join(one if one.startswith("<code>") else known.sub(tip, one) for one in pieces)
    )


@lru_cache(maxsize=1)
def _templates() -> Environment:
    """The page of this folder, with its filter and style."""
    pages = Environment(
        loader=FunctionLoader(asset),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    pages.filters["tipped"] = tipped
    pages.globals |= {"most": MOST, "style": asset("style.css"), "explorer": asset("explorer.html")}
    return pages


def svg_of(name: str, runs: Any, **options: Any) -> str:
    """A figure of the runs as an ``<svg>`` element; empty if they did not record enough for it."""
    written = io.BytesIO()
    with suppress(NotRecorded):
        save(canvas_of(registered[name](runs, **options)), "svg", written)
    text = written.getvalue().decode("utf-8")
    text = UNUSED.sub("", text[max(text.find("<svg"), 0) :])
    # groups are numbered in every figure alike, and nothing refers to them
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    return re.sub("<[^>]*>", _for_page, text)


def placed(svg: str, place: str, words: str) -> Markup:
    """A figure at one place of a page, whose name begins its ids; ``words`` describe it to readers
    who do not see it.
    """
    own = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{place}-", svg)
    head = f'<svg class="figure" role="img" aria-label="{escape(words)}"'
    return Markup(own.replace("<svg", head, 1))


def _for_page(tag: re.Match[str]) -> str:
    """A tag with short numbers and with the colours of both themes."""
    text = DIGITS.sub(r"\1", tag[0])
    for light, dark in COLOURS:
        text = text.replace(light, f"light-dark({light}, {dark})")
    return text


def _pairs() -> list[tuple[str, str]]:
    light, dark = THEMES["light"], THEMES["dark"]
    pairs = dict(zip(light.states.values(), dark.states.values(), strict=True))
    pairs |= dict(zip(light.lines, dark.lines, strict=True))
    pairs |= {light.surface: dark.surface, light.ink: dark.ink, light.muted: dark.muted}
    pairs |= {light.line: dark.line, light.added: dark.added}
    return [(one.lower(), other) for one, other in pairs.items()]


COLOURS = _pairs()
"""colours of the light theme, each with its counterpart in the dark one"""
