"""Noise that belongs to a row of the run: the same on every rank, in every micro-batch, before and after a restart."""

# B batch, S sequence
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sinklab.data.rows import collate, place_generator
from sinklab.diffusion import TimeSampler, sample_times

# what a draw is for: neighbouring places of different kinds must not share a generator
_TIME, _MASK, _STEP_TIMES, _VISIBLE = range(4)


def row_times(seed: int, rows_B: Tensor, batch: int, sampler: TimeSampler) -> Tensor:
    """Diffusion time t_B of each row of the run.

    Args:
        seed: of the run.
        rows_B: ordinals of the rows; row n belongs to step n // batch.
        batch: rows of an optimizer step, over all ranks.
        sampler: ``iid`` draws from (seed, row) alone; ``low_discrepancy`` spreads the rows of a step evenly, drawing
            from (seed, step) and the row's place in its step.

    Raises:
        ValueError: if the sampler is unknown or ``batch`` < 1.
    """
    if sampler == "iid":
        drawn = [sample_times(1, generator=place_generator(seed, _TIME, row)) for row in rows_B.tolist()]
        return torch.cat(drawn)
    steps: dict[int, Tensor] = {}
    for step in {row // batch for row in rows_B.tolist()}:
        generator = place_generator(seed, _STEP_TIMES, step)
        steps[step] = sample_times(batch, sampler=sampler, generator=generator)
    return torch.stack([steps[row // batch][row % batch] for row in rows_B.tolist()])


def row_masks(seed: int, rows_B: Tensor, t_B: Tensor, length: int) -> Tensor:
    """Bool (B, S): what :func:`sinklab.diffusion.corrupt` masks in each row under a generator of (seed, row)."""
    drawn = [torch.rand(length, generator=place_generator(seed, _MASK, row)) for row in rows_B.tolist()]
    return torch.stack(drawn) < t_B[:, None]


def visible_keys(seed: int, step: int, share: float, length: int) -> Tensor:
    """Bool (S, S) of attention-mask annealing (DiffuLLaMA, arXiv 2410.17891): each query sees its left, and each key to
    its right with probability ``share``, drawn for the whole step.
    """
    drawn_SS = torch.rand(length, length, generator=place_generator(seed, _VISIBLE, step))
    return (drawn_SS < share) | torch.ones(length, length, dtype=torch.bool).tril()


def neighbours(window: int | None, length: int) -> Tensor | None:
    """Bool (S, S): keys at most ``window`` positions away; None where there is no window."""
    if window is None:
        return None
    place_S = torch.arange(length)
    return (place_S[:, None] - place_S).abs() <= window


@dataclass(frozen=True)
class NoisyCollator:
    """Rows of the run to a batch with its noise: adds ``t`` (B,) and ``masked`` (B, S), drawn where the data is loaded.

    No noise is drawn for rows of the first ``clean_steps`` steps, which are spent as a causal language model.
    """

    seed: int
    batch: int
    sampler: TimeSampler
    clean_steps: int = 0

    def __call__(self, rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The batch."""
        batch = collate(rows)
        rows_B = batch["row"]
        if int(rows_B[0]) // self.batch < self.clean_steps:
            return batch
        t_B = row_times(self.seed, rows_B, self.batch, self.sampler)
        masked_BS = row_masks(self.seed, rows_B, t_B, batch["input_ids"].shape[1])
        if "maskable" in batch:
            masked_BS &= batch["maskable"]
        return batch | {"t": t_B, "masked": masked_BS}
