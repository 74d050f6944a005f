"""The checked arguments of one attention call and its visibility (which query sees which key): the
input of its statistics.
"""

# B batch, H query heads (those selected), K key/value heads, Q queries, S keys, D head dim; an axis
# of a mask may be 1
from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from sinklab.core.attention.context import RunningCanvas

LOG2E = math.log2(math.e)
SOME = 512
"""Queries that are counted at a time."""


@dataclass(frozen=True, eq=False)
class Scores:
    """Queries, keys, mask and scale of a call. Make one with `Scores.of`."""

    q_BHQD: Tensor
    k_BKSD: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float
    chosen: tuple[int, ...]
    """The query heads to compute, in this order: the H axis of every result."""
    dtype: torch.dtype
    """float32, or float64 for float64 inputs: probabilities summed in half precision drift by
    percents.
    """
    shape: tuple[int, int, int]
    """(B, H, Q) of the selected heads."""
    groups: int
    """Query heads that share one key head."""
    lse_BHQ: Tensor | None = None
    """Log-sum-exp of the rows of every query head in nats, if the attention kernel returned it."""

    @classmethod
    def of(
        cls,
        q_BHQD: Tensor,
        k_BKSD: Tensor,
        mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        heads: Sequence[int] | None = None,
        lse_BHQ: Tensor | None = None,
    ) -> Scores:
        """The arguments of `scaled_dot_product_attention` as the model gives them, for some query
        heads or all.

        Keys stay unexpanded under grouped heads; a boolean mask (True = may attend) or an additive
        one broadcasts to (B, query head, Q, S). Raises ValueError when shapes do not fit, or for a
        head that is not there.
        """
        if not all(factor.dim() == 4 and factor.shape[2] for factor in (q_BHQD, k_BKSD)):
            raise ValueError(
                "q and k must have four axes (batch, head, position, head dim), and at least one "
                f"position, got {tuple(q_BHQD.shape)} and {tuple(k_BKSD.shape)}: add the missing "
                "axes with unsqueeze"
            )
        total, kv_heads = q_BHQD.shape[1], k_BKSD.shape[1]
        same = q_BHQD.shape[0] == k_BKSD.shape[0] and q_BHQD.shape[3] == k_BKSD.shape[3]
        if not same or total % kv_heads:
            raise ValueError(
                "q and k must share batch and head dim, and query heads be a multiple of key "
                f"heads, got {tuple(q_BHQD.shape)} and {tuple(k_BKSD.shape)}: check the order "
                "(batch, head, position, dim)"
            )
        if heads is None:
            heads = range(total)
        chosen = tuple(heads)
        for head in chosen:
            if not 0 <= head < total:
                raise ValueError(
                    f"query heads are 0 … {total - 1}, got {head}: name heads of this call"
                )
        if scale is None:
            scale = q_BHQD.shape[-1] ** -0.5
        if mask is not None:
            mask = compact(mask)
            whole = (*q_BHQD.shape[:3], k_BKSD.shape[2])
            if any(own not in (1, size) for own, size in zip(mask.shape, whole, strict=True)):
                raise ValueError(
                    f"mask must broadcast to (batch, head, query, key) = {whole}, got "
                    f"{tuple(mask.shape)}"
                )
        dtype = torch.promote_types(q_BHQD.dtype, torch.float32)
        shape = (q_BHQD.shape[0], len(chosen), q_BHQD.shape[2])
        return cls(
            q_BHQD.detach(),
            k_BKSD.detach(),
            mask,
            is_causal,
            scale,
            chosen,
            dtype,
            shape,
            total // kv_heads,
            lse_BHQ,
        )

    def factors(self, batches: slice, heads: slice) -> tuple[Tensor, Tensor]:
        """Queries of some rows and chosen heads, (B, H, Q, D), and the keys that these read, (B, H,
        S, D), unscaled.
        """
        chosen = self.chosen[heads]
        q_BHQD = of_heads(self.q_BHQD[batches], chosen)
        k_BHSD = of_heads(self.k_BKSD[batches], [head // self.groups for head in chosen])
        return q_BHQD, k_BHSD

    def bias(self, batches: slice, heads: slice, part: slice, keys: int) -> Tensor | None:
        """Bias that the mask adds to these scores, in units of log 2; None without a mask."""
        mask = self.mask
        if mask is None:
            return None
        if mask.shape[1] > 1:
            mask = of_heads(mask, self.chosen[heads])
        for axis, where in ((0, batches), (2, part), (3, slice(0, keys))):
            if mask.shape[axis] > 1:
                mask = mask.narrow(axis, where.start, where.stop - where.start)
        if mask.dtype == torch.bool:
            return torch.zeros(mask.shape, dtype=self.dtype, device=mask.device).masked_fill_(
                ~mask, -math.inf
            )
        # finfo.min times log2(e) would overflow to -inf, and a row masked by finfo.min alone is
        # uniform, not empty.
        scaled = (mask.to(self.dtype) * LOG2E).clamp_min_(torch.finfo(self.dtype).min / 2)
        return scaled.masked_fill_(mask == -math.inf, -math.inf)


def of_heads(x_BHSD: Tensor, heads: Sequence[int]) -> Tensor:
    """Some heads of a tensor: a view if they are consecutive."""
    consecutive = range(heads[0], heads[-1] + 1)
    if list(heads) == list(consecutive):
        return x_BHSD[:, consecutive.start : consecutive.stop]
    return x_BHSD.index_select(1, on_device(tuple(heads), x_BHSD.device))


def compact(mask: Tensor) -> Tensor:
    """A mask with all four axes, and one row if it is expanded over queries (stride 0): that says
    it all, and costs no S × S pass.
    """
    mask = mask.detach()[(None,) * (4 - mask.dim())]
    if mask.stride(2) == 0:
        return mask[:, :, :1]
    return mask


@cache
def on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """int64, copied there once: every such copy waits for a GPU."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, device=device)


HIDDEN_BELOW = -1e8
"""Values below this mean "no", beside -inf and finfo.min: models write -1e9, and no bias by
distance comes near.
"""
LOW = -100.0
"""Values at most this may mean "no" as well, in a mask of two values: -1e4, or half precision's
finfo.min in float32.
"""


def allowed(mask: Tensor) -> Tensor:
    """A boolean (True = may attend) or additive mask as a boolean one.

    -inf, finfo.min and below -1e8 mean no, and so does c in a mask of the values 0 and c alone, c
    at most -100. A bias that is graded, by distance, blocks nothing, however far it goes. See
    ``doubtful`` for masks that could be either.
    """
    if mask.dtype == torch.bool:
        return mask
    open_, low = _open_and_low(mask)
    return open_ & ~(low & _is_padding(mask, open_, low))


def doubtful(mask: Tensor) -> Tensor:
    """Whether an additive mask could block keys or bias them, a flag on its device (nothing waits
    for it).

    It falls by 50 or more from a key to the next, to -100 or less, and has other values beside 0
    and that one.
    """
    open_, low = _open_and_low(mask)
    if mask.device.type == "cpu" and not low.any():
        return low.new_zeros(())
    falls = ((mask[..., 1:] - mask[..., :-1]).abs() > -LOW / 2) & open_[..., 1:] & open_[..., :-1]
    return (falls & (low[..., 1:] | low[..., :-1])).any() & ~_is_padding(mask, open_, low)


def _open_and_low(mask: Tensor) -> tuple[Tensor, Tensor]:
    open_ = mask > max(torch.finfo(mask.dtype).min / 2, HIDDEN_BELOW)
    return open_, open_ & (mask <= LOW)


def _is_padding(mask: Tensor, open_: Tensor, low: Tensor) -> Tensor:
    """Whether the open entries are 0, or one number that is low: a flag on the device."""
    if mask.device.type == "cpu" and not low.any():
        return low.new_zeros(())
    zero = open_ & (mask == 0)
    least = mask.masked_fill(~low, math.inf).amin()
    most = mask.masked_fill(~low, -math.inf).amax()
    return zero.any() & ((zero | low) == open_).all() & (least == most)


@dataclass(frozen=True, eq=False)
class Visibility:
    """Visibility of keys: which queries may see which keys of a call, counted on first use.

    Padding never counts: a query whose own key no query may see is padding, and does not count as a
    viewer. Which key is a query's own follows from the canvas that runs; without one see
    ``first_own``. A row in which that would leave no query at all has its keys elsewhere: there
    every query counts. Causal masks are top-left aligned, as in torch.
    """

    mask: Tensor | None
    shape: tuple[int, int, int]
    """(batch, queries, keys) of the call."""
    is_causal: bool = False
    running: RunningCanvas | None = None
    """The canvas that was announced for this call; None when none was, or when it does not fit the
    call.
    """
    device: torch.device | None = None
    """Device of the counts that need no mask; the CPU when left out."""

    @cached_property
    def counted_BQ(self) -> Tensor:
        """Queries that count as viewers, bool (B, Q): all but padding."""
        if self.real_BQ is not None:
            return self.real_BQ
        device = self.device
        if self.mask is not None:
            device = self.mask.device
        return torch.ones(self.shape[:2], dtype=torch.bool, device=device)

    @cached_property
    def visible_BHS(self) -> Tensor:
        """Queries that may see each key, int64 (B, 1 or H, S): the S of the excess rule when masks
        are in play.
        """
        return self.seen_by(self.counted_BQ)

    @cached_property
    def visible_BS(self) -> Tensor:
        """Number of queries that may see each key (B, S), for the head in which most queries see
        it.
        """
        return self.visible_BHS.amax(1)

    def seen_by(self, some_BQ: Tensor) -> Tensor:
        """Number of these queries, bool (B, Q), that may see each key: int64 (B, 1 or H, S).

        Costs O(Q·S) if a mask differs between queries.
        """
        _, queries, keys = self.shape
        if self.mask is None and self.is_causal:
            return pad(some_BQ.flip(1).cumsum(1).flip(1), (0, keys - queries))[:, None]
        count_B11 = some_BQ.sum(1)[:, None, None]
        if self.mask is None:
            return count_B11.expand(-1, 1, keys)
        allowed_BHQS = self._allowed(self.mask)
        device = allowed_BHQS.device
        if allowed_BHQS.shape[2] == 1:
            return allowed_BHQS[:, :, 0] * count_B11.to(device)
        # torch widens flags that it adds to eight bytes each, all at once
        parts = zip(allowed_BHQS.split(SOME, 2), some_BQ.to(device).split(SOME, 1), strict=True)
        return torch.stack(
            [(part & some_BC[:, None, :, None]).sum(2) for part, some_BC in parts]
        ).sum(0)

    @cached_property
    def real_BQ(self) -> Tensor | None:
        """False for padding queries; None: all are real, as far as that is known without waiting
        for a device.
        """
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
        """The queries that count as the one group to add up, bool (B, 1, Q); None: all."""
        if self.real_BQ is None:
            return None
        return self.real_BQ.unsqueeze(1)

    @cached_property
    def first_own(self) -> Tensor | int:
        """Key of the first query, without a canvas: the last Q keys belong to the Q queries, as in
        a cache that grows.

        In a static cache there is room behind them. No query sees into it, and under a causal mask
        none sees a key behind its own: the farthest that one sees beyond its number gives their
        start. If several see equally far, the mask is not causal and does not tell. A number on the
        device of the mask.
        """
        _, queries, keys = self.shape
        if self.mask is None or queries >= keys:
            return max(keys - queries, 0)
        allowed_BHQS = self._allowed(self.mask)
        if allowed_BHQS.shape[2] != queries:
            return keys - queries
        number_S = torch.arange(1, keys + 1, device=allowed_BHQS.device)
        # 0 for a query that sees nothing, which says nothing
        last_Q = (allowed_BHQS.any(1).any(0) * number_S).amax(-1)
        first = (
            (last_Q - 1 - torch.arange(queries, device=last_Q.device))
            .amax()
            .clamp(0, keys - queries)
        )
        farthest = last_Q == last_Q.amax()
        return torch.where(
            (farthest.sum() > 1) & (farthest | (last_Q == 0)).all(), keys - queries, first
        )

    @cached_property
    def doubt(self) -> Tensor | None:
        """Whether the mask is ``doubtful``, a flag on its device; None if that is out of the
        question.
        """
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
