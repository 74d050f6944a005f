"""Blocks of open positions: where they stand on the canvas, and how values go there and back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# B batch rows, S canvas positions, C places in a block, N open positions of a block in row-major order


@dataclass(frozen=True, eq=False)
class Block:
    """One block. A row may have fewer open positions in it than another; its other places stand nowhere."""

    number: int
    columns_BC: Tensor
    """int64, canvas column of each place, in ascending order; S where the place stands nowhere."""
    real_BC: Tensor
    """bool, the places that stand somewhere."""
    flat_N: Tensor
    """int64, row * S + column of the real places."""
    full: bool
    """Whether every place is real."""

    def put(self, values_BC: Tensor, canvas_BS: Tensor) -> Tensor:
        """A copy of `canvas_BS` with the values at the block's positions."""
        out_BS = canvas_BS.clone(memory_format=torch.contiguous_format)
        values_N = values_BC.reshape(-1) if self.full else values_BC[self.real_BC]
        out_BS.view(-1).index_copy_(0, self.flat_N, values_N)
        return out_BS

    def get(self, canvas_BS: Tensor, fill: int | bool) -> Tensor:
        """The canvas's values at the block's places, `fill` where a place stands nowhere."""
        values_N = canvas_BS.reshape(-1)[self.flat_N]
        if self.full:
            return values_N.view(self.columns_BC.shape)
        return canvas_BS.new_full(self.columns_BC.shape, fill).masked_scatter(self.real_BC, values_N)


def block_sizes(open_BS: Tensor, block_length: int | None) -> list[int]:
    """Positions in each block of the fullest row. Raises ValueError for block_length < 1."""
    if block_length is not None and block_length < 1:
        raise ValueError(f"block_length must be at least 1, got {block_length}; leave it out for a single block.")
    fullest = int(open_BS.sum(1).max())
    length = min(block_length or fullest, fullest)
    return [min(length, fullest - start) for start in range(0, fullest, length)]


def block_numbers(open_BS: Tensor, sizes: list[int]) -> Tensor:
    """int64 (B, S), the block of every open position (its rank in the row // the first block's size), -1 elsewhere."""
    return torch.where(open_BS, (open_BS.cumsum(1) - 1) // sizes[0], -1)


def blocks(open_BS: Tensor, sizes: list[int]) -> Iterator[Block]:
    """The blocks from left to right."""
    rows, length = open_BS.shape
    column_S = torch.arange(length, device=open_BS.device)
    # Open columns first, in order; what is not open comes after as S.
    columns_BO = torch.where(open_BS, column_S, length).sort(1).values[:, : sum(sizes)]
    row_B1 = torch.arange(rows, device=open_BS.device)[:, None]
    for number, columns_BC in enumerate(columns_BO.split(sizes, 1)):
        real_BC = columns_BC < length
        yield Block(number, columns_BC, real_BC, (row_B1 * length + columns_BC)[real_BC], bool(real_BC.all()))
