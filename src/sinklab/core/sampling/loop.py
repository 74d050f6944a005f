"""The denoising loop, a generator of steps: the caller's `for` is the callback."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor

from sinklab.core.attention.context import decoding, module_of, reads_wait
from sinklab.core.errors import check_count, check_tensor
from sinklab.core.registry import schedules, unmasking_rules, value_of
from sinklab.core.sampling.caches import Cache, Evaluate, cache_of, evaluator
from sinklab.core.sampling.canvas import Block, Canvas, blocks, numbered_blocks
from sinklab.core.sampling.denoisers import Denoiser
from sinklab.core.sampling.rules import Candidates, LowConfidence, UnmaskingRule
from sinklab.core.sampling.schedules import Count, EvenQuota, Schedule, Timed, Unread
from sinklab.core.sampling.token_ids import check_vocabulary, token_ids
from sinklab.core.sampling.tokens import TokenSampling, perturbed, required

# B batch rows, S canvas positions, C places in a block, M candidate positions in row-major order, V
# vocabulary


class RowEnds:
    """Watches one run for rows that are finished.

    Raises ValueError when no stop id is given, when one is negative, and when [MASK] is one.
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
        check_vocabulary("stop_ids", ids)
        self.ids = ids
        self._ids = torch.tensor(ids, device=open_BS.device)
        self._open_BS = open_BS
        self.finished_B = torch.zeros_like(open_BS[:, 0])

    def __call__(self, ids_BS: Tensor, masked_BS: Tensor) -> tuple[Tensor, Tensor]:
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


def check_equal_rows(schedule: Schedule, open_BS: Tensor, blocks: int, steps: int | None) -> None:
    """Raises ValueError if the steps of the fullest row would change the result of a row with fewer
    masks alone.

    In a single block with `steps` the counts are those of each row alone, and so are they with one
    token per step; but steps divided over several blocks, and a schedule in time with as many steps
    as masks, are the fullest row's.
    """
    in_time = getattr(schedule, "allows_surplus_steps", False)
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
    if nan := int(best_M.isnan().sum()):
        raise ValueError(
            f"logits must be numbers, but at {step} {nan} of {len(best_M)} positions are NaN; "
            "check the weights, the dtype, and rows that attend to nothing."
        )
    if barred := int((best_M == -torch.inf).sum()):
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


@dataclass(frozen=True, eq=False)
class Choice:
    """Choice of a step among the candidates of its block."""

    canvas: Canvas
    block: Block
    candidates_BC: Tensor
    place_M: Tensor
    score_M: Tensor
    chosen_BC: Tensor


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
    before_BS: Tensor = field(repr=False)
    """int64, the ids the denoiser saw."""
    ids_BS: Tensor = field(repr=False)
    """int64, the ids after the commit."""
    filled_BS: Tensor = field(repr=False)
    """bool, the open positions to the right of a stop id, filled with it because their row ended
    with this step.
    """
    choice: Choice = field(repr=False)
    goes_on: bool = False
    """Further steps follow in this block even if it has no masks: written tokens may still be
    edited.
    """

    # Spread over the canvas on first use: a loop that wants the text alone does not pay for them.

    @cached_property
    def masked_BS(self) -> Tensor:
        """bool, the open positions that were still masked before this step, in every block."""
        canvas = self.choice.canvas
        return canvas.open_BS & (self.before_BS == canvas.mask_id)

    @cached_property
    def committed_BS(self) -> Tensor:
        """bool, the positions this step committed a proposal to: also one in place of a token, if
        edits are made.
        """
        return self.choice.block.put(
            self.choice.chosen_BC, torch.zeros_like(self.choice.canvas.open_BS)
        )

    @cached_property
    def confidence_BS(self) -> Tensor:
        """float, the rule's score of each candidate (for `LowConfidence` a probability); NaN
        elsewhere.
        """
        score_M, shape = self.choice.score_M, self.choice.candidates_BC.shape
        score_BC = score_M.new_full(shape, torch.nan)
        score_BC.view(-1).index_copy_(0, self.choice.place_M, score_M)
        return self.choice.block.put(score_BC, score_M.new_full(self.ids_BS.shape, torch.nan))


@dataclass(frozen=True, eq=False)
class Run:
    """Arguments of a loop beside its denoiser."""

    canvas: Canvas
    block_BS: Tensor
    sizes: list[int]
    limits: list[int]
    rule: UnmaskingRule
    schedule: Schedule
    sampling: TokenSampling
    generator: torch.Generator | None
    ends: RowEnds | None
    cache: Cache | None = None


class DenoiseOptions(TypedDict, total=False):
    """Sampling of tokens, and the end of a row: keywords of `denoise`."""

    temperature: float
    top_p: float | None
    top_k: int | None
    generator: torch.Generator | None
    stop_ids: Iterable[int] | int | None


def denoise(
    denoiser: Any,
    canvas: Canvas,
    *,
    rule: UnmaskingRule | str | None = None,
    schedule: Schedule | str | None = None,
    cache: Cache | str | None = None,
    steps: int | None = None,
    block_length: int | None = None,
    **options: Unpack[DenoiseOptions],
) -> Iterator[Step]:
    """Decode the open positions of `canvas`, yielding each step; the last step's `ids_BS` is the
    result.

    At every step the denoiser evaluates the masked positions of the current block and nothing else.
    Each gets a proposed token, the rule scores the proposals, the schedule says how many of the
    best are committed in every row, ties from the left. Committed tokens stay; [MASK] itself is
    never proposed; every open position is committed exactly once, or filled after the end of its
    row. A block is left when every row has finished it.

    Args:
        denoiser: a model, or the result of `sinklab.load`; or a `Denoiser`: (ids_BS, wanted_BS) ->
            logits_MV, bound to `canvas.attention_BS` by its builder.
        rule: an unmasking rule or its text ("entropy", "low_confidence:alg_temp=0.1");
            `LowConfidence()` when left out.
        schedule: a schedule or its text; `EvenQuota()` when left out (`Timed()` with the rule
            `Origin`).
        cache: a cache or its text; None recomputes everything. Needs a denoiser with a `session()`.
        steps: evaluations in all, from the number of blocks to the open positions of the fullest
            row (`Timed`: to any number); by default one per position. Divided evenly over the
            blocks, the remainder to the first; refused if rows with unequal numbers of open
            positions would not get the same as alone.
        block_length: open positions per block, decoded from left to right; by default one block.
            The block of a position is its rank among the row's open positions // block_length, so
            masks may stand anywhere.
        options: `temperature` (0 when left out), `top_p` and `top_k` as in `sample_tokens`, and
            these two.
        generator: needed by rules that draw and by a temperature above 0. Draws depend on the whole
            batch.
        stop_ids: once a row holds one of these in an open position with no mask to its left, the
            open positions to its right are filled with it and the row is finished. When all rows
            are, decoding ends.

    Raises ValueError here for settings that do not fit together, and while iterating (naming the
    step) for logits of the wrong shape, NaN logits, NaN scores (on a GPU at the end of the block at
    the latest) and stop ids beyond the vocabulary; TypeError for a class in place of a rule,
    schedule or cache object. Source: LLaDA (2502.09992), Algorithm 5 and `generate.py`.
    """
    given: dict[str, Any] = {**options}
    denoiser = _bound(denoiser, canvas)
    generator, stop_ids = given.pop("generator", None), given.pop("stop_ids", None)
    sampling = TokenSampling(**given)
    chosen = LowConfidence() if rule is None else value_of(unmasking_rules, rule, "__call__")
    plan = planned(chosen, schedule, sampling)
    if sampling.temperature > 0:
        required(generator, "a temperature above 0")
    if getattr(chosen, "needs_generator", False) or getattr(chosen, "alg_temp", None):
        required(generator, f"the rule {chosen}")
    check_count("steps", steps, "leave steps out to commit one token per step.")
    if hasattr(denoiser, "in_blocks"):
        canvas = denoiser.in_blocks(canvas, block_length)
    sizes, block_BS = numbered_blocks(canvas, block_length)
    limits = plan.evaluations(sizes, steps)
    check_equal_rows(plan, canvas.open_BS, len(sizes), steps)
    ends = None if stop_ids is None else RowEnds(stop_ids, canvas.open_BS, canvas.mask_id)
    run = Run(
        canvas, block_BS, sizes, limits, chosen, plan, sampling, generator, ends, cache_of(cache)
    )
    return getattr(plan, "run", _steps)(run, evaluator(denoiser, run.cache, block_BS))


def _bound(given: Any, canvas: Canvas) -> Denoiser:
    """A denoiser as it is; that of a model, bound to the padding of the canvas."""
    model = module_of(given)
    bind: Any = getattr(model, "denoiser", None)
    if bind is not None and isinstance(model, torch.nn.Module):
        return bind(canvas.attention_BS)
    if model is not given:
        raise ValueError(
            f"denoise takes a model that fills masks, got {given!r}; write with its own generate"
        )
    return model


def planned(
    rule: UnmaskingRule, schedule: Schedule | str | None, sampling: TokenSampling
) -> Schedule:
    """The schedule for this rule. Raises ValueError for a combination that makes no sense, whatever
    the canvas.
    """
    default = Timed() if getattr(rule, "measure", None) == "chance" else EvenQuota()
    plan: Schedule = default if schedule is None else value_of(schedules, schedule, "evaluations")
    plan.check_rule(rule)
    if sampling.temperature == 0 and sampling.cuts and not getattr(rule, "reads_shaped", True):
        raise ValueError(
            f"top_p and top_k do nothing at temperature 0 with the rule {rule}, got "
            f"top_p={sampling.top_p} and "
            f"top_k={sampling.top_k}; raise the temperature or leave them out."
        )
    return plan


class _Left:
    """Number of candidates left in each block: known beforehand, or read once a step with all that
    may be wrong.
    """

    def __init__(self, run: Run, plan: list[Block]) -> None:
        self.blocks = [len(block.flat_N) for block in plan]
        self._run, self._waits = run, reads_wait(run.canvas.open_BS.device)
        self._known = [
            self._beforehand(block, limit) for block, limit in zip(plan, run.limits, strict=True)
        ]
        self._doubts: list[tuple[Tensor, Callable[[], None]]] = []

    def _beforehand(self, block: Block, limit: int) -> list[int] | None:
        """Candidates of the block after each evaluation, if the counts read no scores and no row
        may end.
        """
        schedule, left_B = self._run.schedule, block.sizes_B
        count = None if self._run.ends else schedule.start(left_B, limit, self._run.rule)
        if not isinstance(count, Unread):
            return None
        left_B, after = left_B.sum()[None] if schedule.pooled else left_B, []
        place_C = torch.arange(int(left_B.max()))
        for evaluation in range(limit):
            left_BC = place_C < left_B[:, None]
            left_B = (left_B - count(left_BC, left_BC, evaluation)).clamp(min=0)
            after.append(int(left_B.sum()))
        return after

    def doubt(self, wrong: Tensor, check: Callable[[], None]) -> None:
        """Have `check` raise if the flag is set: now, or when the device is next asked."""
        if self._waits:
            self._doubts.append((wrong, check))
        elif bool(wrong):
            check()

    def commit(
        self, number: int, evaluation: int, candidates_BC: Tensor, masked_BS: Tensor
    ) -> None:
        """Update the numbers of candidates left after the commit of an evaluation of this block."""
        if (known := self._known[number]) is not None:
            self.blocks[number] = known[evaluation]
            if self._doubts and not known[evaluation]:
                self._ask(candidates_BC.new_zeros(1, dtype=torch.int64))
        elif self._run.ends is None:
            self.blocks[number] = self._ask(candidates_BC.sum()[None])[0]
        else:
            # rows that have ended are done with later blocks as well
            held_N = candidates_BC.new_zeros(len(self.blocks) + 1, dtype=torch.int64)
            held_N.index_add_(0, self._run.block_BS.flatten() + 1, masked_BS.flatten().long())
            self.blocks = self._ask(held_N)[1:]

    def _ask(self, numbers_N: Tensor) -> list[int]:
        """Read these numbers from the device, and with them whatever is in doubt."""
        doubts, self._doubts = self._doubts, []
        flags = [torch.stack([wrong for wrong, _ in doubts]).long()] if doubts else []
        answers = torch.cat([numbers_N, *flags]).tolist()
        for is_wrong, (_, check) in zip(answers[len(numbers_N) :], doubts, strict=True):
            if is_wrong:
                check()
        return answers[: len(numbers_N)]


def _steps(run: Run, evaluate: Evaluate) -> Iterator[Step]:
    canvas, schedule, ends = run.canvas, run.schedule, run.ends
    if hasattr(run.rule, "start"):
        run = replace(run, rule=run.rule.start(canvas.open_BS, run.generator))
    total = sum(run.limits) if schedule.fixed else None
    ids_BS, masked_BS, index = canvas.ids_BS, canvas.open_BS, 0
    nothing_BS, plan = torch.zeros_like(masked_BS), blocks(run.block_BS, run.sizes)
    left = _Left(run, plan)
    for block, limit in zip(plan, run.limits, strict=True):
        candidates_BC = block.real_BC if ends is None else block.get(masked_BS, False)
        ids_BC = block.get(ids_BS, canvas.mask_id)
        count, evaluation = schedule.start(candidates_BC.sum(1), limit, run.rule), 0
        while wanted := left.blocks[block.number]:
            step = f"step {index} (block {block.number})"
            if evaluation == limit:
                raise ValueError(
                    f"{schedule} left masks behind in block {block.number} after {limit} "
                    "evaluations."
                )
            place_M, places = block.places(candidates_BC, wanted)
            with torch.no_grad(), decoding(run):
                wanted_BS = block.put(candidates_BC, nothing_BS)
                logits_MV = evaluate(ids_BS, wanted_BS, block.number, evaluation, places)
                remedy = "one row per wanted position: logits_BSV[wanted_BS]"
                check_tensor(
                    f"what a denoiser returns at {step}", logits_MV, (wanted, None), remedy=remedy
                )
                if index == 0 and ends is not None:
                    check_vocabulary("stop_ids", ends.ids, logits_MV.shape[1])
                score_M, token_M = _scored(run, block, candidates_BC, logits_MV, left, step)
                chosen_BC = picked(run, score_M, place_M, candidates_BC, count, evaluation)
            choice = Choice(canvas, block, candidates_BC, place_M, score_M, chosen_BC)
            written_BC = ids_BC.flatten().index_copy(0, place_M, token_M).view_as(ids_BC)
            ids_BC = torch.where(chosen_BC, written_BC, ids_BC)
            before_BS, ids_BS, filled_BS = ids_BS, block.put(ids_BC, ids_BS), nothing_BS
            candidates_BC = candidates_BC & ~chosen_BC
            if ends is not None:
                masked_BS = masked_BS & ~block.put(chosen_BC, nothing_BS)
                ids_BS, filled_BS = ends(ids_BS, masked_BS)
                masked_BS = masked_BS & ~filled_BS
                candidates_BC, ids_BC = (
                    block.get(masked_BS, False),
                    block.get(ids_BS, canvas.mask_id),
                )
            left.commit(block.number, evaluation, candidates_BC, masked_BS)
            yield Step(index, total, block.number, before_BS, ids_BS, filled_BS, choice)
            index, evaluation = index + 1, evaluation + 1


def _scored(
    run: Run, block: Block, candidates_BC: Tensor, logits_MV: Tensor, left: _Left, step: str
) -> tuple[Tensor, Tensor]:
    mask_id, columns_BC = run.canvas.mask_id, block.columns_BC
    candidates = Candidates(
        logits_MV, run.sampling, mask_id, candidates_BC, columns_BC, run.generator
    )
    best_M, token_M = candidates.drawn
    left.doubt(~best_M.sum().isfinite(), lambda: check_best(best_M, step))
    score_M = run.rule(candidates)
    check_tensor(
        f"what the rule {run.rule} returns at {step}",
        score_M,
        token_M.shape,
        "float",
        "one per candidate",
    )
    left.doubt(score_M.sum().isnan(), lambda: check_scores(score_M, run.rule, step))
    # A view of logits made in inference mode is an inference tensor still.
    return score_M.clone() if score_M.is_inference() else score_M, token_M


def picked(
    run: Run, score_M: Tensor, place_M: Tensor, candidates_BC: Tensor, count: Count, evaluation: int
) -> Tensor:
    """The best candidates, as many as the count says, bool (B, C)."""
    alg_temp = getattr(run.rule, "alg_temp", None)
    key_M = perturbed(score_M, alg_temp, run.generator) if alg_temp else score_M
    shape = candidates_BC.shape
    if run.schedule.pooled:
        candidates_BC = candidates_BC.reshape(1, -1)
    # A rule may score a candidate -inf; it must still rank above every place that is no candidate.
    key_M = key_M.clamp(min=torch.finfo(key_M.dtype).min)
    key_BC = key_M.new_full(candidates_BC.shape, -torch.inf)
    key_BC.view(-1).index_copy_(0, place_M, key_M)
    ordered_BC, order_BC = key_BC.sort(dim=1, descending=True, stable=True)
    count_B1 = count(ordered_BC, candidates_BC, evaluation)[:, None]
    first_BC = torch.arange(order_BC.shape[1], device=order_BC.device) < count_B1
    return (torch.zeros_like(candidates_BC).scatter_(1, order_BC, first_BC) & candidates_BC).view(
        shape
    )
