"""The denoising loop, a generator of steps: the caller's `for` is the callback."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sinklab.sampling.canvas import Canvas
from sinklab.sampling.denoisers import Denoiser
from sinklab.sampling.rules import LowConfidence, Rule, check_temperature, rule_by_name, sample_tokens
from sinklab.sampling.schedule import commit_counts, deal_steps

# B batch rows, S canvas positions, M candidate positions in row-major order, V vocabulary


@dataclass(frozen=True, eq=False)
class Step:
    """One evaluation of the denoiser and what was committed after it. Later steps never change its tensors."""

    index: int
    """0 for the first step."""
    total: int
    """Number of steps of the whole run."""
    block: int
    """Block that was decoded, 0 for the first."""
    before_BS: Tensor
    """int64, the ids the denoiser saw."""
    ids_BS: Tensor
    """int64, the ids after the commit."""
    committed_BS: Tensor
    """bool, the positions this step filled."""
    masked_BS: Tensor
    """bool, the open positions that were still masked before this step, in every block."""
    confidence_BS: Tensor
    """float, the rule's score of each candidate (for `LowConfidence` a probability); NaN elsewhere."""


@dataclass(frozen=True, eq=False)
class _Plan:
    block_BS: Tensor  # block of every open position, -1 elsewhere
    quotas: list[tuple[int, Tensor]]  # per step: its block, and the number of commits of every row (B,)


def denoise(
    denoiser: Denoiser,
    canvas: Canvas,
    *,
    rule: Rule | str | None = None,
    steps: int | None = None,
    block_length: int | None = None,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> Iterator[Step]:
    """Decode the open positions of `canvas`, yielding each step; the last step's `ids_BS` is the result.

    At every step the denoiser is asked for the masked positions of the current block and for nothing else. Each gets a
    proposed token, the rule scores the proposals, and in every row the best are committed, ties from the left.
    Committed tokens stay; [MASK] itself is never proposed; every open position is committed exactly once.

    Args:
        denoiser: (ids_BS, wanted_BS) -> logits_MV, bound to `canvas.attention_BS` by whoever built it.
        rule: a rule or its name; `LowConfidence()` when left out.
        steps: evaluations in all, from the number of blocks to the open positions of the fullest row; by default one
            token per step. They are dealt to the blocks evenly, the remainder to the first. Within a block, a row
            commits floor(n / steps) tokens, the remainder first; rows with fewer open positions finish early.
        block_length: open positions per block, decoded from left to right; by default one block. The block of a
            position is its rank among the row's open positions // block_length, so masks may stand anywhere.
        temperature: see `sample_tokens`.
        generator: needed by `RandomOrder` and by a temperature above 0. Draws depend on the whole batch.

    Raises ValueError here for settings that do not fit, and while iterating (naming the step) for logits of the wrong
    shape, NaN logits and NaN scores. Source: LLaDA (2502.09992), Algorithm 5 and `generate.py`.
    """
    chosen = LowConfidence() if rule is None else rule_by_name(rule) if isinstance(rule, str) else rule
    check_temperature(temperature, generator)
    plan = _plan(canvas, steps, block_length)
    return _run(denoiser, canvas, plan, chosen, temperature, generator)


def _plan(canvas: Canvas, steps: int | None, block_length: int | None) -> _Plan:
    if block_length is not None and block_length < 1:
        raise ValueError(f"block_length must be at least 1, got {block_length}; leave it out for a single block.")
    if steps is not None and steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}; leave steps out to commit one token per step.")
    open_BS = canvas.open_BS
    count_B = open_BS.sum(1)
    fullest = int(count_B.max())
    length = min(block_length or fullest, fullest)
    sizes = [min(length, fullest - start) for start in range(0, fullest, length)]
    block_BS = torch.where(open_BS, (open_BS.cumsum(1) - 1) // length, -1)
    quotas: list[tuple[int, Tensor]] = []
    for block, dealt in enumerate(deal_steps(sizes, steps)):
        counts_BT = commit_counts((count_B - block * length).clamp(0, length), dealt)
        quotas += [(block, quota_B) for quota_B in counts_BT.unbind(1)]
    return _Plan(block_BS, quotas)


def _run(
    denoiser: Denoiser,
    canvas: Canvas,
    plan: _Plan,
    rule: Rule,
    temperature: float,
    generator: torch.Generator | None,
) -> Iterator[Step]:
    ids_BS, masked_BS = canvas.ids_BS, canvas.open_BS
    for index, (block, quota_B) in enumerate(plan.quotas):
        candidate_BS = masked_BS & (plan.block_BS == block)
        where = f"step {index} (block {block})"
        with torch.no_grad():
            logits_MV = _checked(denoiser(ids_BS, candidate_BS), int(candidate_BS.sum()), where)
            proposal_M = sample_tokens(_without(logits_MV, canvas.mask_id), temperature, generator)
            score_M = rule(logits_MV, proposal_M, generator)
        if score_M.isnan().any():
            raise ValueError(
                f"scores must be numbers, but at {where} the rule {rule} gave NaN; look for logits of -inf only."
            )
        committed_BS = _highest(score_M, candidate_BS, quota_B)
        after_BS = torch.where(committed_BS, ids_BS.masked_scatter(candidate_BS, proposal_M), ids_BS)
        yield Step(
            index=index,
            total=len(plan.quotas),
            block=block,
            before_BS=ids_BS,
            ids_BS=after_BS,
            committed_BS=committed_BS,
            masked_BS=masked_BS,
            confidence_BS=_spread(score_M, candidate_BS, torch.nan),
        )
        ids_BS, masked_BS = after_BS, masked_BS & ~committed_BS


def _checked(logits_MV: Tensor, wanted: int, where: str) -> Tensor:
    if logits_MV.ndim != 2 or logits_MV.shape[0] != wanted:
        raise ValueError(
            f"a denoiser must return one row of logits per wanted position, ({wanted}, vocabulary), but at {where} it "
            f"returned {tuple(logits_MV.shape)}; select with logits_BSV[wanted_BS]."
        )
    bad = logits_MV.isnan().any(-1)
    if bad.any():
        raise ValueError(
            f"logits must be numbers, but at {where} {int(bad.sum())} of {wanted} positions are NaN; check the "
            "weights, the dtype, and rows that attend to nothing."
        )
    return logits_MV


def _without(logits_MV: Tensor, mask_id: int) -> Tensor:
    # A head may be narrower than the ids: then [MASK] has no logit and cannot be proposed.
    if mask_id >= logits_MV.shape[-1]:
        return logits_MV
    return logits_MV.index_fill(-1, torch.tensor([mask_id], device=logits_MV.device), -torch.inf)


def _spread(values_M: Tensor, at_BS: Tensor, fill: float) -> Tensor:
    return values_M.new_full(at_BS.shape, fill).masked_scatter(at_BS, values_M)


def _highest(score_M: Tensor, candidate_BS: Tensor, quota_B: Tensor) -> Tensor:
    # A rule may score a candidate -inf; it must still rank above every position that is no candidate.
    finite_M = score_M.clamp(min=torch.finfo(score_M.dtype).min)
    order_BS = _spread(finite_M, candidate_BS, -torch.inf).argsort(dim=1, descending=True, stable=True)
    rank = torch.arange(candidate_BS.shape[1], device=candidate_BS.device)
    return torch.zeros_like(candidate_BS).scatter(1, order_BS, rank < quota_B[:, None])
