"""Three questions about the attention sinks of a model, answered: of each a word and its numbers.
`sinklab.lab.analysis.sentences` makes the sentence.
"""

# S samples (texts of a trace), R rows of held-out text
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape

import numpy as np
import pandas as pd

from sinklab.lab.analysis import sentences
from sinklab.lab.analysis.estimates import Estimate, mean_over, median_over
from sinklab.lab.analysis.movement import word_over
from sinklab.lab.analysis.sentences import HEADS
from sinklab.lab.analysis.words import CONTROLS

QUESTIONS = {
    "exist": "Do sinks exist?",
    "stay": "Which are they, and do they stay?",
    "cost": "What does blocking them cost?",
}
STAYING = {"static": "stay", "mixed": "partly", "moving": "move", None: "inconclusive"}
"""Words of an answer by the words of `movement.word_over`."""
FREE = 0.05
"""share of the loss that blocked keys may cost and still be called free (limit of Rulli et al.)"""


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
    heads: int = 0
    """heads of all layers; 0 if not known"""
    added_S: np.ndarray = field(default_factory=lambda: np.empty(0))
    """share that the added sinks receive together; empty without any"""


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
    origin: str = ""
    """how the numbers were come by, if not from the samples of the run"""


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
    beyond_equal: Estimate = field(default_factory=lambda: mean_over([]))
    """loss with sinks blocked less that with these keys blocked, over rows"""
    grown_R: np.ndarray = field(default_factory=lambda: np.empty(0))
    """share of heads in which another key is above `STRONG` then, and was not before; empty if not
    measured
    """
    grown_at: Sequence[int] = ()
    """text positions of these keys, one a head and row; below 0 for an added sink"""
    alone: tuple[str, float] | None = None
    """a head whose own key costs more than half of ``delta``, in words, and its cost"""


@dataclass(frozen=True)
class Answer:
    """One question answered: the row of a table, and the sentence that is made of it."""

    question: str
    """one of `QUESTIONS`"""
    word: str
    """yes, weak, no; stay, partly, move, nothing to follow; costs, free; inconclusive; not
    measured
    """
    sentence: str = ""
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
    is_like_control: bool = False
    """whether the model is not distinguishable from the control"""


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
        own: the weight on the strongest keys.
        controls: that of the controls.
        lack: why there is no control.
    """
    found = mean_over(own.strongest_S)
    values = {
        name: mean_over(controls[kind].strongest_S).value
        for kind, name in CONTROLS.items()
        if kind in controls
    }
    difference, at_same_steps = mean_over([]), math.nan
    for one in [controls[kind] for kind in CONTROLS if kind in controls][:1]:
        own_S = own.strongest_S
        if one.own_S is not None:
            own_S, at_same_steps = one.own_S, mean_over(one.own_S).value
        difference = mean_over(own_S - one.strongest_S)
    word = "not measured"
    if found.samples:
        word = _existence(own, found, difference, is_controlled=bool(values))
    numbers = (found.value, found.low, found.high, found.samples, difference.reach, values)
    is_like = word == "no" and difference.above() is None
    answer = Answer("exist", word, "", *numbers, is_like)
    return replace(answer, sentence=sentences.existence(answer, own, at_same_steps, lack))


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
    found, word = median_over(own.mobility_S), "nothing to follow"
    if found.samples:
        word = staying_word(found)
    values = {
        name: median_over(controls[kind].mobility_S).value
        for kind, name in CONTROLS.items()
        if kind in controls
    }
    numbers = (found.value, found.low, found.high, found.samples)
    answer = Answer("stay", word, "", *numbers, mean_over(own.mobility_S).reach, values)
    return replace(answer, sentence=sentences.staying(answer, own))


def staying_word(mobility: Estimate) -> str:
    """*stay*, *move* or *partly*, by the whole interval; *inconclusive* if the interval does not
    decide.
    """
    return STAYING[word_over(mobility)]


def costs(own: Cost | None, controls: Mapping[str, float], command: str) -> Answer:
    """Cost of blocking the strongest keys: *costs*, *free*, *inconclusive*, or *not measured*.

    *Costs*: more than as many random keys, by the interval of the paired difference over rows.
    *Free*: not distinguishable from them, with all of the interval below `FREE` of the loss. A
    second sentence says whether a new sink grew.

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
    named = {"random tokens": own.random, "non-sinks of equal mass": own.equal_mass}
    named = {name: value for name, value in named.items() if not math.isnan(value)}
    named |= {CONTROLS[kind]: value for kind, value in controls.items()}
    numbers = (own.delta.low, own.delta.high, own.delta.samples, own.beyond_random.reach)
    answer = Answer("cost", _cost(own), "", own.masked - own.clean, *numbers, named)
    return replace(answer, sentence=sentences.cost(answer, own))


def _cost(own: Cost) -> str:
    gap = own.beyond_random
    if not gap.is_interval:
        return "inconclusive"
    if gap.above():
        return "costs"
    return "free" if gap.high < FREE * own.clean else "inconclusive"
