"""Keys and values of all columns, and which of them are worth computing anew with the block."""

# B batch, H query heads, G key/value heads, Q queries, S canvas, W columns that run, N sinks, C kept, K = N + S, D dim
# B batch, H query heads, Q queries, S canvas, W columns that run, R refreshed, D head dim
from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from sinklab.attention.received import received_attention
from sinklab.caching.policies import BlockWork, Seen, kept_columns, most_received
from sinklab.models.keyvalues import KeyValueStore
from sinklab.models.sinks.prefix import SinkPrefix


@dataclass(frozen=True, eq=False)
class Window:
    """What runs at the partial evaluations of a block, and what is real."""

    work: BlockWork
    run: slice
    """The block, and where logits are shifted the column before it."""
    real_BS: Tensor

    def received(self, q_BHQD: Tensor, k_BGKD: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Attention that every column of the canvas receives from the real queries of the window, (B, H, S)."""
        q_BHWD = self.queries(q_BHQD)
        if mask is not None and mask.shape[2] > 1:
            mask = mask[:, :, self.run]
        real_BW = self.real_BS[:, self.run]
        groups_B1W = None if bool(real_BW.all()) else real_BW[:, None]
        received = received_attention(q_BHWD, k_BGKD, mask=mask, scale=scale, groups_BGQ=groups_B1W)
        received_BHK = received if groups_B1W is None else received[:, 0]
        return received_BHK[..., -self.real_BS.shape[1] :]

    def queries(self, q_BHQD: Tensor) -> Tensor:
        """Those of the window, whether all of the canvas ran or the window alone."""
        return q_BHQD[:, :, self.run] if q_BHQD.shape[2] == self.real_BS.shape[1] else q_BHQD

    @cached_property
    def candidates_BS(self) -> Tensor:
        """The real columns outside the window, bool."""
        candidates_BS = self.real_BS.clone()
        candidates_BS[:, self.run] = False
        return candidates_BS


class KeptStore:
    """A memory for the layers under a cache that evicts. It stands where a key/value cache stands.

    A layer has room for [added sinks; kept columns; window]. While attention is watched the same keys are spread over
    the canvas instead, the evicted columns as zeros behind a mask, so that a column is where a trace looks for it.
    """

    def __init__(self, prefix: SinkPrefix | None, layers: int) -> None:
        self.prefix = prefix
        self.sinks = 0 if prefix is None else prefix.count
        self.window: Window | None = None
        self.mode = "full"
        """"full" (everything runs), "compact" or "spread" (the window runs)."""
        self.layer = 0
        """The one that asked last."""
        self.chosen = 0
        self.counts_B: Tensor | None = None
        self._most = 0
        self._pending: tuple[Tensor, Tensor] | None = None
        self._held: list[tuple[Tensor, Tensor] | None] = [None] * layers
        self._columns: list[Tensor | None] = [None] * layers
        self._received: list[dict[int, Tensor]] = [{} for _ in range(layers)]
        """By layer and block, (B, G, S): what sinks of an earlier evaluation are chosen by; −∞ inside that block."""

    def begin(self, window: Window, mode: str) -> None:
        """The next evaluation: of this window, in this mode. Everything forgets what was kept."""
        self.window, self.mode, self._pending = window, mode, None
        if mode == "full":
            self.chosen, self.counts_B = 0, None
            self._held = [None] * len(self._held)

    @property
    def is_chosen(self) -> bool:
        """Whether every layer has chosen."""
        return self.chosen == len(self._held)

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values that are held, which are those a partial evaluation attends to."""
        return sum(tensor.nbytes for held in self._held if held is not None for tensor in held)

    def update(self, k_BGWD: Tensor, v_BGWD: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Keys and values to attend to, for those of the columns that run."""
        self.layer = layer_idx
        if self.mode == "full":
            if self.prefix is not None:
                k_BGWD, v_BGWD = self.prefix.update(k_BGWD, v_BGWD, layer_idx)
            self._pending = (k_BGWD, v_BGWD)
            return self._pending
        held = self._held[layer_idx]
        assert held is not None
        width = k_BGWD.shape[2]
        for known, new in zip(held, (k_BGWD, v_BGWD), strict=True):
            known.narrow(2, known.shape[2] - width, width).copy_(new)
        return held if self.mode == "compact" else (self._spread(held[0]), self._spread(held[1]))

    def choose(self, layer: int, q_BHQD: Tensor, mask: Tensor | None, scale: float) -> None:
        """After :meth:`update` of a full evaluation: choose by these queries, gather, and let go of the rest."""
        assert self._pending is not None and self.window is not None
        (k_BGKD, v_BGKD), window, self._pending = self._pending, self.window, None
        policy, candidates_BS = window.work.policy, window.candidates_BS
        budget = policy.budget  # type: ignore[union-attr]
        if self.counts_B is None:
            counts_B = budget.counts(candidates_BS)
            self.counts_B, self._most = counts_B.to(k_BGKD.device), int(counts_B.max())
        seen = self._measured(layer, q_BHQD, k_BGKD, mask, scale)
        sinks_BGS = self._protected(layer, seen, candidates_BS) if budget.sinks else None
        work = window.work
        columns_BGC = kept_columns(budget, seen, candidates_BS, sinks_BGS, work.block, work.number, self._most)
        at_BGCD = (columns_BGC + self.sinks)[..., None].expand(-1, -1, -1, k_BGKD.shape[3])
        run = slice(self.sinks + window.run.start, self.sinks + window.run.stop)
        keys, values = (
            torch.cat([x[:, :, : self.sinks], x.gather(2, at_BGCD), x[:, :, run]], 2) for x in (k_BGKD, v_BGKD)
        )
        self._held[layer], self._columns[layer] = (keys, values), columns_BGC
        self.chosen += 1

    def compact_mask(self) -> Tensor | None:
        """bool (B, 1, 1, N + C + W), the same in every layer: False at filling and padding; None where all is True."""
        assert self.window is not None and self.counts_B is not None and self._columns[0] is not None
        real_BW, kept = self.window.real_BS[:, self.window.run], self._columns[0].shape[2]
        valid_BC = torch.arange(kept, device=real_BW.device) < self.counts_B[:, None]
        seen_BK = torch.cat([real_BW.new_ones(len(real_BW), self.sinks), valid_BC, real_BW], 1)
        return None if bool(seen_BK.all()) else seen_BK[:, None, None]

    def spread_mask(self, layer: int, query_heads: int) -> Tensor:
        """bool (B, H, 1, N + S): which columns of the canvas the heads of this layer still see."""
        columns_BGC = self._columns[layer]
        assert self.window is not None and self.counts_B is not None and columns_BGC is not None
        real_BS, (batch, groups, kept) = self.window.real_BS, columns_BGC.shape
        valid_BGC = (torch.arange(kept, device=real_BS.device) < self.counts_B[:, None])[:, None].expand(-1, groups, -1)
        # filling may name a column twice: what counts is added up
        seen_BGS = torch.zeros(batch, groups, real_BS.shape[1], dtype=torch.int64, device=real_BS.device)
        seen_BGS.scatter_add_(2, columns_BGC, valid_BGC.long())
        seen_BGS[:, :, self.window.run] = real_BS[:, None, self.window.run].long()
        seen_BGK = torch.cat([seen_BGS.new_ones(batch, groups, self.sinks), seen_BGS], 2) > 0
        return seen_BGK.repeat_interleave(query_heads // groups, dim=1)[:, :, None]

    def _spread(self, held: Tensor) -> Tensor:
        columns_BGC = self._columns[self.layer]
        assert self.window is not None and columns_BGC is not None
        batch, groups, _, width = held.shape
        kept = columns_BGC.shape[2]
        whole = held.new_zeros(batch, groups, self.sinks + self.window.real_BS.shape[1], width)
        whole[:, :, : self.sinks] = held[:, :, : self.sinks]
        at_BGCD = (columns_BGC + self.sinks)[..., None].expand(-1, -1, -1, width)
        whole.scatter_(2, at_BGCD, held[:, :, self.sinks : self.sinks + kept])
        whole[:, :, self.sinks + self.window.run.start : self.sinks + self.window.run.stop] = held[
            :, :, self.sinks + kept :
        ]
        return whole

    def _measured(self, layer: int, q_BHQD: Tensor, k_BGKD: Tensor, mask: Tensor | None, scale: float) -> Seen:
        window, groups = self.window, k_BGKD.shape[1]
        assert window is not None
        measures = window.work.policy.budget.measures  # type: ignore[union-attr]
        received_BGS = aligned_BS = None
        if "received" in measures:
            received_BGS = window.received(q_BHQD, k_BGKD, mask, scale).unflatten(1, (groups, -1)).sum(2)
        if "aligned" in measures:
            weight_BW = window.real_BS[:, window.run].to(torch.promote_types(q_BHQD.dtype, torch.float32))
            weight_B1W1 = (weight_BW / weight_BW.sum(1, keepdim=True))[:, None, :, None]
            mean_BHD = (window.queries(q_BHQD).to(weight_B1W1.dtype) * weight_B1W1).sum(2)
            mean_BGD = mean_BHD.unflatten(1, (groups, -1)).mean(2)
            text_BGSD = k_BGKD[:, :, self.sinks :].to(mean_BGD.dtype)
            aligned_BS = torch.einsum("bgd,bgsd->bs", mean_BGD, text_BGSD) / groups
        return Seen(received_BGS, aligned_BS, layer, groups)

    def _protected(self, layer: int, seen: Seen, candidates_BS: Tensor) -> Tensor:
        """The columns that come first, bool (B, G, S)."""
        window = self.window
        assert window is not None and seen.received_BGS is not None
        budget = window.work.policy.budget  # type: ignore[union-attr]
        ranked_BGS = seen.received_BGS.masked_fill(~candidates_BS[:, None], -torch.inf)
        known, number = self._received[layer], window.work.number
        if budget.protect == "first":
            ranked_BGS = known.setdefault(0, ranked_BGS)
        elif budget.protect == "earlier":
            known[number] = ranked_BGS
            ranked_BGS = known.get(number - 1, ranked_BGS)
            known.pop(number - 2, None)
        return most_received(ranked_BGS, candidates_BS, budget.sinks)


class RefreshedStore(KeyValueStore):
    """A memory of all columns that adds up what they receive, to say which are worth computing anew."""

    def __init__(self, prefix: SinkPrefix | None, layers: int) -> None:
        super().__init__(prefix, layers)
        self.window: Window | None = None
        self.layer = 0
        self.chosen = 0
        self._layers = layers
        self._received_BS: Tensor | None = None
        self._columns_BW: Tensor | None = None

    def begin(self, window: Window, mode: str) -> None:
        """The next evaluation: of this window; a full one adds up anew."""
        self.window = window
        if mode == "full":
            self.chosen, self._received_BS, self._columns_BW = 0, None, None
            self.expecting(None)

    @property
    def is_chosen(self) -> bool:
        """Whether every layer has been added up."""
        return self.chosen == self._layers

    def update(self, k_BHWD: Tensor, v_BHWD: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """As in a store that remembers all columns."""
        self.layer = layer_idx
        return super().update(k_BHWD, v_BHWD, layer_idx)

    def choose(self, layer: int, q_BHQD: Tensor, mask: Tensor | None, scale: float) -> None:
        """After :meth:`update` of a full evaluation: add what every column receives from the window's queries."""
        keys = self._keys[layer]
        assert self.window is not None and keys is not None
        received_BS = self.window.received(q_BHQD, keys, mask, scale).sum(1)
        self._received_BS = received_BS if self._received_BS is None else self._received_BS + received_BS
        self.chosen += 1

    def columns_BW(self) -> Tensor:
        """What a partial evaluation runs, int64 (B, W): the window, and the columns that received most beside it.

        A row with fewer other columns runs the first of the window again in their place.
        """
        if self._columns_BW is None:
            self._columns_BW = self._most_received()
        return self._columns_BW

    def _most_received(self) -> Tensor:
        assert self.window is not None and self._received_BS is not None
        run, candidates_BS = self.window.run, self.window.candidates_BS
        count = min(self.window.work.policy.sinks, int(candidates_BS.sum(1).max()))
        outside_BS = self._received_BS.masked_fill(~candidates_BS, -torch.inf)
        most_BR = outside_BS.sort(dim=1, descending=True, stable=True).indices[:, :count]
        most_BR = torch.where(candidates_BS.gather(1, most_BR), most_BR, run.start)
        window_W = torch.arange(run.start, run.stop, device=most_BR.device)
        return torch.cat([window_W.expand(len(most_BR), -1), most_BR], 1)
