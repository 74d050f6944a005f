"""Caches: which columns of the canvas are computed anew at each evaluation of a block, and which
are remembered.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from sinklab.core.errors import unknown
from sinklab.core.registry import caches, value_of
from sinklab.core.sampling.canvas import Places

# B batch rows, S canvas positions, M wanted positions in row-major order, V vocabulary, W
# recomputed columns

Evaluate = Callable[..., Tensor]
"""(ids_BS, wanted_BS, block, nth, places=None) -> logits_MV: one evaluation, the nth (0 = first) of
this block. `places` are `wanted_BS` again, for a denoiser that takes them."""


class Cache(Protocol):
    """Says what to recompute; keys and values of every other column stay as they were when last
    computed.

    One that keeps a memory of its own has two more methods: `work(start, stop, number, nth)`, the
    `BlockWork` that a session of the model's denoiser gets in place of columns, and
    `memory(denoiser)`, which evaluates it. One with a true `is_exact` gives the results of
    computing afresh, for any columns.
    """

    def columns(self, start: int, stop: int, length: int, nth: int) -> slice | Tensor | None:
        """Columns to recompute, the same in every row: a slice, sorted column numbers int64 (W,),
        or None for all.

        Args:
            start, stop: the block occupies the columns [start, stop); they must be among those
                recomputed.
            length: columns of the canvas.
            nth: 0 at the first evaluation of the block, which must be full for the first block of a
                canvas.
        """


@dataclass(frozen=True, eq=False)
class BlockWork:
    """One evaluation under a cache that keeps a memory of its own (`sinklab.lab.caching`)."""

    policy: Any
    """The cache. A session calls its `memory(denoiser)` for (ids_BS, wanted_BS, work, read) ->
    logits_MV, which knows its `policy` and its size in `nbytes`; `read` is the result of the
    denoiser's `read` for the wanted positions.
    """
    block: slice
    """Canvas columns of the block."""
    number: int
    """Number of the block, from 0."""
    is_full: bool
    """Whether everything is computed; else the block (and the columns recomputed with it) alone."""
    is_choice: bool
    """Whether it is a full evaluation that chooses the keys that further ones attend to, or
    recompute.
    """


def cache_of(given: Cache | str | None) -> Cache | None:
    """The cache of this text, or the object itself; None for None and "none".

    Raises ValueError for an unknown name, and TypeError for an object that is no cache.
    """
    if given is None or given == "none":
        return None
    if isinstance(given, str) and (name := given.partition(":")[0].strip()) not in caches:
        raise unknown("cache", name, [*caches, "none"], "pass one of these, or a cache object")
    return value_of(caches, given, "columns")


def evaluator(
    denoiser: Callable[[Tensor, Tensor], Tensor], cache: Cache | None, block_BS: Tensor
) -> Evaluate:
    """The denoiser as the loop calls it, under a cache; with `cache=None` it computes everything
    every time, or takes an exact cache of its own (`own_cache`, asked before every evaluation: a
    trace may begin between two).

    Args:
        denoiser: (ids_BS, wanted_BS) -> logits_MV; with a cache it needs a method `session()`,
            which returns (ids_BS, wanted_BS, columns) -> logits_MV and remembers keys and values
            between its calls.
        block_BS: int64, the block of each open position, -1 elsewhere.

    One evaluator serves one run over one canvas. Batched rows give the same as alone, unequal
    prompts included.

    Raises ValueError for a denoiser that cannot remember, and if a block stands in different
    columns in different rows: a row alone would recompute other columns than the batch.
    """
    takes_places = getattr(denoiser, "takes_places", False)

    def known(places: Places | None) -> dict[str, Any]:
        return {"places": places} if takes_places and places is not None else {}

    if cache is None:
        own: Evaluate | None = None

        def afresh(
            ids_BS: Tensor, wanted_BS: Tensor, block: int, nth: int, places: Places | None = None
        ) -> Tensor:
            nonlocal own
            if (exact := getattr(denoiser, "own_cache", None)) is None:
                own = None
                return denoiser(ids_BS, wanted_BS, **known(places))
            own = own or evaluator(denoiser, cache_of(exact), block_BS)
            return own(ids_BS, wanted_BS, block, nth, places)

        return afresh
    begin: Any = getattr(denoiser, "session", None)
    if begin is None:
        raise ValueError(
            f"{cache} needs a denoiser that remembers keys and values, but "
            f"{type(denoiser).__name__} has no method "
            "session(); use model.denoiser(…) of a sinklab model, or decode without a cache."
        )
    spans = _spans(block_BS, must_agree=not getattr(cache, "is_exact", False))
    session = begin()
    length = block_BS.shape[1]

    work = getattr(cache, "work", None)

    def evaluate(
        ids_BS: Tensor, wanted_BS: Tensor, block: int, nth: int, places: Places | None = None
    ) -> Tensor:
        fresh = (
            cache.columns(*spans[block], length, nth)
            if work is None
            else work(*spans[block], block, nth)
        )
        return session(ids_BS, wanted_BS, fresh, **known(places))

    return evaluate


def _spans(block_BS: Tensor, must_agree: bool) -> list[tuple[int, int]]:
    """First column of every block, and the column after its last; rows that lack a block have no
    say in it. If rows need not agree, of all rows together.
    """
    spans: list[tuple[int, int]] = []
    rows = block_BS.tolist()
    for block in range(int(block_BS.max()) + 1):
        held = [
            (row.index(block), len(row) - row[::-1].index(block), n)
            for n, row in enumerate(rows)
            if block in row
        ]
        start, stop, first = held[0]
        if not must_agree:
            start, stop = min(one[0] for one in held), max(one[1] for one in held)
        for other_start, other_stop, other in held[1:] if must_agree else ():
            if (other_start, other_stop) != (start, stop):
                raise ValueError(
                    f"a cache recomputes the same columns in every row, but block {block} stands "
                    f"in columns {start} to {stop - 1} of row {first} and {other_start} to "
                    f"{other_stop - 1} of row {other}; pad prompts on the left, decode these rows "
                    "one by one, or without a cache."
                )
        spans.append((start, stop))
    return spans
