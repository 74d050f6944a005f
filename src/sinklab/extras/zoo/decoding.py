"""Schedules of models that write block by block: dLLM's counts, SDAR's and LLaDA2.0's quota,
LLaDA2.1's edits; and of DreamOn, with a canvas that changes its length.
"""

# B batch rows, S canvas positions, M candidate positions in row-major order, V
# vocabulary, Z positions of the canvas after a step
from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sinklab.core.attention.context import decoding, running
from sinklab.core.errors import Checked, check_vocabulary, limited
from sinklab.core.probing.statistics import position_states
from sinklab.core.registry import schedules
from sinklab.core.sampling import Candidates, EvenQuota, Turn, UnmaskingRule, commit_counts
from sinklab.core.sampling.canvas import Canvas, Places, block_columns
from sinklab.core.sampling.loop import Run, Step, WritingSchedule, check_best, check_scores
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
class Editing(Threshold, WritingSchedule):
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

    def steps(self, run: Run) -> Iterator[Step]:
        """The steps, in place of those of the loop that commits every position once."""
        canvas, mask_id, ends = run.canvas, run.canvas.mask_id, run.ends
        ids_BS = canvas.ids_BS
        nothing_BS = torch.zeros_like(canvas.open_BS)
        ended_B = nothing_BS[:, 0]
        columns = block_columns(run.block_BS, len(run.limits))
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
                    places = replace(at, columns=columns[block])
                    logits_MV = run.evaluate(ids_BS, places, block, nth)
                    candidates = run.candidates(
                        logits_MV, ids_BS, candidates_BS, len(at.flat_M), step
                    )
                    if index == 0 and ends is not None:
                        check_vocabulary("stop_ids", ends.ids, logits_MV.shape[1])
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
        run: Run,
        at: Places,
        score_M: Tensor,
        masked_BS: Tensor,
        differs_BS: Tensor,
        when: tuple[int, int, Tensor],
    ) -> Tensor:
        """Masks to fill and tokens to replace, bool (B, S)."""
        masked_M = masked_BS[at.wanted_BS]
        of_masks_M = score_M.masked_fill(~masked_M, -torch.inf)
        filled_BS = run.best(of_masks_M, at.flat_M, masked_BS, *when)
        is_sure_M = score_M > self.editing_threshold
        sure_BS = torch.zeros_like(masked_BS).masked_scatter(at.wanted_BS, is_sure_M)
        return filled_BS | (sure_BS & differs_BS & ~masked_BS)


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
class Elastic(WritingSchedule, Checked):
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

    name = "elastic"
    fixed = False
    resizes = True

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

    def for_model(self, context: int | None, **token_ids: int | None) -> Elastic:
        """This schedule with the model's ids and context where it has none of its own."""
        model = {"context": context, **token_ids}
        missing: dict[str, Any] = {
            name: value for name, value in model.items() if getattr(self, name) is None
        }
        return replace(self, **missing)

    def count(self, turn: Turn) -> Tensor:
        """Count of tokens to commit: equal at every evaluation, whatever the size."""
        return turn.candidates_BS.sum(1).clamp(max=self.tokens)

    def steps(self, run: Run) -> Iterator[Step]:
        """The steps, in place of those of the loop that keeps the canvas. Raises ValueError for
        options that need one length.

        Each length is a run of its own to observers: an edit that chooses columns at one step for
        the next starts afresh once they have moved.
        """
        canvas, masks = run.canvas, int(run.canvas.open_BS.sum())
        draws_order = run.rule.start(canvas.open_BS, run.generator) is not run.rule
        refused = {
            f"{len(canvas.ids_BS)} rows": len(canvas.ids_BS) > 1,
            "padding": not bool(canvas.attention_BS.all()),
            "attention in blocks, or blocks of the canvas's own": canvas.block_BS is not None,
            f"the cache {run.cache}": run.cache is not None,
            f"the rule {run.rule}, whose order is drawn for all columns at the start": draws_order,
            "stop ids": run.ends is not None,
            "no id of <|expand|> or <|delete|>": self.expand_id is None or self.delete_id is None,
            f"max_tokens={self.max_tokens} for {masks} masks": (self.max_tokens or masks) < masks,
        }
        wrong = [what for what, is_there in refused.items() if is_there]
        if wrong:
            raise ValueError(
                "the schedule 'elastic' changes the length of a single row, where a model has "
                "tokens for it, got "
                f"{wrong[0]}; mend that, or take schedule='even', which keeps the length"
            )
        return self._steps(run, masks)

    def _steps(self, run: Run, masks: int) -> Iterator[Step]:
        canvas, mask_id = run.canvas, run.canvas.mask_id
        ids_BS, open_BS, block_BS = canvas.ids_BS, canvas.open_BS, run.block_BS
        longest = ids_BS.shape[1] - masks + (self.max_tokens or max(64, masks))
        longest = max(min(longest, self.context or longest), ids_BS.shape[1])
        left = self.expansions
        if left is None:
            left = 2 * (longest - int(open_BS[0].long().argmax()))
        index = 0
        masked_BS = open_BS
        while bool(masked_BS.any()):
            if open_BS is not canvas.open_BS:
                given_BS = ids_BS.masked_fill(open_BS, mask_id)
                canvas = Canvas(given_BS, torch.ones_like(open_BS), open_BS, mask_id)
                run = replace(run, canvas=canvas)
            block = int(block_BS[masked_BS].min())
            room = min(longest - ids_BS.shape[1], left)
            at = Places.of(masked_BS & (block_BS == block))
            states_BS = position_states(canvas, ids_BS)
            with torch.no_grad(), decoding(run), running(ids_BS, None, states_BS):
                step = f"step {index}"
                logits_MV = run.evaluate(ids_BS, at, block, index)
                if not room:
                    expand = ids_BS.new_tensor(self.expand_id)
                    logits_MV = logits_MV.index_fill(1, expand, -torch.inf)
                candidates = run.candidates(logits_MV, ids_BS, at.wanted_BS, len(at.flat_M), step)
                every_M = torch.ones_like(at.flat_M, dtype=torch.bool)
                score_M, token_M = _proposed(run, candidates, every_M, step)
                size_B = at.wanted_BS.sum(1)
                chosen_BS = run.best(score_M, at.flat_M, at.wanted_BS, 0, 1, size_B)
            before_BS = ids_BS
            written_BS = ids_BS.masked_scatter(at.wanted_BS, token_M)
            after_BS = torch.where(chosen_BS, written_BS, ids_BS)
            times_S = self._times(after_BS[0], masked_BS[0], room)
            origin_Z = torch.arange(len(times_S), device=ids_BS.device).repeat_interleave(times_S)
            grown_BS = masked_BS & (after_BS == self.expand_id)
            ids_BS = after_BS.masked_fill(grown_BS, mask_id)[:, origin_Z]
            if bool((times_S != 1).any()):
                left -= int((times_S == 2).sum())
                block_BS, open_BS = block_BS[:, origin_Z], open_BS[:, origin_Z]
            # nothing is filled to the right of an end
            yield ElasticStep(
                index,
                None,
                block,
                canvas,
                before_BS,
                ids_BS,
                at.wanted_BS,
                score_M,
                chosen_BS,
                torch.zeros_like(open_BS),
                origin_Z=origin_Z,
            )
            masked_BS = open_BS & (ids_BS == mask_id)
            index += 1

    def _times(self, after_S: Tensor, masked_S: Tensor, room: int) -> Tensor:
        """Number of times that each column stands in the next canvas: 0, 1 or 2."""
        gone_S = masked_S & (after_S == self.delete_id)
        gone_S = masked_S & (gone_S.cumsum(0) > 0) if self.delete_rest else gone_S
        grows_S = masked_S & (after_S == self.expand_id) & ~gone_S
        return 1 - gone_S.long() + (grows_S & (grows_S.cumsum(0) <= room)).long()


def _proposed(
    run: Run, candidates: Candidates, barred_M: Tensor, step: str
) -> tuple[Tensor, Tensor]:
    """Scores and tokens (M,) of the candidates; [MASK] is none if it is barred."""
    logits_MV, mask_id = candidates.logits_MV, candidates.mask_id
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
