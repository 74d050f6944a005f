"""Visibility: the queries that may see each key, read off the mask of a call.

How much a key receives means little without the number of queries that could give it any, which
causal masks, padding and caches make differ from key to key. Masks are flags, or numbers added to
the scores, which block keys or weigh them: one that could do either is refused.
"""

# B batch, H query heads, Q queries, S keys; an axis of a mask may be 1
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from sinklab.core.attention.context import RunningCanvas

BLOCKED = -1e8
"""Values below this block a key: models write -1e9, and no bias by distance comes near."""
LOW = -100.0
"""Values at most this, to which a mask falls suddenly, could block a key: models write -1e4."""


def compact(mask: Tensor) -> Tensor:
    """A mask with all four axes, and one row if it is expanded over queries."""
    mask = mask.detach()[(None,) * (4 - mask.dim())]
    if mask.stride(2) == 0:
        return mask[:, :, :1]
    return mask


def allowed(mask: Tensor) -> Tensor:
    """A mask as a boolean one, True = may attend: numbers below -1e8, -inf and finfo.min block,
    others are biases (but see `doubtful`).
    """
    if mask.dtype == torch.bool:
        return mask
    return mask > max(torch.finfo(mask.dtype).min / 2, BLOCKED)


def doubtful(mask: Tensor) -> Tensor:
    """Whether biases of an additive mask could be meant to block keys, a flag on its device: from a
    key to the next they fall by 50 or more, to -100 or less. ALiBi's go as far gradually.
    """
    open_ = allowed(mask)
    low = open_ & (mask <= LOW)
    falls = ((mask[..., 1:] - mask[..., :-1]).abs() > -LOW / 2) & open_[..., 1:] & open_[..., :-1]
    return (falls & (low[..., 1:] | low[..., :-1])).any()


@dataclass(frozen=True, eq=False)
class Visibility:
    """The queries that may see each key, counted on first use.

    A query whose own key no query may see is padding and does not count, unless none would be left.
    The canvas says which key is its own, else `first_own`. Causal masks are top-left aligned.
    """

    mask: Tensor | None
    shape: tuple[int, int, int]
    """(batch, queries, keys) of the call."""
    is_causal: bool = False
    running: RunningCanvas | None = None
    """Canvas announced for this call, if it fits."""
    device: torch.device | None = None
    """Device of counts that need no mask."""

    @cached_property
    def counted_BQ(self) -> Tensor:
        """Queries that count as viewers, bool (B, Q): all but padding."""
        if self.real_BQ is not None:
            return self.real_BQ
        device = self.device if self.mask is None else self.mask.device
        return torch.ones(self.shape[:2], dtype=torch.bool, device=device)

    @cached_property
    def visible_BHS(self) -> Tensor:
        """Number of real queries that may see each key, int64 (B, 1 or H, S)."""
        return self.seen_by(self.counted_BQ)

    @cached_property
    def visible_BS(self) -> Tensor:
        """`visible_BHS` in the head in which most queries see the key."""
        return self.visible_BHS.amax(1)

    def seen_by(self, some_BQ: Tensor) -> Tensor:
        """Number of these queries, bool (B, Q), that may see each key: int64 (B, 1 or H, S)."""
        _, queries, keys = self.shape
        if self.mask is None and self.is_causal:
            return pad(some_BQ.flip(1).cumsum(1).flip(1), (0, keys - queries))[:, None]
        count_B11 = some_BQ.sum(1)[:, None, None]
        if self.mask is None:
            return count_B11.expand(-1, 1, keys)
        allowed_BHQS = self._allowed(self.mask)
        if allowed_BHQS.shape[2] == 1:
            return allowed_BHQS[:, :, 0] * count_B11.to(self.mask.device)
        seen_BHQS = allowed_BHQS & some_BQ.to(self.mask.device)[:, None, :, None]
        # a sum into int64 would widen all flags at once
        return seen_BHQS.sum(2, dtype=torch.int32).long()

    @cached_property
    def real_BQ(self) -> Tensor | None:
        """False for padding queries; None: all are real, known without waiting for a device."""
        _, queries, keys = self.shape
        if self.mask is None or (self.running is None and queries > keys):
            return None
        seen_BS = self._allowed(self.mask).any(2).any(1)
        if self.running is None:
            own_key_Q = torch.arange(queries, device=seen_BS.device) + self.first_own
            real_BQ = seen_BS.index_select(1, own_key_Q)
            real_BQ = real_BQ | ~real_BQ.any(1, keepdim=True)
        else:
            own_key_Q = self.running.columns_Q + keys - self.running.ids_BS.shape[1]
            real_BQ = seen_BS.index_select(1, own_key_Q.to(seen_BS.device))
        if real_BQ.device.type == "cpu" and bool(real_BQ.all()):
            return None
        return real_BQ

    @property
    def groups_BGQ(self) -> Tensor | None:
        """Real queries as one group to add up, bool (B, 1, Q); None: all."""
        if self.real_BQ is None:
            return None
        return self.real_BQ.unsqueeze(1)

    @cached_property
    def first_own(self) -> Tensor | int:
        """Key of the first query, without a canvas: the last Q keys are theirs, as in a cache that
        grows.

        A static cache has room behind them: there the farthest that a query sees past its number
        gives their start; if several see equally far, the mask is not causal and does not tell.
        """
        _, queries, keys = self.shape
        if self.mask is None or queries >= keys:
            return max(keys - queries, 0)
        allowed_BHQS = self._allowed(self.mask)
        if allowed_BHQS.shape[2] != queries:
            return keys - queries
        number_S = torch.arange(1, keys + 1, device=allowed_BHQS.device)
        last_Q = (allowed_BHQS.any(1).any(0) * number_S).amax(-1)
        past_Q = last_Q - number_S[:queries]
        farthest = last_Q == last_Q.amax()
        is_tied = (farthest.sum() > 1) & (farthest | (last_Q == 0)).all()
        return torch.where(is_tied, keys - queries, past_Q.amax().clamp(0, keys - queries))

    @cached_property
    def doubt(self) -> Tensor | None:
        """Whether the mask is `doubtful`, a flag on its device; None if it cannot be."""
        if self.mask is None or self.mask.dtype == torch.bool:
            return None
        return doubtful(self.mask.detach())

    def _allowed(self, mask: Tensor) -> Tensor:
        batch, queries, keys = self.shape
        allowed_BHQS = allowed(compact(mask))
        if self.is_causal:
            causal_QS = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).tril()
            allowed_BHQS = allowed_BHQS & causal_QS
        return allowed_BHQS.expand(batch, -1, -1, keys)
