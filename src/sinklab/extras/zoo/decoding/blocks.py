"""Schedules of models that write block by block: dLLM's counts, SDAR's and LLaDA2.0's quota,
LLaDA2.1's edits; and of DreamOn, with a canvas that changes its length.
"""

# B batch rows, S canvas positions, C places in a block, M candidate positions in row-major order, V
# vocabulary Z positions of the canvas after a step
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from sinklab.core.attention.context import decoding, finest, running
from sinklab.core.errors import Checked, check_tensor, limited
from sinklab.core.probing.statistics import position_states
from sinklab.core.registry import schedules
from sinklab.core.sampling.caches import Evaluate
from sinklab.core.sampling.canvas import Block, Canvas, blocks
from sinklab.core.sampling.loop import Choice, Run, Step, check_best, check_scores, picked
from sinklab.core.sampling.rules import Candidates, UnmaskingRule
from sinklab.core.sampling.schedules import Count, EvenQuota, Threshold, Unread, commit_counts
from sinklab.core.sampling.token_ids import check_vocabulary


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

    name: ClassVar[str] = "alpha"
    fixed: ClassVar[bool] = False
    allows_surplus_steps: ClassVar[bool] = True

    def evaluations(self, sizes: Sequence[int], steps: int | None) -> list[int]:
        """Evaluations of each block: at most as many as positions if `steps` is left out."""
        return list(sizes) if steps is None else [-(-steps // max(len(sizes), 1))] * len(sizes)

    def start(self, size_B: Tensor, evaluations: int, rule: UnmaskingRule) -> Count:
        """Counts of every row, those above 0 first."""
        time_T = torch.arange(evaluations, -1, -1, dtype=torch.float64).div(evaluations).float()
        alpha_T = (
            1 - time_T if self.curve == "linear" else 1 - torch.cos(torch.pi / 2 * (1 - time_T))
        )
        # as the original: float32 up to here, then float64
        share_T = 1 - ((1 - alpha_T[1:]) / (1 - alpha_T[:-1])).double()
        device = size_B.device if finest(size_B.device) == torch.float64 else torch.device("cpu")
        left_B, counts = size_B.to(device).double(), []
        for share in share_T.to(device, non_blocking=True).unbind():
            counts.append((left_B * share).round())
            left_B = left_B - counts[-1]
        counts_BT = torch.stack(counts, 1).long().to(size_B.device)
        order_BT = counts_BT.eq(0).sort(dim=1, stable=True).indices
        counts_TB = counts_BT.gather(1, order_BT).unbind(1)
        return Unread(lambda ordered_BC, candidates_BC, evaluation: counts_TB[evaluation])


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

    name: ClassVar[str] = "dynamic"

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
        if self.threshold < 1 or getattr(rule, "measure", None) == "chance":
            super().check_rule(rule)

    def start(self, size_B: Tensor, evaluations: int, rule: UnmaskingRule) -> Count:
        """Count of tokens by the quota, and with a threshold below 1 by the scores."""
        quotas, threshold = self._quotas or [1] * evaluations, self.threshold
        if threshold == 1:
            return Unread(
                lambda ordered_BC, candidates_BC, nth: (
                    candidates_BC.long().sum(1).clamp(max=quotas[nth])
                )
            )
        return lambda ordered_BC, candidates_BC, nth: (
            (ordered_BC > threshold).sum(1).clamp(min=quotas[nth])
        )


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

    name: ClassVar[str] = "editing"
    reads: ClassVar[tuple[str, ...]] = ("probability",)
    lacking: ClassVar[str] = "probability of the proposed token"

    def evaluations(self, sizes: Sequence[int], steps: int | None) -> list[int]:
        """Evaluations of each block: the most before [MASK] is no longer written back."""
        return [size + self.max_post_steps for size in super().evaluations(sizes, steps)]

    def start(self, size_B: Tensor, evaluations: int, rule: UnmaskingRule) -> Count:
        """Masks that are filled, by the scores."""
        least = self.num_to_transfer
        return lambda ordered_BC, candidates_BC, nth: (
            (ordered_BC > self.threshold).sum(1).clamp(min=least)
        )

    def run(self, run: Run, evaluate: Evaluate) -> Iterator[Step]:
        """The steps, in place of those of the loop that commits every position once."""
        canvas, mask_id, ends, index = run.canvas, run.canvas.mask_id, run.ends, 0
        ids_BS, nothing_BS = canvas.ids_BS, torch.zeros_like(canvas.open_BS)
        ended_B = nothing_BS[:, 0]
        for block, limit in zip(blocks(run.block_BS, run.sizes), run.limits, strict=True):
            ids_BC, evaluation, post_B = (
                block.get(ids_BS, mask_id),
                0,
                torch.zeros_like(ended_B, dtype=torch.int64),
            )
            active_B = block.real_BC.any(1) & ~ended_B
            while bool(active_B.any()):
                candidates_BC = block.real_BC & active_B[:, None]
                masked_BC = candidates_BC & (ids_BC == mask_id)
                barred_BC = masked_BC if evaluation < limit else candidates_BC
                with torch.no_grad(), decoding(run):
                    place_M, candidates = _evaluated(
                        run, evaluate, block, candidates_BC, ids_BS, evaluation
                    )
                    if index == 0 and ends is not None:
                        check_vocabulary("stop_ids", ends.ids, candidates.logits_MV.shape[1])
                    barred_M = barred_BC.reshape(-1)[place_M]
                    score_M, token_M = _proposed(
                        run, candidates, barred_M, f"step {index} (block {block.number})"
                    )
                    written_BC = ids_BC.flatten().index_copy(0, place_M, token_M).view_as(ids_BC)
                    chosen_BC = self._chosen(run, place_M, score_M, masked_BC, written_BC != ids_BC)
                ids_BC = torch.where(chosen_BC, written_BC, ids_BC)
                before_BS, ids_BS, filled_BS = ids_BS, block.put(ids_BC, ids_BS), nothing_BS
                has_masks_B = (block.real_BC & (ids_BC == mask_id)).any(1)
                post_B = post_B + ~has_masks_B
                active_B = (
                    active_B
                    & (masked_BC | chosen_BC).any(1)
                    & (has_masks_B | (post_B <= self.max_post_steps))
                )
                goes_on = bool(active_B.any())
                if ends is not None and not goes_on:
                    ids_BS, filled_BS = ends(ids_BS, canvas.open_BS & (ids_BS == mask_id))
                    ended_B = ends.finished_B
                choice = Choice(canvas, block, candidates_BC, place_M, score_M, chosen_BC)
                yield Step(index, None, block.number, before_BS, ids_BS, filled_BS, choice, goes_on)
                index, evaluation = index + 1, evaluation + 1

    def _chosen(
        self, run: Run, place_M: Tensor, score_M: Tensor, masked_BC: Tensor, differs_BC: Tensor
    ) -> Tensor:
        """Masks to fill and tokens to replace, bool (B, C)."""
        masked_M, is_sure_M = masked_BC.reshape(-1)[place_M], score_M > self.editing_threshold
        count = self.start(masked_BC.sum(1), 0, run.rule)
        filled_BC = picked(
            run, score_M.masked_fill(~masked_M, -torch.inf), place_M, masked_BC, count, 0
        )
        sure_BC = (
            torch.zeros_like(masked_BC)
            .flatten()
            .index_copy(0, place_M, is_sure_M)
            .view_as(masked_BC)
        )
        return filled_BC | (sure_BC & differs_BC & ~masked_BC)


@dataclass(frozen=True, eq=False)
class ElasticStep(Step):
    """A step after which the canvas may have another length: `before_BS`, `masked_BS`,
    `committed_BS` and `confidence_BS` have the length of this step, `ids_BS` and `filled_BS` that
    of the next.
    """

    origin_Z: Tensor = field(kw_only=True)
    """int64, for each column of `ids_BS` the column of `before_BS` that it was: twice if a token
    became two masks; one that was deleted is missing.
    """


@schedules.register("elastic")
@dataclass(frozen=True)
class Elastic(EvenQuota, Checked):
    """DreamOn's: a committed <|expand|> is replaced by two masks, and the position of a committed
    <|delete|> (its end of text) is deleted. Each evaluation commits the best `tokens`, until no
    mask is left.

    One row, and no cache. <|expand|> is not proposed if the canvas has no room or the expansions
    are used up; of several at once those that find no room stay masks. With several blocks, those
    to the right move along. The number of evaluations is known at the end only. Source: DreamOn
    (2602.01326), `diffusion_generate` and `eval/generator.py`.
    """

    tokens: int = limited(1, at_least=1, remedy="DreamOn commits 1")
    """Tokens committed at each evaluation (DreamOn's `number_transfer_tokens`)."""
    max_tokens: int | None = limited(None, at_least=1)
    """The most tokens that may stand in place of the masks (its `max_new_tokens`); None: 64, as its
    authors have it, or as many as there are masks. The model's context is another limit."""
    expansions: int | None = limited(None, at_least=0)
    """The most expansions (its `expand_budget`); None: twice the columns from the first mask to the
    end of the longest canvas."""
    delete_rest: bool = False
    """A deletion takes with it every mask to its right (its `pad_delete_to_right`)."""
    expand_id: int | None = None
    """Id of <|expand|>; None: the model's."""
    delete_id: int | None = None
    """Id of <|delete|>; None: the model's."""
    context: int | None = None
    """The most columns of a canvas; None: the model's."""

    name: ClassVar[str] = "elastic"
    fixed: ClassVar[bool] = False
    resizes: ClassVar[bool] = True

    def evaluations(self, sizes: Sequence[int], steps: int | None) -> list[int]:
        """Evaluations of each block: as many as positions if nothing changes the length, and not
        known otherwise.
        """
        if steps is not None:
            raise ValueError(
                f"'elastic' runs until no mask is left, got steps={steps}; leave steps out, or "
                "set tokens"
            )
        return list(sizes)

    def start(self, size_B: Tensor, evaluations: int, rule: UnmaskingRule) -> Count:
        """Count of tokens to commit: equal at every evaluation, whatever the size."""
        return lambda ordered_BC, candidates_BC, nth: candidates_BC.sum(1).clamp(max=self.tokens)

    def run(self, run: Run, evaluate: Evaluate) -> Iterator[Step]:
        """The steps, in place of those of the loop that keeps the canvas. Raises ValueError for
        options that need one length.

        Each length is a run of its own to observers: an edit that chooses columns at one step for
        the next starts afresh once they have moved.
        """
        canvas, masks = run.canvas, int(run.canvas.open_BS.sum())
        refused = {
            f"{len(canvas.ids_BS)} rows": len(canvas.ids_BS) > 1,
            "padding": not bool(canvas.attention_BS.all()),
            "attention in blocks, or blocks of the canvas's own": canvas.block_BS is not None,
            f"the cache {run.cache}": run.cache is not None,
            f"the rule {run.rule}, whose order is drawn for all columns at the start": hasattr(
                run.rule, "start"
            ),
            "stop ids": run.ends is not None,
            "no id of <|expand|> or <|delete|>": self.expand_id is None or self.delete_id is None,
            f"max_tokens={self.max_tokens} for {masks} masks": (self.max_tokens or masks) < masks,
        }
        if wrong := [what for what, is_there in refused.items() if is_there]:
            raise ValueError(
                "the schedule 'elastic' changes the length of a single row, where a model has "
                "tokens for it, got "
                f"{wrong[0]}; mend that, or take schedule='even', which keeps the length"
            )
        return self._steps(run, evaluate, masks)

    def _steps(self, run: Run, evaluate: Evaluate, masks: int) -> Iterator[Step]:
        mask_id, ids_BS, open_BS, block_BS = (
            run.canvas.mask_id,
            run.canvas.ids_BS,
            run.canvas.open_BS,
            run.block_BS,
        )
        longest = ids_BS.shape[1] - masks + (self.max_tokens or max(64, masks))
        longest = max(min(longest, self.context or longest), ids_BS.shape[1])
        left = (
            2 * (longest - int(open_BS[0].long().argmax()))
            if self.expansions is None
            else self.expansions
        )
        index = 0
        while bool((masked_BS := open_BS & (ids_BS == mask_id)).any()):
            if open_BS is not run.canvas.open_BS:
                canvas = Canvas(
                    ids_BS.masked_fill(open_BS, mask_id), torch.ones_like(open_BS), open_BS, mask_id
                )
                run = replace(run, canvas=canvas)
            number, room = int(block_BS[masked_BS].min()), min(longest - ids_BS.shape[1], left)
            here_BS = torch.where(block_BS == number, 0, -1)
            (block,) = blocks(here_BS, [int((here_BS == 0).sum())])
            candidates_BC, ids_BC = block.get(masked_BS, False), block.get(ids_BS, mask_id)
            with (
                torch.no_grad(),
                decoding(run),
                running(ids_BS, None, position_states(run.canvas, ids_BS)),
            ):
                place_M, candidates = _evaluated(run, evaluate, block, candidates_BC, ids_BS, index)
                if not room:
                    barred_MV = candidates.logits_MV.index_fill(
                        1, ids_BS.new_tensor(self.expand_id), -torch.inf
                    )
                    candidates = replace(candidates, logits_MV=barred_MV)
                score_M, token_M = _proposed(run, candidates, place_M >= 0, f"step {index}")
                chosen_BC = picked(
                    run, score_M, place_M, candidates_BC, self.start(place_M, 0, run.rule), 0
                )
            written_BC = ids_BC.flatten().index_copy(0, place_M, token_M).view_as(ids_BC)
            after_BS, before_BS = (
                block.put(torch.where(chosen_BC, written_BC, ids_BC), ids_BS),
                ids_BS,
            )
            times_S = self._times(after_BS[0], masked_BS[0], room)
            origin_Z = torch.arange(len(times_S), device=ids_BS.device).repeat_interleave(times_S)
            ids_BS = after_BS.masked_fill(masked_BS & (after_BS == self.expand_id), mask_id)[
                :, origin_Z
            ]
            if bool((times_S != 1).any()):
                left -= int((times_S == 2).sum())
                block_BS, open_BS = block_BS[:, origin_Z], open_BS[:, origin_Z]
            choice = Choice(run.canvas, block, candidates_BC, place_M, score_M, chosen_BC)
            # nothing is filled to the right of an end
            yield ElasticStep(
                index, None, number, before_BS, ids_BS, ids_BS < 0, choice, origin_Z=origin_Z
            )
            index += 1

    def _times(self, after_S: Tensor, masked_S: Tensor, room: int) -> Tensor:
        """Number of times that each column stands in the next canvas: 0, 1 or 2."""
        gone_S = masked_S & (after_S == self.delete_id)
        gone_S = masked_S & (gone_S.cumsum(0) > 0) if self.delete_rest else gone_S
        grows_S = masked_S & (after_S == self.expand_id) & ~gone_S
        return 1 - gone_S.long() + (grows_S & (grows_S.cumsum(0) <= room)).long()


def _evaluated(
    run: Run, evaluate: Evaluate, block: Block, candidates_BC: Tensor, ids_BS: Tensor, nth: int
) -> tuple[Tensor, Candidates]:
    """The numbers (M,) of the candidates among the block's places, and their logits."""
    place_M, places = block.places(candidates_BC, int(candidates_BC.sum()))
    wanted_BS = block.put(candidates_BC, torch.zeros_like(ids_BS, dtype=torch.bool))
    logits_MV = evaluate(ids_BS, wanted_BS, block.number, nth, places)
    mask_id, columns_BC = run.canvas.mask_id, block.columns_BC
    return place_M, Candidates(
        logits_MV, run.sampling, mask_id, candidates_BC, columns_BC, run.generator
    )


def _proposed(
    run: Run, candidates: Candidates, barred_M: Tensor, step: str
) -> tuple[Tensor, Tensor]:
    """Scores and tokens (M,) of the candidates; [MASK] is none if it is barred."""
    logits_MV, mask_id = candidates.logits_MV, candidates.mask_id
    expected = (len(barred_M), None)
    check_tensor(
        f"what a denoiser returns at {step}",
        logits_MV,
        expected,
        remedy="one row per wanted position",
    )
    # an id beyond the vocabulary bars none
    free = replace(candidates, mask_id=logits_MV.shape[1])
    best_M, token_M = free.drawn
    check_best(best_M, step)
    score_M = run.rule(free)
    barred_M = barred_M & (token_M == mask_id)
    if bool(barred_M.any()):
        token_M = torch.where(barred_M, candidates.tokens_M, token_M)
        score_M = torch.where(barred_M, run.rule(candidates), score_M)
    check_scores(score_M, run.rule, step)
    return score_M.clone(), token_M.clone()
