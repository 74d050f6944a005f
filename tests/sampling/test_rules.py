import itertools
import math

import pytest
import torch
from torch.testing import assert_close
from toy_denoiser import MASK, candidates, seeded, zeros

from refusals import refused
from sinklab.core.subject import Canvas, LowConfidence, denoise
from sinklab.lab.samplers import (
    Entropy,
    MaskgitPlus,
    Origin,
    TopkMargin,
)


def test_confidence_is_taken_in_float32_or_better():

    for rule in (LowConfidence(), MaskgitPlus(), TopkMargin(), Entropy()):
        assert rule(candidates(torch.randn(3, 5).bfloat16())).dtype == torch.float32
        assert rule(candidates(torch.randn(3, 5).double())).dtype == torch.float64


def test_confidences_near_one_keep_their_order():
    logits_MV = torch.tensor([[300.0, 285.5], [300.0, 285.0], [300.0, 286.0]])
    assert LowConfidence()(candidates(logits_MV)).argsort(descending=True).tolist() == [1, 0, 2]


def test_deferred_tokens_have_confidence_zero_and_no_part_in_the_others():
    logits_MV = torch.tensor([[1.0, 5.0, 2.0], [4.0, 3.0, 0.0]])
    score_M = LowConfidence(defer_ids=(1,))(candidates(logits_MV))
    assert score_M[0] == 0
    assert score_M[1].item() == pytest.approx(1 / (1 + math.exp(-4)))
    refused(r"defer_ids .*0 to 2, got \[3\]", LowConfidence(defer_ids=(3,)), candidates(logits_MV))


def test_scores_are_not_those_of_the_proposal_where_the_rule_looks_at_the_distribution():
    """A drawn token of probability 0.1: its own confidence is low, margin and entropy are those of
    the rest.
    """
    p = torch.tensor([[0.6, 0.3, 0.1]] * 400).log()
    drawn = candidates(p, seeded(), temperature=1.0)
    assert set(drawn.tokens_M.tolist()) == {0, 1, 2}
    assert_close(MaskgitPlus()(drawn), p.exp()[0][drawn.tokens_M])
    assert_close(TopkMargin()(drawn), torch.full((400,), 0.3))
    assert_close(
        Entropy()(drawn), torch.full((400,), sum(x * math.log(x) for x in (0.6, 0.3, 0.1)))
    )


def test_a_rule_reads_the_text_around_the_masks():
    canvas = Canvas.from_prompts([[2, 1], [1, 1]], new_tokens=3, mask_id=MASK)
    seen = []

    def beside_text(candidates):
        seen.append(candidates)
        is_text_BS = candidates.ids_BS != candidates.mask_id
        return is_text_BS[candidates.rows_M, candidates.columns_M - 1].float()

    steps = list(denoise(zeros, canvas, rule=beside_text))
    assert all(
        torch.equal(one.ids_BS, step.before_BS) for one, step in zip(seen, steps, strict=True)
    )
    assert all(torch.equal(one.open_BS, canvas.open_BS) for one in seen)


def test_alg_temp_draws_positions_like_successive_draws_without_replacement():
    rows, k, alg_temp = 20_000, 2, 0.3
    confidence = [0.9, 0.5, 0.3, 0.2]
    canvas = Canvas.from_prompts([[]] * rows, new_tokens=4, mask_id=9)
    p = torch.tensor([[x, *[(1 - x) / 8] * 8] for x in confidence], dtype=torch.float64).log()
    denoiser = lambda ids_BS, wanted_BS: p.repeat(rows, 1)  # noqa: E731
    rule = LowConfidence(alg_temp=alg_temp)
    step = next(denoise(denoiser, canvas, rule=rule, steps=2, generator=seeded(1)))
    weights = [math.exp(x / alg_temp) for x in confidence]
    pairs = dict.fromkeys(itertools.combinations(range(4), k), 0.0)
    for first, second in itertools.permutations(range(4), k):
        chance = weights[first] / sum(weights) * weights[second] / (sum(weights) - weights[first])
        pairs[tuple(sorted((first, second)))] += chance
    drawn = step.committed_BS.nonzero()[:, 1].view(rows, k)
    chi_square = 0.0
    for pair, chance in pairs.items():
        found = int((drawn == torch.tensor(pair)).all(1).sum())
        chi_square += (found - rows * chance) ** 2 / (rows * chance)
    # 5 degrees of freedom: 20.5 is passed once in a thousand seeds.
    assert chi_square < 20.5
    assert_close(step.confidence_BS[0], torch.tensor(confidence, dtype=torch.float64))


def test_origin_commits_every_position_alone_with_the_probability_of_the_step():
    rows, steps = 4000, 4
    canvas = Canvas.from_prompts([[1]] * rows, new_tokens=5, mask_id=MASK)
    done = list(denoise(zeros, canvas, rule=Origin(), steps=steps, generator=seeded(2)))
    assert len(done) == steps
    times = [1 - (1 - 1e-3) * step / steps for step in range(steps + 1)]
    for step in done:
        left = int(step.masked_BS.sum())
        chance = 1.0 if step.index == steps - 1 else 1 - times[step.index + 1] / times[step.index]
        spread = math.sqrt(left * chance * (1 - chance))
        assert abs(int(step.committed_BS.sum()) - left * chance) <= 4 * spread
    first = done[0].committed_BS.sum(1)
    # Independent: the number in a row is Binomial(5, 1/4), of variance 15/16, not a quota.
    assert first.float().var().item() == pytest.approx(15 / 16, rel=0.1)
    assert not (done[-1].ids_BS == MASK).any()
