"""The three answers about a model as sentences, and how two models differ: no other English is made
of numbers.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from sinklab.lab.analysis.estimates import FEWEST, mean_over, median_over
from sinklab.lab.analysis.movement import STRONG
from sinklab.lab.analysis.words import counted, nats, percent, whole

HEADS = 0.05
"""share of heads that must have a strong key, or one that the sink rule names, or in which a new
sink must grow
"""
AT_ONE_PLACE = 0.5
"""share of the new sinks that must stand at one position for it to be named"""
RANDOM, EQUAL = "random tokens", "non-sinks of equal mass"
STARTS = {"stay": "They stay", "move": "They move", "partly": "Partly"}
STARTS |= {"costs": "Costs", "free": "Free:"}


def existence(
    found: Any,
    seen: pd.DataFrame,
    heads: int = 0,
    at_same_steps: float = math.nan,
    lack: str = "",
    *,
    is_like: bool = False,
) -> str:
    """Whether sinks exist. `found`: the `Answer`; `seen`: its facts, a row a sample;
    `at_same_steps`: the value at the steps that the control read; `lack`: why there is no control;
    `is_like`: whether the model is not distinguishable from it.
    """
    if not found.samples:
        return "Not measured: no key was seen by enough queries (take a longer text)."
    held = f"the strongest token of a head receives {percent(found.value)} of its attention"
    control = ""
    for name, share in [*found.controls.items()][:1]:
        control = f"{name} {percent(share)}"
        if is_like:
            return f"No: {held}, not distinguishable from {name} ({percent(share)})."
    even = 1 / seen["positions"].mean()
    facts = [counted(found.samples, "sample"), f"even share {percent(even)}"]
    if found.word == "weak" and heads:
        strong = round(median_over(seen["strong"]).value * heads)
        facts.append(f"above {whole(STRONG)} in {strong} of {heads} heads")
    said = f"{found.word.capitalize()}: {held} ({', '.join(facts)})"
    if found.word == "inconclusive":
        lacks = [] if found.samples >= FEWEST else [f"{FEWEST} needed"]
        lacks += [] if control else [f"no control: {lack or 'none was run'}"]
        said = f"{undecided(found.samples, 'sample', lacks)}: {held}"
    if control:
        said += f"; with {control}"
    if not math.isnan(at_same_steps):
        said += f" ({percent(at_same_steps)} at the same steps)"
    added = mean_over(seen["added"])
    if added.samples:
        said += f"; the added sink receives {percent(added.value)}"
        if added.above(even) is False:
            said += ", less than an even share"
    return f"{said}."


def staying(
    found: Any, holders: Sequence[tuple[str, float]], compared: str = "steps", origin: str = ""
) -> str:
    """Say which tokens are sinks, and whether they stay (`found`: the `Answer`)."""
    if not found.samples:
        return f"Nothing to follow: no head has a sink at two {compared}."
    beside = ""
    if origin:
        beside = f" of {counted(found.samples, 'text')}, {origin}"
    for name, value in [*found.controls.items()][:1]:
        beside += f"; {name}: no sinks" if math.isnan(value) else f"; {name} {whole(value)}"
    changes = (
        f"between two random {compared} a head's strongest token changes {whole(found.value)} "
        f"of the time (median{beside})"
    )
    if found.word == "stay" and holders:
        label, share = holders[0]
        return f"They stay: {label} is strongest in {whole(share)} of heads and steps; {changes}."
    # the holder of most, and the next if it holds at least half as much
    most = [label for label, share in holders[:2] if share >= holders[0][1] / 2]
    if most:
        changes += f"; mostly {' and '.join(most)}"
    if found.word != "inconclusive":
        return f"{STARTS[found.word]}: {changes}."
    ends = f"{FEWEST} needed"
    if found.samples >= FEWEST:
        ends = f"95\u00a0% {100 * found.low:.0f} … {whole(found.high)}"
    return f"{undecided(found.samples, 'sample', [ends])}: {changes}."


def cost(
    found: Any, clean: pd.Series, top: pd.Series, alone: tuple[str, float] | None, *, is_less: bool
) -> str:
    """The cost of blocking, and whether a new sink grew. `found`: the `Answer`; `clean`, `top`:
    rows of the table of costs; `is_less`: whether non-sinks of equal mass cost more.
    """
    span = f"{nats(clean['loss'], sign='')} → {nats(top['loss'], sign='')}"
    is_enough = found.samples >= FEWEST
    if is_enough:
        ends = f"{nats(found.low)} … {nats(found.high)}"
        span += f", {counted(found.samples, 'row')}, 95\u00a0% {ends}"
    if alone:
        span += f"; {alone[0]} alone {nats(alone[1])}"
    keys = "" if top["k"] == 1 else f" for {top['k']} keys a head"
    said = f"{nats(found.value)} nats a token{keys} ({span})"
    others = {
        name: nats(found.controls[name]) for name in (RANDOM, EQUAL) if name in found.controls
    }
    if is_less:
        said += f", less than {EQUAL} {others.pop(EQUAL)}"
    if others:
        words = {RANDOM: f"as many {RANDOM}", EQUAL: EQUAL}
        said += "; " + ", ".join(f"{words[name]} {value}" for name, value in others.items())
    start = f"{STARTS.get(found.word)}"
    if found.word == "inconclusive":
        lacks = [] if is_enough else [f"{FEWEST} needed"]
        lacks += [] if RANDOM in found.controls else [f"{RANDOM} were not scored"]
        start = f"{undecided(found.samples, 'row', lacks)}:"
    return f"{start} {said}. {regrowth(top['grown'], top['grown_at'])}".rstrip()


def regrowth(grown_R: Any, grown_at: Sequence[int]) -> str:
    """Whether a new sink grows when the strongest keys are blocked; empty if that was not measured
    or is unclear: in at least `HEADS` of the heads of the typical row (median), by the whole
    interval.
    """
    found = median_over(grown_R)
    if found.above(HEADS) is None:
        return ""
    if not found.above(HEADS):
        return "No new sink grew."
    places, heads = (
        Counter(map(int, pd.Series(grown_at).dropna())),
        f"in {whole(found.value)} of heads",
    )
    ((place, count),) = places.most_common(1)
    if count < AT_ONE_PLACE * places.total():
        return f"New sinks grew {heads}, at several tokens."
    named = "added sink" if place < 0 else f"token at position {place:.0f}"
    return f"A new sink grew at the {named}, {heads}."


def contrast(models: Sequence[tuple[Any, np.ndarray, Sequence[Any]]]) -> str:
    """How the first two models that have strong sinks differ in whether these stay; empty for one.

    models: the `Answers` about each, its mobility for each of its texts, (S,), and their prompts,
    which must be the same.
    """
    if len(models) < 2:
        return ""
    strong = [(found.model, *own) for found, *own in models if found["exist"].word == "yes"]
    if len(strong) < 2:
        who = f"only {strong[0][0]}" if strong else "no model here"
        words = {one["exist"].word for one, *_ in models}
        have = "is known to have" if words & {"inconclusive", "not measured"} else "has"
        return (
            f"No comparison of models: {who} {have} strong sinks (a key above {whole(STRONG)} in "
            f"{whole(HEADS)} of heads)."
        )
    pair = sorted(strong[:2], key=lambda one: -mean_over(one[1]).value)
    (more, one_S, asked), (less, other_S, others) = pair
    shown = f"{more} {whole(median_over(one_S).value)}, {less} {whole(median_over(other_S).value)}"
    found = mean_over(one_S - other_S if asked == others != [] else [])
    if not found.above():
        seen = f"{FEWEST} samples of the same texts would show it"
        if found.is_interval:
            seen = f"{found.samples} samples show {100 * found.reach:.0f} points"
        return f"Inconclusive which model's sinks move more: {shown} ({seen})."
    ends = f"+{100 * found.low:.0f} … +{100 * found.high:.0f}"
    return (
        f"The sinks of {more} move more than those of {less}: {shown} (difference 95\u00a0% {ends} "
        "points)."
    )


def undecided(number: int, noun: str, lacks: Sequence[str]) -> str:
    """The beginning of a sentence without a verdict."""
    brackets = f" ({'; '.join(lacks)})" if lacks else ""
    return f"Inconclusive with {counted(number, noun)}{brackets}"
