"""Denoisers, which map token ids to logits, and caches, which say what an evaluation computes anew.

The loop knows a model by these two alone: a published network, a plain function and a fast decoder
are decoded by the same code.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sinklab.core.attention.context import module_of
from sinklab.core.errors import check_tensor
from sinklab.core.registry import caches
from sinklab.core.subject.canvas import Canvas, Places

# B batch rows, S canvas positions, M wanted positions in row-major order, V vocabulary, W
# recomputed columns


class Cache:
    """Says which columns to recompute; the others keep their last keys and values. A subclass
    writes `columns`, and `session` if it keeps something else.
    """

    is_exact = False
    """Whether it changes no result: models with attention in blocks are then decoded with it."""

    def columns(self, start: int, stop: int, length: int, nth: int) -> slice | Tensor | None:
        """Columns to recompute in every row: a slice, sorted int64 (W,), or None for all.

        Args:
            start, stop: the block's columns [start, stop), always recomputed.
            length: columns of the canvas.
            nth: 0 at the first evaluation of the block; that of a canvas must be full.
        """
        raise NotImplementedError(f"{self} has no method columns of its own; write it")

    def session(self, denoiser: Any) -> Any:
        """A `Session` of its own for one run of a model's denoiser; None for the denoiser's."""
        return None


def cache_of(given: Cache | str | None) -> Cache | None:
    """The cache of this text, or the object itself; None for None and "none"."""
    if given is None or given == "none":
        return None
    return caches.parse(given, Cache)


class Session:
    """A denoiser's memory of keys and values, for one run over one canvas under a cache."""

    def logits(self, ids_BS: Tensor, at: Places, columns: slice | Tensor | None = None) -> Tensor:
        """Logits (M, V) at the wanted positions, all within these columns (`Cache.columns`), which
        attend to all S columns, the others as remembered. The first call must be full.
        """
        raise NotImplementedError

    def __call__(
        self, ids_BS: Tensor, wanted_BS: Tensor, columns: slice | Tensor | None = None
    ) -> Tensor:
        """Logits (M, V) at the True positions of `wanted_BS`."""
        return self.logits(ids_BS, Places.of(wanted_BS), columns)


class Denoiser:
    """A map from token ids to logits, bound to the padding of a canvas. A subclass writes `logits`,
    and `begin` if it can remember.
    """

    is_fast = False
    """Whether evaluations made now skip what is not wanted, as a fast decoder does."""

    def logits(self, ids_BS: Tensor, at: Places) -> Tensor:
        """Logits (M, V) at the wanted positions of a canvas, int64 (B, S)."""
        raise NotImplementedError

    def __call__(self, ids_BS: Tensor, wanted_BS: Tensor) -> Tensor:
        """Logits (M, V) at the True positions of `wanted_BS`, in row-major order."""
        return self.logits(ids_BS, Places.of(wanted_BS))

    def scored(self, ids_BS: Tensor, wanted_BS: Tensor, clean_BS: Tensor) -> Tensor:
        """Logits (M, V) for the score of a text: attention in blocks sees the ids `clean_BS` of the
        blocks before.
        """
        return self(ids_BS, wanted_BS)

    def begin(self, cache: Cache) -> Session:
        """A memory for one run under this cache. Raises ValueError for a denoiser that has none."""
        raise ValueError(
            f"{cache} needs a denoiser that remembers keys and values, but {self} does not; write "
            "a method begin(cache), use model.denoiser(…) of a sinklab model, or no cache"
        )

    def exact_cache(self) -> Cache | None:
        """The cache that changes no result, for evaluations made now."""
        return None

    def in_blocks(self, canvas: Canvas, block_length: int | None = None) -> Canvas:
        """The canvas with decoding blocks that fit the model's attention."""
        return canvas


class DenoisingModel:
    """A model that fills masks; `denoise` asks it for its denoiser."""

    def denoiser(self, attention_mask: Tensor | None = None) -> Denoiser:
        """The denoiser of this model for canvases with this padding."""
        raise NotImplementedError


class FunctionDenoiser(Denoiser):
    """A plain function (ids_BS, wanted_BS) -> logits_MV as a denoiser."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.function = function

    def __repr__(self) -> str:
        return f"the function {self.function}"

    def logits(self, ids_BS: Tensor, at: Places) -> Tensor:
        """The function's value."""
        return self.function(ids_BS, at.wanted_BS)


def denoiser_of(given: Any, canvas: Canvas) -> Denoiser:
    """The denoiser of a model for this canvas; a denoiser or a function as one. Raises ValueError
    for a model of another kind.
    """
    model = module_of(given)
    if isinstance(model, DenoisingModel):
        return model.denoiser(canvas.attention_BS)
    if model is not given:
        raise ValueError(
            f"denoise takes a model that fills masks, got {given!r}; write with its own generate"
        )
    if isinstance(given, Denoiser):
        return given
    return FunctionDenoiser(given)


class Evaluation:
    """A denoiser as the loop calls it: under the cache given, else under its exact cache, else with
    everything computed. Raises ValueError for a cache if a block's columns differ between rows: a
    row alone would recompute others than the batch.
    """

    def __init__(self, denoiser: Denoiser, cache: Cache | None, block_BS: Tensor) -> None:
        self.denoiser = denoiser
        self.cache = cache
        self._session: Session | None = None
        self._spans = []
        for block in range(int(block_BS.max()) + 1):
            held_BS = block_BS == block
            columns = held_BS.any(0).nonzero()[:, 0].tolist()
            start, stop = columns[0], columns[-1]
            self._spans.append(slice(start, stop + 1))
            apart_B = held_BS.any(1) & ~(held_BS[:, start] & held_BS[:, stop])
            if cache is not None and not cache.is_exact and apart_B.any():
                raise ValueError(
                    "a cache recomputes the same columns in every row, but block "
                    f"{block}, in columns {start} to {stop} of the batch, is in fewer of row "
                    f"{int(apart_B.nonzero()[0])}; pad prompts on the left, decode these rows one "
                    "by one, or without a cache."
                )
        if cache is not None:
            self._session = denoiser.begin(cache)

    def __call__(self, ids_BS: Tensor, at: Places, block: int, nth: int) -> Tensor:
        """Logits (M, V) of the nth evaluation (0 = first) of this block."""
        span = self._spans[block]
        at = replace(at, columns=span)
        # asked every time: a trace, under which there is none, may begin between two evaluations
        cache = self.cache or self.denoiser.exact_cache()
        if cache is None:
            self._session = None
            return self.denoiser.logits(ids_BS, at)
        if self._session is None:
            self._session = self.denoiser.begin(cache)
        columns = cache.columns(span.start, span.stop, ids_BS.shape[1], nth)
        if columns is not None and not isinstance(columns, slice):
            check_tensor(f"the columns of {cache}", columns, (None,), "int64", "or give a slice")
        return self._session.logits(ids_BS, at, columns)


def guided(denoiser: Denoiser, scale: float, prompt_BS: Tensor, mask_id: int) -> Denoiser:
    """Classifier-free guidance: un + (scale + 1) * (cond - un), with the prompt masked for `un`.
    Tokens that `cond` rules out (-inf) stay so; scale 0 is the denoiser itself.

    Raises ValueError for a scale that is not finite. Source: Nie et al. 2024 (2410.18514), in the
    form of LLaDA's `generate`.
    """
    if not math.isfinite(scale):
        raise ValueError(
            f"the guidance scale must be a finite number, got {scale}; 0 means no guidance."
        )
    if scale == 0:
        return denoiser
    return Guided(denoiser, denoiser, scale, prompt_BS, mask_id)


@dataclass(frozen=True, eq=False)
class Guided(Session, Denoiser):
    """Guidance of two denoisers or memories. The conditional call comes first: a recording of a
    step's first forward sees the real prompt.
    """

    cond: Any
    un: Any
    scale: float
    prompt_BS: Tensor
    mask_id: int

    def logits(self, ids_BS: Tensor, at: Places, columns: slice | Tensor | None = None) -> Tensor:
        """The mixed logits. Raises ValueError for another canvas's prompt."""
        remedy = "pass canvas.prompt_BS of the same canvas"
        check_tensor("prompt_BS", self.prompt_BS, ids_BS.shape, "bool", remedy)
        how = {}
        if columns is not None:
            how = {"columns": columns}
        cond_MV = self.cond.logits(ids_BS, at, **how)
        without_BS = ids_BS.masked_fill(self.prompt_BS.to(ids_BS.device), self.mask_id)
        un_MV = self.un.logits(without_BS, at, **how)
        mixed_MV = un_MV + (self.scale + 1) * (cond_MV - un_MV)
        return torch.where(cond_MV == -torch.inf, cond_MV, mixed_MV)

    def begin(self, cache: Cache) -> Session:
        """A memory for each of the two calls."""
        return replace(self, cond=self.cond.begin(cache), un=self.un.begin(cache))

    def exact_cache(self) -> Cache | None:
        """The cache of the denoiser."""
        return self.cond.exact_cache()

    def in_blocks(self, canvas: Canvas, block_length: int | None = None) -> Canvas:
        """The canvas as the denoiser has it."""
        return self.cond.in_blocks(canvas, block_length)
