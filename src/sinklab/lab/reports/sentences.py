"""Statements about the numbers of runs, in plain sentences: the numbers here, the words in
sentences.jinja.

Repeats of a training run, which differ in their seed alone, share a sentence: their numbers stand
in it one after the other.
"""

import math
from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from sinklab.lab.analysis.answers import QUESTIONS
from sinklab.lab.analysis.estimates import FEWEST, SEEDS, Estimate, mean_over
from sinklab.lab.analysis.movement import motion_word
from sinklab.lab.reports.figures import typical_head
from sinklab.lab.reports.findings import blocking, richest, with_sinks
from sinklab.lab.reports.study import Study
from sinklab.lab.reports.training import OVER_EVEN, Training
from sinklab.lab.reports.words import (
    interval,
    number,
    quoted,
    same,
    statements,
    times_chance,
    words_of,
)


@lru_cache(maxsize=1)
def _statements() -> Callable[..., list[str]]:
    filters: list[Any] = [
        quoted,
        times_chance,
        listed,
        moving,
        named,
        since,
        last_rows,
        richest,
        mean_of_edits,
    ]
    filters += [groups, blocking, losses_of, np.nanmean, with_sinks]
    tests = {"close_to": same, "many": are_many}
    return statements("sinklab.lab.reports", filters, tests, over_even=OVER_EVEN, fewest=FEWEST)


def told(statement: str, *about: Any, **facts: Any) -> list[str]:
    """The sentences of a statement; none if there is nothing to say."""
    return _statements()(statement, *about, **facts)


def told_of(runs: list[Any], *statements: str) -> list[str]:
    """Statements about each run; for trainings, about each group of repeats that a sink monitor
    watched.
    """
    if runs and isinstance(runs[0], Training):
        watched = [[run for run in group if not run.over("step").empty] for group in groups(runs)]
        return [
            text for name in statements for group in watched if group for text in told(name, group)
        ]
    return [text for run in runs for name in statements for text in told(name, run)]


def mean_of_edits(removals: pd.DataFrame | None) -> list[tuple[Any, pd.Series]]:
    """Mean of the removals of each edit of a run, over samples and forward passes."""
    if removals is None:
        return []
    numbers = ["keys", "held", "removed", "overlap"]
    means = removals.reindex(columns=["edit", *numbers]).groupby("edit", sort=False)[numbers].mean()
    return list(means.iterrows())


def losses_of(group: list[Training], trainings: list[Training]) -> dict[str, Any]:
    """Final held-out losses of a group of repeats, and the differences on the same rows of text."""
    known, gaps, against = [], [], []
    for run in group:
        if run.loss is not None:
            rows = f" (95\u00a0% {interval(run.loss)}, {run.loss.samples} rows)"
            known.append(number(run.loss.value, 4) + rows * (run.loss.samples > 0))
        other, gap = beside_plain(run, trainings)
        if gap is not None:
            gaps.append(gap)
            against.append(other)
    return {
        "known": known,
        "is_final": all(run.has_ended for run in group if run.loss is not None),
        "missing": [run.label for run in group if run.loss is None],
        "against": list(dict.fromkeys(against)),
        "differences": [signed(gap) for gap in gaps],
        "word": _over_seeds([gap.value for gap in gaps], len(set(against))),
    }


def _over_seeds(gaps: list[float], partners: int) -> str:
    """Differences of pairs of runs, a seed each, as words about a variant; errors over rows do not
    include seeds.
    """
    found = mean_over(gaps, fewest=SEEDS)
    if partners < 2:
        return " (± is over rows: seeds are not in it)"
    span = f"from {found.low:+.4f} to {found.high:+.4f}".replace("-", "−")
    if not found.is_interval:
        return (
            f" (± is over rows; over {found.samples} seed{'s' * (found.samples != 1)} {span}, "
            f"a verdict takes {SEEDS})"
        )
    words = {
        True: "worse",
        False: "better",
        None: f"inconclusive, detectable difference {found.reach:.4f}",
    }
    return f" (± is over rows; over {found.samples} seeds 95\u00a0% {span}: {words[found.above()]})"


def last_rows(group: list[Training]) -> dict[Any, list[float]]:
    """The last measurement of each run, a list per column."""
    return pd.DataFrame([run.over("step").iloc[-1] for run in group]).to_dict("list")


def since(group: list[Training], event: str) -> list[str]:
    """The step from which "takeover" or "emergence" held, in each run; "at no point" if it did not
    last to the end.
    """
    found = []
    for run in group:
        step = getattr(run, event)
        first = run.over("step")["step"].iloc[0]
        if step is None:
            found.append("at no point")
        elif step == first:
            found.append(f"from the first measurement on (step {step})")
        else:
            found.append(f"from step {step} on")
    return found


def moving(mobility: float) -> str:
    """How mobile main sinks are."""
    if math.isnan(mobility):
        return "nowhere to follow"
    return f"{motion_word(mobility)} (mobility {number(mobility, 2)})"


def in_short(runs: list[Any]) -> list[str]:
    """The findings that open the page."""
    if isinstance(runs[0], Training):
        # Of many variants, the losses and the takeover; the rest stands below, at its pictures.
        short = told("losses", runs) + told_of(runs, "takeover")
        if are_many(runs):
            return short
        return short + told_of(runs, "emergence", "mobility")
    recorded = [study for study in runs if study.layers]
    added = [study for study in recorded if study.sink_count]
    # The comparison has the share of a run without a sink.
    short = told_of(added or recorded, "share") + told("share_with_and_without", recorded)
    short += told_of(recorded, "motion") + told_of(recorded, "classes", "explained")
    # Norms of runs with an added sink, if there are any.
    short += [text for study in added or recorded for text in told("norms", study)[:1]]
    short += told_of(runs, "removals") + [
        text for study in runs for text in told("heldout", study)[-1:]
    ]
    return short + told_of(recorded, "twins")


def has_data(run: Study, figure: str) -> bool:
    """Whether a study has what a figure of the page shows: held-out losses, or attention."""
    if figure == "heldout_loss":
        return run.heldout is not None
    return bool(run.layers)


def story_of(studies: list[Study], shown: list[str]) -> list[dict[str, Any]]:
    """The opening of the page: three questions with the answer of each run, word for word that of
    `Study.answers`, and a picture if one can be drawn.

    shown: labels of the runs in the explorer.
    """
    found = []
    for question, row in words_of("story", "").items():
        runs = [run for run in studies if has_data(run, row["figure"])]
        explored = [run for run in runs if run.label in shown][:2]
        link = row["figure"]
        if question != "cost" and explored:
            # the heads that show it
            heads = [
                typical_head(run) if question == "stay" else run.measured.strongest
                for run in explored
            ]
            views = [
                (shown.index(run.label), *head) for run, head in zip(explored, heads, strict=True)
            ]
            fields = zip(("run", "layer", "head"), zip(*views, strict=True), strict=True)
            link = "&".join(f"{field}={','.join(map(str, at))}" for field, at in fields)
        names = [run.label if len(studies) > 1 else "" for run in studies]
        sentences = [
            (name, run.answers[question].sentence) for name, run in zip(names, studies, strict=True)
        ]
        about = {"title": QUESTIONS[question], "anchor": f"story-{question}", "link": f"#{link}"}
        found.append(about | {"sentences": sentences, "figure": row["figure"], "runs": runs})
    return found


def are_many(trainings: list[Training]) -> bool:
    """Whether there are more variants than a reader wants to be told of in a row."""
    return len(groups(trainings)) > 3


def groups(trainings: list[Training]) -> list[list[Training]]:
    """Runs that differ in their seed alone, together."""
    names = dict.fromkeys(run.repeats for run in trainings)
    return [[run for run in trainings if run.repeats == name] for name in names]


def named(group: list[Training]) -> str:
    """Name of a group of repeats."""
    return group[0].label if len(group) == 1 else f"{group[0].repeats} ({len(group)} runs)"


def beside_plain(run: Training, trainings: list[Training]) -> tuple[str, Estimate | None]:
    """Label of the run that a run is compared with, and the difference of their losses: a plain run
    (or repeats of the first), of the same seed if there is one; None for those themselves.
    """
    base = next((other for other in trainings if other.variant == "plain"), trainings[0])
    alike = [other for other in trainings if other.repeats == base.repeats]
    if run in alike:
        return "", None
    other = next((one for one in alike if one.run.info.seed == run.run.info.seed), base)
    return other.label, run.against(other)


def signed(gap: Estimate) -> str:
    """A difference with half of its 95 % interval (the longer one), both to the second digit of the
    latter.
    """
    reach = max(gap.high - gap.value, gap.value - gap.low)
    size = reach if reach > 0 else abs(gap.value)
    digits = max(0, 1 - math.floor(math.log10(size))) if size > 0 else 0
    return f"{gap.value:+.{digits}f} ± {reach:.{digits}f}".replace("-", "−")


def listed(words: Iterable[str]) -> str:
    """Words for a sentence, the same ones said once."""
    many = list(words)
    if len(set(many)) == 1:
        return many[0]
    return f"{', '.join(many[:-1])} and {many[-1]}"
