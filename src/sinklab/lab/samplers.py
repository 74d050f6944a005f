"""Rules and schedules of published samplers: LLaDA's, Dream's, Fast-dLLM's and the EB sampler."""

# B batch rows, S canvas positions (of scores: in their descending order), M candidate positions in
# row-major order, V vocabulary
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.core.errors import Checked, limited
from sinklab.core.registry import schedules, unmasking_rules
from sinklab.core.subject.rules import (
    Candidates,
    ConfidenceRule,
    UnmaskingRule,
)
from sinklab.core.subject.schedules import Schedule, Turn, split_steps
from sinklab.core.subject.tokens import required


@unmasking_rules.register("random")
@dataclass(frozen=True)
class RandomOrder(UnmaskingRule):
    """Commit in an order drawn anew at every step (LLaDA's `random` remasking)."""

    measure = "order"
    needs_generator = True

    def __call__(self, candidates: Candidates) -> Tensor:
        source = required(candidates.generator, f"the rule {self}")
        tokens_M = candidates.tokens_M
        draws_M = torch.rand(tokens_M.shape, generator=source, device=source.device)
        return draws_M.to(tokens_M.device)


@unmasking_rules.register("left_to_right")
@dataclass(frozen=True)
class LeftToRight(UnmaskingRule):
    """Commit strictly from left to right; the score is minus the canvas column."""

    measure = "order"

    def __call__(self, candidates: Candidates) -> Tensor:
        return -candidates.columns_M.float()


@unmasking_rules.register("maskgit_plus")
@dataclass(frozen=True)
class MaskgitPlus(ConfidenceRule):
    """Commit the proposals of highest shaped probability first (Dream's `maskgit_plus`).

    The probability is taken after temperature, top-p and top-k.
    """

    def __call__(self, candidates: Candidates) -> Tensor:
        return candidates.at_proposals(candidates.shaped_probability_MV)


@unmasking_rules.register("topk_margin")
@dataclass(frozen=True)
class TopkMargin(ConfidenceRule):
    """Commit the positions of greatest margin p1 - p2 first (Dream's `topk_margin`).

    The margin is that of the best token over the second, after temperature, top-p and top-k.
    Neither need be the proposed token when that is drawn.
    """

    measure = "margin"

    def __call__(self, candidates: Candidates) -> Tensor:
        probability_MV = candidates.shaped_probability_MV
        if probability_MV.shape[-1] == 1:
            return probability_MV[:, 0]
        best_M2 = probability_MV.topk(2, -1).values
        return best_M2[:, 0] - best_M2[:, 1]


@unmasking_rules.register("entropy")
@dataclass(frozen=True)
class Entropy(ConfidenceRule):
    """Commit the positions of least entropy first (Dream's `entropy`).

    The score is Σ p log(p + 1e-10) in nats, after temperature, top-p and top-k.
    """

    measure = "entropy"

    def __call__(self, candidates: Candidates) -> Tensor:
        probability_MV = candidates.shaped_probability_MV
        return (probability_MV * (probability_MV + 1e-10).log_()).sum(-1)


@unmasking_rules.register("origin")
@dataclass(frozen=True)
class Origin(RandomOrder):
    """Commit every masked position independently, with probability 1 - s/t (Dream's `origin`), by
    the `Timed` schedule, which knows s and t; the score is the uniform number drawn.
    """

    measure = "chance"
    usual_schedule = "timed"


@schedules.register("timed")
@dataclass(frozen=True)
class Timed(Schedule, Checked):
    """Commit by a time that runs from 1 to `eps` in equal steps (Dream, SMDM).

    The step from t to s commits floor(n (1 - s/t)) of the n masks that are left, the last step all;
    a step may commit nothing, and there may be more steps than tokens. Time starts anew in each
    block. Counts are taken row by row, in float32.
    """

    eps: float = limited(1e-3, above=0, below=1, remedy="Dream uses 1e-3")
    """Time of the end (Dream 1e-3, SMDM 1e-5)."""
    pooled: bool = False
    """Count and rank over the whole batch, as SMDM's greedy sampler does."""

    name = "timed"
    allows_surplus_steps = True

    def evaluations(self, sizes: Sequence[int], steps: int | None) -> list[int]:
        """Evaluations as requested, also more than positions."""
        if steps is not None:
            sizes = [steps] * len(sizes)
        return split_steps(sizes, steps)

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


@dataclass(frozen=True)
class _Dynamic(Schedule, Checked):
    """Reads the scores: those of rules with one of these measures, or with none."""

    fixed = False
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

    name = "threshold"
    reads: ClassVar[tuple[str, ...]] = ("probability", "margin")
    lacking = "confidence"

    def count(self, turn: Turn) -> Tensor:
        """Counts by the scores."""
        return (turn.ordered_BS >= self.threshold).sum(1).clamp(min=1)


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

    name = "factor"
    reads = ("probability",)
    lacking = "probability of the proposed token"

    def count(self, turn: Turn) -> Tensor:
        """Counts by the scores."""
        rank_S = torch.arange(1, turn.ordered_BS.shape[1] + 1, device=turn.ordered_BS.device)
        enough_BS = turn.ordered_BS >= 1 - self.factor / (rank_S + 1)
        enough_BS[:, 0].fill_(True)
        # Confidences fall and bounds rise along the ranking, so those that pass are the first
        # ones.
        n_B = enough_BS.sum(1)
        if self.strict:
            return n_B
        left_B = turn.candidates_BS.sum(1)
        return torch.where(n_B == left_B - 1, left_B, n_B)


@schedules.register("entropy_bound")
@dataclass(frozen=True)
class EntropyBound(_Dynamic):
    """Commit as many tokens as a bound on their entropies allows (the EB sampler).

    With entropies H_1 <= H_2 <= … in nats, these are the first n for which H_1 + … + H_n - max H <=
    gamma, at least one. Source: Ben-Hamu et al. 2025 (2505.24857).
    """

    gamma: float = limited(0.1, at_least=0, remedy="0 commits one token beside those of entropy 0")

    name = "entropy_bound"
    reads = ("entropy",)
    lacking = "entropy"

    def count(self, turn: Turn) -> Tensor:
        """Counts by the scores, which are negative entropies."""
        entropy_BS = (-turn.ordered_BS).clamp(min=0)
        # In this order the largest of the first n is the nth: the rule sums those before it.
        before_BS = entropy_BS[:, :-1].cumsum(1)
        return (before_BS <= self.gamma).sum(1) + 1
