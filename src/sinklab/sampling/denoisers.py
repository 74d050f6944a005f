"""A denoiser maps token ids to logits; guidance and suppression are functions from denoiser to denoiser."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

# B batch rows, S canvas positions, M wanted positions in row-major order, V vocabulary

Denoiser = Callable[[Tensor, Tensor], Tensor]
"""(ids_BS int64, wanted_BS bool) -> logits_MV at the wanted positions only, in row-major order."""


def guided(denoiser: Denoiser, scale: float, prompt_BS: Tensor, mask_id: int) -> Denoiser:
    """Classifier-free guidance: un + (scale + 1) * (cond - un), where `un` is asked with the prompt masked out.

    The conditional call comes first, so a recording that keeps the first forward of a step sees the real prompt.
    Scale 0 is the conditional denoiser itself, at the cost of one call. A token that the conditional logits rule out
    (-inf) stays ruled out. Raises ValueError for a scale that is not finite, and on the first call when `prompt_BS`
    does not fit the ids.

    Args:
        prompt_BS: bool, the positions to hide in the second call; usually `canvas.prompt_BS`.

    Source: Nie et al. 2024 (2410.18514, unsupervised guidance), in the form of LLaDA's `generate`.
    """
    if not math.isfinite(scale):
        raise ValueError(f"the guidance scale must be a finite number, got {scale}; 0 means no guidance.")
    if scale == 0:
        return denoiser

    def both(ids_BS: Tensor, wanted_BS: Tensor) -> Tensor:
        if prompt_BS.shape != ids_BS.shape or prompt_BS.dtype != torch.bool:
            raise ValueError(
                f"prompt_BS must be bool with the shape of the canvas, {tuple(ids_BS.shape)}, got {prompt_BS.dtype} of "
                f"shape {tuple(prompt_BS.shape)}; pass canvas.prompt_BS of the same canvas."
            )
        cond_MV = denoiser(ids_BS, wanted_BS)
        un_MV = denoiser(ids_BS.masked_fill(prompt_BS.to(ids_BS.device), mask_id), wanted_BS)
        mixed_MV = un_MV + (scale + 1) * (cond_MV - un_MV)
        return torch.where(cond_MV == -torch.inf, cond_MV, mixed_MV)

    return both


def suppressed(denoiser: Denoiser, token_ids: Iterable[int]) -> Denoiser:
    """The denoiser with the given tokens ruled out (logit -inf), as in LLaDA's `logits_eos_inf`.

    Raises ValueError when no token is named, and on the first call when an id lies outside the vocabulary.
    """
    columns = sorted(set(token_ids))
    if not columns:
        raise ValueError("suppressed needs at least one token id, got none; use the denoiser as it is.")

    def without(ids_BS: Tensor, wanted_BS: Tensor) -> Tensor:
        logits_MV = denoiser(ids_BS, wanted_BS)
        if columns[0] < 0 or columns[-1] >= logits_MV.shape[-1]:
            raise ValueError(
                f"suppressed ids must lie in the vocabulary, 0 to {logits_MV.shape[-1] - 1}, got {columns}; "
                "check the tokenizer."
            )
        return logits_MV.index_fill(-1, torch.tensor(columns, device=logits_MV.device), -torch.inf)

    return without
