"""The early end of a row: its text is over once an end-of-text token stands and nothing to the left is open."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from sinklab.sampling.token_ids import token_ids

# B batch rows, S canvas positions


class RowEnds:
    """Watches one run for rows that are over.

    Raises ValueError when no stop id is given, when one is negative, and when [MASK] is one.
    """

    def __init__(self, stop_ids: Iterable[int] | int, open_BS: Tensor, mask_id: int) -> None:
        ids = sorted(set(token_ids("stop_ids", stop_ids)))
        if not ids:
            raise ValueError("stop_ids needs at least one token id, got none; leave it out to decode every position.")
        if mask_id in ids:
            raise ValueError(f"[MASK] (id {mask_id}) is never written, so it cannot be a stop id; use end of text.")
        if ids[0] < 0:
            raise ValueError(f"stop_ids must lie in the vocabulary, 0 upwards, got {ids}; check the tokenizer.")
        self._last = ids[-1]
        self._ids = torch.tensor(ids, device=open_BS.device)
        self._open_BS = open_BS
        self._over_B = torch.zeros_like(open_BS[:, 0])

    def refuse_beyond(self, vocabulary: int) -> None:
        """Raises ValueError for a stop id that has no logit: it could never be written."""
        if self._last >= vocabulary:
            raise ValueError(
                f"stop_ids must lie in the vocabulary, 0 to {vocabulary - 1}, got {self._ids.tolist()}; check the "
                "tokenizer."
            )

    def __call__(self, ids_BS: Tensor, masked_BS: Tensor) -> tuple[Tensor, Tensor]:
        """The ids with the rows that are newly over filled to the right with their stop id, and where (bool (B, S)).

        Every open position to the right is filled, those that hold another token already too.
        """
        first_BS = self._open_BS & torch.isin(ids_BS, self._ids) & (masked_BS.cumsum(1) == 0)
        new_B = first_BS.any(1) & ~self._over_B
        if not bool(new_B.any()):
            return ids_BS, torch.zeros_like(masked_BS)
        self._over_B = self._over_B | new_B
        first_B1 = first_BS.long().argmax(1, keepdim=True)
        right_BS = torch.arange(ids_BS.shape[1], device=ids_BS.device) > first_B1
        filled_BS = self._open_BS & right_BS & new_B[:, None]
        return torch.where(filled_BS, ids_BS.gather(1, first_B1), ids_BS), filled_BS
