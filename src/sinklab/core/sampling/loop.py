"""The denoising loop, a generator of steps: the caller's `for` is the callback."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from sinklab.core.attention.context import decoding
from sinklab.core.errors import check_count, check_tensor, check_vocabulary, token_ids
from sinklab.core.registry import schedules
from sinklab.core.sampling.canvas import (
    Canvas,
    Places,
    block_columns,
    numbered_blocks,
    true_indices,
)
from sinklab.core.sampling.denoisers import (
    Cache,
    Denoiser,
    DenoisingModel,
    Evaluation,
    cache_of,
    denoiser_of,
)
from sinklab.core.sampling.rules import Candidates, UnmaskingRule, rule_of
from sinklab.core.sampling.schedules import EvenQuota, Schedule, Timed, Turn
from sinklab.core.sampling.tokens import TokenSampling, perturbed, required

# B batch rows, S canvas positions, M candidate positions in row-major order, V vocabulary


class RowEnds:
    """The rows of one run that are finished, and the stop ids behind their ends.

    Raises ValueError when no stop id is given, and when [MASK] is one.
    """

    def __init__(self, stop_ids: Iterable[int] | int, open_BS: Tensor, mask_id: int) -> None:
        ids = sorted(set(token_ids("stop_ids", stop_ids)))
        if not ids:
            raise ValueError(
                "stop_ids needs at least one token id, got none; leave it out to decode every "
                "position."
            )
        if mask_id in ids:
            raise ValueError(
                f"[MASK] (id {mask_id}) is never written, so it cannot be a stop id; use end of "
                "text."
            )
        self.ids = ids
        self._ids = torch.tensor(ids, device=open_BS.device)
        self._open_BS = open_BS
        self.finished_B = torch.zeros_like(open_BS[:, 0])

    def fill(self, ids_BS: Tensor, masked_BS: Tensor) -> tuple[Tensor, Tensor]:
        """The ids with the newly finished rows filled to the right with their stop id, and the
        filled positions (bool (B, S)).

        Every open position to the right is filled, those that hold another token already too.
        """
        is_stop_BS = (ids_BS[..., None] == self._ids).any(-1)
        first_BS = self._open_BS & is_stop_BS & (masked_BS.cumsum(1) == 0)
        new_B = first_BS.any(1) & ~self.finished_B
        self.finished_B = self.finished_B | new_B
        first_B1 = first_BS.long().argmax(1, keepdim=True)
        right_BS = torch.arange(ids_BS.shape[1], device=ids_BS.device) > first_B1
        filled_BS = self._open_BS & right_BS & new_B[:, None]
        return torch.where(filled_BS, ids_BS.gather(1, first_B1), ids_BS), filled_BS


@dataclass(frozen=True, eq=False)
class Step:
    """One evaluation of the denoiser and the tokens committed after it. Later steps never change
    its tensors.

    They are ordinary tensors, fit for training, though the denoiser may have run in inference mode.
    """

    index: int
    """0 for the first step."""
    total: int | None
    """Number of steps of the whole run, None when the schedule decides as it goes. Rows that end
    early may lower it.
    """
    block: int
    """Block that was decoded, 0 for the first."""
    canvas: Canvas = field(repr=False)
    """The canvas that is decoded, as it was before the first step."""
    before_BS: Tensor = field(repr=False)
    """int64, the ids the denoiser saw."""
    ids_BS: Tensor = field(repr=False)
    """int64, the ids after the commit."""
    candidates_BS: Tensor = field(repr=False)
    """bool, the positions of the block that were evaluated."""
    score_M: Tensor = field(repr=False)
    """float, the rule's score of each candidate, in row-major order."""
    committed_BS: Tensor = field(repr=False)
    """bool, the positions this step committed a proposal to: also one in place of a token, if edits
    are made.
    """
    filled_BS: Tensor = field(repr=False)
    """bool, the open positions to the right of a stop id, filled with it because their row ended
    with this step.
    """
    goes_on: bool = False
    """Further steps follow in this block even if it has no masks: written tokens may still be
    edited.
    """

    @cached_property
    def masked_BS(self) -> Tensor:
        """bool, the open positions that were still masked before this step, in every block."""
        return self.canvas.open_BS & (self.before_BS == self.canvas.mask_id)

    @cached_property
    def confidence_BS(self) -> Tensor:
        """float, the rule's score of each candidate (for `LowConfidence` a probability); NaN
        elsewhere.
        """
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
    temperature: float = 0.0,
    top_p: float | None = None,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    stop_ids: Iterable[int] | int | None = None,
) -> Iterator[Step]:
    """Decode the open positions of `canvas`: checks now, runs while it is iterated. Each item is a
    step; the last step's `ids_BS` is the result.

    At every step the denoiser evaluates the masked positions of the current block and nothing else.
    Each gets a proposed token, the rule scores the proposals, the schedule says how many of the
    best are committed in every row, ties from the left. Committed tokens stay; [MASK] itself is
    never proposed; every open position is committed exactly once, or filled after the end of its
    row. A block is left when every row has finished it.

    Args:
        denoiser: a model, or the result of `sinklab.load`; or a `Denoiser`, or a function (ids_BS,
            wanted_BS) -> logits_MV, bound to `canvas.attention_BS` by its builder.
        rule: an unmasking rule, a function of the `Candidates`, or the text of a rule ("entropy",
            "low_confidence:alg_temp=0.1").
        schedule: a schedule or its text; `EvenQuota()` when left out (`Timed()` with the rule
            `Origin`).
        cache: a cache or its text; None recomputes everything.
        steps: evaluations in all, from the number of blocks to the open positions of the fullest
            row (`Timed`: to any number); by default one per position. Divided evenly over the
            blocks, the remainder to the first; refused if rows with unequal numbers of open
            positions would not get the same as alone.
        block_length: open positions per block, decoded from left to right; by default one block.
            The block of a position is its rank among the row's open positions // block_length, so
            masks may stand anywhere.
        temperature, top_p, top_k: as in `sample_tokens`.
        generator: needed by rules that draw and by a temperature above 0. Draws depend on the whole
            batch.
        stop_ids: once a row holds one of these in an open position with no mask to its left, the
            open positions to its right are filled with it and the row is finished. When all rows
            are, decoding ends.

    Raises ValueError here for settings that do not fit together, and while iterating (naming the
    step) for logits of the wrong shape, NaN logits, NaN scores and stop ids beyond the vocabulary.
    Source: LLaDA (2502.09992), Algorithm 5 and `generate.py`.
    """
    denoiser = denoiser_of(denoiser, canvas)
    sampling = TokenSampling(temperature, top_p, top_k)
    rule = rule_of(rule)
    schedule = planned(rule, schedule, sampling)
    if temperature > 0:
        required(generator, "a temperature above 0")
    if rule.draws:
        required(generator, f"the rule {rule}")
    check_count("steps", steps, "leave steps out to commit one token per step.")
    canvas = denoiser.in_blocks(canvas, block_length)
    sizes, block_BS = numbered_blocks(canvas, block_length)
    limits = schedule.evaluations(sizes, steps)
    check_equal_rows(schedule, canvas.open_BS, len(sizes), steps)
    ends = None
    if stop_ids is not None:
        ends = RowEnds(stop_ids, canvas.open_BS, canvas.mask_id)
    cache = cache_of(cache)
    evaluate = Evaluation(denoiser, cache, block_BS)
    run = Run(canvas, evaluate, block_BS, limits, rule, schedule, sampling, generator, ends, cache)
    return schedule.loop(run)


def planned(
    rule: UnmaskingRule, schedule: Schedule | str | None, sampling: TokenSampling
) -> Schedule:
    """The schedule for this rule. Raises ValueError for a combination that makes no sense, whatever
    the canvas.
    """
    if schedule is None and rule.measure == "chance":
        schedule = Timed()
    if schedule is None:
        schedule = EvenQuota()
    plan: Schedule = schedules.parse(schedule, Schedule)
    plan.check_rule(rule)
    if sampling.temperature == 0 and sampling.cuts and not rule.reads_shaped:
        raise ValueError(
            f"top_p and top_k do nothing at temperature 0 with the rule {rule}, got "
            f"top_p={sampling.top_p} and "
            f"top_k={sampling.top_k}; raise the temperature or leave them out."
        )
    return plan


@dataclass(frozen=True, eq=False)
class Run:
    """The arguments of `denoise`, checked, and its loop."""

    canvas: Canvas
    evaluate: Evaluation
    block_BS: Tensor
    """int64, the block of every open position, -1 elsewhere."""
    limits: list[int]
    """The most evaluations of each block."""
    rule: UnmaskingRule
    schedule: Schedule
    sampling: TokenSampling
    generator: torch.Generator | None = None
    ends: RowEnds | None = None
    cache: Cache | None = None

    def steps(self) -> Iterator[Step]:
        """Evaluate the masks of a block, commit the best of them, until none is left; then the next
        block.
        """
        canvas = self.canvas
        ends = self.ends
        rule = self.rule.start(canvas.open_BS, self.generator)
        run = replace(self, rule=rule)
        total = None
        if self.schedule.fixed:
            total = sum(self.limits)
        columns = block_columns(self.block_BS, len(self.limits))
        ids_BS = canvas.ids_BS
        masked_BS = canvas.open_BS
        left, _ = self._left(masked_BS)
        index = 0
        for block, limit in enumerate(self.limits):
            size_B = (masked_BS & (self.block_BS == block)).sum(1)
            nth = 0
            while left[block]:
                step = f"step {index} (block {block})"
                if nth == limit:
                    raise ValueError(
                        f"{self.schedule} left masks behind in block {block} after {limit} "
                        "evaluations."
                    )
                candidates_BS = masked_BS & (self.block_BS == block)
                flat_M = true_indices(candidates_BS, left[block])
                places = Places(candidates_BS, flat_M, columns[block])
                with torch.no_grad(), decoding(run):
                    logits_MV = self.evaluate(ids_BS, places, block, nth)
                    candidates = self.candidates(
                        logits_MV, ids_BS, candidates_BS, left[block], step
                    )
                    if index == 0 and ends is not None:
                        check_vocabulary("stop_ids", ends.ids, logits_MV.shape[1])
                    best_M, token_M = candidates.drawn
                    score_M = rule(candidates)
                    what = f"what the rule {rule} returns at {step}"
                    check_tensor(what, score_M, token_M.shape, "float", "one per candidate")
                    if score_M.is_inference():
                        # a view of logits made in inference mode
                        score_M = score_M.clone()
                    chosen_BS = run.best(score_M, flat_M, candidates_BS, nth, limit, size_B)
                written_BS = ids_BS.flatten().index_copy(0, flat_M, token_M).view_as(ids_BS)
                before_BS = ids_BS
                ids_BS = torch.where(chosen_BS, written_BS, ids_BS)
                masked_BS = masked_BS & ~chosen_BS
                filled_BS = torch.zeros_like(masked_BS)
                if ends is not None:
                    ids_BS, filled_BS = ends.fill(ids_BS, masked_BS)
                    masked_BS = masked_BS & ~filled_BS
                left, wrong = self._left(masked_BS, best_M, score_M)
                if wrong:
                    check_best(best_M, step)
                    check_scores(score_M, rule, step)
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

    def candidates(
        self, logits_MV: Tensor, ids_BS: Tensor, candidates_BS: Tensor, count: int, step: str
    ) -> Candidates:
        """The candidates with their logits. Raises ValueError for logits of another shape."""
        remedy = "one row per wanted position: logits_BSV[wanted_BS]"
        check_tensor(f"what a denoiser returns at {step}", logits_MV, (count, None), remedy=remedy)
        return Candidates(
            logits_MV,
            self.sampling,
            self.canvas.mask_id,
            candidates_BS,
            ids_BS,
            self.canvas.open_BS,
            self.generator,
        )

    def _left(self, masked_BS: Tensor, *numbers: Tensor) -> tuple[list[int], bool]:
        """Masks that are left in each block, and whether one of these numbers is wrong: read from
        the device in one piece.
        """
        # first the positions of no block, then the blocks, last the wrong numbers
        counts_N = masked_BS.new_zeros(len(self.limits) + 2, dtype=torch.int64)
        counts_N.index_add_(0, self.block_BS.flatten() + 1, masked_BS.flatten().long())
        for one_M in numbers:
            counts_N[-1] += ~one_M.sum().isfinite()
        _, *left, wrong = counts_N.tolist()
        return left, wrong > 0

    def best(
        self,
        score_M: Tensor,
        flat_M: Tensor,
        candidates_BS: Tensor,
        nth: int,
        evaluations: int,
        size_B: Tensor,
    ) -> Tensor:
        """The best candidates, as many as the schedule says of this `Turn`, bool (B, S)."""
        key_M = score_M
        if self.rule.alg_temp:
            key_M = perturbed(score_M, self.rule.alg_temp, self.generator)
        # A rule may score a candidate -inf; it must still rank above every other position.
        key_M = key_M.clamp(min=torch.finfo(key_M.dtype).min)
        key_BS = key_M.new_full(candidates_BS.shape, -torch.inf)
        key_BS.view(-1).index_copy_(0, flat_M, key_M)
        rows = len(candidates_BS)
        if self.schedule.pooled:
            # the batch is one row
            rows = 1
        among_BS = candidates_BS.reshape(rows, -1)
        ordered_BS, order_BS = key_BS.view(rows, -1).sort(dim=1, descending=True, stable=True)
        turn = Turn(nth, evaluations, size_B, self.rule, ordered_BS, among_BS)
        count_B = self.schedule.count(turn)
        check_tensor(f"what {self.schedule} counts", count_B, (rows,), "int64", "one number a row")
        first_BS = torch.arange(order_BS.shape[1], device=order_BS.device) < count_B[:, None]
        chosen_BS = torch.zeros_like(among_BS).scatter_(1, order_BS, first_BS) & among_BS
        return chosen_BS.view_as(candidates_BS)


def check_equal_rows(schedule: Schedule, open_BS: Tensor, blocks: int, steps: int | None) -> None:
    """Raises ValueError if the steps of the fullest row would change the result of a row with fewer
    masks alone.

    In a single block with `steps` the counts are those of each row alone, and so are they with one
    token per step; but steps divided over several blocks, and a schedule in time with as many steps
    as masks, are the fullest row's.
    """
    in_time = schedule.allows_surplus_steps
    is_shared = (in_time and steps is None) or (blocks > 1 and (in_time or steps is not None))
    if not (schedule.fixed or in_time) or schedule.pooled or not is_shared:
        return
    counts = sorted({count for count in open_BS.sum(1).tolist() if count})
    if len(counts) > 1:
        remedy = "decode these rows one by one, or give steps and no block_length"
        if not in_time:
            remedy = "leave steps or block_length out, or decode these rows one by one"
        raise ValueError(
            f"the schedule {schedule.name!r} splits steps={steps} over {blocks} block(s) by the "
            "number of open positions, which must be the same in every row, got rows with "
            f"{', '.join(map(str, counts))}; {remedy}."
        )


def check_best(best_M: Tensor, step: str) -> None:
    """Raises ValueError for a best logit of NaN (if any in its row is) or -inf (if every token is
    ruled out).
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


def check_scores(score_M: Tensor, rule: UnmaskingRule, step: str) -> None:
    """Raises ValueError for a score of NaN; infinite ones of both signs, which sum to NaN, are
    none.
    """
    if bool(score_M.isnan().any()):
        raise ValueError(
            f"at {step} the rule {rule} gave NaN for a score; look for logits that are infinite"
        )
