"""The referee: what rounding makes of margins and scores, in worlds with a known answer and on
runs.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import scipy

from refusals import refused
from sinklab.extras.referee import Referee, RefereeSettings
from sinklab.extras.referee.margins import PROBES
from sinklab.extras.referee.rounding import (
    Noise,
    change_chances,
    counted,
    draws_variance,
    known_noise,
    noise_between,
    pooled_noise,
    redrawn,
    swing,
)
from sinklab.extras.referee.run import rounding_table
from sinklab.lab.checkpoints.loading import load
from sinklab.lab.records.reading import open_run
from sinklab.lab.records.writing import RunWriter
from sinklab.lab.studies.base import describe
from sinklab.lab.studies.processes import Amount
from sinklab.lab.studies.trace.study import StudySettings, study

CPU = {"dtype": "bfloat16", "device": "cpu"}


def test_counts_are_binomial_where_all_chances_are_one():
    law = scipy.stats.binom(20, 0.3)
    assert counted(np.full((5, 20), 0.3)) == (pytest.approx(6), law.ppf(0.025), law.ppf(0.975))
    assert counted(np.zeros((3, 20))) == (0, 0, 0)
    assert counted(np.ones((3, 20))) == (20, 20, 20)


def test_noise_is_pooled_as_far_as_margins_are_alike():
    draw = np.random.default_rng(0)
    shifts = draw.normal(0, 2.0, (400, 4))
    noise, freedom = pooled_noise(np.sqrt((shifts**2).mean(1)), 4)
    assert freedom > 40 and np.abs(noise / 2.0 - 1).max() < 0.3
    scales = np.exp(draw.normal(0, 1.5, 400))
    raw = np.sqrt(((shifts / 2 * scales[:, None]) ** 2).mean(1))
    noise, freedom = pooled_noise(raw, 4)
    assert freedom < 8 and np.corrcoef(np.log(noise), np.log(scales))[0, 1] > 0.9
    assert pooled_noise(np.array([0.0, 1.0, 2.0]), 4)[0][0] == 0


def world(draw, multiple, probes=4):
    """Margins of 12 texts with the noise that probes saw, and how many texts rounding of this size
    changed.
    """
    rows = np.repeat(np.arange(12), 20)
    margin, scale = draw.exponential(1.0, len(rows)), 0.02 * np.exp(draw.normal(0, 0.3, len(rows)))
    noise = np.sqrt(((draw.normal(size=(len(rows), probes)) * scale[:, None]) ** 2).mean(1))
    flipped = margin + multiple * scale * draw.normal(size=len(rows)) < 0
    table = pd.DataFrame({"row": rows, "kind": "token", "margin": margin, "noise": noise})
    return table, int(pd.Series(flipped).groupby(rows).any().sum())


@pytest.mark.slow
def test_intervals_of_changed_texts_cover_what_happens():
    """Sizes of rounding that vary between models as the noise says: 95 % intervals, told from
    margins alone.
    """
    draw, told = np.random.default_rng(1), Noise("planted", np.log(2.0), 0.2, 60)
    inside, widths, changed = 0, [], []
    for _ in range(100):
        table, count = world(draw, 2.0 * np.exp(draw.normal(0, 0.2)))
        mean, low, high = counted(change_chances(table, told, 4))
        inside, changed = inside + (low <= count <= high), [*changed, count - mean]
        widths.append(high - low)
    assert 0.9 <= inside / 100 <= 0.995 and np.mean(widths) < 8
    assert abs(np.mean(changed)) < 0.4
    larger = sum(
        world(draw, 12.0)[1] > counted(change_chances(world(draw, 2.0)[0], told, 4))[2]
        for _ in range(20)
    )
    assert larger >= 18, "rounding six times as large is more than is foretold"


def test_two_runs_that_differ_by_rounding_lie_within_the_swing():
    """Items of any difficulty, each drawn anew in both runs: 95 % of the differences, or more, lie
    within.
    """
    draw = np.random.default_rng(2)
    chances = draw.beta(2, 1, 1319)
    scores = (draw.random((2000, 2, 1319)) < chances).mean(2)
    within = [abs(one - other) <= swing(1319, redrawn(one, other)) for one, other in scores]
    assert np.mean(within) >= 0.95
    exact = float((2 * chances * (1 - chances)).mean())
    assert np.mean(np.abs(np.subtract(*scores.T)) <= swing(1319, exact)) == pytest.approx(
        0.95, abs=0.02
    )
    assert swing(1319, redrawn(0.775, 0.728)) == pytest.approx(0.0330, abs=1e-4), (
        "the worked example of the docs"
    )


def test_what_was_not_measured_is_extrapolated():
    kinds = noise_between(CPU)
    assert {*kinds} == {"bfloat16.backend", "bfloat16.fast", "bfloat16.batch"}
    assert {*noise_between(CPU, CPU | {"dtype": "float32"})} == {"float32.bfloat16"}
    assert {*noise_between(CPU, CPU | {"device": "cuda"})} == {*kinds, "device"}
    assert noise_between(CPU | {"device": "cuda"})["device"] == max(
        kinds.values(), key=lambda noise: noise.log
    )
    assert {*noise_between({"dtype": "int4", "device": "cpu"})} == {"device"}
    known = known_noise()
    assert (
        known["float32.batch"].log
        < known["float32.float16"].log - 3
        < known["float32.bfloat16"].log - 3
    )


def test_draws_of_likelihoods_change_what_is_near():
    items = pd.DataFrame(
        {"right": [1.0, 1.0], "logprobs": [[-1.0, -1.0], [-1.0, -9.0]], "stderrs": [[0.5, 0.5]] * 2}
    )
    assert draws_variance(items) == pytest.approx(0.25 / 4, abs=0.005)


def benchmark(path, rights, texts, more=None, seed=0, **model):
    """A folder as `sinklab eval` leaves it, with these columns in place of those of written
    answers.
    """
    about = {
        "name": "elsewhere",
        "family": "diffusion",
        "dtype": "float32",
        "device": "cuda",
        "weights_sha256": "0",
    }
    with RunWriter(
        path, kind="benchmark", model=about | model, settings={"seed": seed}, seed=seed
    ) as run:
        columns = {
            "task": "gsm8k",
            "filter": "strict",
            "doc_id": range(len(rights)),
            "response": texts,
        }
        columns |= {
            "prompt": [f"question {number}" for number in range(len(rights))],
            "right": np.array(rights, float),
        }
        columns |= {"answer": "", "target": "#### 7", "cut": 0}
        columns |= {"logprobs": [[]] * len(rights), "stderrs": [[]] * len(rights)}
        run.table("samples", pd.DataFrame(columns | (more or {})))
    return path


def compared(tmp_path, *runs):
    """The run of a referee over benchmarks, without their texts."""
    settings = RefereeSettings(runs=tuple(map(str, runs)), texts=0)
    return open_run(Referee()(None, tmp_path / "out", settings))


@pytest.mark.parametrize(
    ("lost", "word"), [(10, "cannot be told"), (62, "rounding cannot give this difference")]
)
def test_two_runs_are_compared_in_pairs(tmp_path, lost, word):
    rights = [1] * 155 + [0] * 45
    other = [0] * (lost + 4) + [1] * (151 - lost) + [1] * 4 + [0] * 41
    one = benchmark(tmp_path / "one", rights, ["a"] * 200)
    two = benchmark(tmp_path / "two", other, ["b"] * 20 + ["a"] * 180, device="a100")
    out = compared(tmp_path, one, two)
    facts = out.table("verdict").iloc[0]
    assert (facts.scored, facts.gained, facts.lost, facts.apart) == (200, 4, lost + 4, 20)
    assert facts.difference == pytest.approx(-lost / 200) and facts.low < -lost / 200 < facts.high
    assert (
        facts.p == pytest.approx(scipy.stats.binomtest(4, lost + 8).pvalue)
        and facts.differ_in == "device"
    )
    said = Referee().sentences([out])
    assert any(word in line for line in said), said
    assert out.table("variance").set_index("part").loc["items", "variance"] == pytest.approx(
        0.775 * 0.225 / 200
    )


def test_choices_are_compared_by_what_was_chosen(tmp_path):
    """Answers by likelihoods have no text; beside them stand written ones, which have no
    likelihoods.
    """
    more = {"task": ["arc", "arc", "gsm8k"], "logprobs": [[-1.0, -2.0], [-1.0, -2.0], []]}
    more |= {"stderrs": [[1.0, 1.0], [1.0, 1.0], []], "answer": ["a knife", "a fork", "7"]}
    runs = [benchmark(tmp_path / "one", [1, 1, 1], ["", "", "it is 7"], more)]
    more |= {"answer": ["a knife", "a spoon", "7"]}
    runs.append(benchmark(tmp_path / "two", [1, 0, 1], ["", "", "it is 7"], more))
    out = compared(tmp_path, *runs)
    assert out.table("verdict").iloc[0][["items", "apart", "scored", "lost"]].tolist() == [
        3,
        1,
        3,
        1,
    ]
    assert out.table("variance").set_index("part").loc["estimator draws", "variance"] > 0


def test_items_that_are_not_scored_are_not_apart_by_the_seed(tmp_path):
    rights = [[1, 0, 1, 0, np.nan, np.nan], [1, 0, 0, 0, np.nan, np.nan]]
    runs = [
        benchmark(tmp_path / str(seed), right, ["a"] * 6, seed=seed)
        for seed, right in enumerate(rights)
    ]
    out = compared(tmp_path, *runs)
    assert out.table("verdict").iloc[0]["differ_in"] == "seed"
    assert out.table("variance").set_index("part").loc["seed", "variance"] == pytest.approx(
        0.25 / (2 * 4)
    )


@pytest.mark.parametrize("items", [16, 400])
def test_few_texts_and_few_ties_do_not_say_that_rounding_changes_nothing(items):
    """None of 16 texts, and no answer at 12 ties: of 400 items it may still be many, of those 16
    none.
    """
    found = pd.DataFrame({"row": range(16), "kind": "token", "margin": 9.0, "noise": 0.01})
    run: Any = SimpleNamespace(info=SimpleNamespace(model=CPU))
    plan: Any = SimpleNamespace(runs=[run], items=range(items))
    for answers, least in ((np.zeros(12, bool), 0.19 * 0.24), (np.ones(12, bool), 0.19)):
        table = rounding_table(plan, found, pd.DataFrame({"answer": answers}))
        assert (table["high"] == 0).all() and (table["answers"] < 1e-3).all()
        expected = pytest.approx(least if items > 16 else 0.0, abs=0.01)
        assert table["answers_high"].max() == expected and table["answers_high"].min() == expected


def test_a_share_of_an_answer_is_neither_right_nor_wrong(tmp_path):
    """A metric between 0 and 1 (F1, a probability) has no pairs of right and wrong, and no binomial
    variance.
    """
    shares = np.linspace(0.1, 0.8, 20)
    runs = [
        benchmark(tmp_path / str(add), [*(shares + add), 1.0, 0.0], ["a"] * 22)
        for add in (0.0, 0.01)
    ]
    out = compared(tmp_path, *runs)
    facts = out.table("verdict").iloc[0]
    assert (facts["items"], facts.scored, facts.gained, facts.difference) == (22, 2, 0, 0.0)
    assert out.table("variance").set_index("part").loc["items", "variance"] == pytest.approx(
        0.25 / 2
    )


@pytest.mark.slow
def test_answers_are_written_again_as_long_as_they_were(tmp_path):
    """The length that a task asks for, or what a prompt leaves of the context, stands with each
    answer.
    """
    about = describe(load("tiny"))
    one = benchmark(
        tmp_path / "one", [1, 1, 0], ["a"] * 3, {"new_tokens": [4, 3, 4], "cut": [0, 1, 0]}, **about
    )
    out = open_run(Referee()(None, tmp_path / "out", RefereeSettings(runs=(str(one),), forced=0)))
    found = out.table("margins")
    assert found[found["kind"] == "token"].groupby("row").size().tolist() == [4, 3, 4]
    prompt = load("tiny").tokenizer("question 1")["input_ids"]
    assert found.loc[found["row"] == 1, "column"].min() == len(prompt) - 1


@pytest.mark.slow
def test_a_trace_is_judged_by_its_margins(tmp_path):
    lm, short = (
        load("tiny"),
        StudySettings(prompts=("The sea", "It was a dark night"), new_tokens=6, statistics=()),
    )
    study(lm, tmp_path / "plain", short)
    asked = RefereeSettings(runs=(str(tmp_path / "plain"),), forced=4)
    out = Referee()(None, tmp_path / "out", asked)
    # steps of a batch that is read once, and as often under jitter, and of one that goes on from
    # near ties
    words, positions = "2 texts × 6 steps, and up to 4 near ties", 2 * (6 + (7 + 19) // 2 // 4)
    amount = Referee().amount(asked, None)
    assert amount == Amount(words, 6 * (1 + PROBES + 1), positions, lm.model.num_parameters(), 6)
    assert Referee().amount(replace(asked, texts=0), None).evaluations == 0
    run = open_run(out)
    found, forced, rounding = (run.table(name) for name in ("margins", "forced", "rounding"))
    assert found.groupby("row").size().tolist() == [11, 11] and (found["margin"] >= 0).all()
    assert forced["text"].any() and forced["tokens"].between(0, 1).all() and len(forced) <= 4
    assert {*rounding["kind"]} == {"float32.backend", "float32.fast", "float32.batch"}
    assert (rounding["high"] == 0).all(), "float32 rounding changes none of these texts"
    said = " ".join(Referee().sentences([run]))
    assert (
        "12 choices in token" in said
        and "95 % interval 0 to 0" in said
        and "EXTRAPOLATED" not in said
    )
    again = Referee()(
        None, tmp_path / "both", RefereeSettings(runs=(str(tmp_path / "plain"),) * 2, texts=0)
    )
    assert (
        "0 of 2 texts differ between the two runs, which differ in: nothing"
        in Referee().sentences([open_run(again)])[0]
    )


def test_what_cannot_be_judged_is_refused(tmp_path):
    refused("give RUN or RUN OTHER", Referee(), None, tmp_path / "out", RefereeSettings())
    refused("got 3", RefereeSettings, runs=("a", "b", "c"))
    refused("give RUN or RUN OTHER", Referee().amount, RefereeSettings(), None)
    causal = benchmark(tmp_path / "causal", [1], ["a"], family="autoregressive")
    refused(
        "texts that a diffusion model",
        Referee(),
        None,
        tmp_path / "out",
        RefereeSettings(runs=(str(causal),)),
    )
    with RunWriter(tmp_path / "curve", kind="curve", model={"name": "x"}, settings={}, seed=0):
        pass
    refused(
        "is of kind 'curve'",
        Referee(),
        None,
        tmp_path / "out",
        RefereeSettings(runs=(str(tmp_path / "curve"),)),
    )
