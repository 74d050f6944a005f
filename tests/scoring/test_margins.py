"""Margins of a greedy decoder, their noise, and what becomes of a text when the runner-up is
taken.
"""

import copy
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from refusals import refused
from sinklab.core.sampling.canvas import Canvas
from sinklab.core.sampling.settings import DecodingSettings
from sinklab.extras.referee.margins import first_difference, measure_margins, near_ties, rewritten
from sinklab.lab.checkpoints.loading import load
from sinklab.lab.testing.values import MASK_ID, tiny_model

PROMPTS = [[5, 9, 11], [7, 3, 22, 40, 8], [33, 4]]


@pytest.fixture(scope="module")
def random():
    return replace(load("tiny"), model=tiny_model(), tokenizer=None, name="random")


def canvas(new_tokens=6):
    return Canvas.from_prompts(PROMPTS, new_tokens=new_tokens, mask_id=MASK_ID, pad_id=0)


@pytest.fixture(scope="module")
def plain(random):
    return measure_margins(random, canvas(), DecodingSettings(seed=0), plain=True)


def test_margins_are_those_of_plain_forwards(random, plain):
    """One token a step: logits and probabilities of every step, computed anew, give the same two
    margins.
    """
    ids_BS, found = plain
    steps = [*random.model.denoise(canvas(), DecodingSettings(seed=0))]
    assert torch.equal(ids_BS, steps[-1].ids_BS)
    assert (found["kind"] == "token").sum() == 18 and (found["kind"] == "order").sum() == 15
    for line in found.itertuples():
        step = steps[line.step]
        with torch.no_grad():
            logits_BSV = random.model(step.before_BS, canvas().attention_BS).logits.double()
        row_SV = logits_BSV[line.row].clone()
        row_SV[:, MASK_ID] = -torch.inf
        if line.kind == "token":
            best = row_SV[line.column].topk(2)
            assert best.indices.tolist() == [line.token, line.other]
            expected = best.values[0] - best.values[1]
        else:
            chances_S = (
                logits_BSV[line.row].softmax(-1).gather(-1, row_SV.argmax(-1, keepdim=True))[:, 0]
            )
            expected = chances_S[line.column] - chances_S[line.other]
            masked_S = step.masked_BS[line.row]
            assert chances_S[masked_S].topk(2).values.diff().neg().item() == pytest.approx(
                expected.item(), abs=1e-5
            )
        assert line.margin == pytest.approx(expected.item(), abs=2e-5) and line.margin >= 0


def test_a_threshold_has_a_distance(random):
    settings = DecodingSettings(schedule="threshold", threshold=0.3, seed=0)
    _, found = measure_margins(random, canvas(), settings, probes=0)
    steps = [*random.model.denoise(canvas(), settings)]
    lines = found[found["kind"] == "threshold"]
    assert len(lines)
    for line in lines.itertuples():
        confidence_S = steps[line.step].confidence_BS[line.row].double()
        others = confidence_S[~confidence_S.isnan()].sort().values[:-1]
        assert line.margin == pytest.approx((others - 0.3).abs().min().item(), abs=1e-6)
    by_order = found[found["kind"] == "order"].set_index(["row", "step"]).index
    for row, step in by_order:
        assert np.nanmax(np.sort(steps[step].confidence_BS[row].numpy())[:-1]) < 1.0
        assert (steps[step].committed_BS[row].sum() == 1).item(), (
            "where the threshold lets more pass, it decides"
        )


def test_noise_is_in_proportion_to_what_rounding_does(random, plain):
    """The rounding errors of bfloat16 are several times what a jitter of 2^-9 does, those of
    float32 thousandths.
    """
    _, found = plain
    ratios = {}
    for dtype in (torch.bfloat16, torch.float64):
        other = replace(random, model=copy.deepcopy(random.model).to(dtype))
        _, again = measure_margins(other, canvas(), DecodingSettings(seed=0), probes=0, plain=True)
        until = found["row"].map(first_difference(found, again)).fillna(np.inf)
        both = found[found["step"] < until].merge(
            again, on=["row", "step", "kind", "column"], suffixes=("", "_again")
        )
        tokens = both[both["kind"] == "token"]
        ratios[dtype] = (
            (tokens["margin_again"] - tokens["margin"]).abs() / tokens["noise"]
        ).median()
    assert 0.3 < ratios[torch.bfloat16] < 10
    assert 0 < ratios[torch.float64] < 1e-3
    again = measure_margins(random, canvas(), DecodingSettings(seed=0), plain=True)[1]
    pd.testing.assert_frame_equal(found, again)
    assert not first_difference(found, again).notna().any()


@pytest.mark.parametrize("cache", ["none", "dual"])
def test_a_forced_choice_changes_this_choice_and_what_follows(random, cache):
    settings = DecodingSettings(cache=cache, block_length=3, seed=0)
    _, found = measure_margins(random, canvas(), settings)
    chosen = pd.concat(
        [found[found["kind"] == kind].iloc[[0, 4, 8]] for kind in ("token", "order")]
    )
    others = rewritten(random, canvas(), settings, chosen)
    for line, other_S in zip(chosen.itertuples(), others, strict=True):
        steps = [*random.model.denoise(canvas(), settings)]
        before_S, after_S = (
            one[line.row] for one in (steps[line.step].before_BS, steps[line.step].ids_BS)
        )
        held_S = (before_S != MASK_ID) & canvas().attention_BS[line.row]
        assert torch.equal(other_S[held_S], before_S[held_S]), "what stood before stays"
        if line.kind == "token":
            assert other_S[line.column] == line.other and after_S[line.column] == line.token
    nothing = chosen[chosen["step"] < 0]
    assert rewritten(random, canvas(), settings, nothing) == []


def test_a_quota_is_filled_in_order_whatever_passes_the_threshold(random):
    """Four of eight are written at least: where fewer are confident, the order of the others
    decides, and only what is left out can pass the threshold to any effect."""
    settings = DecodingSettings(
        schedule="dynamic:threshold=0.25,steps=2,block_length=8", block_length=8, seed=0
    )
    _, found = measure_margins(random, canvas(16), settings, probes=0)
    told, mixed = found.set_index(["row", "step", "kind"])["margin"], 0
    for step in random.model.denoise(canvas(16), settings):
        for row, (score_S, chosen_S) in enumerate(
            zip(step.confidence_BS.double(), step.committed_BS, strict=True)
        ):
            taken, left = score_S[chosen_S], score_S[~chosen_S & ~score_S.isnan()]
            sure = int((taken > 0.25).sum())
            if len(left) and sure < len(taken):
                mixed += sure > 1
                assert told[row, step.index, "order"] == pytest.approx(
                    float(taken.min() - left.max()), abs=1e-6
                )
                assert told[row, step.index, "threshold"] == pytest.approx(
                    float(0.25 - left.max()), abs=1e-6
                )
    assert mixed


def test_what_a_cache_holds_is_no_noise(random):
    """Keys of an earlier canvas change logits by more than rounding does; a jitter moves margins as
    it does without.
    """
    plain, cached = (
        measure_margins(random, canvas(12), DecodingSettings(block_length=4, cache=cache, seed=0))[
            1
        ]
        for cache in ("none", "dual")
    )
    noise = [found.loc[found["kind"] == "token", "noise"].median() for found in (plain, cached)]
    assert noise[1] == pytest.approx(noise[0], rel=0.5)


def test_steps_are_those_of_a_row_whatever_it_waits_for(random):
    """Rows wait for one another at the end of a block; their choices are found again in a batch of
    other rows.
    """
    settings = DecodingSettings(schedule="threshold", threshold=0.2, block_length=4, seed=0)
    ids_BS, found = measure_margins(random, canvas(12), settings, probes=0)
    quick = found[(found["row"] == 0) & (found["kind"] == "token")]
    assert quick["step"].max() < found["step"].max()
    for other_S, line in zip(
        rewritten(random, canvas(12), settings, quick), quick.itertuples(), strict=True
    ):
        assert other_S[line.column] == line.other != ids_BS[0, line.column]
    alone = Canvas.from_prompts(PROMPTS[:1], new_tokens=12, mask_id=MASK_ID, pad_id=0)
    _, own = measure_margins(random, alone, settings, probes=0)
    assert own["step"].tolist() == found.loc[found["row"] == 0, "step"].tolist()


def test_near_ties_are_near_and_of_both_kinds(plain):
    _, found = plain
    near = near_ties(found, 4, seed=0)
    assert sorted(near["kind"]) == ["order", "order", "token", "token"]
    for kind, lines in near.groupby("kind"):
        ratio = (
            found.loc[found["kind"] == kind, "margin"] / found.loc[found["kind"] == kind, "noise"]
        )
        assert (lines["margin"] / lines["noise"]).max() <= ratio.quantile(0.1) + 1e-12
    assert near.equals(near_ties(found, 4, seed=0))


@pytest.mark.parametrize(
    "settings, message",
    [
        (DecodingSettings(temperature=0.5), "takes the best"),
        (DecodingSettings(rule="random"), "takes the best"),
        (DecodingSettings(alg_temp=0.1), "takes the best"),
        (DecodingSettings(cfg_scale=1.0), "unguided"),
        (DecodingSettings(schedule="timed", pooled=True), "ranks each text by itself"),
    ],
)
def test_decoders_without_margins_are_refused(random, settings, message):
    refused(message, measure_margins, random, canvas(), settings)
