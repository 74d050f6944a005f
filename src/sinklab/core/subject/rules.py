"""Order in which proposals are committed: every rule gives each candidate a score, and the highest
go first.

A rule is a function of the candidates, so that published orders differ by a line or two.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.core.errors import Checked, check_vocabulary, limited, whole_numbers
from sinklab.core.registry import unmasking_rules
from sinklab.core.subject.canvas import true_indices
from sinklab.core.subject.tokens import TokenSampling, proposals, shaped

# B batch rows, S canvas positions, M candidate positions in row-major order, V vocabulary


@dataclass(frozen=True, eq=False)
class Candidates:
    """The candidates of one evaluation; a pass over the vocabulary is made on first use."""

    logits_MV: Tensor
    """Logits as the denoiser gave them, [MASK] included; -inf for suppressed ids."""
    sampling: TokenSampling
    mask_id: int
    """The id that is never proposed."""
    candidates_BS: Tensor
    """bool, the positions of the canvas that are candidates."""
    ids_BS: Tensor
    """int64, the ids that the denoiser saw."""
    open_BS: Tensor
    """bool, the positions that are written in this run: neither prompt nor padding."""
    generator: torch.Generator | None = None
    """The one source of randomness."""

    @property
    def exact_MV(self) -> Tensor:
        """The logits in float32 or better."""
        return self.logits_MV.to(torch.promote_types(self.logits_MV.dtype, torch.float32))

    @cached_property
    def shaped_MV(self) -> Tensor:
        """Logits after temperature, top-p and top-k, float32 or better."""
        return shaped(self.exact_MV, self.sampling)

    @cached_property
    def probability_MV(self) -> Tensor:
        """softmax(logits_MV), float32 or better."""
        return torch.softmax(self.exact_MV, -1)

    @cached_property
    def shaped_probability_MV(self) -> Tensor:
        """softmax(shaped_MV)."""
        if not self.sampling.shapes:
            return self.probability_MV
        return torch.softmax(self.shaped_MV, -1)

    @cached_property
    def drawn(self) -> tuple[Tensor, Tensor]:
        """The value each proposal was chosen by (NaN if logits are), and the proposals."""
        cut_MV = None
        if self.sampling.temperature > 0 and self.sampling.cuts:
            cut_MV = self.shaped_MV
        return proposals(self.logits_MV, cut_MV, self.sampling, self.mask_id, self.generator)

    @property
    def tokens_M(self) -> Tensor:
        """int64, the token that would be committed at each candidate."""
        return self.drawn[1]

    def at_proposals(self, probability_MV: Tensor) -> Tensor:
        """The value (M,) of each proposal."""
        return probability_MV.gather(-1, self.tokens_M[:, None])[:, 0]

    @cached_property
    def columns_M(self) -> Tensor:
        """int64, the canvas column of each candidate, left padding counted."""
        return self._flat_M % self.candidates_BS.shape[1]

    @cached_property
    def rows_M(self) -> Tensor:
        """int64, the batch row of each candidate."""
        return self._flat_M // self.candidates_BS.shape[1]

    @cached_property
    def _flat_M(self) -> Tensor:
        return true_indices(self.candidates_BS, len(self.logits_MV))


class UnmaskingRule:
    """A score for every candidate of a step. A subclass writes `__call__`."""

    measure: ClassVar[str | None] = None
    """Kind of the scores, so that a schedule that reads them can refuse others:

    - "probability": of the proposal, 0 to 1; "margin": p1 − p2; "entropy": Σ p log p in nats.
    - "order": scores that only rank.
    - "chance": every position decides alone, by the number drawn.
    - None: no schedule refuses the rule.
    """
    usual_schedule = "even"
    """Text of the schedule when none is given."""
    sees_truncation = True
    """Whether top-p and top-k change the scores; if not, they are refused at temperature 0."""
    needs_generator = False
    """Whether the rule draws."""
    alg_temp: float | None = None
    """Draw the positions in proportion to exp(score / alg_temp), without replacement; None or 0
    takes the best ones.
    """

    @property
    def draws(self) -> bool:
        """Whether the positions depend on random numbers."""
        return self.needs_generator or bool(self.alg_temp)

    def __call__(self, candidates: Candidates) -> Tensor:
        """One score per candidate, float (M,); the highest are committed first."""
        raise NotImplementedError(f"{self} has no method __call__ of its own; write it")


class FunctionRule(UnmaskingRule):
    """A plain function of the candidates as a rule."""

    def __init__(self, function: Callable[[Candidates], Tensor]) -> None:
        self.function = function

    def __repr__(self) -> str:
        return repr(self.function)

    def __call__(self, candidates: Candidates) -> Tensor:
        """The function's value."""
        return self.function(candidates)


def rule_of(given: UnmaskingRule | Callable[[Candidates], Tensor] | str) -> UnmaskingRule:
    """The rule of this text, the rule itself, or a function as a rule. Raises ValueError for
    anything else, a class too.
    """
    if callable(given) and not isinstance(given, UnmaskingRule | type):
        return FunctionRule(given)
    return unmasking_rules.parse(given, UnmaskingRule)


@dataclass(frozen=True)
class ConfidenceRule(UnmaskingRule, Checked):
    """Base of rules by the model's confidence, with the option `alg_temp`."""

    alg_temp: float | None = limited(
        None, at_least=0, below=math.inf, remedy="0 takes the best positions"
    )

    measure = "probability"


@unmasking_rules.register("low_confidence")
@dataclass(frozen=True)
class LowConfidence(ConfidenceRule):
    """Commit the most probable proposals first (LLaDA's `low_confidence` remasking), by the softmax
    at temperature 1, without top-p and top-k.
    """

    defer_ids: tuple[int, ...] = limited((), read=whole_numbers)
    """Tokens whose confidence is 0, so that they are committed last (LLaDA's
    `confidence_eos_eot_inf`). The probabilities of the others are taken without them."""

    sees_truncation = False

    def __call__(self, candidates: Candidates) -> Tensor:
        # Not exp(logit - logsumexp): near probability 1 its rounding would reorder candidates.
        if not self.defer_ids:
            probability_MV = candidates.probability_MV
        else:
            check_vocabulary("defer_ids", self.defer_ids, candidates.logits_MV.shape[-1])
            deferred = torch.tensor(self.defer_ids, device=candidates.logits_MV.device)
            rest_MV = candidates.logits_MV.index_fill(-1, deferred, -torch.inf)
            probability_MV = replace(candidates, logits_MV=rest_MV).probability_MV
        return candidates.at_proposals(probability_MV)


def check_numbers(best_M: Tensor, score_M: Tensor, rule: UnmaskingRule, step: str) -> None:
    """Raises ValueError for a best logit of NaN (any in its row is) or -inf (every token is ruled
    out), and for a score of NaN; infinite scores are fine.
    """
    nan = int(best_M.isnan().sum())
    if nan:
        raise ValueError(
            f"logits must be numbers, but at {step} {nan} of {len(best_M)} positions are NaN; "
            "check the weights, the dtype, and rows that attend to nothing."
        )
    barred = int((best_M == -torch.inf).sum())
    if barred:
        raise ValueError(
            f"some token must be possible everywhere, but at {step} {barred} of {len(best_M)} "
            "positions have logits of -inf only; suppress fewer tokens."
        )
    if score_M.isnan().any():
        raise ValueError(
            f"at {step} the rule {rule} gave NaN for a score; look for logits that are infinite"
        )
