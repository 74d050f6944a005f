"""What stands below the top of a page: the cards of cards.toml, tokens, rules, texts, and what was run."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import pandas as pd

from sinklab.analysis.verdicts import Verdict
from sinklab.registry import figures
from sinklab.reports import sentences as say
from sinklab.reports.comparison import compare
from sinklab.reports.page import Card, Part, Picture, Share, Table, picture
from sinklab.reports.samples import ADDED, MASK
from sinklab.reports.study import Study
from sinklab.reports.style import asset, printable
from sinklab.reports.tables import rules_table
from sinklab.reports.training import Training
from sinklab.reports.words import number, percent

SHOWN_TOKENS = 15


@lru_cache(maxsize=1)
def _words() -> dict[str, dict[str, Any]]:
    return tomllib.loads(asset("cards.toml"))


def words_of(what: str, name: str) -> Any:
    """What cards.toml says of the "page" of a kind, of its "cards", or of one of the "parts" of a page."""
    return _words()[what][name]


def _part(anchor: str, cards: list[Card], sentences: Sequence[str] = ()) -> Part:
    return Part(anchor, cards=cards, sentences=sentences, **words_of("parts", anchor))


def measured(kind: str, runs: list[Any]) -> list[Part]:
    """The cards of cards.toml, of the runs that have what they show."""
    # One part, so that the style packs short and tall cards below each other.
    cards = [card for row in words_of("cards", kind) if (card := _card(kind, row, runs))]
    return [_part("measured", cards)] if cards else []


def _card(kind: str, row: dict[str, Any], runs: list[Any]) -> Card | None:
    """One card; None without a run that has anything to show, and without a picture where it has some."""
    anchor = row["anchor"]
    if kind == "study":
        runs = [run for run in runs if (run.layers if anchor != "heldout" else run.heldout is not None)]
    pictures = pictures_of(row.get("figures", {}), runs) if runs else []
    tables = DETAILS[anchor](runs) if kind == "study" and anchor in DETAILS and runs else facts_over(row, runs)
    if not runs or ("figures" in row and not pictures) or ("figures" not in row and "over" in row and not tables):
        return None
    return Card(
        row["title"],
        anchor,
        row["how"].replace("{rule}", getattr(runs[0], "rule_words", "")),
        sentences=_sentences(row, runs),
        tables=tables,
        pictures=pictures,
        chart="figures" not in row,
    )


def _sentences(row: dict[str, Any], runs: list[Any]) -> list[str]:
    """What a card tells of each run, and of all of them together."""
    together: dict[str, Callable[[list[Any]], list[str]]] = {
        "share_with_and_without": partial(say.told, "share_with_and_without"),
        "losses": lambda runs: [] if say.are_many(runs) else say.about_losses(runs),
    }
    found = say.told_of(runs, *row.get("told", ()))
    return found + [text for name in row.get("together", ()) for text in together[name](runs)]


def pictures_of(names: dict[str, str], runs: Any) -> list[Picture]:
    """Those of the figures that the runs recorded enough for."""
    drawn = [picture(partial(figures[name], runs), words) for name, words in names.items()]
    return [one for one in drawn if one]


def facts_over(row: dict[str, Any], runs: list[Any]) -> list[Table]:
    """A table of facts of all runs beside each other; columns that a run has nothing for are left out."""
    axis, shown = row.get("over", ""), percent if row.get("shown") == "percent" else number
    kept = [
        (f"{run.label}: {words}", run.over(axis).set_index(axis)[name])
        for run in runs
        for name, words in row.get("columns", {}).items()
        if name in (table := run.over(axis)) and table[name].notna().any() and (run.sink_count or "added" not in name)
    ]
    rows = [
        [place, *(shown(float(values[place])) if place in values.index else "" for _, values in kept)]
        for place in sorted({place for _, values in kept for place in values.index})
    ]
    return [Table([axis, *(title for title, _ in kept)], rows, "numbers")] if kept else []


def curve_numbers(studies: list[Study]) -> list[Table]:
    """Share of tokens that are no sinks, by threshold."""
    curves = [study.curve for study in studies if study.curve is not None]
    rows = [
        [f"{epsilon:g}", *(percent(float(curve.filtered[row])) for curve in curves)]
        for row, epsilon in enumerate(curves[0].epsilon)
    ]
    return [Table(["ε", *(study.label for study in studies)], rows, "numbers")]


def heldout_numbers(studies: list[Study]) -> list[Table]:
    """Every row of the table heldout."""
    columns = ("loss", "stderr", "delta", "delta_stderr")
    rows = [
        (study.label, int(row["k"]), row["control"], *(number(row[key]) for key in columns))
        for study in studies
        if study.heldout is not None
        for row in study.heldout.to_dict("records")
    ]
    return [Table(["run", "hidden", "which", "loss", "s.e.", "change", "s.e."], rows, "numbers")]


DETAILS = {"curve": curve_numbers, "heldout": heldout_numbers}
"""card of studies -> its numbers, where these are not facts over an axis"""


def judged(studies: list[Study]) -> list[tuple[str, bool | None, str]]:
    """The verdicts: which statement was held against which run and its answer, whether it holds, the sentence."""
    return [
        (_answer(study, verdict, alone=len(studies) == 1), verdict.holds, verdict.sentence)
        for study in studies
        if study.layers
        for verdict in study.verdicts
    ]


def _answer(study: Study, verdict: Verdict, *, alone: bool) -> str:
    """Masking says how much was hidden."""
    seen = ("seen", "not seen") if verdict.signature else ("holds", "does not hold")
    answer = "cannot tell" if verdict.holds is None else seen[0] if verdict.holds else seen[1]
    kind = "failure signature" if verdict.signature else "statement"
    hidden = math.nan
    if verdict.name == "masking is costly" and study.heldout is not None:
        frame = study.heldout
        hidden = float(frame[frame["control"] == "sinks"]["k"].min())
    how = f" (K = {hidden:.0f} per layer and head, held-out text)" if hidden > 0 else ""
    return f"{'' if alone else f'{study.label}: '}{kind} “{verdict.name}”{how}: {answer}"


def parts_of(runs: list[Any]) -> list[Part]:
    """Everything below the findings, in reading order; what was run closes the page."""
    middle = _of_trainings(runs) if isinstance(runs[0], Training) else _of_studies(runs)
    return [*middle, _part("runs", [Card(run.label, shows="run", run=run.run) for run in runs])]


def _of_studies(studies: list[Study]) -> list[Part]:
    recorded = [study for study in studies if study.layers]
    found = measured("study", studies)
    if len(recorded) == 2:
        found.append(_compared(*recorded))
    if told := [study for study in recorded if study.sink_tokens is not None]:
        cards = [Card(study.label, tables=_token_tables(study)) for study in told]
        found.append(_part("tokens", cards, say.told_of(told, "tokens", "explained")))
    if recorded:
        found.append(_part("rules", [Card(study.label, tables=[_rules(study)]) for study in recorded]))
    return [*found, _part("text", [Card(study.label, shows="texts", samples=_texts(study)) for study in studies])]


def _token_tables(study: Study) -> list[Table]:
    tables = []
    for title, found in (("token", study.sink_tokens), ("class", study.classes), ("age", study.ages)):
        if found is None:
            continue
        columns = (found.label, found.events, found.frequency, found.occupancy, found.enrichment)
        rows = [
            (
                printable(label, 40) if title == "token" and label not in (MASK, ADDED) else label,
                f"{events:,.0f}",
                Share(percent(often), often),
                Share(percent(there), there),
                f"{number(ratio)}×",
            )
            for label, events, often, there, ratio in list(zip(*columns, strict=True))[:SHOWN_TOKENS]
        ]
        tables.append(Table([title, "events", "frequency", "occupancy", "enrichment"], rows))
    return tables


def _compared(a: Study, b: Study) -> Part:
    """Measures of two runs next to each other."""
    frame = compare(a, b)
    rows = [(row[0], *map(_counted, row[1:])) for row in frame.itertuples(index=False, name=None)]
    return _part("compared", [Card("", tables=[Table(list(frame.columns), rows)], is_narrow=True)])


def _counted(value: float) -> str:
    if math.isnan(value):
        return ""
    return f"{value:,.0f}" if value == int(value) else number(value)


def _rules(study: Study) -> Table:
    head = ["rule", "sinks per head", "tokens that are none", "attention on them", "agreement"]
    rows = [
        (row.rule, number(row.sinks_per_head), *map(percent, (row.filtered, row.absorbed, row.agreement)))
        for row in rules_table(study).itertuples()
    ]
    return Table(head, rows)


def _texts(study: Study) -> list[list[dict[str, Any]]] | None:
    """What was written for every prompt, under each number of hidden sinks: a list of rows per sample."""
    frame = study.generations
    if frame is None:
        return None
    frame = frame.reindex(columns=frame.columns.union(["masked_sinks", "idle"], sort=False))
    frame = frame.assign(masked_sinks=frame["masked_sinks"].fillna(0))
    texts = ["prompt", "completion", "idle"]
    frame = frame.astype({name: object for name in texts}).fillna(dict.fromkeys(texts, ""))
    return [rows.to_dict("records") for _, rows in frame.groupby("sample", sort=True)]


def _of_trainings(trainings: list[Training]) -> list[Part]:
    found = [_part("outcome", [Card("", tables=[_outcome(trainings)])])]
    found += measured("training", trainings)
    words = words_of("each", "run")
    cards = []
    for place, run in enumerate(trainings):
        names = {name: f"{text}, {run.label}" for name, text in words["figures"].items()}
        if pictures := pictures_of(names, run):
            cards.append(Card(run.label, f"run-{place + 1}", words["how"], pictures=pictures))
    return [*found, _part("each", cards)] if cards else found


def _outcome(trainings: list[Training]) -> Table:
    head = ["run", "variant", "seed", "held-out loss", "95 % interval", "against plain"]
    head += ["share of added sinks", "from step", "mobility", "sinks in the text"]
    rows = []
    for run in trainings:
        loss, other = run.loss, say.compared_with(run, trainings)
        gap = None if other is None else run.against(other)
        last = pd.Series(dtype=float) if run.facts.empty else run.over("step").iloc[-1]
        held = ["–", ""] if loss is None else [number(loss.mean, 4), loss.interval]
        rows.append([
            run.label, run.variant, run.run.info.seed, *held,
            "" if gap is None else say.signed(*gap),
            percent(float(last.get("added_share", math.nan))) if run.sink_count else "",
            ("never" if run.takeover is None else run.takeover) if run.sink_count and len(last) else "",
            *(number(float(last.get(name, math.nan))) for name in ("mobility", "text_sinks")),
        ])  # fmt: skip
    return Table(head, rows)
