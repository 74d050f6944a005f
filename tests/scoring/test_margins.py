"""Margins of a greedy decoder and what rounding makes of them, as `benchmarks/referee.py` foretells
it: against plain forwards, and in worlds with a known answer.
"""

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy
import torch

from sinklab.core.subject import Canvas, DecodingSettings
from sinklab.lab.checkpoints import load
from tiny_diffusion import MASK, tiny_model

PROMPTS = [[5, 9, 11], [7, 3, 22, 40, 8], [33, 4]]


@pytest.fixture(scope="module")
def referee():
    path = sys.path[:]
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    try:
        return import_module("referee")
    finally:
        sys.path[:] = path


@pytest.fixture(scope="module")
def random():
    return replace(load("tiny"), model=tiny_model(), tokenizer=None, name="random")


def canvas(new_tokens=6):
    return Canvas.from_prompts(PROMPTS, new_tokens=new_tokens, mask_id=MASK, pad_id=0)


def test_margins_are_those_of_plain_forwards(referee, random):
    """One token a step: logits and probabilities of every step, computed anew, give the same two
    margins.
    """
    settings = DecodingSettings(seed=0)
    ids_BS, found = referee.measure_margins(random, canvas(), settings, plain=True)
    steps = [*random.model.denoise(canvas(), settings)]
    assert torch.equal(ids_BS, steps[-1].ids_BS)
    assert (found["kind"] == "token").sum() == 18 and (found["kind"] == "order").sum() == 15
    for line in found.itertuples():
        step = steps[line.step]
        with torch.no_grad():
            logits_BSV = random.model(step.before_BS, canvas().attention_BS).logits.double()
        row_SV = logits_BSV[line.row].clone()
        row_SV[:, MASK] = -torch.inf
        if line.kind == "token":
            best = row_SV[line.column].topk(2)
            assert best.indices.tolist() == [line.token, line.other]
            expected = best.values[0] - best.values[1]
        else:
            best_S1 = row_SV.argmax(-1, keepdim=True)
            chances_S = logits_BSV[line.row].softmax(-1).gather(-1, best_S1)[:, 0]
            expected = chances_S[line.column] - chances_S[line.other]
        assert line.margin == pytest.approx(expected.item(), abs=2e-5) and line.margin >= 0
    again = referee.measure_margins(random, canvas(), settings, plain=True)[1]
    pd.testing.assert_frame_equal(found, again)
    assert not referee.first_difference(found, again).notna().any()


def test_a_threshold_has_a_distance(referee, random):
    settings = DecodingSettings(schedule="threshold:threshold=0.3", seed=0)
    _, found = referee.measure_margins(random, canvas(), settings, probes=0)
    steps = [*random.model.denoise(canvas(), settings)]
    lines = found[found["kind"] == "threshold"]
    assert len(lines)
    for line in lines.itertuples():
        confidence_S = steps[line.step].confidence_BS[line.row].double()
        others = confidence_S[~confidence_S.isnan()].sort().values[:-1]
        assert line.margin == pytest.approx((others - 0.3).abs().min().item(), abs=1e-6)


def test_counts_are_binomial_where_all_chances_are_one(referee):
    law = scipy.stats.binom(20, 0.3)
    counted = referee.counted
    assert counted(np.full((5, 20), 0.3)) == (pytest.approx(6), law.ppf(0.025), law.ppf(0.975))
    assert counted(np.zeros((3, 20))) == (0, 0, 0)
    assert counted(np.ones((3, 20))) == (20, 20, 20)


@pytest.mark.slow
def test_intervals_of_changed_texts_cover_what_happens(referee):
    """Sizes of rounding that vary between models as the noise says: 95 % intervals, told from
    margins alone.
    """
    draw, told = np.random.default_rng(1), referee.Noise("planted", np.log(2.0), 0.2, 60)
    inside = 0
    for _ in range(100):
        rows, multiple = np.repeat(np.arange(12), 20), 2.0 * np.exp(draw.normal(0, 0.2))
        margin = draw.exponential(1.0, len(rows))
        scale = 0.02 * np.exp(draw.normal(0, 0.3, len(rows)))
        noise = np.sqrt(((draw.normal(size=(len(rows), 4)) * scale[:, None]) ** 2).mean(1))
        flipped = margin + multiple * scale * draw.normal(size=len(rows)) < 0
        table = pd.DataFrame({"row": rows, "kind": "token", "margin": margin, "noise": noise})
        count = int(pd.Series(flipped).groupby(rows).any().sum())
        _, low, high = referee.counted(referee.change_chances(table, told, 4))
        inside += low <= count <= high
    assert 0.9 <= inside / 100 <= 0.995
