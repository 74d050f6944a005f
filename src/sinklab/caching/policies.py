"""Block caches that evict columns, with or without protected sinks, and one that keeps its sinks fresh.

Where a block begins everything is computed; from what the block's queries attend to there, each layer and key head
chooses the columns that the block's further evaluations attend to beside the block itself. The others' keys and values
are thrown away until the next full evaluation. A sink that was added to the model is no column, and always stays.
"""

# B batch rows, G key/value heads, S canvas columns, C kept columns (the most of any row)
from __future__ import annotations

import difflib
import math
from dataclasses import dataclass, fields
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from sinklab.sampling.refreshing import BlockCache

SCORES = ("nearest", "received", "aligned", "random")
"""What ranks the columns that are not protected: distance to the block, attention received from the block's queries,
Sparse-dLLM's dot product, or nothing."""
PROTECTED = ("now", "first", "earlier")
"""Which evaluation's sinks are protected: the one that chooses, the first of the canvas, that of the block before."""
POOLED = 3
"""Neighbouring columns that share their highest dot product (2508.02558)."""


@dataclass(frozen=True)
class Budget:
    """How many columns are kept, and which come first. Every column outside the running ones is a candidate.

    Raises ValueError for numbers that make no sense.
    """

    keep: float = 0.5
    """Share of the columns outside the block that partial evaluations attend to, rounded down; 1 keeps all."""
    sinks: int = 0
    """So many of them, per layer and key head, are the columns that receive most attention."""
    neighbours: int = 0
    """Columns on either side of the block that come next, sinks apart."""
    score: str = "nearest"
    """What ranks the rest."""
    protect: str = "now"
    """Whose sinks these are."""

    def __post_init__(self) -> None:
        if not 0 < self.keep <= 1:
            raise ValueError(f"keep is a share of the columns outside the block, above 0 to 1, got {self.keep}.")
        for name in ("sinks", "neighbours"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} counts columns, at least 0, got {getattr(self, name)}.")
        for name, known in (("score", SCORES), ("protect", PROTECTED)):
            if (value := getattr(self, name)) not in known:
                near = difflib.get_close_matches(value, known, n=1)
                hint = f"did you mean {near[0]}?" if near else "choose among them."
                raise ValueError(f"{name} is one of {', '.join(known)}, got {value!r}; {hint}")
        if self.protect != "now" and not self.sinks:
            raise ValueError(
                f"protect says whose sinks are kept, but with sinks=0 none are, got protect={self.protect!r}; give a "
                "number of sinks, or leave it out."
            )

    def counts(self, candidates_BS: Tensor) -> Tensor:
        """Columns that each row keeps, int64 (B,)."""
        # a product such as 0.29 * 100 falls short of the whole number it stands for
        return torch.tensor([math.floor(self.keep * n + 1e-9) for n in candidates_BS.sum(1).tolist()])

    @property
    def measures(self) -> tuple[str, ...]:
        """What a choosing evaluation must measure: "received", "aligned", both or nothing."""
        received = ("received",) if self.sinks or self.score == "received" else ()
        return (*received, "aligned") if self.score == "aligned" else received


@dataclass(frozen=True, eq=False)
class Seen:
    """One layer at an evaluation that chooses; what was not asked for is None."""

    received_BGS: Tensor | None
    """Attention from the block's queries, summed over them and over the query heads of a key head."""
    aligned_BS: Tensor | None
    """Mean query of the block · key, averaged over heads, no scale, no softmax (2508.02558)."""
    layer: int
    heads: int


def most_received(received_BGS: Tensor, among_BS: Tensor, count: int) -> Tensor:
    """The `count` columns of `among_BS` that receive most attention, bool (B, G, S); all of them where they are few."""
    among_BGS = among_BS[:, None].expand_as(received_BGS)
    ranked_BGS = received_BGS.masked_fill(~among_BGS, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    most_BGS = torch.zeros_like(among_BGS).scatter_(-1, ranked_BGS[..., :count], True)
    return most_BGS & among_BGS


def kept_columns(
    budget: Budget, seen: Seen, candidates_BS: Tensor, sinks_BGS: Tensor | None, block: slice, number: int, most: int
) -> Tensor:
    """Columns to keep, int64 (B, G, C), best first; of row b the first `budget.counts(…)[b]` count, the rest is fill.

    Args:
        candidates_BS: bool, the columns to choose from: real, and not among those that run.
        sinks_BGS: bool, the protected columns; None for none.
        block: where the block stands; distances are counted from it.
        number: of the block, so that a random choice is another one for every block.
        most: C, the greatest of the counts.
    """
    score_BGS = _score(budget, seen, candidates_BS, block, number)
    length = score_BGS.shape[-1]
    column_S = torch.arange(length, device=score_BGS.device)
    order_BGS = score_BGS.sort(dim=-1, descending=True, stable=True).indices
    key_BGS = -torch.empty_like(order_BGS).scatter_(-1, order_BGS, column_S.expand_as(order_BGS))
    if budget.neighbours:
        near_S = (column_S >= block.start - budget.neighbours) & (column_S < block.stop + budget.neighbours)
        key_BGS = key_BGS + length * near_S
    if sinks_BGS is not None:
        key_BGS = key_BGS + 2 * length * sinks_BGS
    key_BGS = key_BGS.masked_fill(~candidates_BS[:, None], -2 * length)
    return key_BGS.topk(most, -1).indices


def _score(budget: Budget, seen: Seen, candidates_BS: Tensor, block: slice, number: int) -> Tensor:
    batch, length = candidates_BS.shape
    shape, device = (batch, seen.heads, length), candidates_BS.device
    column_S = torch.arange(length, device=device)
    if budget.score == "received":
        assert seen.received_BGS is not None
        return seen.received_BGS
    if budget.score == "aligned":
        assert seen.aligned_BS is not None
        outside_BS = seen.aligned_BS.masked_fill(~candidates_BS, -torch.inf)
        return F.max_pool1d(outside_BS[:, None], POOLED, 1, POOLED // 2).expand(shape)
    if budget.score == "nearest":
        left_S, right_S = block.start - column_S, column_S - block.stop + 1
        # of two equally near columns the left one is nearer
        return -torch.where(left_S > 0, 2 * left_S, 2 * right_S + 1).expand(shape)
    salt_G = torch.arange(seen.heads, device=device) + 1009 * seen.layer + 1_000_003 * number
    return _hashed(salt_G[:, None] * 0x9E3779B97F4A7C1 + (column_S - block.stop)).expand(shape)


def _hashed(x: Tensor) -> Tensor:
    """Well mixed whole numbers; a generator's stream would depend on the length of the canvas. Source: SplitMix64."""
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> 31)


@dataclass(frozen=True, eq=False)
class BlockWork:
    """What a session of the model's denoiser is asked for under these caches, in place of columns."""

    policy: EvictingCache | SinkRefreshCache
    block: slice
    """Where the block stands, as canvas columns."""
    number: int
    """Of the block, from 0."""
    is_full: bool
    """Everything is computed; else the block (and what is refreshed with it) alone."""
    is_choice: bool
    """A full evaluation that chooses what further ones attend to, or refresh."""


@dataclass(frozen=True)
class EvictingCache(BlockCache):
    """The one mechanism: keep a share of the columns outside the block, by a score, sinks first where asked.

    At equal `keep` all scores and all numbers of protected sinks attend to equally many columns. Raises ValueError for
    numbers that make no sense.
    """

    keep: float = 0.5
    """Share of the columns outside the block that partial evaluations attend to, rounded down; 1 keeps all."""
    sinks: int = 0
    """So many of them, per layer and key head, are the columns that receive most attention from the block."""
    neighbours: int = 0
    """Columns on either side of the block that come next, before the score decides."""
    protect: str = "now"
    """Whose sinks: of the evaluation that chooses (now), of the first that chose on this canvas (first), or of the
    block before (earlier; now for the first block)."""
    score: str = "nearest"
    """What ranks the rest: nearest, received, aligned or random."""
    delay: int = 0
    """Full evaluations before the one that chooses."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.delay < 0:
            raise ValueError(f"delay counts evaluations, at least 0, got {self.delay}.")
        _ = self.budget

    @cached_property
    def budget(self) -> Budget:
        """What is kept, without when."""
        return Budget(**{field.name: getattr(self, field.name) for field in fields(Budget)})

    def columns(self, start: int, stop: int, length: int, nth: int) -> slice | None:
        """The block alone; None (everything) where a refresh is due."""
        return None if self.phase(nth) <= self.delay else slice(start, stop)

    def work(self, start: int, stop: int, number: int, nth: int) -> BlockWork:
        """What the nth evaluation of this block does."""
        phase = self.phase(nth)
        return BlockWork(self, slice(start, stop), number, phase <= self.delay, phase == self.delay)


@dataclass(frozen=True)
class SinkCache(EvictingCache):
    """Keep the sinks and the block's neighbours: after the protected sinks, the nearest columns fill the budget."""

    sinks: int = 4


@dataclass(frozen=True)
class EvictCache(EvictingCache):
    """Keep the columns that the block's mean query points to, chosen at the second evaluation; no protection by itself.

    Source: Sparse-dLLM (2508.02558): dot product without softmax, highest of three neighbours, all heads alike.
    """

    score: str = "aligned"
    delay: int = 1


@dataclass(frozen=True)
class ReceivedCache(EvictingCache):
    """Keep the columns that receive most attention from the block's queries, per key head: sinks keep themselves."""

    score: str = "received"


@dataclass(frozen=True)
class RandomCache(EvictingCache):
    """Keep random columns, the same for all rows relative to the block: the control at equal budget."""

    score: str = "random"


@dataclass(frozen=True)
class SinkRefreshCache(BlockCache):
    """A dual cache that recomputes its sinks with the block, since those of a diffusion model move and go stale.

    The columns that receive most attention from the block's queries, over all layers and heads, run at every partial
    evaluation. Raises ValueError for a number of sinks below 1.
    """

    sinks: int = 8
    """Columns outside the block that are recomputed with it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sinks < 1:
            raise ValueError(
                f"sinks counts the columns recomputed with the block, at least 1, got {self.sinks}; without any "
                "this is the dual cache."
            )

    def columns(self, start: int, stop: int, length: int, nth: int) -> slice | None:
        """The block (its sinks run with it); None (everything) where a refresh is due."""
        return None if self.phase(nth) == 0 else slice(start, stop)

    def work(self, start: int, stop: int, number: int, nth: int) -> BlockWork:
        """What the nth evaluation of this block does."""
        is_full = self.phase(nth) == 0
        return BlockWork(self, slice(start, stop), number, is_full, is_full)
