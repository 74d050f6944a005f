"""Number of candidates committed at each evaluation, and so the number of evaluations of a block.

Decoders trade quality for speed here: a schedule says how far down the ranking of a step they go.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sinklab.core.errors import check_count
from sinklab.core.registry import schedules
from sinklab.core.subject.rules import UnmaskingRule
from sinklab.core.subject.tokens import TokenSampling

# B batch rows, S canvas positions (of scores: in their descending order), T steps


def commit_counts(n_masked: int | Tensor, steps: int) -> Tensor:
    """Tokens to commit at each step, int64 (*n_masked.shape, steps): floor(n / steps), and one more
    in the first n mod steps. Raises ValueError for steps < 1. Source: LLaDA (2502.09992),
    `get_num_transfer_tokens`.
    """
    check_count("steps", steps, "leave steps out to commit one token per step.")
    count = torch.as_tensor(n_masked, dtype=torch.int64)
    step_T = torch.arange(steps, device=count.device)
    return (count // steps)[..., None] + (step_T < (count % steps)[..., None])


def split_steps(sizes: Sequence[int], steps: int | None) -> list[int]:
    """Share `steps` out to blocks of these sizes: evenly, remainder to the first; what a block
    cannot use goes to the others. None gives one step per position. Raises ValueError when a block
    would get no step, or a step no position.
    """
    if steps is None:
        return list(sizes)
    if steps < len(sizes):
        raise ValueError(
            f"each block needs at least 1 step, got {steps} steps for {len(sizes)} blocks; give at "
            f"least {len(sizes)} steps or a larger block_length."
        )
    if steps > sum(sizes):
        raise ValueError(
            f"steps must not exceed the open positions, got {steps} steps for {sum(sizes)} "
            "positions; some steps would "
            f"commit nothing: use at most {sum(sizes)}, or leave steps out for one token per step."
        )
    shares = [0] * len(sizes)
    while sum(shares) < steps:
        room = [block for block, size in enumerate(sizes) if shares[block] < size]
        share, extra = divmod(steps - sum(shares), len(room))
        for rank, block in enumerate(room):
            part = share + (rank < extra)
            shares[block] += min(part, sizes[block] - shares[block])
    return shares


@dataclass(frozen=True, eq=False)
class Turn:
    """One evaluation of a block, as a schedule sees it."""

    nth: int
    """Number of the evaluation, 0 for the first of the block."""
    evaluations: int
    """The most evaluations that the block may take."""
    size_B: Tensor
    """int64, masks of each row when the block began."""
    rule: UnmaskingRule
    """The rule whose scores are counted."""
    ordered_BS: Tensor
    """Scores in descending order, -inf after the row's candidates; for a `pooled` schedule the
    batch is one row, (1, B · S).
    """
    candidates_BS: Tensor
    """bool, the candidates, not in that order."""


class Schedule:
    """How far down the ranking a step commits. A subclass writes `count`."""

    name: ClassVar[str]
    """Name for errors."""
    pooled = False
    """Whether candidates of all rows are ranked together."""
    fixed = True
    """Whether `evaluations` is met exactly, so that it is known in advance."""
    allows_surplus_steps = False
    """Whether there may be more evaluations than positions, which changes the counts."""

    def evaluations(self, sizes: Sequence[int], steps: int | None) -> list[int]:
        """The most evaluations of each block, given its positions in the fullest row. Raises
        ValueError for a number of `steps` that makes no sense.
        """
        return split_steps(sizes, steps)

    def count(self, turn: Turn) -> Tensor:
        """Commits of every row, int64 (B,), or (1,) if `pooled`; too many means all of them."""
        raise NotImplementedError(f"{self} has no method count of its own; write it")

    def loop(self, run: Any) -> Iterator[Any]:
        """The steps of a `sampling.loop.DenoisingLoop`: its own, or those of another loop."""
        return run.steps()

    def check_rule(self, rule: UnmaskingRule) -> None:
        """Raises ValueError for a rule whose scores this schedule cannot use."""
        if rule.measure == "chance":
            raise self.misfit(rule, "decides on every position alone", "use schedule='timed'")

    def misfit(self, rule: UnmaskingRule, why: str, remedy: str) -> ValueError:
        """The error for a rule that does not go with this schedule."""
        return ValueError(
            f"the schedule {self.name!r} does not go with the rule {rule}, which {why}; {remedy}."
        )


def schedule_of(
    given: Schedule | str | None, rule: UnmaskingRule, sampling: TokenSampling
) -> Schedule:
    """The schedule of this text, the object itself, or for None the rule's usual one. Raises
    ValueError for a combination that makes no sense.
    """
    if given is None:
        given = rule.usual_schedule
    schedule: Schedule = schedules.parse(given, Schedule)
    schedule.check_rule(rule)
    if sampling.temperature == 0 and sampling.cuts and not rule.sees_truncation:
        raise ValueError(
            f"top_p and top_k do nothing at temperature 0 with the rule {rule}, got "
            f"top_p={sampling.top_p} and "
            f"top_k={sampling.top_k}; raise the temperature or leave them out."
        )
    return schedule


def check_equal_rows(schedule: Schedule, open_BS: Tensor, blocks: int, steps: int | None) -> None:
    """Raises ValueError if a row with fewer masks would get other counts than alone, as the fullest
    row divides steps over blocks, or time over masks.
    """
    in_time = schedule.allows_surplus_steps
    is_shared = blocks > 1 and steps is not None
    if in_time:
        is_shared = blocks > 1 or steps is None
    if schedule.pooled or not is_shared:
        return
    counts = sorted({count for count in open_BS.sum(1).tolist() if count})
    if len(counts) > 1:
        remedy = "decode these rows one by one, or give steps and no block_length"
        if not in_time:
            remedy = "leave steps or block_length out, or decode these rows one by one"
        raise ValueError(
            f"the schedule {schedule.name!r} splits steps={steps} over {blocks} block(s) by the "
            "number of open positions, which must be the same in every row, got rows with "
            f"{', '.join(map(str, counts))}; {remedy}."
        )


@schedules.register("even")
@dataclass(frozen=True)
class EvenQuota(Schedule):
    """Commit a block's tokens in equal parts, as `commit_counts` divides them (LLaDA)."""

    name = "even"

    def count(self, turn: Turn) -> Tensor:
        """Quotas that sum to the size of each row."""
        return commit_counts(turn.size_B, turn.evaluations)[:, turn.nth]
