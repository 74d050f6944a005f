"""Number of scored candidates committed at each evaluation, and so the number of evaluations of a
block.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from sinklab.core.attention.context import reads_wait
from sinklab.core.errors import Checked, check_count, limited
from sinklab.core.registry import schedules, unmasking_rules
from sinklab.core.sampling.rules import UnmaskingRule

# B batch rows, C candidates in the order of their scores, T steps


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
    floor, remainder = count // steps, count % steps
    return floor[..., None] + (step_T < remainder[..., None])


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
    while left := steps - sum(shares):
        room = [block for block, size in enumerate(sizes) if surplus or shares[block] < size]
        share, extra = divmod(left, len(room))
        for rank, block in enumerate(room):
            part = share + (rank < extra)
            shares[block] += part if surplus else min(part, sizes[block] - shares[block])
    return shares


Count = Callable[[Tensor, Tensor, int], Tensor]
"""(ordered_BC, candidates_BC, evaluation) -> int64 (B,): commits of every row at an evaluation (0 =
first) of a block.

ordered_BC: scores in descending order, -inf beyond the row's candidates. candidates_BC: bool, the
candidates, not in that order. More than a row has left is cut to the rest.
"""


@dataclass(frozen=True)
class Unread:
    """A count that reads no scores and of the candidates no more than how many there are: the loop
    takes it twice, on the device for the commit and on the CPU to know the number left. Made by a
    schedule's `start`.
    """

    of: Count

    def __call__(self, ordered_BC: Tensor, candidates_BC: Tensor, evaluation: int) -> Tensor:
        """Call `of`."""
        return self.of(ordered_BC, candidates_BC, evaluation)


class Schedule(Protocol):
    """Decides how far down the ranking a step commits.

    Optional attribute `allows_surplus_steps`: there may be more evaluations than positions, and
    they change counts. Optional method `run(run, evaluate)`: the steps, in place of the loop that
    commits every position once. Optional attribute `resizes`: tokens change the length of the
    canvas; fields `expand_id`, `delete_id` and `context` that are None are then filled in by the
    model that decodes.
    """

    @property
    def name(self) -> str:
        """Name for errors: the registered one, or any."""

    @property
    def pooled(self) -> bool:
        """Whether candidates of all rows are ranked together."""

    @property
    def fixed(self) -> bool:
        """Whether `evaluations` is met exactly, so that it is known in advance."""

    def evaluations(self, sizes: Sequence[int], steps: int | None) -> list[int]:
        """The most evaluations that each block may take.

        Args:
            sizes: positions per block, of the fullest row.
            steps: the number requested, in all. Raises ValueError when that makes no sense.
        """

    def check_rule(self, rule: UnmaskingRule) -> None:
        """Raises ValueError for a rule whose scores this schedule cannot use."""

    def start(self, size_B: Tensor, evaluations: int, rule: UnmaskingRule) -> Count:
        """The counts of one block, with `size_B` open positions in each row, in at most
        `evaluations`.

        If `pooled` is set, counts are taken and given as if the batch were one row.
        """


def _draws_positions(rule: UnmaskingRule) -> bool:
    """Whether the rule decides on every position alone, and not by a ranking."""
    return getattr(rule, "measure", None) == "chance"


def _misfit(rule: UnmaskingRule, schedule: str, why: str, remedy: str) -> ValueError:
    return ValueError(
        f"the schedule {schedule!r} does not go with the rule {rule}, which {why}; {remedy}."
    )


def _check_ranks(rule: UnmaskingRule, schedule: str) -> None:
    if _draws_positions(rule):
        raise _misfit(rule, schedule, "decides on every position alone", "use schedule='timed'")


@schedules.register("even")
@dataclass(frozen=True)
class EvenQuota:
    """Commit a block's tokens in equal parts (LLaDA).

    Every step takes floor(n / steps) tokens, and one more in the first n mod steps.
    """

    name: ClassVar[str] = "even"
    pooled: ClassVar[bool] = False
    fixed: ClassVar[bool] = True

    def evaluations(self, sizes: Sequence[int], steps: int | None) -> list[int]:
        """One token per step if `steps` is left out, else `steps` divided evenly."""
        return split_steps(sizes, steps)

    def check_rule(self, rule: UnmaskingRule) -> None:
        """Any rule but `Origin`."""
        _check_ranks(rule, self.name)

    def start(self, size_B: Tensor, evaluations: int, rule: UnmaskingRule) -> Count:
        """Quotas that sum to the size of each row."""
        quotas = commit_counts(size_B, evaluations).unbind(-1)
        return Unread(lambda ordered_BC, candidates_BC, evaluation: quotas[evaluation])


@schedules.register("timed")
@dataclass(frozen=True)
class Timed(Checked):
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
    fixed: ClassVar[bool] = True
    allows_surplus_steps: ClassVar[bool] = True

    def evaluations(self, sizes: Sequence[int], steps: int | None) -> list[int]:
        """One step per position if `steps` is left out; also more steps than positions."""
        return split_steps(sizes, steps, surplus=True)

    def check_rule(self, rule: UnmaskingRule) -> None:
        """Any rule, but `Origin` cannot be pooled."""
        if self.pooled and _draws_positions(rule):
            raise _misfit(
                rule, "timed (pooled)", "decides on every position alone", "leave pooled out"
            )

    def start(self, size_B: Tensor, evaluations: int, rule: UnmaskingRule) -> Count:
        """Counts by the masks that are left, or by the scores of `Origin`."""
        time_T = torch.linspace(1, self.eps, evaluations + 1, dtype=torch.float32)
        ratio_T = time_T[1:] / time_T[:-1]
        ratio_T[-1].zero_()
        ratios = ratio_T.to(size_B.device, non_blocking=True).unbind()
        if _draws_positions(rule):
            return lambda ordered_BC, candidates_BC, evaluation: (
                ordered_BC >= ratios[evaluation]
            ).sum(1)
        return Unread(
            lambda ordered_BC, candidates_BC, nth: (candidates_BC.sum(1) * (1 - ratios[nth])).long()
        )


@dataclass(frozen=True)
class _Dynamic(Checked):
    """Reads the scores: those of rules with one of these measures, or with none."""

    pooled: ClassVar[bool] = False
    fixed: ClassVar[bool] = False
    name: ClassVar[str]
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
        """Rules that measure something else, and positions drawn with `alg_temp`."""
        if getattr(rule, "measure", None) not in (None, *self.reads):
            usable = [
                name
                for name, kind in unmasking_rules.items()
                if getattr(kind, "measure", None) in self.reads
            ]
            raise _misfit(rule, self.name, f"gives no {self.lacking}", f"use {' or '.join(usable)}")
        if getattr(rule, "alg_temp", None):
            raise ValueError(
                f"the schedule {self.name!r} reads the scores themselves, got "
                f"alg_temp={getattr(rule, 'alg_temp', 0)}; "
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

    def start(self, size_B: Tensor, evaluations: int, rule: UnmaskingRule) -> Count:
        """Counts by the scores."""
        return lambda ordered_BC, candidates_BC, evaluation: (
            (ordered_BC >= self.threshold).sum(1).clamp(min=1)
        )


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

    def start(self, size_B: Tensor, evaluations: int, rule: UnmaskingRule) -> Count:
        """Counts by the scores."""

        def count(ordered_BC: Tensor, candidates_BC: Tensor, evaluation: int) -> Tensor:
            rank_C = torch.arange(1, ordered_BC.shape[1] + 1, device=ordered_BC.device)
            enough_BC = ordered_BC >= 1 - self.factor / (rank_C + 1)
            enough_BC[:, 0].fill_(True)
            # Confidences fall and bounds rise along the ranking, so those that pass are the first
            # ones.
            n_B = enough_BC.sum(1)
            if self.strict:
                return n_B
            left_B = candidates_BC.sum(1)
            return torch.where(n_B == left_B - 1, left_B, n_B)

        return count


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

    def start(self, size_B: Tensor, evaluations: int, rule: UnmaskingRule) -> Count:
        """Counts by the scores, which are negative entropies."""

        def count(ordered_BC: Tensor, candidates_BC: Tensor, evaluation: int) -> Tensor:
            entropy_BC = (-ordered_BC).clamp(min=0)
            # In this order the largest of the first n is the nth: the rule sums those before it.
            before_BC = entropy_BC[:, :-1].cumsum(1)
            return (before_BC <= self.gamma).sum(1) + 1

        return count
