"""Block caches that choose their columns: evicting ones, with or without protected sinks, and one
that refreshes sinks.

When a block begins everything is computed; from the attention of the block's queries there, the
columns are chosen that the block's further evaluations attend to beside the block itself (each
layer and key head its own; the others' keys and values are thrown away until the next full
evaluation), or that are recomputed with the block. A sink that was added to the model is no column,
and always stays. A policy of one's own inherits from `ChoosingCache`.
"""

# B batch rows, G key/value heads, S canvas columns
from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sinklab.core.errors import limited
from sinklab.core.registry import caches
from sinklab.core.sampling.denoisers import BlockWork
from sinklab.lab.caching.blocks import BlockCache

if TYPE_CHECKING:
    from sinklab.lab.caching.store import BlockSession, Seen

SCORES = ("nearest", "received", "aligned", "random")
"""Rankings of the columns that are not protected: distance to the block, attention received from
the block's queries, Sparse-dLLM's dot product, or random.
"""
PROTECTED = ("now", "first", "earlier")
"""Evaluations whose sinks may be protected: the one that chooses, the first of the canvas, that of
the block before.
"""
POOLED = 3
"""Neighbouring columns that share their highest dot product (2508.02558)."""


@dataclass(frozen=True)
class ChoosingCache(BlockCache):
    """Base of all caches that choose columns; a policy says how many it wants, and how they rank.

    Raises ValueError for a negative delay.
    """

    delay: int = limited(0, at_least=0)
    """Full evaluations of a block before the one that chooses."""

    evicts = True
    """The chosen columns are kept and the others thrown away; else all are kept, and the chosen
    ones recomputed with the block, ranked by the sum over layers and heads."""

    def counts(self, candidates_BS: Tensor) -> Tensor:
        """Columns that each row chooses among the True ones, int64 (B,), at most as many as there
        are.
        """
        raise NotImplementedError

    def ranks(self, seen: Seen) -> Tensor:
        """Scores by which the columns of a layer are chosen, the highest first, (B, 1 or G, S);
        ties go to the left.
        """
        raise NotImplementedError

    def columns(self, start: int, stop: int, length: int, nth: int) -> slice | None:
        """The block (and the columns recomputed with it); None (everything) if a refresh is due."""
        if self.phase(nth) <= self.delay:
            return None
        return slice(start, stop)

    def work(self, start: int, stop: int, number: int, nth: int) -> BlockWork:
        """Work of the nth evaluation of this block."""
        phase = self.phase(nth)
        return BlockWork(slice(start, stop), number, phase <= self.delay, phase == self.delay)

    def memory(self, denoiser: Any) -> BlockSession:
        """Memory for keys and values of one run; `denoiser` is a model's own."""
        # to name a cache must not cost transformers
        from sinklab.lab.caching.store import BlockSession

        return BlockSession(denoiser, self)


@dataclass(frozen=True)
class EvictingCache(ChoosingCache):
    """Keep a share of the columns outside the block, by a score, sinks first if requested.

    At equal `keep` all scores and all numbers of protected sinks attend to equally many columns.
    Raises ValueError for numbers that make no sense.
    """

    keep: float = limited(0.5, above=0, at_most=1)
    """Share of the columns outside the block that partial evaluations attend to, rounded down; 1
    keeps all.
    """
    sinks: int = limited(0, at_least=0)
    """So many of them, per layer and key head, are the columns that receive most attention from the
    block.
    """
    neighbours: int = limited(0, at_least=0)
    """Columns on either side of the block that come next, before the score decides."""
    protect: str = limited("now", one_of=PROTECTED)
    """Evaluation whose sinks are protected: the one that chooses (now), the first that chose on
    this canvas (first), or that of the block before (earlier; now for the first block).
    """
    score: str = limited("nearest", one_of=SCORES)
    """Ranking of the rest: nearest, received, aligned or random."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.protect != "now" and not self.sinks:
            raise ValueError(
                "protect selects the sinks to keep, but with sinks=0 none are, got "
                f"protect={self.protect!r}; give a number of sinks, or leave it out."
            )

    def counts(self, candidates_BS: Tensor) -> Tensor:
        """A share of them, rounded down."""
        # a product such as 0.29 * 100 falls short of the whole number it stands for
        return torch.tensor(
            [math.floor(self.keep * n + 1e-9) for n in candidates_BS.sum(1).tolist()]
        )

    def ranks(self, seen: Seen) -> Tensor:
        """Rank by the score; the block's neighbours before the others, and protected sinks before
        these.
        """
        score_BGS = self._score(seen)
        length = score_BGS.shape[-1]
        column_S = torch.arange(length, device=score_BGS.device)
        order_BGS = score_BGS.sort(dim=-1, descending=True, stable=True).indices
        rank_BGS = -torch.empty_like(order_BGS).scatter_(
            -1, order_BGS, column_S.expand_as(order_BGS)
        )
        if self.neighbours:
            block = seen.block
            near_S = (column_S >= block.start - self.neighbours) & (
                column_S < block.stop + self.neighbours
            )
            rank_BGS = rank_BGS + length * near_S
        if not self.sinks:
            return rank_BGS
        return rank_BGS + 2 * length * self.protected(seen)

    def protected(self, seen: Seen) -> Tensor:
        """The sinks that come first, bool (B, G, S)."""
        received_BGS = seen.received_BGS.masked_fill(~seen.candidates_BS[:, None], -torch.inf)
        if self.protect == "first":
            received_BGS = seen.history.setdefault(0, received_BGS)
        elif self.protect == "earlier":
            seen.history[seen.number] = received_BGS
            received_BGS = seen.history.get(seen.number - 1, received_BGS)
            seen.history.pop(seen.number - 2, None)
        return most_received(received_BGS, seen.candidates_BS, self.sinks)

    def _score(self, seen: Seen) -> Tensor:
        candidates_BS = seen.candidates_BS
        if self.score == "received":
            return seen.received_BGS
        if self.score == "aligned":
            outside_BS = seen.aligned_BS.masked_fill(~candidates_BS, -torch.inf)
            score_BGS = F.max_pool1d(outside_BS[:, None], POOLED, 1, POOLED // 2)
        else:
            block = seen.block
            column_S = torch.arange(candidates_BS.shape[1], device=candidates_BS.device)
            if self.score == "nearest":
                left_S, right_S = block.start - column_S, column_S - block.stop + 1
                # of two equally near columns the left one is nearer
                score_BGS = -torch.where(left_S > 0, 2 * left_S, 2 * right_S + 1)
            else:
                salt_G = (
                    torch.arange(seen.heads, device=column_S.device)
                    + 1009 * seen.layer
                    + 1_000_003 * seen.number
                )
                score_BGS = _hashed(salt_G[:, None] * 0x9E3779B97F4A7C1 + (column_S - block.stop))
        return score_BGS.expand(len(candidates_BS), seen.heads, -1)


def most_received(received_BGS: Tensor, among_BS: Tensor, count: int) -> Tensor:
    """The `count` columns of `among_BS` that receive most attention, bool (B, G, S); all of them if
    they are few.
    """
    among_BGS = among_BS[:, None].expand_as(received_BGS)
    ranked_BGS = (
        received_BGS.masked_fill(~among_BGS, -torch.inf)
        .sort(dim=-1, descending=True, stable=True)
        .indices
    )
    return torch.zeros_like(among_BGS).scatter_(-1, ranked_BGS[..., :count], True) & among_BGS


def _hashed(x: Tensor) -> Tensor:
    """Well mixed whole numbers; a generator's stream would depend on the length of the canvas.
    Source: SplitMix64.
    """
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> 31)


@caches.register("sink")
@dataclass(frozen=True)
class SinkCache(EvictingCache):
    """Keep the sinks and the block's neighbours: after the protected sinks, the nearest columns
    fill the budget.
    """

    sinks: int = limited(4, at_least=0)


@caches.register("evict")
@dataclass(frozen=True)
class EvictCache(EvictingCache):
    """Keep the columns that the block's mean query points to, chosen at the second evaluation; no
    protection by itself.

    Source: Sparse-dLLM (2508.02558): dot product without softmax, highest of three neighbours, all
    heads alike.
    """

    score: str = limited("aligned", one_of=SCORES)
    delay: int = limited(1, at_least=0)


@caches.register("received")
@dataclass(frozen=True)
class ReceivedCache(EvictingCache):
    """Keep the columns that receive most attention from the block's queries, per key head: sinks
    keep themselves.
    """

    score: str = limited("received", one_of=SCORES)


@caches.register("random")
@dataclass(frozen=True)
class RandomCache(EvictingCache):
    """Keep random columns, the same for all rows relative to the block: the control at equal
    budget.
    """

    score: str = limited("random", one_of=SCORES)


@caches.register("sink_refresh")
@dataclass(frozen=True)
class SinkRefreshCache(ChoosingCache):
    """A dual cache that recomputes its sinks with the block, since those of a diffusion model move
    and go stale.

    The columns that receive most attention from the block's queries, over all layers and heads, run
    at every partial evaluation. Raises ValueError for a number of sinks below 1.
    """

    sinks: int = limited(8, at_least=1, remedy="without any this is the dual cache")
    """Columns outside the block that are recomputed with it."""

    evicts = False

    def counts(self, candidates_BS: Tensor) -> Tensor:
        """The number of sinks, or all if they are fewer."""
        return candidates_BS.sum(1).clamp(max=self.sinks)

    def ranks(self, seen: Seen) -> Tensor:
        """Rank by the attention received."""
        return seen.received_BGS
