import torch
from toy_denoiser import candidates

from refusals import refused
from sinklab.core.subject import (
    Canvas,
    commit_counts,
    denoise,
    split_steps,
)
from sinklab.lab.samplers import Entropy, EntropyBound, Threshold


def test_every_row_has_its_own_counts():
    n_B = torch.arange(50)
    for steps in range(1, 12):
        counts_BT = commit_counts(n_B, steps)
        assert counts_BT.shape == (50, steps)
        assert torch.equal(counts_BT.sum(-1), n_B)
        assert (counts_BT.diff(dim=-1) <= 0).all()
        assert (counts_BT.max(-1).values - counts_BT.min(-1).values <= 1).all()


def test_any_deal_uses_every_step_and_leaves_no_block_out():
    for last in range(1, 6):
        sizes = [5, 5, 5, last]
        for steps in range(4, sum(sizes) + 1):
            dealt = split_steps(sizes, steps)
            assert sum(dealt) == steps
            assert all(1 <= got <= size for got, size in zip(dealt, sizes, strict=True))


def test_counts_that_cannot_be_are_refused():
    refused("steps must be at least 1", commit_counts, 4, 0)
    refused("got 2 steps for 3 blocks", split_steps, [8, 8, 8], 2)
    refused("got 25 steps for 24 positions", split_steps, [8, 8, 8], 25)


def committed(logits_MV, **settings):
    """Tokens committed by the first evaluation."""
    canvas = Canvas.from_prompts([[0]], new_tokens=len(logits_MV), mask_id=logits_MV.shape[1])
    return int(
        next(denoise(lambda ids_BS, wanted_BS: logits_MV, canvas, **settings)).committed_BS.sum()
    )


def test_a_confidence_that_is_just_the_threshold_is_enough():

    coins_MV = torch.zeros(4, 2)
    assert committed(coins_MV, schedule=Threshold(0.5)) == 4
    assert committed(coins_MV, schedule=Threshold(0.5 + 2**-20)) == 1
    sure_MV = torch.tensor([[0.0, -torch.inf]] * 3)
    assert committed(sure_MV, schedule=Threshold(1.0)) == 3


def test_a_sum_of_entropies_that_is_just_the_bound_is_allowed():

    coins_MV = torch.zeros(5, 2)
    coin = -Entropy()(candidates(coins_MV))[0]
    for n in (1, 2):
        # What counts is the sum without the largest, and n + n is exact.
        assert committed(coins_MV, rule="entropy", schedule=EntropyBound(float(coin) * n)) == n + 1
        assert (
            committed(coins_MV, rule="entropy", schedule=EntropyBound(float(coin) * n * (1 - 1e-5)))
            == n
        )
