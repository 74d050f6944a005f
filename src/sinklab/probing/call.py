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

from sinklab.attention import Scores, attention_map, attention_statistics
from sinklab.probing.place import Sight, SightCache

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
    sight: Sight
    layout: str
    fold: int

    @classmethod
    def of(cls, layer: str, module: nn.Module, given: dict[str, Any], sights: SightCache) -> AttentionCall:
        """Read the arguments by name. Raises ValueError for axes that are not (batch, [head,] position, dim)."""
        query, key, value, mask = given["query"], given["key"], given["value"], given.get("attn_mask")
        layout = _layout(layer, query, key, module)
        sight_mask, fold = mask, query.shape[-2]
        if layout == "headless":
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
            mask = mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask
            sight_mask = mask
        elif layout == "packed":
            query = query.flatten(1, 2).unsqueeze(2)
            if mask is not None and mask.dim() == 4 and mask.shape[1] > 1:
                mask = mask.flatten(1, 2).unsqueeze(2)
                sight_mask, fold = mask, query.shape[-2]
        if mask is not None:
            mask = mask[(None,) * (4 - mask.dim())]
        batch, queries, keys = query.shape[0], query.shape[2], key.shape[2]
        is_causal = bool(given.get("is_causal", False))
        sight = sights.of(sight_mask, batch, queries, keys, is_causal)
        return cls(
            layer,
            query,
            key,
            value,
            mask,
            is_causal,
            given.get("scale"),
            given.get("dropout_p", 0.0),
            sight,
            layout,
            fold,
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
        if self.layout == "headless":
            return out_BHQD.squeeze(1)
        if self.layout == "packed":
            return out_BHQD.squeeze(2).unflatten(1, (-1, self.fold))
        return out_BHQD

    def unrolled(self, out: Tensor) -> Tensor:
        """An output in the layout of the original call as (B, H, Q, D)."""
        if self.layout == "headless":
            return out.unsqueeze(1)
        return out.flatten(1, 2).unsqueeze(2) if self.layout == "packed" else out

    def scores(self, heads: Sequence[int] | None = None) -> Scores:
        """What statistics of this call, edits included, are computed from; some query heads or all."""
        return Scores.of(self.query_BHQD, self.key_BKSD, self.mask, self.is_causal, self.scale, heads)

    @cached_property
    def received_BHS(self) -> Tensor:
        """Column sums over the real queries of this call, edits included; shared by all who ask."""
        real_BQ = self.sight.real_BQ
        groups_BGQ = None if real_BQ is None else real_BQ.unsqueeze(1)
        received = attention_statistics(self.scores(), ("received",), groups_BGQ=groups_BGQ)["received"]
        return received if real_BQ is None else received[:, 0]

    @cached_property
    def last_row_BHS(self) -> Tensor:
        """The attention row of the last real query of every batch row (how an autoregressive model is read)."""
        batch, _, queries, dim = self.query_BHQD.shape
        real_BQ = self.sight.real_BQ
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
            # torch counts from the upper left corner: query i sees the keys up to i.
            seen_B11S = torch.arange(keys, device=last_B.device) <= at_B111
            mask = (
                seen_B11S if mask is None else mask.where(seen_B11S, False if mask.dtype == torch.bool else -math.inf)
            )
        return attention_map(query_BH1D, self.key_BKSD, mask=mask, scale=self.scale)[:, :, 0]


def _layout(layer: str, query: Tensor, key: Tensor, module: nn.Module) -> str:
    if query.dim() == 3 and key.dim() == 3:
        return "headless"
    if query.dim() != 4 or key.dim() != 4:
        raise ValueError(
            f"{layer or 'the model'} calls scaled_dot_product_attention with query {tuple(query.shape)}: traces read "
            "(batch, head, position, dim) or (batch, position, dim); reshape before the call"
        )
    # transformers folds the query heads of one key head into the query axis when it decodes one token under a mask.
    groups = getattr(module, "num_key_value_groups", 1)
    heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
    packed = groups > 1 and query.shape[1] == key.shape[1] and query.shape[2] == groups
    return "packed" if packed and heads == query.shape[1] * groups else "plain"
