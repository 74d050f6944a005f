"""Keys and values of all columns, and which of them are worth computing anew with the block."""

# B batch, H query heads, Q queries, S canvas, W columns that run, R refreshed, D head dim
from __future__ import annotations

import torch
from torch import Tensor

from sinklab.models.kept import Window
from sinklab.models.keyvalues import KeyValueStore
from sinklab.models.sink import SinkPrefix


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
