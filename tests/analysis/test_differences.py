"""One table of effects: what is paired with what, what is counted, and how often its words are
wrong.
"""

# S samples
import numpy as np
import pandas as pd
import pytest
from scipy import stats

from refusals import refused
from sinklab.lab.analysis.differences import INCONCLUSIVE, effects
from sinklab.lab.analysis.estimates import mean_over, mean_p


def rows_of(**arms):
    """Rows of arms, a value for every sample."""
    return pd.DataFrame(
        {"arm": arm, "sample": number, "value": value, "removed": 0.1 * len(arm)}
        for arm, values in arms.items()
        for number, value in enumerate(values)
    )


RNG = np.random.default_rng(0)
NONE_S = RNG.normal(5, 1, 12)
ARMS = {"none": NONE_S, "top": NONE_S + RNG.normal(2, 0.5, 12), "random": NONE_S + 0.01}


def test_a_line_per_arm_and_pair_is_the_interval_of_paired_differences():
    table = effects(rows_of(**ARMS), base="none", pairs=[("top", "random")], doses=["removed"])
    assert table[["arm", "less"]].to_numpy().tolist() == [
        ["top", "none"],
        ["random", "none"],
        ["top", "random"],
    ]
    apart_S = ARMS["top"] - ARMS["random"]
    over, line = mean_over(apart_S), table.iloc[2]
    assert (line["mean"], line["low"], line["high"]) == pytest.approx((over.value, *over.interval))
    assert (line["detectable"], line["n"], line["missing"]) == (pytest.approx(over.reach), 12, 0)
    # the greatest of three p-values, and never less than a smaller one became
    assert line["p"] == pytest.approx(3 * mean_p(apart_S), rel=1)
    assert table["removed"].tolist() == pytest.approx([0.3, 0.6, 0.3])
    assert line["verdict"] == "above"
    alone = effects(rows_of(**ARMS), threshold=100, words=("more", "less"))
    assert alone["less"].isna().all() and {*alone["verdict"]} == {"less"}


def test_a_missing_value_takes_the_sample_out_of_its_pairs_alone():
    rows = rows_of(**ARMS)
    rows.loc[(rows["arm"] == "top") & (rows["sample"] == 3), "value"] = np.nan
    rows = rows[(rows["arm"] != "top") | (rows["sample"] != 5)]
    table = effects(rows, base="none", pairs=[("top", "random")])
    assert table["n"].tolist() == [10, 12, 10] and table["missing"].tolist() == [2, 0, 2]
    kept = [number for number in range(12) if number not in (3, 5)]
    assert table["mean"][0] == pytest.approx((ARMS["top"] - NONE_S)[kept].mean())
    rows.loc[rows["arm"] == "top", "value"] = np.nan
    nothing = effects(rows, base="none").iloc[0]
    assert (nothing["n"], nothing["caution"], nothing["verdict"]) == (0, "", INCONCLUSIVE)


def test_equal_texts_count_once():
    rows = rows_of(**ARMS).assign(text=lambda rows: rows["sample"] % 6)
    table = effects(rows, base="none", unit="text")
    assert table["n"].tolist() == [6, 6] and table["low"].isna().all()
    assert {*table["verdict"]} == {"inconclusive"} and table["p"].isna().all()
    assert table["mean"][0] == pytest.approx((ARMS["top"] - NONE_S).mean())


def test_arms_may_have_several_columns():
    rows = rows_of(**ARMS).assign(
        k=lambda rows: rows["arm"].map({"none": 0, "top": 1, "random": 1})
    )
    table = effects(rows, arm=("k", "arm"), base=(0, "none"))
    assert table[["k", "arm"]].to_numpy().tolist() == [[1, "top"], [1, "random"]]
    assert table["less"].tolist() == [(0, "none")] * 2


def test_right_answers_are_compared_as_shares():
    before_S, after_S = np.repeat([1.0, 0.0], [80, 20]), np.repeat([1.0, 0.0], [50, 50])
    (line,) = effects(
        rows_of(none=before_S, top=after_S), pairs=[("none", "top")], design="binary"
    ).to_dict("records")
    # 30 lost and none gained, with half an answer more in every cell
    assert line["mean"] == pytest.approx(0.3) and 0.18 < line["low"] < line["high"] < 0.4
    assert line["verdict"] == "above" and line["p"] < 1e-4
    all_lost = rows_of(none=np.ones(8), top=np.zeros(8))
    (line,) = effects(all_lost, pairs=[("none", "top")], design="binary").to_dict("records")
    # the interval ends at 1, its p-value is that of the uncut one
    error = np.sqrt(9 - 64 / 10) / 10
    assert line["high"] == 1 and line["p"] == pytest.approx(2 * stats.norm.sf(0.8 / error))
    refused("0.5", effects, rows_of(a=[0.5] * 9), design="binary")


def crossed_rows(values_TG):
    texts, seeds = np.indices(values_TG.shape)
    columns = {"text": texts.ravel(), "seed": seeds.ravel(), "value": values_TG.ravel()}
    return pd.DataFrame(columns).assign(arm="a")


def test_texts_are_crossed_with_seeds():
    values_TG = RNG.normal(size=(12, 3)) + 3.0 * np.arange(-1, 2)
    how = {"unit": ("text", "seed"), "design": "crossed"}
    (line,) = effects(crossed_rows(values_TG), **how).to_dict("records")
    # two degrees of freedom of three seeds that differ
    assert line["high"] - line["mean"] > 3 and line["n"] == 12
    values_TG[4, 1] = np.nan
    (line,) = effects(crossed_rows(values_TG), **how).to_dict("records")
    assert (line["n"], line["missing"]) == (11, 1)
    (line,) = effects(crossed_rows(values_TG[:, :1]), **how).to_dict("records")
    one = values_TG[:, 0]
    assert line["low"] == pytest.approx(one.mean() - stats.t.ppf(0.975, 11) * stats.sem(one))


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ({"base": "zzz"}, "'none', 'top', 'random', got 'zzz'"),
        ({"pairs": [("top", "zzz")]}, "'zzz'"),
        ({"design": "nested"}, "nested"),
        ({"unit": "text"}, "arm, text, value, got 36"),
        ({"design": "crossed"}, "text and seed"),
    ],
)
def test_what_makes_no_sense_is_refused(how, named):
    refused(named, effects, rows_of(**ARMS), **how)
    refused("infinite", effects, rows_of(a=[1.0, np.inf]))


def false_alarms(draw, **how):
    """Share of 40 worlds without any difference in which some word is said."""
    words = 0
    for seed in range(40):
        words += (
            effects(draw(np.random.default_rng(seed)), **how)["verdict"] != INCONCLUSIVE
        ).any()
    return words / 40


@pytest.mark.slow
def test_a_word_is_seldom_said_where_nothing_differs():
    """Without the correction a word is said in four of ten such worlds, and as often of seeds that
    are not crossed.
    """
    arms = [f"arm {number}" for number in range(10)]

    def losses(rng):
        return rows_of(**{arm: rng.normal(size=12) for arm in arms})

    def answers(rng):
        ease_S = rng.random(40)
        return rows_of(**{arm: (rng.random(40) < ease_S).astype(float) for arm in arms})

    def seeds(rng):
        values_TG = rng.normal(0, 1, 3) + rng.normal(size=(24, 1)) + rng.normal(size=(24, 3))
        return crossed_rows(values_TG)

    # 5 %, and two standard errors of 40 worlds; intervals of shares are a little short
    assert false_alarms(losses) <= 0.119
    assert false_alarms(answers, base=arms[0], design="binary") <= 0.17
    assert false_alarms(seeds, unit=("text", "seed"), design="crossed") <= 0.119
