"""How the layers of the fast decoder attend: rotated heads, calls of SDPA, padded rows without
their padding; and how a trace hears them, each where it is computed.

The slow twin is the model's own forward, under the tap if a trace hears.
"""

# B batch, S canvas, T its real tokens, W columns that run, Q columns wanted, H query heads, G
# key/value heads, K keys, D head dim, A attention width H·D, N sinks, E hidden size
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from sinklab.core.attention.context import reads_wait
from sinklab.core.attention.received import row_logsumexp
from sinklab.core.instrument.tap import Tap
from sinklab.core.subject.masks import take
from sinklab.core.subject.prefix import SinkPrefix
from sinklab.extras.fast import compat
from sinklab.lab.sink_logits import logits_of

_LARGE = 1 << 19  # numbers from which on two passes over halves cost less than a rolled copy


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
    ) -> Tensor:
        """Attention output of the heads, (B, W, H·D)."""
        logits_HN = logits_of(memory, layer)
        # the kernel that says the log-sum-exp divides by the number of queries
        if logits_HN is None or q_BHWD.shape[2] == 0:
            return _attend(q_BHWD, k_BGKD, v_BGKD, self.folded, scale)
        # the log-sum-exp form of sinks that are logits alone: no mask of their own, and none of
        # their keys
        count = logits_HN.shape[1]
        k_BGKD = k_BGKD[:, :, count:]
        v_BGKD = v_BGKD[:, :, count:]
        mask = self.mask_B1WK
        if mask is not None:
            mask = mask[..., count:]
        out_BHWD, lse_BHW = compat.attention_with_logsumexp(
            q_BHWD, k_BGKD, v_BGKD, mask, scale
        ) or (
            F.scaled_dot_product_attention(
                q_BHWD, k_BGKD, v_BGKD, attn_mask=mask, scale=scale, enable_gqa=True
            ),
            row_logsumexp(q_BHWD, k_BGKD, mask=mask, scale=scale),
        )
        return with_sink_logits(out_BHWD, lse_BHW, logits_HN).transpose(1, 2).flatten(2)


@dataclass(frozen=True, eq=False, kw_only=True)
class Packed(View):
    """The texts of padded rows one behind the other in a single row; attention alone tells them
    apart.

    No padding is computed, and attention needs no mask.
    """

    place_BS: Tensor
    """Place of each column's token in the single row, int64; for padding, the place where its text
    begins.
    """
    index_T: Tensor
    """int64, the number of each token in the flattened canvas."""
    keys: list[int]
    queries: list[int]
    sinks: list[SinkPrefix | None]

    @classmethod
    def rows(cls, whole: View, sinks: SinkPrefix | None) -> Packed | None:
        """Pack the texts of these rows. None without padding, if a mask says more, and off the CPU:
        there padding costs less than more calls.
        """
        mask, length = whole.mask_B1WK, whole.cos_BW1D.shape[1]
        if (
            mask is None
            or mask.shape[2] > 1
            or reads_wait(mask.device)
            or logits_of(sinks) is not None
        ):
            return None
        real_BS = mask[:, 0, 0, -length:] == 0
        lengths_B, index_T = real_BS.sum(1), real_BS.flatten().nonzero()[:, 0]
        place_BS = (real_BS.cumsum(1) - 1).clamp(min=0) + (lengths_B.cumsum(0) - lengths_B)[:, None]
        cos, sin = (
            table.flatten(0, 1).index_select(0, index_T)[None]
            for table in (whole.cos_BW1D, whole.sin_BW1D)
        )
        keys = lengths_B.tolist()
        before = [sinks and _of_row(sinks, row) for row in range(len(keys))]
        return cls(
            cos,
            sin,
            None,
            place_BS=place_BS,
            index_T=index_T,
            keys=keys,
            queries=keys,
            sinks=before,
        )

    def of(self, queries: slice | Tensor, shared: int) -> Packed:
        """This view for these queries, equally many of each text."""
        rows = len(self.keys)
        return (
            self
            if isinstance(queries, slice)
            else replace(self, queries=[len(queries) // rows] * rows)
        )

    def attend(
        self, q_BHWD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, memory: Any, layer: int, scale: float
    ) -> Tensor:
        """Attention output of the heads, each text from itself."""
        parts, out = (
            (q_BHWD.split(self.queries, 2), k_BGKD.split(self.keys, 2), v_BGKD.split(self.keys, 2)),
            [],
        )
        for q, k, v, sinks in zip(*parts, self.sinks, strict=True):
            seen_k, seen_v = sinks.update(k, v, layer) if sinks else (k, v)
            out.append(_attend(q, seen_k, seen_v, None, scale))
        return torch.cat(out, 1)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A boolean mask (True = may attend) as one that is added to the scores."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -torch.inf)


def rotated(x_BWHD: Tensor, norm: Callable | None, cos_BW1D: Tensor, sin_BW1D: Tensor) -> Tensor:
    """Heads normed if the decoder norms them, and rotated, (B, H, W, D)."""
    if norm is not None:
        x_BWHD = norm(x_BWHD)
    out_BWHD, half = x_BWHD * cos_BW1D, x_BWHD.shape[-1] // 2
    if x_BWHD.numel() < _LARGE:
        return out_BWHD.addcmul_(x_BWHD.roll(half, -1), sin_BW1D).transpose(1, 2)
    for there, here in ((slice(0, half), slice(half, None)), (slice(half, None), slice(0, half))):
        out_BWHD[..., there].addcmul_(x_BWHD[..., here], sin_BW1D[..., there])
    return out_BWHD.transpose(1, 2)


def _attend(
    q_BHWD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, mask_B1WK: Tensor | None, scale: float
) -> Tensor:
    batch, heads, width, dim = q_BHWD.shape
    # Query heads of one key head become more queries of it: no key is copied, with or without a
    # mask.
    q_BGQD = q_BHWD.reshape(batch, k_BGKD.shape[1], -1, dim)
    out = F.scaled_dot_product_attention(q_BGQD, k_BGKD, v_BGKD, attn_mask=mask_B1WK, scale=scale)
    return out.reshape(batch, heads, width, dim).transpose(1, 2).flatten(2)


def _of_row(sinks: SinkPrefix, row: int) -> SinkPrefix:
    """The prefix of one row of a batch."""
    keys, values = (
        tuple(one[row % len(one)][None] for one in states) for states in (sinks.keys, sinks.values)
    )
    return SinkPrefix(keys, values)


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


def with_sink_logits(out_BHQD: Tensor, lse_BHQ: Tensor, logits_HN: Tensor) -> Tensor:
    """The attention output as if every row of the softmax had N more terms exp(b), with nothing
    behind them: exact.

    `out_BHQD` and `lse_BHQ` are output and row log-sum-exp without them; out' = out · sigmoid(lse −
    ln Σ_n exp(b_n)). These are the learned sinks of gpt-oss (arXiv 2508.10925), one a head there.
    """
    kept_BHQ = torch.sigmoid(lse_BHQ - logits_HN.to(lse_BHQ).logsumexp(-1)[:, None])
    return out_BHQD * kept_BHQ.unsqueeze(-1).to(out_BHQD.dtype)
