"""The three answers about a model as sentences, and how two models differ: no other English is made
of numbers.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sinklab.lab.analysis.estimates import FEWEST, Estimate, mean_over, median_over
from sinklab.lab.analysis.strongest import STRONG

CONTROLS = {"permuted": "shuffled weights", "initialised": "fresh weights"}
"""Controls as run folders name them -> as people read them; the first that was run is the one of a
sentence.
"""
HEADS = 0.05
"""share of heads that must have a strong key, or one that the sink rule names, or in which a new
sink must grow
"""
AT_ONE_PLACE = 0.5
"""share of the new sinks that must stand at one position for it to be named"""
PLACES = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
"""positions of a text, from 0, in words"""
STARTS = {"stay": "They stay", "move": "They move", "partly": "Partly"}


def existence(found: Any, own: Any, at_same_steps: float = math.nan, lack: str = "") -> str:
    """Whether sinks exist.

    Args:
        found: the `Answer`.
        own: the `Existence` that it is about.
        at_same_steps: what the model's value is at the steps that the control read.
        lack: why there is no control.
    """
    if not found.samples:
        return "Not measured: no attention was recorded."
    held = f"the strongest token of a head receives {percent(found.value)} of its attention"
    control = ""
    for name, share in [*found.controls.items()][:1]:
        control = f"{name} {percent(share)}"
        if found.word == "no" and found.is_like_control:
            return f"No: {held}, not distinguishable from {name} ({percent(share)})."
    facts = [counted(found.samples, "sample"), f"even share {percent(own.even)}"]
    if found.word == "weak" and own.heads:
        strong = round(median_over(own.strong_S).value * own.heads)
        facts.append(f"above {whole(STRONG)} in {strong} of {own.heads} heads")
    said = f"{found.word.capitalize()}: {held} ({', '.join(facts)})"
    if found.word == "inconclusive":
        lacks = [] if found.samples >= FEWEST else [f"{FEWEST} needed"]
        lacks += [] if control else [f"no control: {lack or 'none was run'}"]
        said = f"{undecided(found.samples, 'sample', lacks)}: {held}"
    if control:
        said += f"; with {control}"
    if not math.isnan(at_same_steps):
        said += f" ({percent(at_same_steps)} at the same steps)"
    added = mean_over(own.added_S)
    if added.samples:
        few = ", less than an even share" if added.above(own.even) is False else ""
        said += f"; the added sink receives {percent(added.value)}{few}"
    return f"{said}."


def staying(found: Any, own: Any) -> str:
    """The sentence on which tokens are sinks, and whether they stay. `found`: the `Answer`, `own`:
    `Staying`.
    """
    if not found.samples:
        return f"Nothing to follow: no head has a sink at two {own.compared}."
    beside = ""
    for name, value in [*found.controls.items()][:1]:
        beside = f"; {name}: no sinks" if math.isnan(value) else f"; {name} {whole(value)}"
    origin = ""
    if own.origin:
        origin = f" of {counted(found.samples, 'text')}, {own.origin}"
    changes = (
        f"between two random {own.compared} a head's strongest token changes {whole(found.value)} "
        f"of the time (median{origin}{beside})"
    )
    if found.word == "stay" and own.holders:
        label, share = own.holders[0]
        return f"They stay: {label} is strongest in {whole(share)} of heads and steps; {changes}."
    # the holder of most, and the next if it holds at least half as much
    most = [label for label, share in own.holders[:2] if share >= own.holders[0][1] / 2]
    if most:
        changes += f"; mostly {' and '.join(most)}"
    if found.word != "inconclusive":
        return f"{STARTS[found.word]}: {changes}."
    ends = f"{FEWEST} needed"
    if found.samples >= FEWEST:
        ends = f"95\u00a0% {100 * found.low:.0f} … {whole(found.high)}"
    return f"{undecided(found.samples, 'sample', [ends])}: {changes}."


def cost(found: Any, own: Any) -> str:
    """The cost of blocking, and whether a new sink grew. `found`: the `Answer`, `own`: `Cost`."""
    span = f"{nats(own.clean, sign='')} → {nats(own.masked, sign='')}"
    if own.delta.is_interval:
        ends = f"{nats(own.delta.low)} … {nats(own.delta.high)}"
        span += f", {counted(own.delta.samples, 'row')}, 95\u00a0% {ends}"
    if own.alone:
        span += f"; {own.alone[0]} alone {nats(own.alone[1])}"
    keys = "" if own.keys == 1 else f" for {own.keys} keys a head"
    said = f"{nats(found.value)} nats a token{keys} ({span})"
    equal = f"non-sinks of equal mass {nats(own.equal_mass)}"
    others = []
    if not math.isnan(own.random):
        others.append(f"as many random tokens {nats(own.random)}")
    if own.beyond_equal.above() is False:
        said += f", less than {equal}"
    elif not math.isnan(own.equal_mass):
        others.append(equal)
    said = "; ".join([said, ", ".join(others)] if others else [said])
    start = {"costs": "Costs", "free": "Free:"}.get(found.word, "")
    if found.word == "inconclusive":
        start = "Inconclusive, no losses of rows were kept:"
        lacks = [] if own.delta.is_interval else [f"{FEWEST} needed"]
        lacks += [] if own.beyond_random.samples else ["random tokens were not scored"]
        if own.delta.samples:
            start = f"{undecided(own.delta.samples, 'row', lacks)}:"
    return f"{start} {said}. {regrowth(own.grown_R, own.grown_at)}".rstrip()


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
    (place, count), heads = Counter(grown_at).most_common(1)[0], f"in {whole(found.value)} of heads"
    if count < AT_ONE_PLACE * len(grown_at):
        return f"New sinks grew {heads}, at several tokens."
    named = "added sink" if place < 0 else f"token at position {place}"
    if 0 <= place < len(PLACES):
        named = f"{PLACES[place]} token"
    return f"A new sink grew at the {named}, {heads}."


def contrast(models: Sequence[tuple[Any, np.ndarray]]) -> str:
    """How the first two models that have strong sinks differ in whether these stay; empty for one.

    Args:
        models: the `Answers` about each, and its mobility for each of the texts, (S,), which all
            models read alike.
    """
    if len(models) < 2:
        return ""
    strong = [(found.model, own_S) for found, own_S in models if found["exist"].word == "yes"]
    if len(strong) < 2:
        who = f"only {strong[0][0]}" if strong else "no model here"
        open_words = {"inconclusive", "not measured"}
        is_open = any(one["exist"].word in open_words for one, _ in models)
        have = "is known to have" if is_open else "has"
        return (
            f"No comparison of models: {who} {have} strong sinks (a key above {whole(STRONG)} in "
            f"{whole(HEADS)} of heads)."
        )
    (more, one_S), (less, other_S) = strong[:2]
    shown = f"{more} {whole(median_over(one_S).value)}, {less} {whole(median_over(other_S).value)}"
    found: Estimate = mean_over(one_S - other_S if len(one_S) == len(other_S) else [])
    if found.above() is None:
        seen = f"{FEWEST} samples of the same texts would show it"
        if found.is_interval:
            seen = f"{found.samples} samples show {100 * found.reach:.0f} points"
        return f"Inconclusive which model's sinks move more: {shown} ({seen})."
    ends = found.low, found.high
    if not found.above():
        more, less, ends = less, more, (-found.high, -found.low)
    low, high = (f"{100 * end:+.0f}".replace("-", "−") for end in ends)
    return (
        f"The sinks of {more} move more than those of {less}: {shown} (difference 95\u00a0% {low} "
        f"… {high} points)."
    )


def beside(texts: Mapping[str, str], own: Any = (), theirs: Mapping[str, Any] | None = None) -> str:
    """Numbers of the controls, written behind that of the model: «shuffled weights 6.3 %, fresh
    weights 2.6 %».

    Args:
        texts: the number of each control as it is written, by the control's name in a run folder;
            empty for none.
        own: (S,) the numbers of the model's samples; a control that is not distinguishable (the
            95 % interval of the paired difference holds 0) is marked «not distinguishable».
        theirs: (S,) those of each control.
    """
    said = []
    for kind in CONTROLS:
        if not texts.get(kind):
            continue
        words = f"{CONTROLS[kind]} {texts[kind]}"
        others = (theirs or {}).get(kind, ())
        if np.size(own) and np.shape(own) == np.shape(others):
            difference = mean_over(np.subtract(own, others))
            if difference.is_interval and difference.above() is None:
                words += " (not distinguishable)"
        said.append(words)
    return ", ".join(said)


def undecided(number: int, noun: str, lacks: Sequence[str]) -> str:
    """The beginning of a sentence without a verdict."""
    brackets = f" ({'; '.join(lacks)})" if lacks else ""
    return f"Inconclusive with {counted(number, noun)}{brackets}"


def percent(share: float) -> str:
    """A share as a percentage with one decimal."""
    if math.isnan(share):
        return "–"
    return f"{100 * share:.1f}\u00a0%".replace("-", "−")


def whole(share: float) -> str:
    """A share as a whole percentage."""
    return f"{100 * share:.0f}\u00a0%"


def nats(value: float, sign: str = "+") -> str:
    """A loss or its change with two decimals."""
    return f"{value:{sign}.2f}".replace("-", "−")


def counted(number: int, noun: str) -> str:
    """A number of things: «1 sample», «2 samples»."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
