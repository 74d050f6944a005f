"""What the numbers of runs say, in plain sentences: the numbers here, the words in sentences.jinja.

Repeats of a training run, which differ in their seed alone, share a sentence: their numbers stand in it one after the
other.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd
from jinja2 import Environment, FunctionLoader, StrictUndefined

from sinklab.analysis.movement import motion_word
from sinklab.analysis.tokens import Enrichment
from sinklab.reports.samples import ADDED, MASK, Reader
from sinklab.reports.study import Study
from sinklab.reports.style import asset
from sinklab.reports.training import OVER_EVEN, Training
from sinklab.reports.words import number, percent, quoted, same, times_chance

# A class with fewer places or events than this share is too rare to speak of.
RARE = 0.01
# Shares of variance closer than this are called alike.
ALIKE = 0.05


@lru_cache(maxsize=1)
def _statements() -> Any:
    # Plain text: the page escapes it.
    words = Environment(
        loader=FunctionLoader(asset), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, autoescape=False
    )
    words.filters |= {"number": number, "percent": percent, "quoted": quoted, "times_chance": times_chance}
    words.filters |= {"mean": np.nanmean, "listed": listed}
    words.tests |= {"unknown": pd.isna, "infinite": math.isinf, "close_to": same}
    return words.get_template("sentences.jinja").module


def told(statement: str, **facts: Any) -> list[str]:
    """The sentences of a statement; none where there is nothing to say."""
    text = getattr(_statements(), statement)(**facts)
    # not the spaces that do not break
    return [one for part in text.split("¶") if (one := re.sub(r"[ \n]+", " ", part).strip(" "))]


def first(sentences: list[str]) -> str:
    """The only sentence, or nothing."""
    return sentences[0] if sentences else ""


def about_run(statement: str) -> Callable[[Study], str]:
    """The sentence of a statement that needs nothing but the run."""
    return lambda run: first(told(statement, run=run))


about_path, about_motion = about_run("path"), about_run("motion")
about_depth, about_blocks = about_run("depth"), about_run("blocks")
about_split, about_events = about_run("split"), about_run("events")


def about_explained(study: Study) -> str:
    """Semantic or positional; empty without tokens."""
    return first(told("explained", run=study, alike=ALIKE))


def about_classes(study: Study) -> str:
    """Which class of tokens and which age is a sink more often than its share of the canvas; empty without tokens."""
    parts = [(what, *_richest(found)) for what, found in (("of class", study.classes), ("that are", study.ages))]
    return first(told("classes", run=study, richest=[part for part in parts if len(part) > 1]))


def _richest(found: Enrichment | None) -> tuple[Any, ...]:
    """Label, frequency, occupancy and enrichment of the most enriched label that is not rare; empty without one."""
    rows = zip(found.label, found.frequency, found.occupancy, found.enrichment, strict=True) if found else ()
    text = [row for row in rows if row[0] not in (ADDED, "sink") and min(row[1], row[2]) >= RARE]
    best = max(text, key=lambda row: float(row[3]), default=None)
    return () if best is None or same(float(best[3]), 1) or best[3] < 1 else best


def about_removals(study: Study) -> list[str]:
    """What the edits of the run took away, a sentence each; empty for a run without edits."""
    frame = study.removals
    if frame is None:
        return []
    numbers = ["removed", "mass", "realised", "overlap"]
    means = frame.reindex(columns=["edit", *numbers]).groupby("edit", sort=False)[numbers].mean()
    return told("removals", run=study, edits=list(means.iterrows()))


def about_share(studies: list[Study]) -> list[str]:
    """Attention on the added sink, and on the greatest text position with and without it."""
    sentences = [text for study in studies for text in told("share", run=study)]
    recorded = [study for study in studies if study.layers]
    plain = next((study for study in recorded if not study.sink_count), None)
    added = next((study for study in recorded if study.sink_count), None)
    return sentences + (told("share_with_and_without", plain=plain, added=added) if plain and added else [])


def about_norms(study: Study) -> list[str]:
    """Length of value vectors of sinks against other text, averaged over layers."""
    return told("norms", run=study) if study.layers else []


def about_tokens(study: Study) -> str:
    """Which token is most often a sink, and whether it is so more than its occupancy explains."""
    found = study.sink_tokens
    return first(told("tokens", run=study, mask=found.label.index(MASK) if found and MASK in found.label else 0))


def about_heldout(study: Study) -> list[str]:
    """Loss with nothing hidden, and what hiding the most sinks changes against as many random columns."""
    frame = study.heldout
    if frame is None:
        return []
    frame = frame.reindex(columns=frame.columns.union(["bits_per_byte"])).sort_values("k")
    base, hidden = _row(frame[frame["k"] == 0], 0), _row(frame[frame["control"] == "sinks"], -1)
    random = None if hidden is None else _row(frame[(frame["control"] == "random") & (frame["k"] == hidden["k"])], 0)
    gap = error = math.nan
    if hidden is not None and random is not None:
        gap = hidden["loss"] - random["loss"]
        error = math.hypot(hidden["delta_stderr"], random["delta_stderr"])
    return told("heldout", run=study, base=base, hidden=hidden, random=random, gap=gap, error=error)


def _row(frame: pd.DataFrame, place: int) -> pd.Series | None:
    return None if frame.empty else frame.iloc[place]


def about_losses(trainings: list[Training]) -> list[str]:
    """Final held-out losses with their intervals, and the differences on the same rows of text."""
    found = []
    for group in groups(trainings):
        known = [run.loss for run in group if run.loss is not None]
        pairs = [(run, other) for run in group if (other := compared_with(run, trainings)) is not None]
        gaps = [(gap, other) for run, other in pairs if (gap := run.against(other)) is not None]
        found += told(
            "losses",
            group=named(group),
            missing=[run.label for run in group if run.loss is None],
            known=len(known),
            numbers=[
                number(loss.mean, 4) + (f" (95\u00a0% {loss.interval}, {loss.rows} rows)" if loss.interval else "")
                for loss in known
            ],
            is_final=all(loss.is_final for loss in known),
            against=list(dict.fromkeys(other.label for _, other in gaps)),
            differences=[signed(*gap) for gap, _ in gaps],
            word=_judged([gap for gap, _ in gaps]),
        )
    return found


def _judged(gaps: list[tuple[float, float]]) -> str:
    if all(abs(gap) <= reach for gap, reach in gaps):
        return ", no difference beyond chance"
    both = any(gap > 0 for gap, _ in gaps) and any(gap < 0 for gap, _ in gaps)
    return ", which is not of one sign" if both else ""


def about_takeover(group: list[Training]) -> str:
    """When the added sinks came to draw attention, and how much they draw at the end."""
    if not group[0].sink_count:
        return ""
    last = _last(group)
    facts: dict[str, Any] = {"since": _since(group, "takeover"), "shares": _percents(last["sink_share"])}
    facts |= {"over_even": OVER_EVEN, "even": last["even_share"].iloc[0], "heads": _percents(last["main_added"])}
    return first(told("takeover", group=named(group), count=group[0].sink_count, **facts))


def about_emergence(group: list[Training]) -> str:
    """When sinks came up at all, and how many there are in the text at the end."""
    last = _last(group)
    facts = {"sinks": [number(value, 2) for value in last["text_sinks"]], "first": _percents(last["main_first"])}
    return first(told("emergence", group=named(group), since=_since(group, "emergence"), **facts))


def about_mobility(group: list[Training]) -> str:
    """Whether main sinks are static between the mask ratios of the last measurement."""
    last = _last(group)
    text = [_moving(value) for value in last["text_mobility"]] if group[0].sink_count else []
    return first(told("mobility", group=named(group), whole=[_moving(value) for value in last["mobility"]], text=text))


def _last(group: list[Training]) -> pd.DataFrame:
    return pd.DataFrame([run.looks.iloc[-1] for run in group])


def _percents(values: Iterable[float]) -> list[str]:
    return [percent(float(value)) for value in values]


def _since(group: list[Training], event: str) -> list[str]:
    found = []
    for run in group:
        step = getattr(run, event)
        start = step is not None and step == run.looks["step"].iloc[0]
        found.append(
            "at no step permanently" if step is None
            else f"from the first measurement on (step {step})" if start else f"from step {step} on"
        )  # fmt: skip
    return found


def _moving(mobility: float) -> str:
    if math.isnan(mobility):
        return "nowhere to follow"
    return f"{motion_word(mobility)} (mobility {number(mobility, 2)})"


def in_short(runs: list[Any]) -> list[str]:
    """The findings that open the page."""
    return _of_trainings(runs) if isinstance(runs[0], Training) else _of_studies(runs)


def _of_studies(studies: list[Study]) -> list[str]:
    """Those of runs with an added sink, where there are any, and the comparison."""
    recorded = [study for study in studies if study.layers]
    added = [study for study in recorded if study.sink_count]
    # What a run without a sink says of its share is repeated by the comparison.
    short = [text for text in about_share(recorded) if not (added and "which has no added sink" in text)]
    short += [about_motion(study) for study in recorded]
    short += [text for study in recorded for text in (about_classes(study), about_explained(study)) if text]
    short += [text for study in added or recorded for text in about_norms(study)[:1]]
    short += [text for study in studies for text in about_removals(study)]
    return short + [text for study in studies for text in about_heldout(study)[-1:]]


def _of_trainings(trainings: list[Training]) -> list[str]:
    """Of many variants, the losses and the takeover; the rest stands below, at its pictures."""
    more = () if are_many(trainings) else (about_emergence, about_mobility)
    return about_losses(trainings) + [text for tell in (about_takeover, *more) for text in of_each(trainings, tell)]


def about_state(run: Reader) -> list[str]:
    """That a run did not end, and that it ran under edits: its numbers must not be read as those of the model alone."""
    edits = [str(edit) for edit in run.run.info.settings.get("edits") or ()]
    return told("status", run=run, info=run.run.info) + told("edited", run=run, edits=edits)


def are_many(trainings: list[Training]) -> bool:
    """Whether there are more variants than a reader wants to be told of in a row."""
    return len(groups(trainings)) > 3


def of_each(trainings: list[Training], tell: Callable[[list[Training]], str]) -> list[str]:
    """What there is to tell of each group of repeats that a sink monitor watched."""
    watched = [[run for run in group if not run.looks.empty] for group in groups(trainings)]
    return [text for group in watched if group and (text := tell(group))]


def groups(trainings: list[Training]) -> list[list[Training]]:
    """Runs that differ in their seed alone, together."""
    names = dict.fromkeys(run.repeats for run in trainings)
    return [[run for run in trainings if run.repeats == name] for name in names]


def named(group: list[Training]) -> str:
    """What a group of repeats is called."""
    return group[0].label if len(group) == 1 else f"{group[0].repeats} ({len(group)} runs)"


def compared_with(run: Training, trainings: list[Training]) -> Training | None:
    """What a run is held against: a plain run (or repeats of the first), of the same seed where there is one; None for
    those themselves.
    """
    base = next((other for other in trainings if other.variant == "plain"), trainings[0])
    alike = [other for other in trainings if other.repeats == base.repeats]
    if run in alike:
        return None
    return next((other for other in alike if other.run.info.seed == run.run.info.seed), base)


def signed(gap: float, reach: float) -> str:
    """A difference with half of its 95 % interval, both to the second digit of the latter."""
    size = reach if reach > 0 else abs(gap)
    digits = max(0, 1 - math.floor(math.log10(size))) if size > 0 else 0
    return f"{gap:+.{digits}f} ± {reach:.{digits}f}".replace("-", "−")


def listed(words: Iterable[str]) -> str:
    """Words as they stand in a sentence, the same ones said once."""
    many = list(words)
    many = many[:1] if len(set(many)) == 1 else many
    return many[0] if len(many) == 1 else f"{', '.join(many[:-1])} and {many[-1]}"
