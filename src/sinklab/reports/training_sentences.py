"""Plain sentences about training runs, computed from the numbers, whichever way these fall.

Repeats, which differ in their seed alone, share a sentence: their numbers stand in it one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from sinklab.analysis.trends import motion_word
from sinklab.reports.printed import number, percent
from sinklab.reports.training import OVER_EVEN, HeldoutLoss, Training


def in_short(trainings: list[Training]) -> list[str]:
    """The findings that open the page; of many variants the rest stands below, at its pictures."""
    found = about_losses(trainings)
    for tell in (about_takeover,) if are_many(trainings) else (about_takeover, about_emergence, about_motion):
        found += of_each(trainings, tell)
    return found


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


def compared_with(run: Training, trainings: list[Training]) -> Training | None:
    """What a run is held against: a plain run (or repeats of the first), of the same seed where there is one; None for
    those themselves.
    """
    base = next((other for other in trainings if other.variant == "plain"), trainings[0])
    alike = [other for other in trainings if other.repeats == base.repeats]
    if run in alike:
        return None
    return next((other for other in alike if other.run.info.seed == run.run.info.seed), base)


def about_losses(trainings: list[Training]) -> list[str]:
    """Final held-out losses with their intervals, and the differences on the same rows of text."""
    found = []
    for group in groups(trainings):
        losses = [run.loss for run in group]
        known = [loss for loss in losses if loss is not None]
        if len(known) < len(losses):
            missing = [run.label for run, loss in zip(group, losses, strict=True) if loss is None]
            found.append(f"{listed(missing)} measured no held-out loss.")
        if known:
            score = "scores" if len(group) == 1 else "score"
            numbers = listed(f"{number(loss.mean, 4)}{interval(loss)}" for loss in known)
            when = "at the end" if all(loss.is_final for loss in known) else "when last measured"
            text = f"{named(group)} {score} {numbers} nats per token on held-out text {when}"
            found.append(f"{text}{_differences(group, trainings)}.")
    return found


def interval(loss: HeldoutLoss) -> str:
    """The 95 % interval in brackets; nothing where it is not known."""
    if math.isnan(loss.low):
        return ""
    return f" (95\u00a0% {number(loss.low, 4)} to {number(loss.high, 4)}, {loss.rows} rows)"


def signed(gap: float, reach: float) -> str:
    """A difference with half of its 95 % interval, both to the second digit of the latter."""
    size = reach if reach > 0 else abs(gap)
    digits = max(0, 1 - math.floor(math.log10(size))) if size > 0 else 0
    return f"{gap:+.{digits}f} ± {reach:.{digits}f}".replace("-", "−")


def _differences(group: list[Training], trainings: list[Training]) -> str:
    pairs = [(run, other) for run in group if (other := compared_with(run, trainings)) is not None]
    found = [(gap, other) for run, other in pairs if (gap := run.against(other)) is not None]
    if not found:
        return ""
    against = listed(dict.fromkeys(other.label for _, other in found))
    text = f"; against {against} on the same rows that is {listed(signed(*gap) for gap, _ in found)}"
    if all(abs(gap) <= reach for (gap, reach), _ in found):
        return f"{text}, no difference beyond chance"
    if any(gap > 0 for (gap, _), _ in found) and any(gap < 0 for (gap, _), _ in found):
        return f"{text}, which is not of one sign"
    return text


def about_takeover(group: list[Training]) -> str:
    """When the added sinks came to draw attention, and how much they draw at the end."""
    if not group[0].added:
        return ""
    count, last = group[0].added, [run.looks.iloc[-1] for run in group]
    what, draw = ("the added sink", "draws") if count == 1 else (f"the {count} added sinks", "draw")
    main = "it is" if count == 1 else "one of them is"
    even = percent(float(last[0]["even_share"]))
    begun = f"In {named(group)}, {what} {draw} more than {OVER_EVEN:g} times an even share (of {even})"
    shares = listed(percent(float(look["sink_share"])) for look in last)
    heads = listed(percent(float(look["main_added"])) for look in last)
    since = listed(_since(run.takeover, run) for run in group)
    return f"{begun} {since}; at the end {shares} of all attention, when {main} the main sink of {heads} of heads."


def about_emergence(group: list[Training]) -> str:
    """When sinks came up at all, and how many there are in the text at the end."""
    last = [run.looks.iloc[-1] for run in group]
    since = listed(_since(run.emergence, run) for run in group)
    there = listed(number(float(look["text_sinks"]), 2) for look in last)
    first = listed(percent(float(look["main_first"])) for look in last)
    return (
        f"In {named(group)}, more than half of all heads have a sink {since}; at the end {there} tokens of the text "
        f"are sinks of a head, and the first token is the main sink of {first} of heads."
    )


def about_motion(group: list[Training]) -> str:
    """Whether main sinks stand still between the levels of masking at the last look."""
    last = [run.looks.iloc[-1] for run in group]
    said = (
        f"In {named(group)}, the main sinks are {listed(_moving(float(look['mobility'])) for look in last)} at the end"
    )
    if not group[0].added:
        return f"{said}."
    return f"{said}; those of the text alone are {listed(_moving(float(look['text_mobility'])) for look in last)}."


def named(group: list[Training]) -> str:
    """What a group of repeats is called."""
    return group[0].label if len(group) == 1 else f"{group[0].repeats} ({len(group)} runs)"


def listed(words: Iterable[str]) -> str:
    """Words as they stand in a sentence, the same ones said once."""
    many = list(words)
    many = many[:1] if len(set(many)) == 1 else many
    return many[0] if len(many) == 1 else f"{', '.join(many[:-1])} and {many[-1]}"


def _since(step: int | None, run: Training) -> str:
    if step is None:
        return "at no step lastingly"
    return f"from the first look on (step {step})" if step == run.looks["step"].iloc[0] else f"from step {step} on"


def _moving(mobility: float) -> str:
    if math.isnan(mobility):
        return "nowhere to follow"
    return f"{motion_word(mobility)} (mobility {number(mobility, 2)})"
