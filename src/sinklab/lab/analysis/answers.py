"""Three questions about the attention sinks of a model, answered: of each a word, its numbers, and
one sentence.
"""

# S samples (texts of a trace), R rows of held-out text
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

import numpy as np
import pandas as pd

from sinklab.lab.analysis.estimates import FEWEST, Estimate, mean_over, median_over
from sinklab.lab.analysis.movement import word_over
from sinklab.lab.analysis.strongest import STRONG

QUESTIONS = {
    "exist": "Do sinks exist?",
    "stay": "Which are they, and do they stay?",
    "cost": "What does blocking them cost?",
}
HEADS = 0.05
"""share of heads that must have such a key, or one that the sink rule names, or in which a new sink
must grow
"""
AT_ONE_PLACE = 0.5
"""share of the new sinks that must stand at one position for it to be named"""
PLACES = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
"""positions of a text, from 0, in words"""
STAYING = {"static": "stay", "mixed": "partly", "moving": "move", None: "inconclusive"}
"""Words of an answer by the words of `movement.word_over`."""
FREE = 0.05
"""share of the loss that blocked keys may cost and still be called free (limit of Rulli et al.)"""

CONTROLS = {"permuted": "shuffled weights", "initialised": "fresh weights"}
"""Controls as run folders name them -> as people read them; the first that was run is the one of a
sentence.
"""


@dataclass(frozen=True)
class Existence:
    """Weight on the strongest keys of a model, a number a sample."""

    strongest_S: np.ndarray
    """share of a head's attention that its strongest key receives, mean over steps and heads"""
    strong_S: np.ndarray
    """share of heads whose strongest key receives more than `STRONG`, mean over steps"""
    ruled_S: np.ndarray
    """share of the heads, over steps, that have a sink by the sink rule"""
    even: float = math.nan
    """share of every key if a head attended to all alike"""
    own_S: np.ndarray | None = None
    """of a control that read a few steps alone, what ``strongest_S`` of the model is at these"""


@dataclass(frozen=True)
class Staying:
    """Mobility of the sinks of a model, a number a sample, and which tokens they are."""

    mobility_S: np.ndarray
    """chance that a head's sink is another key at another step; NaN for a sample without sinks at
    two steps
    """
    holders: Sequence[tuple[str, float]] = ()
    """tokens that are the strongest of a head, by falling share of the heads and steps"""
    compared: str = "steps"
    """moments that are compared: steps, or of an autoregressive model windows of queries"""


@dataclass(frozen=True)
class Cost:
    """Losses of rows of held-out text, in nats a token, with the strongest keys of every head
    masked and without.
    """

    keys: int
    """blocked keys of each head"""
    clean: float
    masked: float
    delta: Estimate
    """loss with sinks blocked less the clean loss, over rows; no samples if the losses of single
    rows were not kept
    """
    beyond_random: Estimate
    """loss with sinks blocked less that with as many random keys blocked, over rows; no samples if
    the latter was not scored
    """
    random: float = math.nan
    """cost of as many random keys"""
    equal_mass: float = math.nan
    """cost of keys that are no sinks and hold as much attention"""
    grown_R: np.ndarray = field(default_factory=lambda: np.empty(0))
    """share of heads in which another key is above `STRONG` then, and was not before; empty if not
    measured
    """
    grown_at: Sequence[int] = ()
    """text positions of these keys, one a head and row; below 0 for an added sink"""


@dataclass(frozen=True)
class Answer:
    """One question answered: the row of a table, and the sentence that is made of it."""

    question: str
    """one of `QUESTIONS`"""
    word: str
    """yes, weak, no; stay, partly, move, nothing to follow; costs, free; inconclusive; not
    measured
    """
    sentence: str
    value: float = math.nan
    """strongest weight; mobility; nats a token"""
    low: float = math.nan
    """ends of its 95 % interval over samples; the least and the greatest sample if there are too
    few
    """
    high: float = math.nan
    samples: int = 0
    detectable: float = math.nan
    """difference from the control, or the threshold, that so many samples would show 4 times in
    5
    """
    controls: Mapping[str, float] = field(default_factory=dict)
    """the same number of the controls, by their names"""


@dataclass(frozen=True)
class Answers:
    """The answers about one model; as text its three sentences, one a line."""

    model: str
    answers: tuple[Answer, ...]

    def __iter__(self) -> Iterator[Answer]:
        return iter(self.answers)

    def __getitem__(self, question: str) -> Answer:
        """The answer to one of `QUESTIONS`. Raises KeyError for another."""
        return {one.question: one for one in self.answers}[question]

    def __str__(self) -> str:
        return "\n".join(self.sentences)

    def __repr__(self) -> str:
        return str(self)

    @property
    def sentences(self) -> list[str]:
        """One a question."""
        return [one.sentence for one in self.answers]

    @property
    def table(self) -> pd.DataFrame:
        """A row a question: model, question, word, value, low, high, samples, detectable, a column
        for each control.
        """
        rows = []
        for one in self.answers:
            numbers = ("word", "value", "low", "high", "samples", "detectable")
            row = {"model": self.model, "question": QUESTIONS[one.question]}
            row |= {name: getattr(one, name) for name in numbers}
            rows.append(row | dict(one.controls) | {"sentence": one.sentence})
        frame = pd.DataFrame(rows)
        return frame[[*frame.columns.drop("sentence"), "sentence"]]

    def _repr_html_(self) -> str:
        return "\n".join(
            f"<p><b>{QUESTIONS[one.question]}</b> {escape(one.sentence)}</p>"
            for one in self.answers
        )


def exists(own: Existence, controls: Mapping[str, Existence], lack: str = "") -> Answer:
    """Whether sinks exist: *yes*, *weak*, *no* or *inconclusive*.

    *Yes*: in at least `HEADS` of the heads of the typical sample (median) some key receives more
    than `STRONG`, and the strongest keys receive more than those of the control, by the interval of
    the paired difference. *Weak*: sinks by the sink rule alone, distinguishable from the control.
    *No*: not distinguishable from the control, or neither kind of sink. Controls read the same
    texts, sample by sample.

    Args:
        lack: why there is no control.
    """
    found = mean_over(own.strongest_S)
    if not found.samples:
        return Answer("exist", "not measured", "Not measured: no attention was recorded.")
    held = f"the strongest token of a head receives {percent(found.value)} of its attention"
    values = {CONTROLS[kind]: mean_over(one.strongest_S).value for kind, one in controls.items()}
    name = _first(controls)
    beside = ""
    difference = mean_over([])
    if name:
        own_S = controls[name].own_S
        if own_S is None:
            own_S = own.strongest_S
        difference = mean_over(own_S - controls[name].strongest_S)
        beside = f"{CONTROLS[name]} {percent(values[CONTROLS[name]])}"
        if controls[name].own_S is not None:
            beside += f" ({percent(mean_over(own_S).value)} at the same steps)"
    word = _existence(own, found, difference, is_controlled=bool(name))
    if word == "no" and difference.above() is None:
        control = f"{CONTROLS[name]} ({percent(values[CONTROLS[name]])})"
        sentence = f"No: {held}, not distinguishable from {control}."
    else:
        of = counted(found.samples, "sample")
        start = f"{word.capitalize()}: {held} ({of}, even share {percent(own.even)})"
        if word == "inconclusive":
            lacks = []
            if not found.is_interval:
                lacks.append(f"{FEWEST} needed")
            if not name:
                lacks.append(f"no control: {lack or 'none was run'}")
            start = f"{_undecided(found.samples, 'sample', lacks)}: {held}"
        sentence = f"{start}; with {beside}." if beside else f"{start}."
    numbers = (found.value, found.low, found.high, found.samples, difference.reach, values)
    return Answer("exist", word, sentence, *numbers)


def _first(controls: Mapping[str, Any]) -> str:
    """The control that a sentence names; empty without one."""
    return next((kind for kind in CONTROLS if kind in controls), "")


def _undecided(number: int, noun: str, lacks: Sequence[str]) -> str:
    brackets = f" ({'; '.join(lacks)})" if lacks else ""
    return f"Inconclusive with {counted(number, noun)}{brackets}"


def _existence(
    own: Existence, found: Estimate, difference: Estimate, *, is_controlled: bool
) -> str:
    if not found.is_interval or not is_controlled:
        return "inconclusive"
    if not difference.above():
        return "no"
    strong, ruled = median_over(own.strong_S).above(HEADS), median_over(own.ruled_S).above(HEADS)
    if strong:
        return "yes"
    if ruled:
        return "weak"
    return "inconclusive" if strong is None or ruled is None else "no"


def stays(own: Staying, controls: Mapping[str, Staying]) -> Answer:
    """Answer on the tokens of the sinks, and on whether they *stay*, *move*, or *partly* do: by the
    whole interval of mobility.

    The interval is that of the median over samples; if it holds a cut of `motion_word` the answer
    is *inconclusive*.
    """
    found = median_over(own.mobility_S)
    if not found.samples:
        return Answer(
            "stay",
            "nothing to follow",
            f"Nothing to follow: no head has a sink at two {own.compared}.",
        )
    values = {CONTROLS[kind]: median_over(one.mobility_S).value for kind, one in controls.items()}
    # other statements of a page have the mean
    beside = " (median)"
    if _first(controls):
        name = CONTROLS[_first(controls)]
        beside = f" (median; {name}: no sinks)"
        if not math.isnan(values[name]):
            beside = f" (median; {name} {whole(values[name])})"
    word = staying_word(found)
    moving = f"a head's strongest token differs {whole(found.value)} of the time{beside}"
    if own.holders:
        moving += f"; mostly {' and '.join(label for label, _ in leading(own.holders))}"
    if word == "stay" and own.holders:
        label, share = own.holders[0]
        sentence = (
            f"They stay: {label} is strongest in {whole(share)} of heads and steps; "
            f"two random {own.compared} differ {whole(found.value)} of the time{beside}."
        )
    elif word == "inconclusive":
        # the ends tell between which words
        ends = f"{FEWEST} needed"
        if found.is_interval:
            ends = f"95\u00a0% {100 * found.low:.0f} … {whole(found.high)}"
        sentence = f"{_undecided(found.samples, 'sample', [ends])}: {moving}."
    else:
        start = {"stay": "They stay", "move": "They move", "partly": "Partly"}[word]
        sentence = f"{start}: at two random {own.compared} {moving}."
    numbers = (found.value, found.low, found.high, found.samples)
    return Answer("stay", word, sentence, *numbers, mean_over(own.mobility_S).reach, values)


def staying_word(mobility: Estimate) -> str:
    """*stay*, *move* or *partly*, by the whole interval; *inconclusive* if the interval does not
    decide.
    """
    return STAYING[word_over(mobility)]


def leading(holders: Sequence[tuple[str, float]]) -> list[tuple[str, float]]:
    """The holder of most, and the next if it holds at least half as much."""
    return [one for one in holders[:2] if one[1] >= holders[0][1] / 2]


def costs(own: Cost | None, controls: Mapping[str, float], command: str) -> Answer:
    """Cost of blocking the strongest keys: *costs*, *free*, *inconclusive*, or *not measured*.

    *Costs*: more than as many random keys, by the interval of the paired difference over rows.
    *Free*: not distinguishable from them, with all of the interval below `FREE` of the loss. A
    second sentence says whether a new sink grew (`regrowth`).

    Args:
        own: the losses; None if nothing was scored.
        controls: the cost for controls, in nats a token.
        command: measures it.
    """
    if own is None:
        said = (
            f"Not measured: `{command}` measures it; give its run to `sinklab report` beside "
            "this one."
        )
        return Answer("cost", "not measured", said)
    change = own.masked - own.clean
    span = f"{nats(own.clean, sign='')} → {nats(own.masked, sign='')}"
    if own.delta.is_interval:
        ends = f"{nats(own.delta.low)} … {nats(own.delta.high)}"
        span += f", {counted(own.delta.samples, 'row')}, 95\u00a0% {ends}"
    keys = "" if own.keys == 1 else f" for {own.keys} keys a head"
    sentence = f"{nats(change)} nats a token{keys} ({span})"
    named = {"random tokens": own.random, "non-sinks of equal mass": own.equal_mass}
    named = {name: value for name, value in named.items() if not math.isnan(value)}
    if named:
        words = ", ".join(f"{name} {nats(value)}" for name, value in named.items())
        sentence += f"; {words}".replace("; random", "; as many random")
    word = _cost(own)
    start = {"costs": "Costs", "free": "Free:"}.get(word, "")
    if word == "inconclusive":
        lacks = []
        if not own.delta.is_interval:
            lacks.append(f"{FEWEST} needed")
        if not own.beyond_random.samples:
            lacks.append("random tokens were not scored")
        start = "Inconclusive, no losses of rows were kept:"
        if own.delta.samples:
            start = f"{_undecided(own.delta.samples, 'row', lacks)}:"
    sentence = f"{start} {sentence}. {regrowth(own)}".rstrip()
    named |= {CONTROLS[kind]: value for kind, value in controls.items()}
    numbers = (own.delta.low, own.delta.high, own.delta.samples, own.beyond_random.reach)
    return Answer("cost", word, sentence, change, *numbers, named)


def _cost(own: Cost) -> str:
    gap = own.beyond_random
    if not gap.is_interval:
        return "inconclusive"
    if gap.above():
        return "costs"
    return "free" if gap.high < FREE * own.clean else "inconclusive"


def regrowth(own: Cost) -> str:
    """Whether a new sink grows when the strongest keys are blocked; empty if that was not measured
    or is unclear.

    One grows if another key is above `STRONG` then, and was not before, in at least `HEADS` of the
    heads of the typical row (median), by the whole interval. Its position is named if at least
    `AT_ONE_PLACE` of them stand there.
    """
    found = median_over(own.grown_R)
    has_grown = found.above(HEADS)
    if has_grown is None:
        return ""
    if not has_grown:
        return "No new sink grew."
    place, count = Counter(own.grown_at).most_common(1)[0]
    heads = f"in {whole(found.value)} of heads"
    if count < AT_ONE_PLACE * len(own.grown_at):
        return f"New sinks grew {heads}, at several tokens."
    return f"A new sink grew at the {_ordinal(place)}, {heads}."


def _ordinal(place: int) -> str:
    """A text position in words; «second token» for 1."""
    if place < 0:
        return "added sink"
    return f"{PLACES[place]} token" if place < len(PLACES) else f"token at position {place}"


def contrast(models: Sequence[tuple[Answers, np.ndarray]]) -> str:
    """How the first two models that have sinks differ in whether these stay, in one sentence; empty
    for one model.

    Whether sinks exist is asked first: a model without strong ones is not compared.

    Args:
        models: the answers about each, and its mobility for each of the texts, (S,), which all
            models read alike.
    """
    if len(models) < 2:
        return ""
    strong = [(found.model, own_S) for found, own_S in models if found["exist"].word == "yes"]
    if len(strong) < 2:
        who = f"only {strong[0][0]}" if strong else "no model here"
        have = "has"
        if any(one["exist"].word in ("inconclusive", "not measured") for one, _ in models):
            have = "is known to have"
        least, heads = f"{100 * STRONG:.0f}\u00a0%", f"{100 * HEADS:.0f}\u00a0%"
        return (
            f"No comparison of models: {who} {have} strong sinks (a key above {least} in {heads} "
            "of heads)."
        )
    (more, one_S), (less, other_S) = strong[:2]
    shown = f"{more} {whole(median_over(one_S).value)}, {less} {whole(median_over(other_S).value)}"
    found = mean_over([])
    if len(one_S) == len(other_S):
        found = mean_over(one_S - other_S)
    side = found.above()
    if side is None:
        seen = f"{FEWEST} samples of the same texts would show it"
        if found.is_interval:
            seen = (
                f"{found.samples} samples show {100 * found.reach:.0f} points; more would show less"
            )
        return f"Inconclusive which model's sinks move more: {shown} ({seen})."
    low, high = found.low, found.high
    if not side:
        more, less = less, more
        low, high = -high, -low
    ends = f"{100 * low:+.0f} … {100 * high:+.0f}".replace("-", "−")
    return (
        f"The sinks of {more} move more than those of {less}: {shown} (difference 95\u00a0% "
        f"{ends} points)."
    )


def beside(texts: Mapping[str, str], own: Any = (), theirs: Mapping[str, Any] | None = None) -> str:
    """Numbers of the controls, written behind that of the model: «shuffled weights 6.3 %, fresh
    weights 2.6 %».

    If there is a number for each sample, a control from which the model cannot be distinguished
    (the 95 % interval of the paired difference holds 0) is marked «not distinguishable».

    Args:
        texts: the number of each control as it is written, by the control's name in a run folder;
            empty for none.
        own: (S,) the numbers of the model's samples.
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
