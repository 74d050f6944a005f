"""How steps are dealt to blocks, and tokens to steps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# B batch rows, T steps


def commit_counts(n_masked: int | Tensor, steps: int) -> Tensor:
    """Tokens to commit at each of `steps` steps: floor(n / steps), and one more in the first n mod steps of them.

    Args:
        n_masked: number of masked positions, an int or an int64 tensor of any shape (one number per row).
        steps: number of steps, at least 1.

    Returns int64 of shape (*n_masked.shape, steps) that sums to n_masked over the last axis and never rises along it.
    Raises ValueError for steps < 1 or a negative count. Source: LLaDA (2502.09992), `get_num_transfer_tokens`.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}; leave steps out to commit one token per step.")
    count = torch.as_tensor(n_masked, dtype=torch.int64)
    if (count < 0).any():
        raise ValueError(
            f"the number of masked positions cannot be negative, got {int(count.min())}; count the open masks."
        )
    step_T = torch.arange(steps, device=count.device)
    floor, remainder = count // steps, count % steps
    return floor[..., None] + (step_T < remainder[..., None])


def deal_steps(sizes: Sequence[int], steps: int | None, *, idle: bool = False) -> list[int]:
    """Deal `steps` to blocks of the given sizes: evenly, remainder to the first, never more than a block holds.

    What a short block cannot use goes to the others by the same rule, so that every step commits something.
    `steps=None` gives one step per position. With `idle` there may be more steps than positions, and a block may get
    more than it holds. Raises ValueError when a block would get no step, or (without `idle`) a step no position.
    """
    if steps is None:
        return list(sizes)
    if steps < len(sizes):
        raise ValueError(
            f"each block needs at least 1 step, got {steps} steps for {len(sizes)} blocks; give at least "
            f"{len(sizes)} steps or a larger block_length."
        )
    if idle:
        share, extra = divmod(steps, len(sizes))
        return [share + (block < extra) for block in range(len(sizes))]
    if steps > sum(sizes):
        raise ValueError(
            f"steps must not exceed the open positions, got {steps} steps for {sum(sizes)} positions; some steps would "
            f"commit nothing: ask for at most {sum(sizes)}, or leave steps out for one token per step."
        )
    dealt = [0] * len(sizes)
    while left := steps - sum(dealt):
        room = [block for block, size in enumerate(sizes) if dealt[block] < size]
        share, extra = divmod(left, len(room))
        for rank, block in enumerate(room):
            dealt[block] += min(share + (rank < extra), sizes[block] - dealt[block])
    return dealt
