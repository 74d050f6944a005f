import pytest
import torch

from sinklab.lab.data.noise import corrupt, sample_times

MASK = 9


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def test_each_row_has_its_own_rate_and_masks_are_independent_of_position():
    times = torch.tensor([0.1, 0.5, 0.9])
    noisy, masked = corrupt(
        torch.zeros(3, 60_000, dtype=torch.long), times, mask_id=MASK, generator=seeded()
    )
    assert torch.equal(noisy == MASK, masked)
    assert torch.allclose(masked.float().mean(1), times, atol=0.01)
    neighbours = (masked[:, 1:] & masked[:, :-1]).float().mean(1)
    assert torch.allclose(neighbours, times**2, atol=0.01)


def test_what_is_not_maskable_stays():
    ids = torch.randint(0, MASK, (4, 50))
    maskable = torch.rand(4, 50) < 0.5
    noisy, masked = corrupt(
        ids, torch.ones(4), mask_id=MASK, maskable_BS=maskable, generator=seeded()
    )
    assert torch.equal(masked, maskable)
    assert torch.equal(noisy[~maskable], ids[~maskable])


def test_the_generator_decides_and_the_input_is_left_alone():
    ids = torch.randint(0, MASK, (4, 50))
    before, times = ids.clone(), torch.full((4,), 0.5)
    first, again, other = (
        corrupt(ids, times, mask_id=MASK, generator=seeded(seed))[1] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(ids, before)


@pytest.mark.parametrize("sampler", ["iid", "low_discrepancy"])
def test_times_are_uniform_from_eps_to_one(sampler):
    times = torch.stack(
        [sample_times(8, sampler=sampler, eps=0.1, generator=seeded(seed)) for seed in range(2000)]
    )
    assert times.min() >= 0.1
    assert times.max() <= 1.0
    # of a row, not of the batch: each row alone must be uniform, whatever its place
    for row in times.T:
        counts = torch.histc(row, bins=10, min=0.1, max=1.0)
        assert abs(row.mean().item() - 0.55) < 4 * 0.9 / 12**0.5 / 2000**0.5
        assert (counts - 200).abs().max() < 5 * 200**0.5


def test_low_discrepancy_spreads_the_batch_evenly():
    even, free = (
        torch.stack([sample_times(16, sampler=one, generator=seeded(n)).mean() for n in range(300)])
        for one in ("low_discrepancy", "iid")
    )
    # 1 / 16 of the variance is expected
    assert even.var() < free.var() / 10
    times = sample_times(16, sampler="low_discrepancy", eps=1e-6, generator=seeded())
    gaps = times.sort().values.diff()
    assert torch.allclose(gaps, torch.full((15,), 1 / 16), atol=1e-5)
    assert not torch.equal(times, times.sort().values), "the order of rows must not tell the time"
