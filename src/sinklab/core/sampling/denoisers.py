"""A denoiser maps token ids to logits; guidance and suppression are functions from denoiser to
denoiser.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from sinklab.core.errors import check_count, check_tensor
from sinklab.core.sampling.caches import BlockWork
from sinklab.core.sampling.token_ids import check_vocabulary, token_ids

# B batch rows, S canvas positions, M wanted positions in row-major order, V vocabulary, W
# recomputed columns

Denoiser = Callable[[Tensor, Tensor], Tensor]
"""(ids_BS int64, wanted_BS bool) -> logits_MV at the wanted positions only, in row-major order. One
with a true attribute `takes_places` gets the keyword `places` as well (`canvas.Places`)."""


class Session(Protocol):
    """A denoiser that remembers the keys and values of its last evaluations, for one run over one
    canvas.
    """

    def __call__(
        self, ids_BS: Tensor, wanted_BS: Tensor, columns: slice | Tensor | BlockWork | None
    ) -> Tensor:
        """Logits (M, V) at the wanted positions, which must lie inside `columns`.

        Args:
            columns: columns to compute anew, the same in every row: a slice, or sorted column
                numbers int64 (W,). They attend to all S columns, with the other columns' keys and
                values as remembered. None computes everything; the first call must be such a one. A
                cache with a memory of its own hands over a `BlockWork` in their place, which not
                every denoiser need know.
        """


class CachingDenoiser(Protocol):
    """A denoiser that a cache can work with."""

    def __call__(self, ids_BS: Tensor, wanted_BS: Tensor) -> Tensor:
        """Logits (M, V), everything computed afresh."""

    def session(self) -> Session:
        """Start to remember."""


def guided(denoiser: Denoiser, scale: float, prompt_BS: Tensor, mask_id: int) -> Denoiser:
    """Classifier-free guidance: un + (scale + 1) * (cond - un), with `un` evaluated with the prompt
    masked out.

    The conditional call comes first, so a recording that keeps the first forward of a step sees the
    real prompt. Scale 0 is the conditional denoiser itself, at the cost of one call. A token that
    the conditional logits rule out (-inf) stays ruled out. Under a cache the two calls remember
    apart. Raises ValueError for a scale that is not finite, and on the first call when `prompt_BS`
    does not fit the ids.

    Args:
        prompt_BS: bool, the positions to mask in the second call; usually `canvas.prompt_BS`.

    Source: Nie et al. 2024 (2410.18514, unsupervised guidance), in the form of LLaDA's `generate`.
    """
    if not math.isfinite(scale):
        raise ValueError(
            f"the guidance scale must be a finite number, got {scale}; 0 means no guidance."
        )
    if scale == 0:
        return denoiser

    def mixed(evaluations: list[Any], ids_BS: Tensor, *wanted: Any, **places: Any) -> Tensor:
        check_tensor(
            "prompt_BS", prompt_BS, ids_BS.shape, "bool", "pass canvas.prompt_BS of the same canvas"
        )
        cond, un = evaluations
        cond_MV = cond(ids_BS, *wanted, **places)
        un_MV = un(ids_BS.masked_fill(prompt_BS.to(ids_BS.device), mask_id), *wanted, **places)
        return torch.where(cond_MV == -torch.inf, cond_MV, un_MV + (scale + 1) * (cond_MV - un_MV))

    return _wrapped(denoiser, mixed, 2)


def suppressed(denoiser: Denoiser, suppress_ids: Iterable[int] | int) -> Denoiser:
    """The denoiser with the given tokens ruled out (logit -inf), as in LLaDA's `logits_eos_inf`.

    Raises ValueError when no token is named, and on the first call when an id lies outside the
    vocabulary.
    """
    columns = sorted(set(token_ids("suppress_ids", suppress_ids)))
    if not columns:
        raise ValueError(
            "suppressed needs at least one token id, got none; use the denoiser as it is."
        )
    columns_on: dict[torch.device, Tensor] = {}

    def without(evaluations: list[Any], *call: Any, **places: Any) -> Tensor:
        logits_MV = evaluations[0](*call, **places)
        check_vocabulary("suppress_ids", columns, logits_MV.shape[-1])
        at = logits_MV.device
        if at not in columns_on:
            columns_on[at] = torch.tensor(columns, device=at)
        return logits_MV.index_fill(-1, columns_on[at], -torch.inf)

    return _wrapped(denoiser, without)


def limited(denoiser: Denoiser, vocabulary: int) -> Denoiser:
    """The denoiser over the ids below `vocabulary` alone: a text decoder for a model that also
    writes image codes.

    The other ids take no part in any probability. Raises ValueError for vocabulary < 1.
    """
    check_count("vocabulary", vocabulary, "use the denoiser as it is.")
    return _wrapped(
        denoiser,
        lambda evaluations, *call, **places: evaluations[0](*call, **places)[:, :vocabulary],
    )


def _wrapped(denoiser: Denoiser, change: Callable[..., Tensor], count: int = 1) -> Denoiser:
    """Logits that `change(evaluations, ids_BS, wanted_BS, …)` makes of `count` evaluations, which
    remember apart.
    """
    return (_CachingWrapped if hasattr(denoiser, "session") else _Wrapped)(denoiser, change, count)


@dataclass(frozen=True, eq=False)
class _Wrapped:
    denoiser: Any
    change: Callable[..., Tensor]
    count: int

    def __getattr__(self, name: str) -> Any:
        # attributes that a loop reads from the model's denoiser, and that a wrapper does not change
        if name in ("takes_places", "own_cache", "in_blocks"):
            return getattr(self.denoiser, name)
        raise AttributeError(name)

    def __call__(self, ids_BS: Tensor, wanted_BS: Tensor, **places: Any) -> Tensor:
        return self.change([self.denoiser] * self.count, ids_BS, wanted_BS, **places)


class _CachingWrapped(_Wrapped):
    def session(self) -> Session:
        return partial(self.change, [self.denoiser.session() for _ in range(self.count)])
