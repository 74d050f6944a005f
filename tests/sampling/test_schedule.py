from __future__ import annotations

import pytest
import torch

from sinklab.sampling import commit_counts, deal_steps


@pytest.mark.parametrize(
    ("n_masked", "steps", "expected"),
    [
        (24, 7, [4, 4, 4, 3, 3, 3, 3]),
        (8, 3, [3, 3, 2]),
        (2, 4, [1, 1, 0, 0]),
        (0, 2, [0, 0]),
        (5, 1, [5]),
        (3, 3, [1, 1, 1]),
    ],
)
def test_floor_and_remainder_first(n_masked, steps, expected):
    assert commit_counts(n_masked, steps).tolist() == expected


def test_every_row_has_its_own_counts():
    n_B = torch.arange(50)
    for steps in range(1, 12):
        counts_BT = commit_counts(n_B, steps)
        assert counts_BT.shape == (50, steps)
        assert torch.equal(counts_BT.sum(-1), n_B)
        assert (counts_BT.diff(dim=-1) <= 0).all()
        assert (counts_BT.max(-1).values - counts_BT.min(-1).values <= 1).all()


@pytest.mark.parametrize(
    ("sizes", "steps", "expected"),
    [
        ([8, 8, 8], 24, [8, 8, 8]),
        ([8, 8, 8], 10, [4, 3, 3]),
        ([8, 8, 8], None, [8, 8, 8]),
        ([8, 8, 4], 20, [8, 8, 4]),
        ([8, 2], 9, [7, 2]),
        ([4], 3, [3]),
    ],
)
def test_steps_are_dealt_evenly_and_never_wasted(sizes, steps, expected):
    assert deal_steps(sizes, steps) == expected


def test_any_deal_uses_every_step_and_leaves_no_block_out():
    for last in range(1, 6):
        sizes = [5, 5, 5, last]
        for steps in range(4, sum(sizes) + 1):
            dealt = deal_steps(sizes, steps)
            assert sum(dealt) == steps
            assert all(1 <= got <= size for got, size in zip(dealt, sizes, strict=True))


def test_counts_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        commit_counts(4, 0)
    with pytest.raises(ValueError, match="cannot be negative, got -2"):
        commit_counts(torch.tensor([3, -2]), 2)
    with pytest.raises(ValueError, match="each block needs at least 1 step, got 2 steps for 3 blocks; give at least 3"):
        deal_steps([8, 8, 8], 2)
    with pytest.raises(ValueError, match="steps must not exceed the open positions, got 25 steps for 24 positions"):
        deal_steps([8, 8, 8], 25)
