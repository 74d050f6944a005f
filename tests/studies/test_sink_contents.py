"""The script on what sinks carry: its smallest run, the sinks and matches that it takes, and its
probes against planted answers.
"""

import json
import runpy
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch

from launched import ROOT

pytestmark = pytest.mark.ring("lab")

SCRIPT = ROOT / "studies" / "sink_contents.py"
RUN = "tiny-sink-strongest"
BLOCK, FUTURE, COMMITTED, PROMPT = range(4)


@pytest.fixture(scope="module")
def study():
    # under the name of tests/test_docs.py, so that its statistic is registered once
    return runpy.run_path(str(SCRIPT), run_name="imported")


@pytest.fixture(scope="module")
def tables(study, tmp_path_factory):
    """Tables of the smallest run, of the model with an added sink and a control."""
    out, main = tmp_path_factory.mktemp("contents"), study["main"]
    with pytest.MonkeyPatch.context() as patch:
        few = {"permuted": study["UNTRAINED"]["permuted"]}
        patch.setitem(main.__globals__, "UNTRAINED", few)
        patch.setitem(main.__globals__, "CONTROLLED", {"tiny-sink": ("strongest",)})
        main(study["SMALLEST"], out)
    assert {*out.glob("*.png")}
    found = json.loads((out / "results.json").read_text("utf-8"))
    assert [*found] == [RUN]
    return {name: pd.DataFrame(table) for name, table in found[RUN].items() if name != "settings"}


@pytest.mark.slow
def test_the_smallest_run_has_every_table_of_the_page(tables):
    committed = json.loads(SCRIPT.with_suffix("").joinpath("results.json").read_text("utf-8"))
    committed = committed["tiny-strongest"] | committed[RUN]
    other = {"settings", "texts", "texts_with_future_sinks", "sides", "sentences"}
    other.add("probes-initialised")
    assert {*committed} - other <= {*tables}
    for name in committed.keys() & tables:
        more = {"texts"} if name == "looks" else set()
        assert {*tables[name].columns} == {*committed[name]} | more, name
    added = tables["added"]
    assert added["spread"].eq(0).all() and added["share"].between(0, 1, "neither").all()


@pytest.mark.slow
def test_what_must_hold_in_any_run_holds_in_the_smallest(tables):
    # after the last layer the lens is the model, and embeddings of masks are all alike
    last = tables["lens"].query("measure == 'kl' and layer == 6")["value"]
    assert len(last) and last.abs().max() < 1e-5
    future = tables["lens"].query("place == 'future' and layer == 0")
    assert future[future["measure"] == "variation"]["value"].abs().max() < 1e-12
    probes = tables["probes"]
    told = probes.query("place == 'future' and layer == 0")
    assert len(told) and told["value"].abs().max() < 1e-12
    wide = probes.pivot(index=["place", "layer", "target"], columns="population", values="value")
    np.testing.assert_allclose(wide["difference"], wide["sink"] - wide["matched"], atol=1e-9)
    looks = tables["looks"]
    assert (looks["pairs"] <= looks["sinks"].clip(upper=2)).all()


def recorded(received_LHK):
    """A recording of one step, whose first key is an added sink."""
    received_BLHK = torch.tensor(received_LHK)[None]
    visible = torch.full_like(received_BLHK[:, :, 0], received_BLHK.shape[-1])
    return SimpleNamespace(prefix=1, received=[received_BLHK], visible_by_layer=[visible])


@pytest.mark.slow
def test_the_strongest_of_each_place_are_taken_head_by_head(study):
    seen = recorded([[[9.0, 1, 2, 3, 4, 5], [9, 5, 4, 3, 2, 1]]])
    # one position alone has nothing to be compared with
    place_S = np.array([PROMPT, PROMPT, FUTURE, FUTURE, BLOCK])
    chosen = study["chosen_keys"](seen, place_S, "strongest")
    assert chosen.tolist() == [[True, True, True, True, False]]


def test_sinks_are_those_of_the_published_rule(study):
    seen = recorded([[[0.1, 5.0, 0.3, 0.2, 0.2, 0.2], [0.5, 1.1, 1.1, 1.1, 1.1, 1.1]]])
    chosen = study["chosen_keys"](seen, np.zeros(5), "excess")
    assert chosen.tolist() == [[True, False, False, False, False]]


def test_matches_are_alike_and_near(study):
    place_S = np.array([PROMPT] * 4 + [COMMITTED] * 5 + [FUTURE] * 3)
    token_S = np.array([7, 7, 8, 9, 4, 5, 4, 6, 5, 2, 2, 2])
    sink_S = np.isin(np.arange(12), [0, 5, 10])
    pairs = study["matched_pairs"](sink_S, place_S, token_S, np.random.default_rng(0)).tolist()
    # the same token before the nearest: 8 is a 5 as 5 is, though 4 and 6 are nearer
    assert [0, 1] in pairs and [5, 8] in pairs
    assert [10, 9] in pairs or [10, 11] in pairs
    assert len(pairs) == 3


def test_nothing_is_matched_twice(study):
    place_S, token_S = np.full(4, FUTURE), np.full(4, 2)
    sink_S = np.arange(4) < 3
    pairs = study["matched_pairs"](sink_S, place_S, token_S, np.random.default_rng(0))
    # three sinks, one other
    assert pairs[:, 1].tolist() == [3]
    none = study["matched_pairs"](sink_S & False, place_S, token_S, np.random.default_rng(0))
    assert none.shape == (0, 2)


def test_whole_texts_are_exchanged(study):
    text = np.repeat([0, 1, 2], [3, 5, 4])
    target = np.arange(12)[:, None]
    mixed_N = study["shuffled"](target, text)[:, 0]
    for one in range(3):
        rows = mixed_N[text == one].tolist()
        (other,) = {int(text[row]) for row in rows}
        whole = target[text == other, 0].tolist()
        first = whole.index(rows[0])
        assert other != one
        assert rows == [whole[(first + step) % len(whole)] for step in range(len(rows))]


def planted(rng, texts, rows=12, size=32, *, told):
    """States that are alike within a text, and a target that they tell or that belongs to the
    text.
    """
    text = np.repeat(np.arange(texts), rows)
    x = rng.standard_normal((texts, size))[text] + 0.5 * rng.standard_normal((len(text), size))
    if told:
        return x, x[:, :1] + 0.5 * rng.standard_normal((len(text), 1)), text
    return x, rng.standard_normal((texts, 1))[text], text


@pytest.mark.parametrize("told", [False, True])
def test_a_probe_reads_what_was_planted_and_nothing_else(study, told):
    """Each state says which text it is of: rows dealt apart would read what belongs to the text."""
    x, y, text = planted(np.random.default_rng(0), 24, told=told)
    fold = np.arange(24) % 5
    targets = {("progress", "true"): y, ("progress", "shuffled"): study["shuffled"](y, text)}
    held = study["ridge_scores"](x, targets, text, fold)
    count = np.random.default_rng(1).multinomial(24, np.full(24, 1 / 24), 200)
    (row, _, _) = study["with_intervals"](
        [held["progress", "true"]] * 2, [{"texts": 24}] * 3, count
    )
    assert row["low"] > 0.5 if told else row["low"] < 0.05
    assert held["progress", "shuffled"].values(np.ones((1, 24)))[0] < 0.05
    (row, _, _) = study["with_intervals"]([held["progress", "true"]] * 2, [{"texts": 7}] * 3, count)
    assert np.isnan([row["low"], row["high"]]).all()


def test_skill_is_measured_from_the_most_frequent_answer(study):
    answer, text = np.array([0] * 40 + [1] * 20), np.arange(60) % 10
    x = answer[:, None] + 0.01 * np.random.default_rng(0).standard_normal((60, 3))
    targets = {("token", "true"): np.eye(2)[answer]}
    targets["token", "shuffled"] = study["shuffled"](targets["token", "true"], text)
    held = study["ridge_scores"](x, targets, text, np.arange(10) % 5)
    assert held["token", "true"].values(np.ones((1, 10)))[0] == 1
    assert held["token", "shuffled"].values(np.ones((1, 10)))[0] <= 0
