"""Texts scored under several arms, position by position: `LM.compare`."""

import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from torch.nn.functional import cross_entropy

import sinklab
from refusals import refused
from sinklab.core.instrument import BlockKeys, Positions, TopKeys, intervene
from sinklab.lab.measures import EqualMass, MaskPositions, MaskSinks
from sinklab.lab.short_road import LM
from sinklab.lab.short_road.compare import Comparison
from tiny_diffusion import tiny_loaded
from tiny_llama import tiny_llama
from tiny_masked import FAMILIES, tiny_masked, word_tokenizer

TEXTS = [[*range(20, 44)], [*range(60, 80)], [*range(100, 130)]]
ARMS = {
    "sinks": MaskSinks(k=2),
    "random": "block_keys:keys=random:like=top:k=2",
    "first": MaskPositions((0,)),
}


def an_lm(family):
    return LM(**vars(tiny_loaded(1) if family == "diffusion" else tiny_llama()))


def test_positions_of_a_causal_model_cost_what_its_logits_say():
    """The slow twin: one text and one arm after another."""
    lm = an_lm("autoregressive")
    rows = lm.compare(ARMS, TEXTS).to_pandas()
    for number, ids in enumerate(TEXTS):
        for arm, edits in {"none": [], "first": [ARMS["first"]]}.items():
            with intervene(lm.model, *edits) as log, torch.no_grad():
                logits_1SV = lm.model(torch.tensor([ids])).logits
            losses = cross_entropy(logits_1SV[0, :-1], torch.tensor(ids[1:]), reduction="none")
            found = rows[(rows["arm"] == arm) & (rows["text"] == number)]
            assert found["position"].tolist() == [*range(1, len(ids))]
            assert np.allclose(found["nats"], losses, rtol=1e-4)
        assert found["removed"].iloc[0] == pytest.approx(log.dose().removed, abs=1e-6)


@pytest.mark.slow
def test_positions_that_are_read_are_those_that_were_asked_for():
    lm = an_lm("diffusion")
    whole = lm.compare(ARMS, TEXTS, samples=4).to_pandas()
    for read, kept in (("from12", range(12, 99)), ([3, 5], (3, 5))):
        some = lm.compare(ARMS, TEXTS, read=read, samples=4).to_pandas()
        expected = whole[whole["position"].isin(kept)].reset_index(drop=True)
        pd.testing.assert_frame_equal(some, expected, rtol=1e-4)


@pytest.mark.slow
def test_a_summary_has_a_line_for_each_arm_and_pair_and_eight_texts_take_a_verdict():
    lm = an_lm("autoregressive")
    arms = {name: ARMS[name] for name in ("sinks", "random")}
    few = lm.compare(arms, TEXTS)
    assert str(few.summary()).count("(3 texts, 8 needed for a verdict)") == 3
    assert "sinks against random: " in str(few.summary())
    assert "inconclusive" not in str(few.summary())
    many = lm.compare(arms, [[*range(start, start + 24)] for start in range(20, 220, 20)])
    assert len(many.plot().lines) >= 2 and "10 texts" in repr(many)
    assert str(many.summary()).count("(10 texts, 95 %") == 3
    assert "<table" in many._repr_html_()


def test_an_edit_that_notes_no_keys_has_no_new_sinks_in_its_line():
    lm = an_lm("autoregressive")
    told = str(lm.compare({"less": "amplify:positions=0,scale=0.5"}, TEXTS).summary())
    assert "3 texts" in told and "new sink" not in told and "removed" not in told


MASKED = [[0, *words, 2] for words in ([5, 9, 7, 12], [8, 6, 11, 5, 10, 7], [12, 5])]
"""texts of words between [CLS] and [SEP]"""
KINDS = ("bert", "diffusion", "diffusion that starts", "autoregressive", "blocks")


def a_kind(kind):
    """A model of a kind, and texts that it reads."""
    if kind in FAMILIES:
        return sinklab.wrap(tiny_masked(kind), word_tokenizer(), kind="masked"), MASKED
    if kind == "autoregressive":
        # `loss` has it read an end of text first, where it names one
        lm = an_lm(kind)
        return replace(lm, special=replace(lm.special, bos=None, eos=None)), TEXTS
    loaded = tiny_loaded(1, **({"block_length": 8} if kind == "blocks" else {}))
    if kind.endswith("starts"):
        loaded = replace(loaded, special=replace(loaded.special, bos=20))
    return LM(**vars(loaded)), TEXTS


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_text_costs_what_its_loss_says_whatever_the_model(kind):
    """Given tokens, [CLS], [SEP] or a start token, are no tokens without loss."""
    lm, texts = a_kind(kind)
    arms = {"first": BlockKeys(Positions((1,))), "top": BlockKeys(TopKeys(1))}
    rows = lm.compare(arms, texts, samples=4).to_pandas()
    means = rows.groupby(["arm", "text"])["nats"].mean()
    for number, ids in enumerate(texts):
        for arm, edits in {"none": [], "first": [arms["first"]], "top": [arms["top"]]}.items():
            expected = float(lm.loss(ids, edits=edits, samples=4))
            assert means[arm, number] == pytest.approx(expected, rel=1e-4), arm
    if kind in FAMILIES:
        refused(
            "leaves nothing of a text of 6 tokens, of which 4", lm.compare, arms, texts, read=[0]
        )


@pytest.mark.parametrize("arm, other", [("keys", ""), ("control", ",arm=keys")])
def test_one_arm_at_equal_mass_is_refused_without_the_other(arm, other):
    lm, edits = an_lm("diffusion"), {"keys": None, "control": None}
    for name in edits:
        edits[name] = BlockKeys(EqualMass(TopKeys(1), None, name), layers=(0,))
    arms = {"sinks": MaskSinks(k=1), "one": edits[arm]}
    refused(
        f"'one' .* give '.*equal_mass:like=top:k=1{other}[,)].*layers=0,", lm.compare, arms, TEXTS
    )
    elsewhere = {name: replace(edit, layers=(1,)) for name, edit in edits.items() if name != arm}
    refused("'one' .*control of equal mass", lm.compare, arms | elsewhere, TEXTS)
    rows = lm.compare(edits, TEXTS, samples=2).to_pandas()
    assert {*rows["arm"]} == {"none", "keys", "control"}


@pytest.mark.parametrize("family", ["diffusion", "autoregressive"])
def test_a_loss_that_is_no_number_is_refused(family):
    lm = an_lm(family)
    with torch.no_grad():
        lm.model.get_output_embeddings().weight[7] = math.nan
    refused("NaN logits under the arm 'none'", lm.compare, ARMS, TEXTS, samples=2)


def test_what_a_sample_says_against_its_interval_is_said():
    def summary(*costs):
        rows = [
            {"arm": arm, "text": text, "position": 1, "nats": nats, "removed": 0, "regrown": 0}
            for text, cost in enumerate(costs)
            for arm, nats in (("none", 1.0), ("a", 1.0 + cost))
        ]
        return str(Comparison(pd.DataFrame(rows), {"a": "none"}).summary())

    assert "one text bears 62% of it" in summary(5.0, *range(1, 3), *[0.0] * 7)
    assert "no text differs: an effect in 31%" in summary(*[0.0] * 8)
    assert "of it" not in summary(*range(1, 9))


@pytest.mark.slow
def test_controls_that_learned_nothing_are_arms():
    found = an_lm("diffusion").compare({"sinks": MaskSinks(k=1)}, TEXTS, samples=2, controls=True)
    words = ("shuffled weights", "fresh weights")
    assert set(found.baselines) == {"sinks", *(f"sinks ({word})" for word in words)}
    table = found.summary().table.set_index("arm")
    assert table.loc["sinks (fresh weights)", "less"] == "none (fresh weights)"


@pytest.mark.parametrize(
    ("arms", "texts", "how", "named"),
    [
        ({}, TEXTS, {}, "no arm"),
        (["block_keys:keys=top:k=1"], TEXTS, {}, "name: .*'block_keys:keys=top:k=1'"),
        ({"none": "block_keys:keys=top:k=1"}, TEXTS, {}, "'none'"),
        (ARMS, "one text", {}, "several"),
        (ARMS, [[5]], {}, "has 1"),
        (ARMS, TEXTS, {"read": "late"}, "'late'"),
        (ARMS, TEXTS, {"read": "from99"}, "'from99'"),
        ({"far": MaskPositions((25,))}, TEXTS, {}, "position 25"),
        (
            {"a": "block_keys:keys=top:k=1", "a (shuffled weights)": []},
            TEXTS,
            {"controls": True},
            "rename",
        ),
        ({1: "block_keys:keys=top:k=1"}, TEXTS, {}, "got 1"),
        (ARMS, [TEXTS[0], [5, 2, 9]], {}, "text 1 holds .MASK."),
        (ARMS, [[5, 280]], {}, "the id 280"),
        (ARMS, [[5, True]], {}, "token ids, but True"),
        (ARMS, TEXTS, {"read": [2, 999]}, "0 to 29 here, but 999"),
        (ARMS, TEXTS, {"read": [True, False]}, "but True"),
    ],
)
def test_what_makes_no_sense_is_refused(arms, texts, how, named):
    refused(named, an_lm("diffusion").compare, arms, texts, samples=2, **how)


def test_equal_texts_count_once():
    lm = an_lm("autoregressive")
    once, twice = (lm.compare(ARMS, texts).rows for texts in (TEXTS, [*TEXTS, TEXTS[0]]))
    pd.testing.assert_frame_equal(once, twice)


def test_the_first_token_of_a_causal_model_has_no_loss():
    refused("leaves nothing", an_lm("autoregressive").compare, ARMS, TEXTS, read=[0])
