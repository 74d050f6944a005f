"""How the layers of the fast decoder attend: rotated heads and calls of SDPA; and how a trace hears
them, each where it is computed.

The slow twin is the model's own forward, under the tap if a trace hears.
"""

# B batch, W columns that run, H query heads, G key/value heads, K keys, D head dim, A attention
# width H·D, N sinks, E hidden size
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sinklab.core.instrument.tap import Tap
from sinklab.core.subject.masks import take
from sinklab.lab.sink_logits import logits_of, with_logits


@dataclass(frozen=True, eq=False)
class View:
    """Tables of the columns that run, for the layers."""

    cos_BW1D: Tensor
    sin_BW1D: Tensor
    """Sines with the sign of the rotated half inside: −sin in the first half of D, sin in the
    second.
    """
    mask_B1WK: Tensor | None
    """Additive, 0 or −∞, of one query if all see the same; None when nothing is blocked."""
    folded: Tensor | None = None  # the same for queries as `_attend` folds them
    heard: Heard | None = None
    """Listeners to be told of each layer."""

    def of(self, queries: slice | Tensor, shared: int) -> View:
        """This view with the mask of these queries alone, folded for so many query heads a key
        head.
        """
        mask = self.mask_B1WK
        if mask is None or mask.shape[2] == 1:
            return replace(self, folded=mask)
        mask = take(mask.transpose(1, 2), queries).transpose(1, 2)
        return replace(
            self, mask_B1WK=mask, folded=mask.repeat(1, 1, shared, 1) if shared > 1 else mask
        )

    def attend(
        self, q_BHWD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, memory: Any, layer: int, scale: float
    ) -> tuple[Tensor, Tensor | None]:
        """Attention output of the heads, (B, W, H·D), and the mask that they were under."""
        logits_HN = logits_of(memory, layer)
        mask = self.mask_B1WK
        if logits_HN is None:
            return _attend(q_BHWD, k_BGKD, v_BGKD, self.folded, scale), mask
        if mask is None:
            mask = q_BHWD.new_zeros(1, 1, 1, k_BGKD.shape[2])
        mask = with_logits(mask, logits_HN, q_BHWD)
        out_BHWD = F.scaled_dot_product_attention(
            q_BHWD, k_BGKD, v_BGKD, attn_mask=mask, scale=scale, enable_gqa=True
        )
        return out_BHWD.transpose(1, 2).flatten(2), mask


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask (True = may attend) as one that is added to the scores."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)


def rotated(x_BWHD: Tensor, norm: Callable | None, cos_BW1D: Tensor, sin_BW1D: Tensor) -> Tensor:
    """Heads normed if the decoder norms them, and rotated, (B, H, W, D)."""
    if norm is not None:
        x_BWHD = norm(x_BWHD)
    turned_BWHD = x_BWHD.roll(x_BWHD.shape[-1] // 2, -1)
    return (x_BWHD * cos_BW1D).addcmul_(turned_BWHD, sin_BW1D).transpose(1, 2)


def _attend(
    q_BHWD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, mask_B1WK: Tensor | None, scale: float
) -> Tensor:
    batch, heads, width, dim = q_BHWD.shape
    # Query heads of one key head become more queries of it: no key is copied, with or without a
    # mask.
    q_BGQD = q_BHWD.reshape(batch, k_BGKD.shape[1], -1, dim)
    out = F.scaled_dot_product_attention(q_BGQD, k_BGKD, v_BGKD, attn_mask=mask_B1WK, scale=scale)
    return out.reshape(batch, heads, width, dim).transpose(1, 2).flatten(2)


class Heard:
    """One evaluation, told to the listeners of a tap. None of them edits: see `FastDecoder.tap`."""

    def __init__(self, tap: Tap) -> None:
        self.tap = tap
        self._known: dict[tuple, Any] = {}

    def layer(self, index: int, given: dict[str, Any], out_BWA: Tensor, states_BWE: Tensor) -> None:
        """A layer has run.

        Args:
            index: its number.
            given: its attention call, by the names of `scaled_dot_product_attention`.
            out_BWA: output of the heads.
            states_BWE: hidden states that leave the layer.
        """
        path = f"model.layers.{index}.self_attn"
        call = self.tap.call_of(path, path, given, self._known)
        out_BHWD = out_BWA.unflatten(2, (call.q_BHQD.shape[1], -1)).transpose(1, 2)
        for listener in self.tap.listeners:
            listener.observe(call, out_BHWD)
            listener.observe_states([path], states_BWE)


@contextmanager
def told(tap: Tap) -> Iterator[Heard]:
    """One evaluation, from its beginning to its end: a forward to the listeners."""
    tap.check_thread()
    tap.flush()
    tap.begin()
    try:
        yield Heard(tap)
    except BaseException:
        tap.flush(complete=False)
        raise
    tap.forwards += 1
    tap.flush(complete=True)
