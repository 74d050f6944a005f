"""Number of scored candidates committed at each evaluation, and so the number of evaluations of a
block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.core.attention.context import reads_wait
from sinklab.core.errors import Checked, check_count, limited
from sinklab.core.registry import schedules, unmasking_rules
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


class Schedule:
    """Decides how far down the ranking a step commits. A subclass writes `evaluations` and
    `count`.
    """

    name: ClassVar[str]
    """Name for errors: the registered one, or any."""
    pooled: bool = False
    """Whether candidates of all rows are ranked together."""
    fixed: ClassVar[bool] = True
    """Whether `evaluations` is met exactly, so that it is known in advance."""
    allows_surplus_steps: ClassVar[bool] = False
    """Whether there may be more evaluations than positions, which changes the counts."""
    resizes: ClassVar[bool] = False
    """Whether tokens change the length of the canvas."""

    def evaluations(self, sizes: Sequence[int], steps: int | None) -> list[int]:
        """The most evaluations that each block may take.

        Args:
            sizes: positions per block, of the fullest row.
            steps: the number requested, in all. Raises ValueError when that makes no sense.
        """
        raise NotImplementedError

    def count(self, ordered_BS: Tensor, candidates_BS: Tensor, turn: Turn) -> Tensor:
        """Commits of every row, int64 (B,); more than a row has left is cut to the rest. If
        `pooled` is set, the batch is one row, (1, B · S).

        Args:
            ordered_BS: scores in descending order, -inf beyond the row's candidates.
            candidates_BS: bool, the candidates, not in that order.
            turn: the evaluation.
        """
        raise NotImplementedError

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

    def for_model(self, context: int | None, **token_ids: int | None) -> Schedule:
        """This schedule with what it needs of the model that decodes: the tokens of its context,
        and the ids of its control tokens.
        """
        return self


@schedules.register("even")
@dataclass(frozen=True)
class EvenQuota(Schedule):
    """Commit a block's tokens in equal parts (LLaDA).

    Every step takes floor(n / steps) tokens, and one more in the first n mod steps.
    """

    name: ClassVar[str] = "even"

    def evaluations(self, sizes: Sequence[int], steps: int | None) -> list[int]:
        """One token per step if `steps` is left out, else `steps` divided evenly."""
        return split_steps(sizes, steps)

    def count(self, ordered_BS: Tensor, candidates_BS: Tensor, turn: Turn) -> Tensor:
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

    name: ClassVar[str] = "timed"
    allows_surplus_steps: ClassVar[bool] = True

    def evaluations(self, sizes: Sequence[int], steps: int | None) -> list[int]:
        """One step per position if `steps` is left out; also more steps than positions."""
        return split_steps(sizes, steps, surplus=True)

    def check_rule(self, rule: UnmaskingRule) -> None:
        """Any rule, but `Origin` cannot be pooled."""
        if self.pooled and rule.measure == "chance":
            raise self.misfit(rule, "decides on every position alone", "leave pooled out")

    def count(self, ordered_BS: Tensor, candidates_BS: Tensor, turn: Turn) -> Tensor:
        """Counts by the masks that are left, or by the scores of `Origin`."""
        time_T = torch.linspace(1, self.eps, turn.evaluations + 1, dtype=torch.float32)
        ratio = time_T[turn.nth + 1] / time_T[turn.nth]
        if turn.nth == turn.evaluations - 1:
            ratio = torch.zeros(())
        if turn.rule.measure == "chance":
            return (ordered_BS >= ratio).sum(1)
        return (candidates_BS.sum(1) * (1 - ratio)).long()


@dataclass(frozen=True)
class _Dynamic(Schedule, Checked):
    """Reads the scores: those of rules with one of these measures, or with none."""

    fixed: ClassVar[bool] = False
    reads: ClassVar[tuple[str, ...]]
    lacking: ClassVar[str]

    def evaluations(self, sizes: Sequence[int], steps: int | None) -> list[int]:
        """One evaluation per position at most: each commits at least one token in every row that
        has any left.
        """
        if steps is not None:
            raise ValueError(
                f"the schedule {self.name!r} runs until each block is done, got steps={steps}; "
                "leave steps out, or use schedule='even' for a fixed number."
            )
        return list(sizes)

    def check_rule(self, rule: UnmaskingRule) -> None:
        """Raises ValueError for rules that measure something else, and positions drawn with
        `alg_temp`.
        """
        if rule.measure not in (None, *self.reads):
            usable = [name for name, kind in unmasking_rules.items() if kind.measure in self.reads]
            raise self.misfit(rule, f"gives no {self.lacking}", f"use {' or '.join(usable)}")
        if rule.alg_temp:
            raise ValueError(
                f"the schedule {self.name!r} reads the scores themselves, got "
                f"alg_temp={rule.alg_temp}; "
                "leave alg_temp out, or use schedule='even' or 'timed'."
            )


@schedules.register("threshold")
@dataclass(frozen=True)
class Threshold(_Dynamic):
    """Commit every candidate with a confidence of at least `threshold` (Fast-dLLM).

    The best one is always committed.
    """

    threshold: float = limited(0.9, at_least=0, at_most=1, remedy="Fast-dLLM uses 0.9")

    name: ClassVar[str] = "threshold"
    reads: ClassVar[tuple[str, ...]] = ("probability", "margin")
    lacking: ClassVar[str] = "confidence"

    def count(self, ordered_BS: Tensor, candidates_BS: Tensor, turn: Turn) -> Tensor:
        """Counts by the scores."""
        return (ordered_BS >= self.threshold).sum(1).clamp(min=1)


@schedules.register("factor")
@dataclass(frozen=True)
class Factor(_Dynamic):
    """Commit as many tokens as their confidences allow, by a `factor` (Fast-dLLM).

    With confidences c_1 >= c_2 >= …, these are the first n for which c_i >= 1 - factor / (i + 1)
    holds for every i from 2 to n; the best one always.

    As released, the last candidate goes with the others when it alone fails, so two masks always go
    together; `strict` holds it back. Source: Fast-dLLM (2505.22618), `get_transfer_index_dynamic`.
    """

    factor: float = limited(1.0, above=0, remedy="Fast-dLLM uses 1")
    strict: bool = False
    """True follows the formula to the last candidate."""

    name: ClassVar[str] = "factor"
    reads: ClassVar[tuple[str, ...]] = ("probability",)
    lacking: ClassVar[str] = "probability of the proposed token"

    def count(self, ordered_BS: Tensor, candidates_BS: Tensor, turn: Turn) -> Tensor:
        """Counts by the scores."""
        rank_S = torch.arange(1, ordered_BS.shape[1] + 1, device=ordered_BS.device)
        enough_BS = ordered_BS >= 1 - self.factor / (rank_S + 1)
        enough_BS[:, 0].fill_(True)
        # Confidences fall and bounds rise along the ranking, so those that pass are the first
        # ones.
        n_B = enough_BS.sum(1)
        if self.strict:
            return n_B
        left_B = candidates_BS.sum(1)
        return torch.where(n_B == left_B - 1, left_B, n_B)


@schedules.register("entropy_bound")
@dataclass(frozen=True)
class EntropyBound(_Dynamic):
    """Commit as many tokens as a bound on their entropies allows (the EB sampler).

    With entropies H_1 <= H_2 <= … in nats, these are the first n for which H_1 + … + H_n - max H <=
    gamma, at least one. Source: Ben-Hamu et al. 2025 (2505.24857).
    """

    gamma: float = limited(0.1, at_least=0, remedy="0 commits one token beside those of entropy 0")

    name: ClassVar[str] = "entropy_bound"
    reads: ClassVar[tuple[str, ...]] = ("entropy",)
    lacking: ClassVar[str] = "entropy"

    def count(self, ordered_BS: Tensor, candidates_BS: Tensor, turn: Turn) -> Tensor:
        """Counts by the scores, which are negative entropies."""
        entropy_BS = (-ordered_BS).clamp(min=0)
        # In this order the largest of the first n is the nth: the rule sums those before it.
        before_BS = entropy_BS[:, :-1].cumsum(1)
        return (before_BS <= self.gamma).sum(1) + 1
