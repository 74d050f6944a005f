"""Rows of equal length in the order of a run, and batches of them."""

# R rows, S sequence, B batch
from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset


def place_generator(seed: int, *place: int) -> torch.Generator:
    """A CPU generator for one place (pass, block, …) of a run: it does not depend on what was drawn before."""
    mixed = seed
    for part in place:
        # any odd multiplier spreads neighbouring places; the generator scrambles the rest
        mixed = (mixed * 0x9E3779B97F4A7C15 + part + 1) & (2**63 - 1)
    return torch.Generator().manual_seed(mixed)


class Rows(Dataset[dict[str, Tensor]]):
    """Rows in memory in the order in which a run consumes them: item n is row n of the run.

    Each pass over the rows has a permutation of its own that depends on (seed, pass) alone; so row n is the same on
    every rank, in every process and after a restart, and is read with a sequential sampler.

    Args:
        ids_RS: token ids, any integer type.
        documents_RS: number of the document inside its row, for attention that stays inside documents.
        maskable_RS: True where noise may fall; without it everywhere.
        attention_RS: True where there is a token, False at padding.
        seed: of the order; None keeps it, for evaluation.
        total: rows of the whole run; one pass when left out.

    Raises:
        ValueError: if there is no row, shapes differ, the total is below 1, or is more than one pass without a seed.
    """

    def __init__(
        self,
        ids_RS: Tensor,
        *,
        documents_RS: Tensor | None = None,
        maskable_RS: Tensor | None = None,
        attention_RS: Tensor | None = None,
        seed: int | None = None,
        total: int | None = None,
    ) -> None:
        if ids_RS.dim() != 2 or not ids_RS.numel():
            raise ValueError(f"rows must be a matrix with at least one token, but their shape is {tuple(ids_RS.shape)}")
        extra = {"documents": documents_RS, "maskable": maskable_RS, "attention_mask": attention_RS}
        self.columns = {"input_ids": ids_RS} | {name: given for name, given in extra.items() if given is not None}
        for name, given in self.columns.items():
            if given.shape != ids_RS.shape:
                raise ValueError(
                    f"{name} must have the shape of the rows, {tuple(ids_RS.shape)}, but has {tuple(given.shape)}"
                )
        self.seed = seed
        self.total = ids_RS.shape[0] if total is None else total
        if self.total < 1:
            raise ValueError(f"a run needs at least one row, but total is {self.total}")
        if seed is None and self.total > ids_RS.shape[0]:
            raise ValueError(
                f"rows in their own order are read once, so total must be at most {ids_RS.shape[0]}, but is "
                f"{self.total}; give a seed for more passes"
            )
        self._order: tuple[int, Tensor] = (-1, torch.empty(0))

    def __len__(self) -> int:
        return self.total

    def place(self, row: int) -> int:
        """Index in the stored rows of row ``row`` of the run."""
        if self.seed is None:
            return row
        rows = self.columns["input_ids"].shape[0]
        number, inside = divmod(row, rows)
        if self._order[0] != number:
            self._order = (number, torch.randperm(rows, generator=place_generator(self.seed, number)))
        return int(self._order[1][inside])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < self.total:
            raise IndexError(f"row {index} of {self.total}")
        at = self.place(index)
        row = {name: column[at] for name, column in self.columns.items()}
        return row_of_batch(row, index)


def row_of_batch(columns: Mapping[str, Tensor], ordinal: int) -> dict[str, Tensor]:
    """One row as batches hold it: ids and document numbers int64, the rest as it is, and the ordinal in the run."""
    row = {name: part.long() if name in ("input_ids", "documents") else part for name, part in columns.items()}
    return row | {"row": torch.tensor(ordinal)}


def collate(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Stack rows into a batch: ``input_ids`` (B, S), ``row`` (B,), and what else every row has.

    Raises:
        ValueError: if there is no row, or rows differ in what they have.
    """
    if not rows:
        raise ValueError("a batch needs at least one row, but there is none")
    for row in rows:
        if row.keys() != rows[0].keys():
            raise ValueError(f"rows of a batch must have the same parts, but one has {sorted(row)}, {sorted(rows[0])}")
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
