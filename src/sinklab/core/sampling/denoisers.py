"""Caches, which say what is computed anew at each evaluation of a block; denoisers, which map token
ids to logits; and those that change the logits of another one: guidance and suppression.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sinklab.core.attention.context import module_of, on_device
from sinklab.core.errors import check_count, check_tensor, check_vocabulary, token_ids, unknown
from sinklab.core.registry import caches, value_of
from sinklab.core.sampling.canvas import Canvas, Places

# B batch rows, S canvas positions, M wanted positions in row-major order, V vocabulary, W
# recomputed columns


class Cache:
    """Says what to recompute; keys and values of every other column stay as they were when last
    computed.

    There are two kinds. Most caches write `columns`: the model's denoiser keeps keys and values and
    recomputes those columns. One that decides otherwise writes `work` and `memory`, a session of
    its own, as studies/sink_caches.py does.
    """

    is_exact = False
    """Whether it gives the results of computing afresh, for any columns: models with attention in
    blocks are then decoded with it.
    """

    def columns(self, start: int, stop: int, length: int, nth: int) -> slice | Tensor | None:
        """Columns to recompute, left padding counted, the same in every row: a slice, sorted column
        numbers int64 (W,), or None for all.

        Args:
            start, stop: the block occupies the columns [start, stop); they must be among those
                recomputed.
            length: columns of the canvas.
            nth: 0 at the first evaluation of the block, which must be full for the first block of a
                canvas.
        """
        raise NotImplementedError(f"{self} has no method columns of its own; write it")

    def work(self, start: int, stop: int, number: int, nth: int) -> BlockWork | None:
        """The nth evaluation of a block for a memory of the cache's own; None to use `columns`."""
        return None

    def memory(self, denoiser: Any) -> Any:
        """A `ModelSession` of its own for one run of a model's denoiser; None to use the
        denoiser's.
        """
        return None


@dataclass(frozen=True, eq=False)
class BlockWork:
    """One evaluation under a cache that keeps a memory of its own (`Cache.memory`)."""

    block: slice
    """Canvas columns of the block."""
    is_full: bool
    """Whether everything is computed; else the block alone."""


def cache_of(given: Cache | str | None) -> Cache | None:
    """The cache of this text, or the object itself; None for None and "none".

    Raises ValueError for an unknown name, and TypeError for an object that is no cache.
    """
    if given is None or given == "none":
        return None
    if isinstance(given, str):
        name = given.partition(":")[0].strip()
        if name not in caches:
            raise unknown("cache", name, [*caches, "none"], "pass one of these, or a cache object")
    return value_of(caches, given, Cache)


class Session:
    """A denoiser's memory of keys and values, for one run over one canvas under a cache."""

    def logits(
        self, ids_BS: Tensor, at: Places, columns: slice | Tensor | BlockWork | None = None
    ) -> Tensor:
        """Logits (M, V) at the wanted positions, which must lie inside `columns`.

        Args:
            columns: columns to compute anew, the same in every row: a slice, or sorted column
                numbers int64 (W,). They attend to all S columns, with the other columns' keys and
                values as remembered. None computes everything; the first call must be such a one. A
                cache with a memory of its own hands over a `BlockWork` in their place.
        """
        raise NotImplementedError

    def __call__(
        self,
        ids_BS: Tensor,
        wanted_BS: Tensor,
        columns: slice | Tensor | BlockWork | None = None,
    ) -> Tensor:
        """Logits (M, V) at the True positions of `wanted_BS`."""
        return self.logits(ids_BS, Places.of(wanted_BS), columns)


class Denoiser:
    """A map from token ids to logits. A subclass writes `logits`, and `begin` if a cache can work
    with it.

    It is bound to the padding of a canvas by whoever makes it. A function (ids_BS, wanted_BS) ->
    logits_MV becomes one by `denoiser_of`.
    """

    is_fast = False
    """Whether evaluations made now leave out what is not wanted, as a fast decoder does."""

    def logits(self, ids_BS: Tensor, at: Places) -> Tensor:
        """Logits (M, V) at the wanted positions of a canvas int64 (B, S), everything computed."""
        raise NotImplementedError

    def __call__(self, ids_BS: Tensor, wanted_BS: Tensor) -> Tensor:
        """Logits (M, V) at the True positions of `wanted_BS`, in row-major order."""
        return self.logits(ids_BS, Places.of(wanted_BS))

    def scored(self, ids_BS: Tensor, wanted_BS: Tensor, clean_BS: Tensor) -> Tensor:
        """Logits (M, V) for a score of a text whose right ids are known; a model that attends in
        blocks reads the clean blocks before each block.
        """
        return self(ids_BS, wanted_BS)

    def begin(self, cache: Cache) -> Session:
        """A memory for one run under this cache. Raises ValueError for a denoiser that has none."""
        raise ValueError(
            f"{cache} needs a denoiser that remembers keys and values, but {self} does not; write "
            "a method begin(cache), use model.denoiser(…) of a sinklab model, or no cache"
        )

    def exact_cache(self) -> Cache | None:
        """The cache that saves time and changes no result, for evaluations made now."""
        return None

    def in_blocks(self, canvas: Canvas, block_length: int | None = None) -> Canvas:
        """The canvas with decoding blocks that fit the model's attention; itself if that is
        full.
        """
        return canvas


class DenoisingModel:
    """A model that fills masks: `denoise` takes it in place of its denoiser."""

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


def _adapted(given: Denoiser | Callable[[Tensor, Tensor], Tensor]) -> Denoiser:
    if isinstance(given, Denoiser):
        return given
    return FunctionDenoiser(given)


def denoiser_of(given: Any, canvas: Canvas) -> Denoiser:
    """The denoiser of a model, bound to the padding of the canvas; a denoiser or a function as it
    is. Raises ValueError for anything else.
    """
    model = module_of(given)
    if isinstance(model, DenoisingModel):
        return model.denoiser(canvas.attention_BS)
    if model is not given:
        raise ValueError(
            f"denoise takes a model that fills masks, got {given!r}; write with its own generate"
        )
    return _adapted(given)


class Evaluation:
    """A denoiser as the loop calls it, for one run over one canvas; without a cache it computes
    everything every time, or takes the denoiser's exact cache.

    Batched rows give the same as alone, unequal prompts included. Raises ValueError for a cache
    with a denoiser that cannot remember, and if a block stands in different columns in different
    rows: a row alone would recompute other columns than the batch.

    Args:
        block_BS: int64, the block of each open position, -1 elsewhere.
    """

    def __init__(self, denoiser: Denoiser, cache: Cache | None, block_BS: Tensor) -> None:
        self.denoiser = denoiser
        self.cache = cache
        self.block_BS = block_BS
        self._session: Session | None = None
        self._spans: list[tuple[int, int]] = []
        if cache is not None:
            self._begin(cache)

    def _begin(self, cache: Cache) -> Session:
        self._spans = _spans(self.block_BS, must_agree=not cache.is_exact)
        self._session = self.denoiser.begin(cache)
        return self._session

    def __call__(self, ids_BS: Tensor, at: Places, block: int, nth: int) -> Tensor:
        """Logits (M, V) at these places: the nth evaluation (0 = first) of this block."""
        # asked every time: a trace, under which there is none, may begin between two evaluations
        cache = self.cache or self.denoiser.exact_cache()
        if cache is None:
            self._session = None
            return self.denoiser.logits(ids_BS, at)
        session = self._session or self._begin(cache)
        start, stop = self._spans[block]
        work = cache.work(start, stop, block, nth)
        if work is not None:
            return session.logits(ids_BS, at, work)
        columns = cache.columns(start, stop, ids_BS.shape[1], nth)
        if columns is not None and not isinstance(columns, slice):
            check_tensor(f"the columns of {cache}", columns, (None,), "int64", "or give a slice")
        return session.logits(ids_BS, at, columns)


def _spans(block_BS: Tensor, must_agree: bool) -> list[tuple[int, int]]:
    """First column of every block, and the column after its last, of all rows together. Rows that
    lack a block have no say in whether they agree.
    """
    spans: list[tuple[int, int]] = []
    for block in range(int(block_BS.max()) + 1):
        held_BS = block_BS == block
        row_N = held_BS.any(1).nonzero()[:, 0]
        held_NS = held_BS[row_N].byte()
        start_N = held_NS.argmax(1)
        stop_N = held_NS.shape[1] - held_NS.flip(1).argmax(1)
        apart_N = (start_N != start_N[0]) | (stop_N != stop_N[0])
        if must_agree and apart_N.any():
            other = int(apart_N.byte().argmax())
            raise ValueError(
                f"a cache recomputes the same columns in every row, but block {block} stands in "
                f"columns {start_N[0]} to {stop_N[0] - 1} of row {row_N[0]} and {start_N[other]} "
                f"to {stop_N[other] - 1} of row {row_N[other]}; pad prompts on the left, decode "
                "these rows one by one, or without a cache."
            )
        spans.append((int(start_N.min()), int(stop_N.max())))
    return spans


Evaluations = Sequence[Callable[[Tensor], Tensor]]
"""Functions from ids to logits (M, V), each an evaluation of a denoiser."""
Change = Callable[[Tensor, Evaluations], Tensor]
"""(ids_BS, evaluations) -> logits (M, V), made of the evaluations."""


def unchanged(ids_BS: Tensor, evaluations: Evaluations) -> Tensor:
    """The logits of one evaluation as they are."""
    return evaluations[0](ids_BS)


class ChangedDenoiser(Denoiser):
    """The logits of another denoiser, changed.

    Args:
        denoiser: the other one, or a function.
        change: function that makes the logits.
        calls: evaluations of the other denoiser for each of this one; under a cache they remember
            apart.
    """

    def __init__(
        self,
        denoiser: Denoiser | Callable[[Tensor, Tensor], Tensor],
        change: Change = unchanged,
        calls: int = 1,
    ) -> None:
        self.denoiser = _adapted(denoiser)
        self.change = change
        self.calls = calls

    def logits(self, ids_BS: Tensor, at: Places) -> Tensor:
        """The changed logits."""
        return self.change(ids_BS, [partial(self.denoiser.logits, at=at)] * self.calls)

    def begin(self, cache: Cache) -> Session:
        """A memory for each of the calls."""
        return _ChangedSession(self.change, [self.denoiser.begin(cache) for _ in range(self.calls)])

    def exact_cache(self) -> Cache | None:
        """The cache of the other denoiser."""
        return self.denoiser.exact_cache()

    def in_blocks(self, canvas: Canvas, block_length: int | None = None) -> Canvas:
        """The canvas as the other denoiser has it."""
        return self.denoiser.in_blocks(canvas, block_length)


class _ChangedSession(Session):
    def __init__(self, change: Change, sessions: list[Session]) -> None:
        self.change = change
        self.sessions = sessions

    def logits(
        self, ids_BS: Tensor, at: Places, columns: slice | Tensor | BlockWork | None = None
    ) -> Tensor:
        evaluations = [partial(one.logits, at=at, columns=columns) for one in self.sessions]
        return self.change(ids_BS, evaluations)


def guided(denoiser: Any, scale: float, prompt_BS: Tensor, mask_id: int) -> Denoiser:
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
        return _adapted(denoiser)

    def change(ids_BS: Tensor, evaluations: Evaluations) -> Tensor:
        check_tensor(
            "prompt_BS", prompt_BS, ids_BS.shape, "bool", "pass canvas.prompt_BS of the same canvas"
        )
        with_prompt, without_prompt = evaluations
        cond_MV = with_prompt(ids_BS)
        un_MV = without_prompt(ids_BS.masked_fill(prompt_BS.to(ids_BS.device), mask_id))
        mixed_MV = un_MV + (scale + 1) * (cond_MV - un_MV)
        return torch.where(cond_MV == -torch.inf, cond_MV, mixed_MV)

    return ChangedDenoiser(denoiser, change, calls=2)


def suppressed(denoiser: Any, suppress_ids: Iterable[int] | int) -> Denoiser:
    """The denoiser with the given tokens ruled out (logit -inf), as in LLaDA's `logits_eos_inf`.

    Raises ValueError when no token is named, and on the first call when an id lies outside the
    vocabulary.
    """
    columns = sorted(set(token_ids("suppress_ids", suppress_ids)))
    if not columns:
        raise ValueError(
            "suppressed needs at least one token id, got none; use the denoiser as it is."
        )

    def change(ids_BS: Tensor, evaluations: Evaluations) -> Tensor:
        logits_MV = unchanged(ids_BS, evaluations)
        check_vocabulary("suppress_ids", columns, logits_MV.shape[-1])
        return logits_MV.index_fill(-1, on_device(tuple(columns), logits_MV.device), -torch.inf)

    return ChangedDenoiser(denoiser, change)


def text_only(denoiser: Any, vocabulary: int) -> Denoiser:
    """The denoiser over the ids below `vocabulary` alone: a text decoder for a model that also
    writes image codes.

    The other ids take no part in any probability. Raises ValueError for vocabulary < 1.
    """
    check_count("vocabulary", vocabulary, "use the denoiser as it is.")

    def change(ids_BS: Tensor, evaluations: Evaluations) -> Tensor:
        return unchanged(ids_BS, evaluations)[:, :vocabulary]

    return ChangedDenoiser(denoiser, change)
