"""Loss on held-out rows, each under noise of its own that never changes: batch sizes and ranks do not matter."""

# R rows, B batch, S sequence, M masked positions (row-major), V vocabulary
from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sinklab.data import Rows
from sinklab.training.noise import NoisyCollator, neighbours
from sinklab.training.objective import asked_causally, sight

NOISE_SEED = 0
"""Of held-out noise: not the run's own, so that runs of different seeds compare."""


@dataclass(frozen=True)
class HeldOut:
    """Rows to measure on.

    Args:
        rows: the held-out rows in their order.
        mask_id: id of [MASK].
        together: rows that go through the model at a time.
        window: neighbours in sight on either side; None for all.
    """

    rows: Rows
    mask_id: int
    together: int
    window: int | None = None

    @cached_property
    def batch(self) -> dict[str, Tensor]:
        """All rows with their noise, evenly spread times."""
        collator = NoisyCollator(NOISE_SEED, len(self.rows), "low_discrepancy")
        return collator([self.rows[number] for number in range(len(self.rows))])

    @torch.no_grad()
    def measure(self, model: Any, accelerator: Any, *, causal: bool, shifted: bool) -> dict[str, Any]:
        """``loss``: nats per token over all rows; ``losses`` (R,) float64: of each row, under the masked-token
        objective (weight 1/t) or, for a causal model, the next token; ``tokens`` (R,): what each row's loss is a
        mean over.

        Every process works on its share; all get the whole result.
        """
        count, ranks, rank = len(self.rows), accelerator.num_processes, accelerator.process_index
        sums_R = torch.zeros(count, dtype=torch.float64 if accelerator.device.type != "mps" else torch.float32)
        for turn in range(math.ceil(count / (self.together * ranks))):
            first = (turn * ranks + rank) * self.together
            # the last group is filled up with repeated rows: one shape to compile, one number of calls on each rank
            places = [min(first + number, count - 1) for number in range(self.together)]
            batch = {name: part[places].to(accelerator.device) for name, part in self.batch.items()}
            sums_B = self._sums(model, batch, causal, shifted).to(sums_R)
            own = max(0, min(self.together, count - first))
            sums_R[first : first + own] = sums_B[:own]
        sums_R = accelerator.reduce(sums_R.to(accelerator.device), reduction="sum").cpu()
        tokens_R = self.tokens(causal)
        losses_R = sums_R / tokens_R
        return {"loss": (sums_R.sum() / tokens_R.sum()).item(), "losses": losses_R, "tokens": tokens_R}

    def tokens(self, causal: bool) -> Tensor:
        """Tokens (R,) that each row's loss is a mean over."""
        if causal:
            return asked_causally(self.batch).sum(dim=1)
        ids_RS = self.batch["input_ids"]
        return self.batch.get("maskable", torch.ones_like(ids_RS, dtype=torch.bool)).sum(dim=1)

    def _sums(self, model: Any, batch: dict[str, Tensor], causal: bool, shifted: bool) -> Tensor:
        """Weighted cross-entropy of each row (B,)."""
        ids_BS = batch["input_ids"]
        seen = sight(batch, neighbours(self.window, ids_BS.shape[1]))
        if causal:
            asked_BS = asked_causally(batch)
            keep_BS = asked_BS if shifted else asked_BS.roll(-1, dims=1)
            logits_MV = model(ids_BS, logits_to_keep=keep_BS, causal=True, **seen).logits
            weights_B = torch.ones(ids_BS.shape[0], device=ids_BS.device)
        else:
            asked_BS = batch["masked"]
            logits_MV = model(ids_BS.masked_fill(asked_BS, self.mask_id), logits_to_keep=asked_BS, **seen).logits
            weights_B = 1 / batch["t"]
        losses_M = F.cross_entropy(logits_MV.float(), ids_BS[asked_BS], reduction="none")
        row_M = asked_BS.nonzero()[:, 0]
        weighted_M = losses_M * weights_B.to(losses_M)[row_M]
        return losses_M.new_zeros(ids_BS.shape[0]).index_add(0, row_M, weighted_M)
