from __future__ import annotations

import dataclasses

import pytest
import torch

from sinklab.sampling import LowConfidence, RandomOrder, rule_by_name, sample_tokens


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_low_confidence_is_the_softmax_probability_of_the_proposal():
    logits_MV = torch.randn(7, 11, generator=seeded(), dtype=torch.float64)
    proposal_M = torch.randint(0, 11, (7,), generator=seeded())
    expected = [(row.exp()[token] / row.exp().sum()).item() for row, token in zip(logits_MV, proposal_M, strict=True)]
    score_M = LowConfidence()(logits_MV, proposal_M, None)
    torch.testing.assert_close(score_M, torch.tensor(expected, dtype=torch.float64), rtol=1e-12, atol=0)


def test_confidence_is_taken_in_float32_or_better():
    logits_MV = torch.randn(3, 5).bfloat16()
    assert LowConfidence()(logits_MV, logits_MV.argmax(-1), None).dtype == torch.float32


def test_confidences_near_one_keep_their_order():
    logits_MV = torch.tensor([[300.0, 285.5], [300.0, 285.0], [300.0, 286.0]])
    score_M = LowConfidence()(logits_MV, torch.zeros(3, dtype=torch.int64), None)
    assert score_M.argsort(descending=True).tolist() == [1, 0, 2]


def test_random_order_ignores_the_logits_and_follows_the_generator():
    proposal_M = torch.zeros(200, dtype=torch.int64)
    first = RandomOrder()(torch.zeros(200, 3), proposal_M, seeded(1))
    assert torch.equal(first, RandomOrder()(torch.randn(200, 3), proposal_M, seeded(1)))
    assert not torch.equal(first, RandomOrder()(torch.zeros(200, 3), proposal_M, seeded(2)))
    with pytest.raises(ValueError, match=r"random order needs a source of randomness.*generator=torch.Generator\(\)"):
        RandomOrder()(torch.zeros(2, 3), proposal_M[:2], None)


def test_rules_are_values_with_names():
    assert rule_by_name("low_confidence") == LowConfidence()
    assert rule_by_name("random") == RandomOrder()
    with pytest.raises(dataclasses.FrozenInstanceError):
        LowConfidence().threshold = 0.9
    with pytest.raises(ValueError, match=r"unknown unmasking rule 'low_confidance'.*did you mean low_confidence\?"):
        rule_by_name("low_confidance")
    with pytest.raises(ValueError, match="known rules are low_confidence, random; pass one of these"):
        rule_by_name("zzz")


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_gumbel_samples_follow_the_softmax(temperature):
    draws = 60_000
    logits_V = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, -torch.inf])
    tokens_M = sample_tokens(logits_V.expand(draws, -1), temperature, seeded(3))
    expected_V = (logits_V.double() / temperature).softmax(-1) * draws
    counts_V = torch.bincount(tokens_M, minlength=6).double()
    assert counts_V[-1] == 0
    chi_square = ((counts_V - expected_V)[:-1] ** 2 / expected_V[:-1]).sum()
    # 4 degrees of freedom: 18.5 is passed once in a thousand seeds.
    assert chi_square < 18.5


def test_the_sample_is_lladas_own_form_of_the_noise():
    # E = -log U makes exp(l) / (-log U)^T and l - T log E the same ordering, draw for draw.
    logits_MV = torch.randn(500, 13, generator=seeded(4), dtype=torch.float64)
    exponential_MV = torch.empty(500, 13, dtype=torch.float64).exponential_(generator=seeded(5))
    for temperature in (0.3, 1.0, 1.7):
        expected_M = (logits_MV.exp() / exponential_MV**temperature).argmax(-1)
        assert torch.equal(sample_tokens(logits_MV, temperature, seeded(5)), expected_M)


def test_temperature_zero_is_the_argmax_and_draws_nothing():
    logits_MV = torch.randn(9, 5, generator=seeded())
    generator = seeded(8)
    before = generator.get_state()
    assert torch.equal(sample_tokens(logits_MV, 0.0, generator), logits_MV.argmax(-1))
    assert torch.equal(generator.get_state(), before)


def test_large_logits_do_not_overflow():
    logits_MV = torch.tensor([[3000.0, 2000.0], [2000.0, 3000.0]])
    assert sample_tokens(logits_MV, 1.0, seeded()).tolist() == [0, 1]


def test_bad_temperatures_are_refused():
    for temperature in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="temperature must be 0 or a positive finite number"):
            sample_tokens(torch.zeros(1, 2), temperature, seeded())
    with pytest.raises(ValueError, match="a temperature above 0 needs a source of randomness"):
        sample_tokens(torch.zeros(1, 2), 1.0)
