"""What stands below the explorer: findings, verdicts, charts with their numbers, tokens, texts, and what was run."""

from __future__ import annotations

import math
from collections.abc import Callable
from html import escape

from sinklab.analysis.verdicts import Verdict
from sinklab.reports import sentences as say
from sinklab.reports.comparison import compare
from sinklab.reports.page import Card, Part, beside, findings, generations, number_table, plain_table, run_facts
from sinklab.reports.sentences import number, percent
from sinklab.reports.study import ADDED, MASK, Study
from sinklab.reports.style import printable
from sinklab.reports.tables import rules_table

SHOWN_TOKENS = 15


def short(studies: list[Study]) -> str:
    """The findings that open the page, and the verdicts."""
    judged = [
        (_answer(study, verdict, alone=len(studies) == 1), verdict.holds, verdict.sentence)
        for study in studies
        if study.layers
        for verdict in study.verdicts
    ]
    return findings(say.in_short(studies), judged)


def _answer(study: Study, verdict: Verdict, *, alone: bool) -> str:
    """Which statement was held against which run, and whether it was found; masking says how much was hidden."""
    seen = ("seen", "not seen") if verdict.signature else ("holds", "does not hold")
    answer = "cannot tell" if verdict.holds is None else seen[0] if verdict.holds else seen[1]
    kind = "failure signature" if verdict.signature else "statement"
    hidden = math.nan
    if verdict.name == "masking is costly" and study.heldout is not None:
        frame = study.heldout
        hidden = float(frame[frame["control"] == "sinks"]["k"].min())
    how = f" (K = {hidden:.0f} per layer and head, held-out text)" if hidden > 0 else ""
    return f"{'' if alone else f'{study.label}: '}{kind} “{verdict.name}”{how}: {answer}"


def parts(studies: list[Study]) -> list[Part]:
    """Everything under the explorer, in reading order; what was run closes the page."""
    recorded = [study for study in studies if study.layers]
    cards = [*_attention_cards(recorded)] if recorded else []
    if any(study.heldout is not None for study in studies):
        cards.append(_heldout([study for study in studies if study.heldout is not None]))
    found = [Part("measured", "What was measured", "", beside([card.html() for card in cards]))] if cards else []
    if len(recorded) == 2:
        found.append(_compared(*recorded))
    if any(study.sink_tokens is not None for study in recorded):
        found.append(_tokens([study for study in recorded if study.sink_tokens is not None]))
    if recorded:
        found.append(_rules(recorded))
    texts = [f'<div class="card"><h3>{escape(study.label)}</h3>{generations(study)}</div>' for study in studies]
    found.append(Part("text", "What was written", "Prompts are in italics.", beside(texts)))
    return [*found, Part("runs", "What was run", "", beside([run_facts(study) for study in studies]))]


def _attention_cards(studies: list[Study]) -> list[Card]:
    """What sinks take and carry, how many they are, and how they move."""
    carried = [study for study in studies if any(math.isfinite(facts.text_norm) for facts in study.facts)]
    return [
        _share(studies),
        *([_norms(carried)] if carried else []),
        _count(studies),
        *_spread(studies),
        _moves(studies),
    ]


def _share(studies: list[Study]) -> Card:
    return Card(
        "share",
        "How much attention sinks take",
        "Mean attention weight over all queries, heads, steps and samples. The greatest text position is looked up "
        "anew for every head and step.",
        say.about_share(studies),
        _over_layers(studies, {"added_share": "added sink", "text_share": "greatest text"}, percent),
    )


def _norms(studies: list[Study]) -> Card:
    norms = {"added_norm": "added sink", "sink_norm": "text sinks", "rest_norm": "other text"}
    return Card(
        "norms",
        "What sinks carry",
        "L2 norm of value vectors, mean over heads. Text sinks are positions above the sink rule, counted once for "
        "each head that has a sink there.",
        [sentence for study in studies for sentence in say.about_norms(study)],
        _over_layers(studies, norms, number),
    )


def _count(studies: list[Study]) -> Card:
    return Card(
        "count",
        "How many sinks a head has",
        "Mean number of keys above 1 + 3 (S−1)/S, per head and step.",
        [text for study in studies for text in (say.about_events(study), say.about_depth(study)) if text],
        _over_layers(studies, {"sinks": "sinks of a head"}, number),
    )


def _spread(studies: list[Study]) -> list[Card]:
    curves = [study.curve for study in studies if study.curve is not None]
    rows = [
        [f"{epsilon:g}", *(percent(float(curve.filtered[row])) for curve in curves)]
        for row, epsilon in enumerate(curves[0].epsilon)
    ]
    return [
        Card(
            "curve",
            "What the threshold lets through",
            "Share of (step, layer, head, token) that are no sinks, over ε.",
            details=number_table(["ε", *(study.label for study in studies)], rows),
        ),
        Card(
            "histogram",
            "How received attention is spread",
            "Share of (step, layer, head, token) by what the token receives; both axes are logarithmic.",
        ),
    ]


def _moves(studies: list[Study]) -> Card:
    about = (say.about_path, say.about_blocks, say.about_split)
    return Card(
        "motion",
        "How sinks move",
        "Chance that two steps have the main sink of a head at different places, weighted by how strong it is: 0 is "
        "static, 1 is elsewhere at every step.",
        [text for study in studies for tell in about if (text := tell(study))],
    )


def _over_layers(studies: list[Study], fields: dict[str, str], shown: Callable[[float], str]) -> str:
    """Facts per layer as a table; runs with other layers leave cells empty."""
    of = [{facts.layer: facts for facts in study.facts} for study in studies]
    head = ["layer", *(f"{study.label}: {words}" for study in studies for words in fields.values())]
    rows = [
        [layer, *(shown(getattr(known[layer], field)) if layer in known else "" for known in of for field in fields)]
        for layer in sorted(set().union(*of))
    ]
    return number_table(head, rows)


def _tokens(studies: list[Study]) -> Part:
    cards = []
    for study in studies:
        tables = []
        for title, found in (("token", study.sink_tokens), ("class", study.classes), ("age", study.ages)):
            if found is None:
                continue
            columns = (found.label, found.events, found.frequency, found.occupancy, found.enrichment)
            rows = [
                (
                    printable(label, 40) if title == "token" and label not in (MASK, ADDED) else label,
                    f"{events:,.0f}",
                    (percent(often), often),
                    (percent(there), there),
                    f"{number(ratio)}×",
                )
                for label, events, often, there, ratio in list(zip(*columns, strict=True))[:SHOWN_TOKENS]
            ]
            tables.append(plain_table([title, "events", "frequency", "occupancy", "enrichment"], rows))
        cards.append(f'<div class="card"><h3>{escape(study.label)}</h3>{"".join(tables)}</div>')
    return Part(
        "tokens",
        "Which tokens are sinks",
        "Frequency counts sink events; occupancy counts how often the token stands anywhere on the canvas. Enrichment "
        "is their ratio: 1× is what chance would give.",
        beside(cards),
        [text for study in studies for text in (say.about_tokens(study), say.about_explained(study)) if text],
    )


def _compared(a: Study, b: Study) -> Part:
    """Measures of two runs next to each other."""
    frame = compare(a, b)
    rows = [(row[0], *(_counted(value) for value in row[1:])) for row in frame.itertuples(index=False, name=None)]
    table = plain_table(list(frame.columns), rows)
    return Part("compared", "Side by side", "", f'<div class="card narrow">{table}</div>')


def _counted(value: float) -> str:
    if math.isnan(value):
        return ""
    return f"{value:,.0f}" if value == int(value) else number(value)


def _rules(studies: list[Study]) -> Part:
    """What other rules call a sink."""
    tables = []
    for study in studies:
        rows = [
            (
                row.rule,
                number(row.sinks_per_head),
                *(percent(getattr(row, key)) for key in ("filtered", "absorbed", "agreement")),
            )
            for row in rules_table(study).itertuples()
        ]
        head = ["rule", "sinks per head", "tokens that are none", "attention on them", "agreement"]
        tables.append(f'<div class="card"><h3>{escape(study.label)}</h3>{plain_table(head, rows)}</div>')
    how = "Sinks under the rules of several papers. Agreement is the Jaccard overlap with the first rule."
    return Part("rules", "What other rules call a sink", how, beside(tables))


def _heldout(studies: list[Study]) -> Card:
    rows = [
        (
            study.label,
            int(row["k"]),
            row["control"],
            *(number(row[key]) for key in ("loss", "stderr", "delta", "delta_stderr")),
        )
        for study in studies
        if study.heldout is not None
        for row in study.heldout.to_dict("records")
    ]
    return Card(
        "heldout",
        "What hiding sinks costs",
        "Change of the loss on held-out text when the K columns that receive most are hidden from every query of a "
        "head, and when as many random others are. Same text and noise throughout; bars are one standard error.",
        [sentence for study in studies for sentence in say.about_heldout(study)],
        number_table(["run", "hidden", "which", "loss", "s.e.", "change", "s.e."], rows),
    )
