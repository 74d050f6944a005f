"""Schedules of models that write block by block: dLLM's counts, SDAR's and LLaDA2.0's quota,
LLaDA2.1's edits.
"""

# B batch rows, S canvas positions, M candidate positions in row-major order, V vocabulary
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from sinklab.core.attention.context import decoding
from sinklab.core.errors import Checked, check_vocabulary, limited
from sinklab.core.registry import schedules
from sinklab.core.subject import Candidates, EvenQuota, Turn, UnmaskingRule, commit_counts
from sinklab.core.subject.canvas import Places
from sinklab.core.subject.loop import DenoisingLoop, Step
from sinklab.core.subject.rules import check_numbers
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


@schedules.register("editing")
@dataclass(frozen=True)
class Editing(Threshold):
    """LLaDA2.1's: fill masks as `Dynamic` does, and in the same evaluation replace written tokens
    of the block if another token is proposed with a confidence above `editing_threshold`; [MASK]
    may be written back.

    A row leaves a block once an evaluation of the block without masks edits nothing, or after
    `max_post_steps` of them. A stop id ends a row with its block. Edits are commits of their steps.
    So that a block ends, [MASK] is never proposed in its own place (the original may, and then
    reveals nothing), nor written back after as many evaluations as the block has positions and
    `max_post_steps` more. Source: LLaDA2.1, `generate`.
    """

    threshold: float = limited(0.95, at_least=0, at_most=1, remedy="LLaDA2.1 uses 0.95")
    editing_threshold: float = limited(0.9, at_least=0, at_most=1, remedy="1 edits nothing")
    """Confidence above which a written token is replaced; the prompt is never edited."""
    max_post_steps: int = limited(
        16, at_least=0, remedy="0 leaves a block when its last mask is filled"
    )
    """Evaluations of a block in which no mask is left."""
    num_to_transfer: int = limited(1, at_least=1)
    """Masks that are filled at least."""

    name = "editing"
    reads = ("probability",)
    lacking = "probability of the proposed token"

    def evaluations(self, sizes: Sequence[int], steps: int | None) -> list[int]:
        """Evaluations of each block: the most before [MASK] is no longer written back."""
        return [size + self.max_post_steps for size in super().evaluations(sizes, steps)]

    def count(self, turn: Turn) -> Tensor:
        """Masks that are filled, by the scores."""
        return (turn.ordered_BS > self.threshold).sum(1).clamp(min=self.num_to_transfer)

    def loop(self, run: DenoisingLoop) -> Iterator[Step]:
        """The steps, in place of those of the loop that commits every position once."""
        canvas, mask_id, ends = run.canvas, run.canvas.mask_id, run.ends
        ids_BS = canvas.ids_BS
        nothing_BS = torch.zeros_like(canvas.open_BS)
        ended_B = nothing_BS[:, 0]
        index = 0
        for block, limit in enumerate(run.limits):
            inside_BS = run.block_BS == block
            post_B = torch.zeros_like(ended_B, dtype=torch.int64)
            active_B = inside_BS.any(1) & ~ended_B
            nth = 0
            while bool(active_B.any()):
                step = f"step {index} (block {block})"
                candidates_BS = inside_BS & active_B[:, None]
                masked_BS = candidates_BS & (ids_BS == mask_id)
                barred_BS = masked_BS if nth < limit else candidates_BS
                with torch.no_grad(), decoding(run):
                    at = Places.of(candidates_BS)
                    logits_MV = run.evaluate(ids_BS, at, block, nth)
                    candidates = run.candidates(logits_MV, ids_BS, at, step)
                    if index == 0 and ends is not None:
                        check_vocabulary("stop_ids", ends.ids, candidates.logits_MV.shape[1])
                    score_M, token_M = _proposed(run, candidates, barred_BS[candidates_BS], step)
                    written_BS = ids_BS.masked_scatter(candidates_BS, token_M)
                    when = (nth, limit, masked_BS.sum(1))
                    differs_BS = written_BS != ids_BS
                    chosen_BS = self._chosen(run, at, score_M, masked_BS, differs_BS, when)
                before_BS = ids_BS
                ids_BS = torch.where(chosen_BS, written_BS, ids_BS)
                has_masks_B = (inside_BS & (ids_BS == mask_id)).any(1)
                post_B = post_B + ~has_masks_B
                is_changed_B = (masked_BS | chosen_BS).any(1)
                is_early_B = post_B <= self.max_post_steps
                active_B = active_B & is_changed_B & (has_masks_B | is_early_B)
                goes_on = bool(active_B.any())
                filled_BS = nothing_BS
                if ends is not None and not goes_on:
                    ids_BS, filled_BS = ends.fill(ids_BS, canvas.open_BS & (ids_BS == mask_id))
                    ended_B = ends.finished_B
                yield Step(
                    index,
                    None,
                    block,
                    canvas,
                    before_BS,
                    ids_BS,
                    candidates_BS,
                    score_M,
                    chosen_BS,
                    filled_BS,
                    goes_on,
                )
                index += 1
                nth += 1

    def _chosen(
        self,
        run: DenoisingLoop,
        at: Places,
        score_M: Tensor,
        masked_BS: Tensor,
        differs_BS: Tensor,
        when: tuple[int, int, Tensor],
    ) -> Tensor:
        """Masks to fill and tokens to replace, bool (B, S)."""
        masked_M = masked_BS[at.wanted_BS]
        of_masks_M = score_M.masked_fill(~masked_M, -torch.inf)
        filled_BS = run.best(of_masks_M, replace(at, wanted_BS=masked_BS), *when)
        is_sure_M = score_M > self.editing_threshold
        sure_BS = torch.zeros_like(masked_BS).masked_scatter(at.wanted_BS, is_sure_M)
        return filled_BS | (sure_BS & differs_BS & ~masked_BS)


def _proposed(
    run: DenoisingLoop, candidates: Candidates, barred_M: Tensor, step: str
) -> tuple[Tensor, Tensor]:
    """Scores and tokens (M,) of the candidates; [MASK] is none if it is barred."""
    logits_MV, mask_id = candidates.logits_MV, candidates.mask_id
    # an id beyond the vocabulary bars none
    free = replace(candidates, mask_id=logits_MV.shape[1])
    best_M, token_M = free.drawn
    score_M = run.rule(free)
    barred_M = barred_M & (token_M == mask_id)
    if bool(barred_M.any()):
        token_M = torch.where(barred_M, candidates.tokens_M, token_M)
        score_M = torch.where(barred_M, run.rule(candidates), score_M)
    check_numbers(best_M, score_M, run.rule, step)
    return score_M.clone(), token_M.clone()
