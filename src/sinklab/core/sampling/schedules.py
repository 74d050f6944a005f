"""Number of scored candidates committed at each evaluation, and so the number of evaluations of a
block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sinklab.core.attention.context import reads_wait
from sinklab.core.errors import Checked, check_count, limited
from sinklab.core.registry import schedules
from sinklab.core.sampling.rules import UnmaskingRule

# B batch rows, S canvas positions (of scores: in their descending order), T steps


def commit_counts(n_masked: int | Tensor, steps: int) -> Tensor:
    """Tokens to commit at each of `steps` steps: floor(n / steps), and one more in the first n mod
    steps of them.

    Args:
        n_masked: number of masked positions, an int or an int64 tensor of any shape (one number per
            row).
        steps: number of steps, at least 1.

    Returns int64 of shape (*n_masked.shape, steps) that sums to n_masked over the last axis and
    never rises along it. Raises ValueError for steps < 1 or a negative count. Source: LLaDA
    (2502.09992), `get_num_transfer_tokens`.
    """
    check_count("steps", steps, "leave steps out to commit one token per step.")
    count = torch.as_tensor(n_masked, dtype=torch.int64)
    if not reads_wait(count.device) and (count < 0).any():
        raise ValueError(
            f"n_masked cannot be negative, got {int(count.min())}; count the open masks"
        )
    step_T = torch.arange(steps, device=count.device)
    return (count // steps)[..., None] + (step_T < (count % steps)[..., None])


def split_steps(sizes: Sequence[int], steps: int | None, *, surplus: bool = False) -> list[int]:
    """Share `steps` out to blocks of these sizes: evenly, remainder to the first, never more than a
    block holds.

    Steps that a short block cannot use go to the others by the same rule, so that every step
    commits something. `steps=None` gives one step per position. With `surplus` there may be more
    steps than positions, and a block may get more than it holds. Raises ValueError when a block
    would get no step, or (without `surplus`) a step no position.
    """
    if steps is None:
        return list(sizes)
    if steps < len(sizes):
        raise ValueError(
            f"each block needs at least 1 step, got {steps} steps for {len(sizes)} blocks; give at "
            f"least {len(sizes)} steps or a larger block_length."
        )
    if not surplus and steps > sum(sizes):
        raise ValueError(
            f"steps must not exceed the open positions, got {steps} steps for {sum(sizes)} "
            "positions; some steps would "
            f"commit nothing: use at most {sum(sizes)}, or leave steps out for one token per step."
        )
    shares = [0] * len(sizes)
    most = list(sizes)
    if surplus:
        most = [steps] * len(sizes)
    while sum(shares) < steps:
        room = [block for block, size in enumerate(most) if shares[block] < size]
        share, extra = divmod(steps - sum(shares), len(room))
        for rank, block in enumerate(room):
            part = share + (rank < extra)
            shares[block] += min(part, most[block] - shares[block])
    return shares


@dataclass(frozen=True, eq=False)
class Turn:
    """One evaluation of a block, to a schedule."""

    nth: int
    """Number of the evaluation, 0 for the first of the block."""
    evaluations: int
    """The most evaluations that the block may take."""
    size_B: Tensor
    """int64, masks of each row when the block began."""
    rule: UnmaskingRule
    """The rule whose scores are counted."""
    ordered_BS: Tensor
    """Scores in descending order, -inf beyond the row's candidates; of a schedule that is `pooled`
    the batch is one row, (1, B · S).
    """
    candidates_BS: Tensor
    """bool, the candidates, not in that order."""


class Schedule:
    """Decides how far down the ranking a step commits. A subclass writes `count`, and
    `evaluations` if their number is another one.
    """

    name: ClassVar[str]
    """Name for errors: the registered one, or any."""
    pooled = False
    """Whether candidates of all rows are ranked together."""
    fixed = True
    """Whether `evaluations` is met exactly, so that it is known in advance."""
    allows_surplus_steps = False
    """Whether there may be more evaluations than positions, which changes the counts."""

    def evaluations(self, sizes: Sequence[int], steps: int | None) -> list[int]:
        """The most evaluations that each block may take.

        Args:
            sizes: positions per block, of the fullest row.
            steps: the number requested, in all. Raises ValueError when that makes no sense. If it
                is left out, one token is committed per step; else they are divided evenly.
        """
        return split_steps(sizes, steps)

    def count(self, turn: Turn) -> Tensor:
        """Commits of every row, int64 (B,), or (1,) if `pooled`; more than a row has left is cut to
        the rest.
        """
        raise NotImplementedError(f"{self} has no method count of its own; write it")

    def loop(self, run: Any) -> Iterator[Any]:
        """The steps of a `sampling.loop.Run`: its own, which commit every position once,
        or those of another loop.
        """
        return run.steps()

    def check_rule(self, rule: UnmaskingRule) -> None:
        """Raises ValueError for a rule whose scores this schedule cannot use; by default for one
        that decides on every position alone, and not by a ranking.
        """
        if rule.measure == "chance":
            raise self.misfit(rule, "decides on every position alone", "use schedule='timed'")

    def misfit(self, rule: UnmaskingRule, why: str, remedy: str) -> ValueError:
        """The error for a rule that does not go with this schedule."""
        return ValueError(
            f"the schedule {self.name!r} does not go with the rule {rule}, which {why}; {remedy}."
        )


@schedules.register("even")
@dataclass(frozen=True)
class EvenQuota(Schedule):
    """Commit a block's tokens in equal parts (LLaDA).

    Every step takes floor(n / steps) tokens, and one more in the first n mod steps.
    """

    name = "even"

    def count(self, turn: Turn) -> Tensor:
        """Quotas that sum to the size of each row."""
        return commit_counts(turn.size_B, turn.evaluations)[:, turn.nth]


@schedules.register("timed")
@dataclass(frozen=True)
class Timed(Schedule, Checked):
    """Commit by a time that runs from 1 to `eps` in equal steps (Dream, SMDM).

    The step from t to s commits floor(n (1 - s/t)) of the n masks that are left, the last step all.

    A step may commit nothing: with as many steps as tokens the first commits none and the last two.
    There may be more steps than tokens. With several blocks, time starts anew in each. Counts are
    taken row by row, in float32.
    """

    eps: float = limited(1e-3, above=0, below=1, remedy="Dream uses 1e-3")
    """Time of the end (Dream 1e-3, SMDM 1e-5)."""
    pooled: bool = False
    """Count and rank over the whole batch, as SMDM's greedy sampler does: rows then disturb one
    another.
    """

    name = "timed"
    allows_surplus_steps = True

    def evaluations(self, sizes: Sequence[int], steps: int | None) -> list[int]:
        """One step per position if `steps` is left out; also more steps than positions."""
        return split_steps(sizes, steps, surplus=True)

    def check_rule(self, rule: UnmaskingRule) -> None:
        """Any rule, but `Origin` cannot be pooled."""
        if self.pooled and rule.measure == "chance":
            raise self.misfit(rule, "decides on every position alone", "leave pooled out")

    def count(self, turn: Turn) -> Tensor:
        """Counts by the masks that are left, or by the scores of `Origin`."""
        time_T = torch.linspace(1, self.eps, turn.evaluations + 1, dtype=torch.float32)
        ratio = time_T[turn.nth + 1] / time_T[turn.nth]
        if turn.nth == turn.evaluations - 1:
            ratio = torch.zeros(())
        if turn.rule.measure == "chance":
            return (turn.ordered_BS >= ratio).sum(1)
        return (turn.candidates_BS.sum(1) * (1 - ratio)).long()
