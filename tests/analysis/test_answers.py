"""The three questions: words by their thresholds, numbers with controls, short sentences."""

import re

import numpy as np
import pandas as pd
import pytest

from sinklab.lab.analysis.answers import Answer, Answers, costs, exists, stays
from sinklab.lab.analysis.sentences import contrast

SPREAD = 0.01 * np.array([-1.0, 1.0, -0.5, 0.5, -0.8, 0.8, -0.2, 0.2])


def seen(strongest, strong=0.0, ruled=0.0, samples=8, added=np.nan):
    """Facts of so many samples."""
    shares = {"strongest": strongest + SPREAD[:samples], "strong": strong, "ruled": ruled}
    return pd.DataFrame(shares | {"positions": 62.5, "added": added})


def words_in(sentence):
    """Numbers and words; signs that stand alone are none."""
    return len(re.findall(r"\S*\w\S*", sentence))


def spoken(answer):
    return answer.sentence.replace("\u00a0", " ")


@pytest.mark.parametrize(
    ("own", "control", "word"),
    [
        (seen(0.388, strong=0.2, ruled=0.8), 0.051, "yes"),
        (seen(0.1, strong=0.0, ruled=0.3), 0.063, "weak"),
        # strong keys in 4 % of heads are too few, whatever their weight
        (seen(0.388, strong=0.04, ruled=0.3), 0.051, "weak"),
        (seen(0.1, strong=0.0, ruled=0.01), 0.063, "no"),
        (seen(0.1, strong=0.2, ruled=0.3), 0.15, "no"),
        (seen(0.388, strong=0.2, ruled=0.8, samples=7), 0.051, "inconclusive"),
        (seen(0.388, strong=0.2, ruled=0.8), None, "inconclusive"),
    ],
)
def test_whether_sinks_exist_is_a_word_by_its_thresholds(own, control, word):
    controls = {}
    if control is not None:
        controls = {"initialised": 0.02 + SPREAD[:2], "permuted": control + SPREAD[: len(own)]}
    found = exists(own, controls)
    assert found.word == word and found.sentence.casefold().startswith(word)
    assert words_in(found.sentence) <= 25
    if control is not None:
        assert found.controls["shuffled weights"] == pytest.approx(control, abs=0.001)
        assert f"{100 * found.controls['shuffled weights']:.1f} %" in spoken(found)


def test_the_sentence_on_existence_has_its_numbers_and_the_control():
    found = exists(seen(0.388, strong=0.2, ruled=0.8), {"permuted": 0.051 + SPREAD})
    assert spoken(found) == (
        "Yes: the strongest token of a head receives 38.8 % of its attention (8 samples, even "
        "share 1.6 %); with shuffled weights 5.1 %."
    )
    # as strong as the control, give or take: a test of the paired difference, whatever part of it
    # that is
    same = exists(seen(0.1, ruled=0.3), {"permuted": 0.1 + SPREAD[::-1]})
    assert same.word == "no" and "not distinguishable from shuffled weights (10.0 %)" in spoken(
        same
    )
    assert same.detectable > 0
    # a control that read a few steps is compared with the same steps
    lately = {"permuted": 0.2 + SPREAD[::-1]}
    beside = exists(seen(0.3, ruled=0.3), lately, own_S=0.4 + SPREAD)
    assert beside.word == "weak", "0.3 and 0.2 would overlap"
    assert "with shuffled weights 20.0 % (40.0 % at the same steps)" in spoken(beside)
    few = exists(seen(0.1, samples=1), {})
    assert "Inconclusive with 1 sample (8 needed; no control: none was run): " in few.sentence


@pytest.mark.parametrize(
    ("mobility", "word", "start"),
    [
        (
            0.07,
            "stay",
            "They stay: the first token is strongest in 77 % of heads and steps; between two "
            "random steps a head's strongest token changes 7 % of the time",
        ),
        (
            0.8,
            "move",
            "They move: between two random steps a head's strongest token changes 80 % of the time",
        ),
        (
            0.4,
            "partly",
            "Partly: between two random steps a head's strongest token changes 40 % of the time",
        ),
        (
            0.25,
            "inconclusive",
            "Inconclusive with 8 samples (95 % 24 … 26 %): between two random steps",
        ),
    ],
)
def test_whether_they_stay_is_said_by_the_whole_interval(mobility, word, start):
    holders = [("the first token", 0.77), ("“.”", 0.1)]
    found = stays(mobility + SPREAD, {"permuted": 0.55 + SPREAD}, holders)
    assert (
        found.word == word
        and spoken(found).startswith(start)
        and "; shuffled weights 55 %)" in spoken(found)
    )
    assert words_in(found.sentence) <= 30
    few = stays(mobility + SPREAD[:1], {}, holders)
    assert few.word == "inconclusive" and "with 1 sample (8 needed)" in few.sentence


def test_the_tokens_that_are_sinks_are_named():
    found = stays(0.8 + SPREAD, {}, [("[MASK]", 0.3), ("“.”", 0.16), ("“the”", 0.15)])
    assert found.sentence.endswith("; mostly [MASK] and “.”.")
    assert stays(np.full(8, np.nan), {}).word == "nothing to follow"


def cost(top, random, equal_mass=None, rows=8, wobble=1.0):
    """A table of costs: loses of so many rows, with one key blocked."""
    spread_R = wobble * SPREAD[:rows]
    arms = {
        "none": (0, 0 * spread_R),
        "top": (1, top + spread_R),
        "random": (1, random + spread_R[::-1]),
    }
    if equal_mass is not None:
        arms["equal_mass"] = (1, equal_mass + spread_R)
    return pd.DataFrame(
        {
            "k": k,
            "control": name,
            "mean": cost_R.mean(),
            "loss": 3.73 + cost_R.mean(),
            "losses": [*(3.73 + cost_R)],
            "grown": [np.nan] * rows,
            "grown_at": [],
        }
        for name, (k, cost_R) in arms.items()
    )


def test_what_masking_costs_is_held_against_random_keys():
    found = costs(cost(0.18, 0.0, 0.18), {"permuted": 0.01}, "sinklab curve")
    low, high = found.low, found.high
    assert found.word == "costs" and spoken(found) == (
        f"Costs +0.18 nats a token (3.73 → 3.91, 8 rows, 95 % +{low:.2f} … +{high:.2f}); as many "
        "random tokens +0.00, non-sinks of equal mass +0.18."
    )
    assert found.controls["shuffled weights"] == 0.01 and words_in(found.sentence) <= 25
    assert costs(cost(0.0, 0.0), {}, "").word == "free"
    # of 3.73 nats 5 % are 0.19: with rows that differ so much it may be more
    assert costs(cost(0.0, 0.0, wobble=40), {}, "").word == "inconclusive"
    few = costs(cost(0.68, 0.0, rows=4), {}, "")
    assert few.word == "inconclusive" and few.sentence.startswith(
        "Inconclusive with 4 rows (8 needed): +0.68 nats"
    )
    none = costs(None, {}, "sinklab curve --model x")
    assert none.word == "not measured" and "`sinklab curve --model x`" in none.sentence


def test_what_a_newcomer_would_ask_is_said():
    alone, control = seen(0.1, strong=1 / 36, ruled=0.3), {"permuted": 0.063 + SPREAD}
    weak = exists(alone.assign(added=0.01 + SPREAD / 10), control, heads=36)
    assert "above 30 % in 1 of 36 heads" in spoken(weak)
    assert spoken(weak).endswith("the added sink receives 1.0 %, less than an even share.")
    much = exists(alone.assign(added=0.2 + SPREAD), control)
    assert spoken(much).endswith("; the added sink receives 20.0 %.")
    said = spoken(costs(cost(0.18, 0.0, 0.73, wobble=0.1), {}, ""))
    assert "), less than non-sinks of equal mass +0.73; as many random tokens +0.00." in said


def model(name, exist, mobility_S):
    answers = [Answer("exist", exist, ""), Answer("stay", "", ""), Answer("cost", "", "")]
    return Answers(name, tuple(answers)), mobility_S, [*"abcdefgh"]


def test_models_are_compared_once_both_have_strong_sinks():
    one, other = model("a", "yes", 0.6 + SPREAD), model("b", "yes", 0.1 - SPREAD)
    weak = model("c", "weak", 0.9 + SPREAD)
    assert contrast([one]) == ""
    assert "only a has strong sinks" in contrast(
        [weak, one]
    ) and "no model here has strong" in contrast([weak, weak])
    assert contrast([weak, other, one]).startswith("The sinks of a move more than those of b: a 60")
    for pair in ([one, other], [other, one]):
        # whichever stands first, the difference is that of the one that moves more
        ends = re.findall(r"[+−]\d+", contrast(pair).split("95")[1])
        assert len(ends) == 2 and all(end.startswith("+") for end in ends)
    same = contrast([one, model("d", "yes", 0.6 + SPREAD[::-1])])
    assert (
        same.startswith("Inconclusive which model's sinks move more: ")
        and "8 samples show " in same
    )


def test_answers_are_a_table_and_three_sentences():
    three = (
        exists(seen(0.388, strong=0.2, ruled=0.8), {"permuted": 0.051 + SPREAD}),
        stays(0.07 + SPREAD, {}),
        costs(cost(0.18, 0.0), {}, ""),
    )
    found = Answers("x", three)
    assert str(found).splitlines() == [one.sentence for one in three] == found.sentences
    assert found["cost"].word == "costs"
    table = found.table
    assert table["word"].tolist() == ["yes", "stay", "costs"] and table["model"].unique() == ["x"]
    assert table["shuffled weights"].iloc[0] == pytest.approx(0.051) and np.isnan(
        table["shuffled weights"].iloc[1]
    )
    assert {"value", "low", "high", "samples", "detectable", "sentence"} <= {*table.columns}
