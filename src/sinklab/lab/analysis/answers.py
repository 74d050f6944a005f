"""Three questions about the attention sinks of a model, answered: of each a word and its numbers.
`sinklab.lab.analysis.sentences` makes the sentence.
"""

# S samples (texts of a trace)
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from html import escape
from typing import Any

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
OTHERS = {"random": sentences.RANDOM, "equal_mass": sentences.EQUAL}
"""arms of a masking curve -> their names among the controls of an answer"""
FREE = 0.05
"""share of the loss that blocked keys may cost and still be called free (limit of Rulli et al.)"""


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


def named(controls: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of controls by the names that people read, the first in a sentence in front."""
    return {name: controls[kind] for kind, name in CONTROLS.items() if kind in controls}


def exists(
    seen: pd.DataFrame,
    controls: Mapping[str, Any],
    *,
    own_S: Any = None,
    heads: int = 0,
    lack: str = "",
) -> Answer:
    """Whether sinks exist: *yes*, *weak*, *no* or *inconclusive*.

    *Yes*: in at least `HEADS` of the heads of the typical sample (median) some key receives more
    than `STRONG`, and the strongest keys receive more than those of the control, by the interval of
    the paired difference. *Weak*: sinks by the sink rule alone, distinguishable from the control.
    *No*: not distinguishable from the control, or neither kind of sink. Controls read the same
    texts, sample by sample.

    Args:
        seen: a row a sample: strongest, the share of a head's attention that its strongest key
            receives, mean over steps and heads; strong, the share of heads whose strongest key
            receives more than `STRONG`; ruled, the share of the heads, over steps, that have a sink
            by the sink rule; positions; added, the share that the added sinks receive together, NaN
            without any.
        controls: strongest (S,) of each control, by its name in a run folder.
        own_S: what strongest of the model is at the steps that the control read, if it read few.
        heads: of all layers; 0 if not known.
        lack: why there is no control.
    """
    found, theirs = mean_over(seen["strongest"]), named(controls)
    difference = mean_over([])
    for first_S in [*theirs.values()][:1]:
        difference = mean_over(np.subtract(seen["strongest"] if own_S is None else own_S, first_S))
    word = "not measured"
    if found.samples:
        word = _existence(seen, found, difference, is_controlled=bool(theirs))
    values = {name: mean_over(strongest_S).value for name, strongest_S in theirs.items()}
    numbers = (found.value, found.low, found.high, found.samples, difference.reach, values)
    answer = Answer("exist", word, "", *numbers)
    is_like = word == "no" and difference.above() is None
    at_same = math.nan if own_S is None else mean_over(own_S).value
    said = sentences.existence(answer, seen, heads, at_same, lack, is_like=is_like)
    return replace(answer, sentence=said)


def _existence(
    seen: pd.DataFrame, found: Estimate, difference: Estimate, *, is_controlled: bool
) -> str:
    if not found.is_interval or not is_controlled:
        return "inconclusive"
    if not difference.above():
        return "no"
    strong, ruled = (median_over(seen[name]).above(HEADS) for name in ("strong", "ruled"))
    if strong:
        return "yes"
    if ruled:
        return "weak"
    return "inconclusive" if strong is None or ruled is None else "no"


def stays(
    mobility_S: Any,
    controls: Mapping[str, Any],
    holders: Sequence[tuple[str, float]] = (),
    *,
    compared: str = "steps",
    origin: str = "",
) -> Answer:
    """Answer on the tokens of the sinks, and on whether they *stay*, *move*, or *partly* do: by the
    whole interval of mobility.

    The interval is that of the median over samples; if it holds a cut of `motion_word` the answer
    is *inconclusive*.

    Args:
        mobility_S: chance that a head's sink is another key at another step, a number a sample; NaN
            for one without sinks at two steps.
        controls: the same of each control, by its name in a run folder.
        holders: tokens that are the strongest of a head, by falling share of the heads and steps.
        compared: moments that are compared: steps, or of an autoregressive model windows of
            queries.
        origin: how the numbers were come by, if not from the samples of the run.
    """
    found, word = median_over(mobility_S), "nothing to follow"
    if found.samples:
        word = staying_word(found)
    values = {name: median_over(theirs_S).value for name, theirs_S in named(controls).items()}
    numbers = (found.value, found.low, found.high, found.samples)
    answer = Answer("stay", word, "", *numbers, mean_over(mobility_S).reach, values)
    return replace(answer, sentence=sentences.staying(answer, holders, compared, origin))


def staying_word(mobility: Estimate) -> str:
    """*stay*, *move* or *partly*, by the whole interval; *inconclusive* if the interval does not
    decide.
    """
    return STAYING[word_over(mobility)]


def fewest(cost: pd.DataFrame) -> tuple[pd.Series, pd.DataFrame]:
    """The row with nothing blocked, and those with the fewest strongest keys blocked and as many
    others, by control.
    """
    k = cost.loc[cost["control"] == "top", "k"].min()
    return cost[cost["k"] == 0].iloc[0], cost[cost["k"] == k].set_index("control")


def costs(
    cost: pd.DataFrame | None,
    controls: Mapping[str, float],
    command: str,
    alone: tuple[str, float] | None = None,
) -> Answer:
    """Cost of blocking the strongest keys: *costs*, *free*, *inconclusive*, or *not measured*.

    *Costs*: more than as many random keys, by the interval of the paired difference over rows.
    *Free*: not distinguishable from them, with all of the interval below `FREE` of the loss. A
    second sentence says whether a new sink grew.

    Args:
        cost: of a masking curve a row for each number of keys, k, and arm, control (none, top,
            random, equal_mass): loss and mean, its change, in nats a token, and lists with a number
            a row of text: losses; grown, the share of heads in which another key is above `STRONG`
            then, and was not before; grown_at, the text positions of most of these, below 0 for an
            added sink. None if nothing was scored.
        controls: the cost for controls, in nats a token, by their names in a run folder.
        command: measures it.
        alone: a head whose own key costs more than half of that, in words, and its cost.
    """
    if cost is None:
        said = (
            f"Not measured: `{command}` measures it; give its run to `sinklab report` beside "
            "this one."
        )
        return Answer("cost", "not measured", said)
    clean, arms = fewest(cost)
    top = arms.loc["top"]
    losses = {"none": clean["losses"], **arms["losses"]}
    delta, beyond, beyond_equal = (
        mean_over(np.subtract(top["losses"], losses[arm]) if arm in losses else [])
        for arm in ("none", "random", "equal_mass")
    )
    word = "inconclusive"
    if beyond.above():
        word = "costs"
    elif beyond.is_interval and beyond.high < FREE * clean["loss"]:
        word = "free"
    values = {name: arms.loc[arm, "mean"] for arm, name in OTHERS.items() if arm in arms.index}
    values |= named(controls)
    numbers = (delta.low, delta.high, delta.samples, beyond.reach, values)
    answer = Answer("cost", word, "", top["mean"], *numbers)
    is_less = beyond_equal.above() is False
    return replace(answer, sentence=sentences.cost(answer, clean, top, alone, is_less=is_less))
