"""The denoising loop, a generator of steps: the caller's `for` is the callback.

Published decoders differ in the score of a proposal (rule), how many are committed at an evaluation
(schedule), and what is computed anew (cache). These are values, and meet here alone: evaluate the
masks of a block, propose, score, commit the best, until no mask is left; then the next block. A
step reads the device once: on a GPU each read is a wait.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sinklab.core.attention.context import decoding
from sinklab.core.errors import check_count, check_tensor, check_vocabulary
from sinklab.core.subject.canvas import (
    Canvas,
    Places,
    RowEnds,
    numbered_blocks,
    true_indices,
)
from sinklab.core.subject.denoisers import (
    Cache,
    Denoiser,
    DenoisingModel,
    Evaluation,
    cache_of,
    denoiser_of,
)
from sinklab.core.subject.rules import Candidates, UnmaskingRule, check_numbers, rule_of
from sinklab.core.subject.schedules import Schedule, Turn, check_equal_rows, schedule_of
from sinklab.core.subject.tokens import TokenSampling, perturb, required

# B batch rows, S canvas positions, M candidate positions in row-major order, V vocabulary


@dataclass(frozen=True, eq=False)
class Step:
    """One evaluation and the tokens committed after it. Later steps never change its tensors, which
    are fit for training even if the denoiser ran in inference mode.
    """

    index: int
    """0 for the first step."""
    total: int | None
    """The most steps of the run, None when the schedule decides as it goes."""
    block: int
    """Block that was decoded, 0 for the first."""
    canvas: Canvas = field(repr=False)
    """The canvas as it was before the first step."""
    before_BS: Tensor = field(repr=False)
    """int64, the ids the denoiser saw."""
    ids_BS: Tensor = field(repr=False)
    """int64, the ids after the commit."""
    candidates_BS: Tensor = field(repr=False)
    """bool, the positions that were evaluated."""
    score_M: Tensor = field(repr=False)
    """float, the rule's score of each candidate."""
    committed_BS: Tensor = field(repr=False)
    """bool, the positions that received a proposal, also in place of an edited token."""
    filled_BS: Tensor = field(repr=False)
    """bool, the open positions filled with a stop id because their row ended with this step."""
    goes_on: bool = False
    """Further steps follow in this block, even without masks: tokens may still be edited."""

    @cached_property
    def masked_BS(self) -> Tensor:
        """bool, the open positions of all blocks that were masked before this step."""
        return self.canvas.open_BS & (self.before_BS == self.canvas.mask_id)

    @cached_property
    def confidence_BS(self) -> Tensor:
        """float, the rule's score of each candidate; NaN elsewhere."""
        nothing_BS = self.score_M.new_full(self.candidates_BS.shape, torch.nan)
        return nothing_BS.masked_scatter(self.candidates_BS, self.score_M)


def denoise(
    denoiser: DenoisingModel | Denoiser | Callable[[Tensor, Tensor], Tensor],
    canvas: Canvas,
    *,
    rule: UnmaskingRule | Callable[[Candidates], Tensor] | str = "low_confidence",
    schedule: Schedule | str | None = None,
    cache: Cache | str | None = None,
    steps: int | None = None,
    block_length: int | None = None,
    generator: torch.Generator | None = None,
    stop_ids: Iterable[int] | int | None = None,
    **tokens: Any,
) -> Iterator[Step]:
    """Decode the open positions of `canvas` while the steps are iterated; the last step has the
    result, `ids_BS`. [MASK] is never proposed; every open position is committed once, ties from the
    left, or filled after the end of its row.

    Args:
        denoiser: a model, the result of `sinklab.load`, a `Denoiser`, or a function (ids_BS,
            wanted_BS) -> logits_MV that knows `canvas.attention_BS`.
        rule: an unmasking rule, its text ("low_confidence:alg_temp=0.1"), or a function of the
            `Candidates`.
        schedule: a schedule or its text; by default the rule's usual one.
        cache: a cache or its text; None recomputes everything.
        steps: evaluations in all, divided evenly over the blocks; by default one per position.
        block_length: open positions per block, decoded from left to right; by default one block.
        generator: needed by rules that draw and by a temperature above 0; shared by the batch.
        stop_ids: once a row holds one of these with no mask to its left, the open positions to its
            right are filled with it, and the row is finished.
        tokens: `temperature`, `top_p` and the other fields of `TokenSampling`.

    Raises ValueError for settings that do not fit together, or by which a row would be decoded
    otherwise than alone; and while iterating, with the step, for wrong logits or scores.
    Source: LLaDA (2502.09992), Algorithm 5 and `generate.py`.
    """
    denoiser = denoiser_of(denoiser, canvas)
    sampling = TokenSampling(**tokens)
    rule = rule_of(rule)
    schedule = schedule_of(schedule, rule, sampling)
    if sampling.temperature > 0:
        required(generator, "a temperature above 0")
    if rule.draws:
        required(generator, f"the rule {rule}")
    check_count("steps", steps, "leave steps out to commit one token per step.")
    # with decoding blocks inside those of a model whose attention goes in blocks; else the same
    canvas = denoiser.in_blocks(canvas, block_length)
    sizes, block_BS = numbered_blocks(canvas, block_length)
    limits = schedule.evaluations(sizes, steps)
    check_equal_rows(schedule, canvas.open_BS, len(sizes), steps)
    ends = None
    if stop_ids is not None:
        ends = RowEnds(stop_ids, canvas)
    run = DenoisingLoop(
        canvas,
        Evaluation(denoiser, cache_of(cache), block_BS),
        block_BS,
        limits,
        rule,
        schedule,
        sampling,
        generator,
        ends,
    )
    # by default `run.steps()`
    return schedule.loop(run)


@dataclass(frozen=True, eq=False)
class DenoisingLoop:
    """The arguments of `denoise` and its loop; `Schedule.loop` may build another of its parts."""

    canvas: Canvas
    evaluate: Evaluation
    block_BS: Tensor
    """int64, the block of every open position, -1 elsewhere."""
    limits: list[int]
    """The most evaluations of each block."""
    rule: UnmaskingRule
    schedule: Schedule
    sampling: TokenSampling
    generator: torch.Generator | None
    ends: RowEnds | None

    def steps(self) -> Iterator[Step]:
        """The steps, block by block."""
        canvas = self.canvas
        ends = self.ends
        rule = self.rule
        total = None
        if self.schedule.fixed:
            total = sum(self.limits)
        ids_BS = canvas.ids_BS
        masked_BS = canvas.open_BS
        remaining, _ = self._count_masks(masked_BS)
        index = 0
        for block, limit in enumerate(self.limits):
            size_B = (masked_BS & (self.block_BS == block)).sum(1)
            nth = 0
            while remaining[block]:
                step = f"step {index} (block {block})"
                if nth == limit:
                    raise ValueError(
                        f"{self.schedule} left masks behind in block {block} after {limit} "
                        "evaluations."
                    )
                # 1) ask for logits of the masks of the block: the cache says which columns run
                candidates_BS = masked_BS & (self.block_BS == block)
                flat_M = true_indices(candidates_BS, remaining[block])
                at = Places(candidates_BS, flat_M)
                # these forwards are of one run: edits and traces count its steps, and forget others
                with torch.no_grad(), decoding(self):
                    logits_MV = self.evaluate(ids_BS, at, block, nth)
                    candidates = self.candidates(logits_MV, ids_BS, at, step)
                    if index == 0 and ends is not None:
                        check_vocabulary("stop_ids", ends.ids, candidates.logits_MV.shape[1])
                    # 2) propose a token for each, score the proposals
                    best_M, token_M = candidates.drawn
                    score_M = rule(candidates)
                    what = f"what the rule {rule} returns at {step}"
                    check_tensor(what, score_M, token_M.shape, "float", "one per candidate")
                    if score_M.is_inference():
                        # a view of logits made in inference mode
                        score_M = score_M.clone()
                    # 3) commit the best of them
                    chosen_BS = self.best(score_M, at, nth, limit, size_B)
                written_BS = ids_BS.flatten().index_copy(0, flat_M, token_M).view_as(ids_BS)
                before_BS = ids_BS
                ids_BS = torch.where(chosen_BS, written_BS, ids_BS)
                masked_BS = masked_BS & ~chosen_BS
                filled_BS = torch.zeros_like(masked_BS)
                if ends is not None:
                    ids_BS, filled_BS = ends.fill(ids_BS, masked_BS)
                    masked_BS = masked_BS & ~filled_BS
                # 4) see what is left: the one wait for the device
                remaining, wrong = self._count_masks(masked_BS, best_M, score_M)
                if wrong:
                    check_numbers(best_M, score_M, rule, step)
                yield Step(
                    index,
                    total,
                    block,
                    canvas,
                    before_BS,
                    ids_BS,
                    candidates_BS,
                    score_M,
                    chosen_BS,
                    filled_BS,
                )
                index += 1
                nth += 1

    def candidates(self, logits_MV: Tensor, ids_BS: Tensor, at: Places, step: str) -> Candidates:
        """The candidates. Raises ValueError for logits of the wrong shape."""
        what = f"what a denoiser returns at {step}"
        remedy = "one row per wanted position: logits_BSV[wanted_BS]"
        check_tensor(what, logits_MV, (len(at.flat_M), None), remedy=remedy)
        return Candidates(
            self.sampling.allowed(logits_MV),
            self.sampling,
            self.canvas.mask_id,
            at.wanted_BS,
            ids_BS,
            self.canvas.open_BS,
            self.generator,
        )

    def best(
        self, score_M: Tensor, at: Places, nth: int, evaluations: int, size_B: Tensor
    ) -> Tensor:
        """The best candidates, as many as the schedule says of this `Turn`, bool (B, S)."""
        key_M = score_M
        if self.rule.alg_temp:
            key_M = perturb(score_M, self.rule.alg_temp, self.generator)
        # A rule may score a candidate -inf; it must still rank above every other position.
        key_M = key_M.clamp(min=torch.finfo(key_M.dtype).min)
        key_BS = key_M.new_full(at.wanted_BS.shape, -torch.inf)
        key_BS.view(-1).index_copy_(0, at.flat_M, key_M)
        rows = len(key_BS)
        if self.schedule.pooled:
            # the batch is one row
            rows = 1
        among_BS = at.wanted_BS.reshape(rows, -1)
        ordered_BS, order_BS = key_BS.view(rows, -1).sort(dim=1, descending=True, stable=True)
        turn = Turn(nth, evaluations, size_B, self.rule, ordered_BS, among_BS)
        count_B = self.schedule.count(turn)
        check_tensor(f"what {self.schedule} counts", count_B, (rows,), "int64", "one number a row")
        first_BS = torch.arange(order_BS.shape[1], device=order_BS.device) < count_B[:, None]
        chosen_BS = torch.zeros_like(among_BS).scatter_(1, order_BS, first_BS) & among_BS
        return chosen_BS.view_as(at.wanted_BS)

    def _count_masks(self, masked_BS: Tensor, *numbers: Tensor) -> tuple[list[int], bool]:
        """Masks left in each block, and whether a number may be wrong, in one read."""
        # first the positions of no block, then the blocks, last the wrong numbers
        counts_N = masked_BS.new_zeros(len(self.limits) + 2, dtype=torch.int64)
        counts_N.index_add_(0, self.block_BS.flatten() + 1, masked_BS.flatten().long())
        for one_M in numbers:
            counts_N[-1] += ~one_M.sum().isfinite()
        _, *remaining, wrong = counts_N.tolist()
        return remaining, wrong > 0
