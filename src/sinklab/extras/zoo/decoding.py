"""Schedules of models that write block by block: dLLM's counts, SDAR's and LLaDA2's quota."""

# B batch rows, T evaluations, S canvas positions
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sinklab.core.errors import Checked, limited
from sinklab.core.registry import schedules
from sinklab.core.subject import EvenQuota, Turn, UnmaskingRule, commit_counts
from sinklab.lab.samplers import Threshold


@schedules.register("alpha")
@dataclass(frozen=True)
class Alpha(EvenQuota, Checked):
    """dLLM's: time runs from 1 to 0 in equal steps, and the step from t to s commits round(n (1 -
    m(s) / m(t))) of the n masks that are left (half to even), with m(t) the share that is masked at
    t. Steps that commit nothing are left out, so there are never more evaluations than masks.

    `steps` are divided over the blocks and rounded up. Source: dLLM, `get_num_transfer_tokens`.
    """

    curve: str = limited("linear", one_of=("linear", "cosine"))
    """m(t) = t, or cos(π (1 - t) / 2)."""

    name = "alpha"
    fixed = False
    allows_surplus_steps = True

    def evaluations(self, sizes: Sequence[int], steps: int | None) -> list[int]:
        """Evaluations of each block: at most as many as positions if `steps` is left out."""
        return list(sizes) if steps is None else [-(-steps // max(len(sizes), 1))] * len(sizes)

    def count(self, turn: Turn) -> Tensor:
        """Counts of every row, those above 0 first."""
        counts_BT = _alpha_counts(tuple(turn.size_B.tolist()), turn.evaluations, self.curve)
        return counts_BT[:, turn.nth].to(turn.size_B.device)


@lru_cache(maxsize=8)
def _alpha_counts(sizes: tuple[int, ...], evaluations: int, curve: str) -> Tensor:
    """Commits of rows with so many masks at each evaluation, int64 (B, T)."""
    time_T = torch.arange(evaluations, -1, -1, dtype=torch.float64).div(evaluations).float()
    alpha_T = 1 - time_T
    if curve == "cosine":
        alpha_T = 1 - torch.cos(torch.pi / 2 * (1 - time_T))
    # as the original: float32 up to here, then float64
    share_T = 1 - ((1 - alpha_T[1:]) / (1 - alpha_T[:-1])).double()
    left_B = torch.tensor(sizes, dtype=torch.float64)
    counts = []
    for share in share_T:
        counts.append((left_B * share).round())
        left_B = left_B - counts[-1]
    counts_BT = torch.stack(counts, 1).long()
    order_BT = counts_BT.eq(0).sort(dim=1, stable=True).indices
    return counts_BT.gather(1, order_BT)


@schedules.register("dynamic")
@dataclass(frozen=True)
class Dynamic(Threshold):
    """SDAR's and LLaDA2.0's: every candidate with a confidence above the threshold, if they are at
    least the quota; else as many of the best as the quota says. A block ends when no mask is left.

    The quota is one token, or with `steps` an equal part of a whole block, the remainder first:
    also in a block that the prompt has begun or the end cuts short. Raises ValueError for `steps`
    without a `block_length` or above it, and for a block that is longer. Source: SDAR
    (`generate.py`), LLaDA2.0 (`generate`).
    """

    threshold: float = limited(0.9, at_least=0, at_most=1, remedy="SDAR uses 0.85, LLaDA2.0 0.95")
    """1 commits the quota alone (SDAR's static remasking, and with the rule left_to_right its
    sequential one).
    """
    steps: int | None = limited(None, at_least=1, remedy="leave it out for a quota of one token")
    """Evaluations of a whole block that has no confident candidates."""
    block_length: int | None = limited(
        None, at_least=1, remedy="leave it out for a quota of one token"
    )
    """Tokens of a whole block, if `steps` is given."""

    name = "dynamic"

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.steps is None) != (self.block_length is None) or (self.steps or 0) > (
            self.block_length or 0
        ):
            raise ValueError(
                "steps divide the block_length tokens of a whole block, at least one each, got "
                f"steps={self.steps} and block_length={self.block_length}; give both, or neither "
                "for one token a step"
            )

    def evaluations(self, sizes: Sequence[int], steps: int | None) -> list[int]:
        """Evaluations of each block: as many as the quota takes."""
        if self.block_length is not None and max(sizes, default=0) > self.block_length:
            raise ValueError(
                f"the schedule {self.name!r} has a quota for blocks of {self.block_length} "
                "tokens, but one has "
                f"{max(sizes)}; set its block_length, or decode in blocks of {self.block_length}"
            )
        done = [sum(self._quotas[: step + 1]) for step in range(len(self._quotas))]
        most = super().evaluations(sizes, steps)
        return [1 + sum(tokens < size for tokens in done) if done else size for size in most]

    @property
    def _quotas(self) -> list[int]:
        """Tokens of each step of a whole block; none without `steps`: one token each."""
        if self.steps is None or self.block_length is None:
            return []
        return commit_counts(self.block_length, self.steps).tolist()

    def check_rule(self, rule: UnmaskingRule) -> None:
        """Accept with a threshold of 1 any rule that ranks; else check it as `Threshold` does."""
        if self.threshold < 1 or rule.measure == "chance":
            super().check_rule(rule)

    def count(self, turn: Turn) -> Tensor:
        """Count of tokens by the quota, and with a threshold below 1 by the scores."""
        quotas = self._quotas or [1] * turn.evaluations
        if self.threshold == 1:
            return turn.candidates_BS.sum(1).clamp(max=quotas[turn.nth])
        return (turn.ordered_BS > self.threshold).sum(1).clamp(min=quotas[turn.nth])
