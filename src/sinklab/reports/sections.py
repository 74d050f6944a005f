"""What stands below the top of a page: cards declared as rows, tokens, rules, texts, and what was run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pandas as pd

from sinklab.analysis.verdicts import Verdict
from sinklab.registry import figures
from sinklab.reports import sentences as say
from sinklab.reports.comparison import compare
from sinklab.reports.page import Card, Part, Picture, Share, Table, picture
from sinklab.reports.printed import number, percent
from sinklab.reports.samples import ADDED, MASK
from sinklab.reports.study import Study
from sinklab.reports.style import printable
from sinklab.reports.tables import rules_table
from sinklab.reports.training import HeldoutLoss, Training

SHOWN_TOKENS = 15


@dataclass(frozen=True)
class Finding:
    """A card of a page: what it shows of which runs."""

    anchor: str
    title: str
    how: str
    """what is measured; {rule} is the sink rule in words"""
    tell: Callable[[list[Any]], list[str]] = lambda runs: []
    details: Callable[[list[Any]], list[Table]] = lambda runs: []
    figures: dict[str, str] = field(default_factory=dict)
    """figures that are its pictures -> what they show; without any, the script draws a chart"""
    has: Callable[[Any], bool] = lambda run: True
    """whether a run has anything to show"""

    def card(self, runs: list[Any]) -> Card | None:
        """The card of those runs that have something; None without any, and without a picture where it has some."""
        runs = [run for run in runs if self.has(run)]
        pictures = pictures_of(self.figures, runs) if runs else []
        if not runs or (self.figures and not pictures):
            return None
        how = self.how.replace("{rule}", getattr(runs[0], "rule_words", ""))
        parts = {"sentences": self.tell(runs), "tables": self.details(runs), "pictures": pictures}
        return Card(self.title, self.anchor, how, chart=not self.figures, **parts)


def pictures_of(names: dict[str, str], runs: Any) -> list[Picture]:
    """Those of the figures that the runs recorded enough for."""
    drawn = [picture(partial(figures[name], runs), words) for name, words in names.items()]
    return [one for one in drawn if one]


def facts_over(axis: str, columns: dict[str, str], shown: Callable[[float], str]) -> Callable[[list[Any]], list[Table]]:
    """A table of facts of all runs beside each other; columns that a run has nothing for are left out."""

    def made(runs: list[Any]) -> list[Table]:
        tables = {run.label: (run, run.over(axis)) for run in runs}
        kept = [
            (f"{label}: {words}", table.set_index(axis)[name])
            for label, (run, table) in tables.items()
            for name, words in columns.items()
            if name in table and table[name].notna().any() and (run.sink_count or "added" not in name)
        ]
        rows = [
            [place, *(shown(float(values[place])) if place in values.index else "" for _, values in kept)]
            for place in sorted({place for _, values in kept for place in values.index})
        ]
        return [Table([axis, *(title for title, _ in kept)], rows, "numbers")] if kept else []

    return made


def each(*tell: Callable[[Study], Any]) -> Callable[[list[Study]], list[str]]:
    """What there is to tell of every run."""

    def told(runs: list[Study]) -> list[str]:
        found = [one(run) for run in runs for one in tell]
        return [text for said in found for text in ([said] if isinstance(said, str) else said) if text]

    return told


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


MEASURED = (
    Finding(
        "share",
        "How much attention sinks take",
        "Mean attention weight over all queries, heads, steps and samples. The greatest text position is looked up "
        "anew for every head and step.",
        say.about_share,
        facts_over("layer", {"added_share": "added sink", "text_share": "greatest text"}, percent),
        has=lambda run: run.layers,
    ),
    Finding(
        "norms",
        "What sinks carry",
        "L2 norm of value vectors, mean over heads. Text sinks are positions above the sink rule, counted once for "
        "each head that has a sink there.",
        each(say.about_norms),
        facts_over("layer", {"added_norm": "added sink", "sink_norm": "text sinks", "rest_norm": "other text"}, number),
        has=lambda run: run.layers and run.over("layer")["text_norm"].notna().any(),
    ),
    Finding(
        "count",
        "How many sinks a head has",
        "Mean number of sinks ({rule}), per head and step.",
        each(say.about_events, say.about_depth),
        facts_over("layer", {"sinks": "sinks of a head"}, number),
        has=lambda run: run.layers,
    ),
    Finding(
        "curve",
        "What the threshold lets through",
        "Share of (step, layer, head, token) that are no sinks, over ε.",
        details=curve_numbers,
        has=lambda run: run.layers,
    ),
    Finding(
        "histogram",
        "How received attention is spread",
        "Share of (step, layer, head, token) by what the token receives; both axes are logarithmic.",
        has=lambda run: run.layers,
    ),
    Finding(
        "motion",
        "How sinks move",
        "Chance that two steps have the main sink of a head at different places, weighted by how strong it is: 0 is "
        "static, 1 is elsewhere at every step.",
        each(say.about_path, say.about_blocks, say.about_split),
        has=lambda run: run.layers,
    ),
    Finding(
        "heldout",
        "What hiding sinks costs",
        "Change of the loss on held-out text when the K columns that receive most are hidden from every query of a "
        "head, and when as many random others are. Same text and noise throughout; bars are one standard error.",
        each(say.about_heldout),
        heldout_numbers,
        has=lambda run: run.heldout is not None,
    ),
)
"""cards of studies"""


def of_groups(tell: Callable[[list[Training]], str]) -> Callable[[list[Training]], list[str]]:
    """What there is to tell of every group of repeats."""
    return lambda runs: say.of_each(runs, tell)


TRAINED = (
    Finding(
        "loss",
        "Loss over training",
        "Lines with markers: loss on held-out text, in nats per token. Faint lines: loss of the training batches.",
        lambda runs: [] if say.are_many(runs) else say.about_losses(runs),
        figures={"training_loss": "Training and held-out loss over steps"},
    ),
    Finding(
        "optimization",
        "How the runs went",
        "Learning rate, norm of the gradient before clipping, and speed, as logged.",
        figures={"optimization": "Learning rate, gradient norm and speed over steps"},
    ),
    Finding(
        "emergence",
        "How much attention sinks take",
        "Mean over layers, heads, queries, rows of text and mask ratios. The greatest text token is looked up anew for "
        "every head and mask ratio. Up to a dotted line, where there is one, the model is the causal one of the warm "
        "start, and is looked at as that.",
        of_groups(say.about_takeover),
        facts_over("step", {"added_share": "added sinks", "text_share": "greatest text token"}, percent),
        {"sink_emergence": "Share of attention on sinks over steps"},
    ),
    Finding(
        "count",
        "How many sinks a head has",
        "Keys above 1 + 3 (S−1)/S times an even share, per head and mask ratio.",
        of_groups(say.about_emergence),
        figures={"sinks_over_training": "Sinks of a head over steps"},
    ),
    Finding(
        "mobility",
        "Whether sinks move",
        "The text is read with 90, 70, 50, 30 and 10 % of it masked, a token once open staying open. Mobility is the "
        "chance that two of these mask ratios have the main sink of a head at different places, weighted by how strong "
        "it is: 0 static, 1 elsewhere every time.",
        of_groups(say.about_mobility),
        figures={"mobility_over_training": "Mobility of main sinks over steps"},
    ),
    Finding(
        "massive",
        "Massive activations",
        "Greatest absolute number in the residual stream after any layer.",
        details=facts_over("step", {"activation_ratio": "over median", "activation_added": "added sink"}, number),
        figures={"massive_activations": "Greatest activation over steps"},
    ),
    Finding(
        "share",
        "Attention by layer",
        "At the last look, mean over heads, queries, rows and mask ratios.",
        details=facts_over("layer", {"added_share": "added sinks", "text_share": "greatest text token"}, percent),
        figures={"trained_share": "Share of attention on sinks by layer"},
    ),
    Finding(
        "norms",
        "What sinks carry",
        "At the last look: norm of value vectors over that of text that is no sink, mean over heads. Below 1 a sink "
        "carries less than other tokens do.",
        details=facts_over(
            "layer", {"added_norm": "added sinks", "sink_norm": "text sinks", "rest_norm": "other text"}, number
        ),
        figures={"trained_norms": "Norm of the values of sinks by layer"},
    ),
)
"""cards of training runs"""


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
    return [*middle, Part("runs", "What was run", [Card(run.label, shows="run", run=run.run) for run in runs])]


def _measured(rows: Sequence[Finding], runs: list[Any]) -> list[Part]:
    # One part, so that the style packs short and tall cards below each other.
    cards = [card for row in rows if (card := row.card(runs))]
    return [Part("measured", "What was measured", cards)] if cards else []


def _of_studies(studies: list[Study]) -> list[Part]:
    recorded = [study for study in studies if study.layers]
    found = _measured(MEASURED, studies)
    if len(recorded) == 2:
        found.append(_compared(*recorded))
    if told := [study for study in recorded if study.sink_tokens is not None]:
        how = (
            "Frequency counts sink events; occupancy counts how often the token stands anywhere on the canvas. "
            "Enrichment is their ratio: 1× is what chance would give."
        )
        cards = [Card(study.label, tables=_token_tables(study)) for study in told]
        found.append(
            Part("tokens", "Which tokens are sinks", cards, how, each(say.about_tokens, say.about_explained)(told))
        )
    if recorded:
        how = "Sinks under the rules of several papers. Agreement is the Jaccard overlap with the first rule."
        cards = [Card(study.label, tables=[_rules(study)]) for study in recorded]
        found.append(Part("rules", "What other rules call a sink", cards, how))
    texts = [Card(study.label, shows="texts", samples=_texts(study)) for study in studies]
    return [*found, Part("text", "What was written", texts, "Prompts are in italics.")]


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
    return Part("compared", "Side by side", [Card("", tables=[Table(list(frame.columns), rows)], is_narrow=True)])


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
    found = [Part("outcome", "How the runs came out", [Card("", tables=[_outcome(trainings)])])]
    found += _measured(TRAINED, trainings)
    how = (
        "Above: which keys hold the main sinks of all heads. Below: share of attention by step and layer, each map on "
        "a scale of its own."
    )
    cards = []
    for place, run in enumerate(trainings):
        names = {"main_holders": "Holders of main sinks over steps", "emergence_map": "Attention by step and layer"}
        pictures = pictures_of({name: f"{words}, {run.label}" for name, words in names.items()}, run)
        if pictures:
            cards.append(Card(run.label, f"run-{place + 1}", how, pictures=pictures))
    return [*found, Part("each", "Run by run", cards)] if cards else found


def _outcome(trainings: list[Training]) -> Table:
    head = ["run", "variant", "seed", "held-out loss", "95 % interval", "against plain"]
    head += ["share of added sinks", "from step", "mobility", "sinks in the text"]
    rows = []
    for run in trainings:
        loss, other = run.loss, say.compared_with(run, trainings)
        gap = None if other is None else run.against(other)
        last = pd.Series(dtype=float) if run.looks.empty else run.looks.iloc[-1]
        held = ["–", ""] if loss is None else [number(loss.mean, 4), _interval(loss)]
        rows.append([
            run.label, run.variant, run.run.info.seed, *held,
            "" if gap is None else say.signed(*gap),
            percent(float(last.get("sink_share", math.nan))) if run.sink_count else "",
            ("never" if run.takeover is None else run.takeover) if run.sink_count and len(last) else "",
            *(number(float(last.get(name, math.nan))) for name in ("mobility", "text_sinks")),
        ])  # fmt: skip
    return Table(head, rows)


def _interval(loss: HeldoutLoss) -> str:
    return "" if math.isnan(loss.low) else f"{number(loss.low, 4)} to {number(loss.high, 4)}"
