"""What the loop refuses: logits it cannot use, and settings that rows of one batch cannot share."""

from __future__ import annotations

import torch
from torch import Tensor

from sinklab.sampling.schedules import Schedule

# B batch rows, S canvas positions, M candidate positions in row-major order, V vocabulary


def refuse_unequal(schedule: Schedule, open_BS: Tensor, blocks: int, steps: int | None) -> None:
    """Raises ValueError where the fullest row's deal of steps would change what a row with fewer masks gets alone.

    In a single block with `steps` the counts are those of each row alone, and so are they with one token per step;
    but steps dealt to several blocks, and a clock that has as many ticks as there are masks, are the fullest row's.
    """
    idle = getattr(schedule, "idle", False)
    clock = idle and steps is None
    dealt = blocks > 1 and (idle or steps is not None)
    if not schedule.fixed or schedule.pooled or not (clock or dealt):
        return
    counts = sorted({count for count in open_BS.sum(1).tolist() if count})
    if len(counts) > 1:
        remedy = "decode these rows one by one, or give steps and no block_length"
        if not idle:
            remedy = "leave steps or block_length out, or decode these rows one by one"
        raise ValueError(
            f"the schedule {schedule.name!r} deals steps={steps} to {blocks} block(s) by the number of open positions, "
            f"which must be the same in every row, got rows with {', '.join(map(str, counts))}; {remedy}."
        )


def checked_logits(logits_MV: Tensor, wanted: int, where: str) -> Tensor:
    """The logits. Raises ValueError for another shape than one row per wanted position."""
    if logits_MV.ndim != 2 or logits_MV.shape[0] != wanted:
        raise ValueError(
            f"a denoiser must return one row of logits per wanted position, ({wanted}, vocabulary), but at {where} it "
            f"returned {tuple(logits_MV.shape)}; select with logits_BSV[wanted_BS]."
        )
    return logits_MV


def refuse_logits(best_M: Tensor, where: str) -> None:
    """The best logit of a row is NaN where any is, and -inf where every token is ruled out."""
    if nan := int(best_M.isnan().sum()):
        raise ValueError(
            f"logits must be numbers, but at {where} {nan} of {len(best_M)} positions are NaN; check the "
            "weights, the dtype, and rows that attend to nothing."
        )
    if barred := int((best_M == -torch.inf).sum()):
        raise ValueError(
            f"some token must be possible everywhere, but at {where} {barred} of {len(best_M)} positions have logits "
            "of -inf only; suppress fewer tokens."
        )
