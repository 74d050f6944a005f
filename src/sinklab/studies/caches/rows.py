"""How faithful caches are: what they give for the same half-revealed text, and which texts are written under them."""

# R rows, B batch, S canvas columns, N new tokens, M wanted positions (row-major), V vocabulary
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinklab.checkpoints.loading import Loaded
from sinklab.sampling.canvas import Canvas, block_numbers, block_sizes
from sinklab.scoring.heldout import heldout_rows
from sinklab.studies.base import columns_of, heldout_text
from sinklab.studies.caches.policies import DELAY, Policy
from sinklab.studies.caches.study import CacheSettings

METRICS = ("loss", "divergence", "same")
"""Of the tokens still masked: nats of the true one; nats from the uncached distribution to the cached one; share of
positions at which both have the same token first."""


def rows_of_text(loaded: Loaded, settings: CacheSettings) -> Tensor:
    """Rows the model has not seen, int64 (R, S). Raises ValueError where the corpus does not fill them."""
    most, source = max(settings.rows, settings.texts), heldout_text(settings.text)
    ids_RS = heldout_rows(loaded, source, rows=most, length=settings.length).ids_RS
    if len(ids_RS) < settings.rows:
        raise ValueError(
            f"the text fills {len(ids_RS)} rows of {settings.length} tokens, but rows={settings.rows}; ask for fewer, "
            "or name a longer text."
        )
    return ids_RS


def revealed(settings: CacheSettings, rows: Sequence[int]) -> Tensor:
    """When each new token is revealed: its turn within its block, int64 (B, N); by row, whatever the batch."""
    draws_BN = np.stack([np.random.default_rng([settings.seed, row]).random(settings.new_tokens) for row in rows])
    blocks = np.split(draws_BN, range(settings.block_length, settings.new_tokens, settings.block_length), axis=1)
    return torch.from_numpy(np.concatenate([block.argsort(1).argsort(1) for block in blocks], 1))


def canvas_of(model: Any, ids_BS: Tensor, new_tokens: int) -> Canvas:
    """The rows with their last tokens masked. Raises ValueError for rows that do not fit the model."""
    fits = {"mask_id": model.config.mask_token_id, "context": model.config.text_positions}
    return Canvas.from_prompts(ids_BS[:, : ids_BS.shape[1] - new_tokens], new_tokens=new_tokens, **fits)


@torch.inference_mode()
def forced(
    loaded: Loaded,
    ids_BS: Tensor,
    rows: Sequence[int],
    found: Sequence[Policy],
    settings: CacheSettings,
    progress: Callable[[], object] | None = None,
) -> dict[str, list[Any]]:
    """Every policy on the same text, revealed block by block, in the same random order: a table, a line per policy and
    row with the means of `METRICS`.

    What counts is the evaluations that run the block alone under every cache, from the third on. The true tokens are
    revealed whatever a policy proposes, so that errors do not pile up and rows can be compared in pairs.

    Args:
        ids_BS: the true text.
        rows: the numbers of these rows, which seed the order.
        found: the policies, the uncached one first.
        progress: called after each evaluation of all policies.
    """
    model: Any = loaded.model
    ids_BS = ids_BS.to(model.device)
    canvas = canvas_of(model, ids_BS, settings.new_tokens)
    block_BS = block_numbers(canvas.open_BS, block_sizes(canvas.open_BS, settings.block_length))
    turn_BS = torch.full_like(ids_BS, -1)
    turn_BS[canvas.open_BS] = revealed(settings, rows).flatten().to(model.device)
    run = {policy: policy.evaluate(model, block_BS) for policy in found}
    sums = {policy: torch.zeros(len(METRICS), len(ids_BS)) for policy in found}
    count_B = torch.zeros(len(ids_BS))
    for block, nth, wanted_BS in _moments(block_BS, turn_BS, settings):
        noisy_BS = torch.where(wanted_BS | (block_BS > block), canvas.mask_id, ids_BS)
        counts = nth > DELAY
        truth_MV = None
        for policy, evaluate in run.items():
            # nothing that an uncached or delayed evaluation computes is remembered
            if not counts and (policy.cache is None or (nth < DELAY and policy.is_evicting)):
                continue
            logits_MV = evaluate(noisy_BS, wanted_BS, block, nth)
            if counts:
                log_MV = _log_probs(logits_MV, model.config)
                truth_MV = log_MV if truth_MV is None else truth_MV
                row_M = wanted_BS.nonzero()[:, 0].cpu()
                values = _measured(log_MV, truth_MV, ids_BS[wanted_BS])
                sums[policy].index_add_(1, row_M, values)
        count_B += wanted_BS.sum(1).cpu() * counts
        if progress is not None:
            progress()
    return columns_of(
        asdict(policy) | {"row": row} | dict(zip(METRICS, means, strict=True))
        for policy in found
        for row, means in zip(rows, (sums[policy] / count_B).T.tolist(), strict=True)
    )


def evaluations(settings: CacheSettings) -> int:
    """How often `forced` calls its progress for a batch."""
    starts = range(0, settings.new_tokens, settings.block_length)
    sizes = (min(settings.block_length, settings.new_tokens - start) for start in starts)
    return sum(-(-size // settings.tokens_per_step) for size in sizes)


def _moments(block_BS: Tensor, turn_BS: Tensor, settings: CacheSettings) -> Iterator[tuple[int, int, Tensor]]:
    """(block, nth evaluation, positions of the block still masked)."""
    for block in range(int(block_BS.max()) + 1):
        inside_BS = block_BS == block
        for nth in range(-(-int(inside_BS[0].sum()) // settings.tokens_per_step)):
            yield block, nth, inside_BS & (turn_BS >= nth * settings.tokens_per_step)


def _log_probs(logits_MV: Tensor, config: Any) -> Tensor:
    """Over the tokens that may be written: text, and not [MASK]."""
    logits_MV = logits_MV[:, : config.text_vocab_size].float()
    if config.mask_token_id < logits_MV.shape[1]:
        logits_MV = logits_MV.index_fill(1, torch.tensor([config.mask_token_id], device=logits_MV.device), -torch.inf)
    return logits_MV.log_softmax(1)


def _measured(log_MV: Tensor, truth_MV: Tensor, ids_M: Tensor) -> Tensor:
    """`METRICS` of every position, (3, M)."""
    loss_M = -log_MV.gather(1, ids_M[:, None])[:, 0]
    # what is ruled out has probability 0 in both
    divergence_M = (truth_MV.exp() * (truth_MV - log_MV).nan_to_num(0.0)).sum(1)
    same_M = (log_MV.argmax(1) == truth_MV.argmax(1)).float()
    return torch.stack([loss_M, divergence_M, same_M]).cpu()


def written(loaded: Loaded, ids_BS: Tensor, policy: Policy, settings: CacheSettings) -> Tensor:
    """What a policy writes after the beginnings of these rows, one token a step, int64 (B, N)."""
    model: Any = loaded.model
    canvas = canvas_of(model, ids_BS.to(model.device), settings.new_tokens)
    options = {"text_vocabulary": model.config.text_vocab_size, "cache": policy.cache}
    with torch.inference_mode():
        *_, last = settings.decoding().decode(policy.denoiser(model), canvas, **options)
    return last.ids_BS[:, -settings.new_tokens :].clone().cpu()
