"""One attention call as the tap sees it: the arguments of scaled_dot_product_attention in one form."""

# B batch, H query heads, K key/value heads, Q queries, S keys, D head dim
from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from sinklab.attention.context import RunningCanvas, running_canvas
from sinklab.attention.received import attention_map, attention_statistics
from sinklab.attention.scores import Scores, real_queries, visible_queries


@dataclass(frozen=True, eq=False)
class Visibility:
    """Which queries may see which keys before any intervention; computed on first use."""

    mask: Tensor | None
    shape: tuple[int, int, int]
    """(batch, queries, keys) of the call."""
    is_causal: bool
    running: RunningCanvas | None
    """The canvas that was announced for this call; None when none was, or when it does not fit the call."""

    @cached_property
    def visible_BHS(self) -> Tensor:
        """Queries that may see each key, int64 (B, 1 or H, S)."""
        with torch.no_grad():
            return visible_queries(self.mask, *self.shape, is_causal=self.is_causal, own_Q=self._own_Q)

    @cached_property
    def real_BQ(self) -> Tensor | None:
        """False for padding queries; None: all are real."""
        with torch.no_grad():
            return real_queries(self.mask, *self.shape, is_causal=self.is_causal, own_Q=self._own_Q)

    @property
    def visible_BS(self) -> Tensor:
        """Queries that may see each key, int64 (B, S), in the head that sees most."""
        return self.visible_BHS.amax(1)

    @cached_property
    def columns_Q(self) -> Tensor | None:
        """Canvas positions of the queries, int64 on the CPU; None when no canvas was announced."""
        return None if self.running is None else _columns(self.running)

    @property
    def prefix(self) -> int | None:
        """Sink columns in front of the keys; None when no canvas was announced."""
        return None if self.running is None else self.shape[2] - self.running.ids_BS.shape[1]

    @property
    def _own_Q(self) -> Tensor | None:
        return None if self.columns_Q is None else self.columns_Q + (self.prefix or 0)


class VisibilityCache:
    """The visibility of a mask, kept for a forward: all layers are given the same mask."""

    def __init__(self) -> None:
        self._known: dict[tuple, tuple[RunningCanvas | None, Visibility]] = {}

    def clear(self) -> None:
        self._known.clear()

    def of(self, mask: Tensor | None, batch: int, queries: int, keys: int, is_causal: bool) -> Visibility:
        running = running_canvas()
        # Mask and canvas are kept beside it, so that their ids cannot be taken by others while it is known.
        key = (id(mask), id(running), batch, queries, keys, is_causal)
        if key not in self._known:
            fits = running is not None and _fits(running, batch, queries, keys)
            self._known[key] = (running, Visibility(mask, (batch, queries, keys), is_causal, running if fits else None))
        return self._known[key][1]


def _fits(running: RunningCanvas, batch: int, queries: int, keys: int) -> bool:
    """Whether a call of these sizes can be an evaluation of this canvas (another model may run inside the block)."""
    rows, length = running.ids_BS.shape
    return rows == batch and length <= keys and len(_columns(running)) == queries


def _columns(running: RunningCanvas) -> Tensor:
    columns, length = running.columns, running.ids_BS.shape[1]
    if isinstance(columns, Tensor):
        return columns.cpu()
    return torch.arange(length)[columns if columns is not None else slice(None)]


NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of one call with all axes present: query (B, H, Q, D), key, value (B, K, S, D), mask 4-D or None."""

    layer: str
    query_BHQD: Tensor
    key_BKSD: Tensor
    value_BKSD: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float | None
    dropout_p: float
    visibility: Visibility
    output_shape: torch.Size
    """Of the output where the call was made, but for its last axis: axes may be folded or missing there."""

    @classmethod
    def of(cls, layer: str, module: nn.Module, given: dict[str, Any], visibilities: VisibilityCache) -> AttentionCall:
        """Read the arguments by name. Raises ValueError for axes that are not (batch, [head,] position, dim)."""
        query, key, value, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
        output_shape = query.shape[:-1]
        if query.dim() == 3 and key.dim() == 3:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
            mask = mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask
        elif query.dim() != 4 or key.dim() != 4:
            raise ValueError(
                f"{layer or 'the model'} calls scaled_dot_product_attention with query {tuple(query.shape)}: traces "
                "read (batch, head, position, dim) or (batch, position, dim); reshape before the call"
            )
        elif _is_folded(query, key, module):
            query = query.flatten(1, 2).unsqueeze(2)
            if mask is not None and mask.dim() == 4 and mask.shape[1] > 1:
                mask = mask.flatten(1, 2).unsqueeze(2)
        is_causal = bool(given.get("is_causal", False))
        # by the mask object that all layers share, not by a view of it
        visibility = visibilities.of(mask, query.shape[0], query.shape[2], key.shape[2], is_causal)
        mask = None if mask is None else mask[(None,) * (4 - mask.dim())]
        return cls(
            layer,
            query,
            key,
            value,
            mask,
            is_causal,
            given.get("scale"),
            given.get("dropout_p", 0.0),
            visibility,
            output_shape,
        )

    def run(self, function: Callable[..., Tensor]) -> Tensor:
        """Make the call with these arguments and give the output the layout of the original call."""
        out_BHQD = function(
            self.query_BHQD,
            self.key_BKSD,
            self.value_BKSD,
            attn_mask=self.mask,
            dropout_p=self.dropout_p,
            is_causal=self.is_causal,
            scale=self.scale,
            enable_gqa=self.query_BHQD.shape[1] != self.key_BKSD.shape[1],
        )
        return out_BHQD.reshape(*self.output_shape, out_BHQD.shape[-1])

    def unrolled(self, out: Tensor) -> Tensor:
        """An output in the layout of the original call as (B, H, Q, D)."""
        return out.reshape(*self.query_BHQD.shape[:3], out.shape[-1])

    @property
    def masking(self) -> dict[str, Any]:
        """What the functions of `sinklab.attention` take beside queries and keys."""
        return {"mask": self.mask, "is_causal": self.is_causal, "scale": self.scale}

    def scores(self, heads: Sequence[int] | None = None) -> Scores:
        """What statistics of this call, edits included, are computed from; some query heads or all."""
        return Scores.of(self.query_BHQD, self.key_BKSD, self.mask, self.is_causal, self.scale, heads)

    @cached_property
    def received_BHS(self) -> Tensor:
        """Column sums over the real queries of this call, edits included; computed once."""
        real_BQ = self.visibility.real_BQ
        groups_BGQ = None if real_BQ is None else real_BQ.unsqueeze(1)
        received = attention_statistics(self.scores(), ("received",), groups_BGQ=groups_BGQ)["received"]
        return received if real_BQ is None else received[:, 0]

    @cached_property
    def last_row_BHS(self) -> Tensor:
        """The attention row of the last real query of every batch row (how an autoregressive model is read)."""
        batch, _, queries, dim = self.query_BHQD.shape
        real_BQ = self.visibility.real_BQ
        last_B = torch.full((batch,), queries - 1, device=self.query_BHQD.device)
        if real_BQ is not None:
            last_B = queries - 1 - real_BQ.flip(-1).long().argmax(-1).to(last_B.device)
        at_B111 = last_B.view(batch, 1, 1, 1)
        query_BH1D = self.query_BHQD.gather(2, at_B111.expand(-1, self.query_BHQD.shape[1], 1, dim))
        mask, keys = self.mask, self.key_BKSD.shape[2]
        if mask is not None and mask.shape[2] > 1:
            mask = mask.expand(batch, -1, -1, -1)
            mask = mask.gather(2, at_B111.expand(-1, mask.shape[1], 1, mask.shape[3]))
        if self.is_causal:
            # Causal masks are top-left aligned, as in torch: query i sees the keys up to i.
            seen_B11S = torch.arange(keys, device=last_B.device) <= at_B111
            mask = seen_B11S if mask is None else narrowed(mask, seen_B11S)
        return attention_map(query_BH1D, self.key_BKSD, mask=mask, scale=self.scale)[:, :, 0]


def narrowed(mask: Tensor, keep: Tensor) -> Tensor:
    """A boolean or additive mask that also hides what is not in `keep`."""
    return mask & keep if mask.dtype == torch.bool else mask.masked_fill(~keep, -math.inf)


def _is_folded(query: Tensor, key: Tensor, module: nn.Module) -> bool:
    """Whether the query axis holds the query heads of one key head: so transformers decodes one token under a mask."""
    groups = getattr(module, "num_key_value_groups", 1)
    heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
    folded = groups > 1 and query.shape[1] == key.shape[1] and query.shape[2] == groups
    return folded and heads == query.shape[1] * groups
