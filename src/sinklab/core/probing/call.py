"""One attention call as the tap sees it: the arguments of scaled_dot_product_attention in one form;
the origin of the keys that a module reads; and the base class of those that are shown calls.
"""

# B batch, H query heads, K key/value heads, Q queries, S keys, D head dim (width of hidden states)
from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn

from sinklab.core.attention.context import running_canvas
from sinklab.core.attention.received import attention_map, attention_statistics
from sinklab.core.attention.scores import Scores, Visibility
from sinklab.core.compat import config_value, seen_length, stated

NAMES = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa")
OTHERS = (
    "key_value_states",
    "encoder_hidden_states",
    "cross_attention_states",
    "context",
    "memory",
    "kv",
)
"""Parameters of an attention's forward that hold the states of the keys it reads in place of its
own.
"""
CACHES = ("past_key_values", "past_key_value", "layer_past")
"""Parameters that hold a cache of transformers."""


@dataclass(frozen=True, eq=False)
class KeyOrigin:
    """Origin of the keys that an attention module reads, by its arguments, and never by the number
    of keys.
    """

    is_own: bool
    """Whether the keys belong to the sequence of the queries; False for cross attention."""
    cache: Any
    """Cache of the keys of the positions before; None without one."""
    layer_idx: int | None
    """Number of the layer in that cache."""

    @classmethod
    def of(cls, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> KeyOrigin:
        """Read the origin from the arguments of the module's forward."""
        kind: Any = type(module)
        names = parameters(kind)
        given = dict(zip(names, args, strict=False)) | kwargs
        first = next(iter(given.values()), None)
        others = [given.get(name) for name in OTHERS if name in names]
        if "query" in names and "key" in names:
            first = given.get("query")
            others.append(given.get("key"))
        is_own = not any(
            isinstance(other, Tensor) and not _is_same(other, first) for other in others
        )
        found = next((given[name] for name in CACHES if given.get(name) is not None), None)
        # of an encoder-decoder, whose cross attention has a cache of its own
        found = stated(found, "self_attention_cache", found)
        return cls(is_own, found, stated(module, "layer_idx"))

    def check(self, layer: str, keys: int) -> None:
        """Raises ValueError if the cache has dropped keys, so that these are not all there were."""
        layers = stated(self.cache, "layers")
        if not layers:
            return
        stores = layers
        if self.layer_idx is not None:
            # layers beyond those of the cache read the keys of an earlier one
            stores = layers[self.layer_idx : self.layer_idx + 1] or layers
        seen = max(map(seen_length, stores))
        if seen > keys:
            raise ValueError(
                f"{layer}: the cache {type(stores[0]).__name__} has seen {seen} positions and "
                f"gives {keys} keys, but traces and edits read caches that keep every key: run it "
                "with use_cache=False, or with past_key_values=DynamicCache()"
            )


@cache
def parameters(kind: Any) -> tuple[str, ...]:
    """Names of the parameters of a module's forward."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def says_more(kind: Any) -> bool:
    """Whether the arguments of such a module may say that its keys are not simply its own."""
    return not {*OTHERS, *CACHES, "key"}.isdisjoint(parameters(kind))


def _is_same(other: Tensor, first: Any) -> bool:
    """Whether both are one tensor, or views of it that show the same."""
    if other is first or not isinstance(first, Tensor):
        return other is first
    return other.data_ptr() == first.data_ptr() and (other.shape, other.stride()) == (
        first.shape,
        first.stride(),
    )


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of one call with all axes present: query (B, H, Q, D), key, value (B, K, S, D),
    mask 4-D or None.

    An intervention answers with ``dataclasses.replace(call, query_BHQD=…)`` and leaves tensors as
    they are: those of the call belong to the model. ``layer`` is the path of the attention module,
    ``mask`` bool (True: seen) or additive, ``scale`` None for 1/√D.
    """

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
    """Shape of the output as the model made the call, but for its last axis: axes may be folded or
    missing there.
    """
    known: dict[str, Tensor] = field(default_factory=dict, init=False, repr=False)
    """Results that are computed once: "received_BHS", and "lse_BHQ" where a fast path got it from
    the attention kernel.
    """

    @classmethod
    def of(
        cls, layer: str, module: nn.Module, given: dict[str, Any], known: dict[tuple, Any]
    ) -> AttentionCall:
        """Read the arguments by name.

        `known` keeps, for a forward, the findings about a mask that its layers share.

        Raises ValueError for axes that are not (batch, [head,] position, dim).
        """
        query = given["query"]
        key = given["key"]
        value = given["value"]
        mask = given.get("attn_mask")
        output_shape = query.shape[:-1]
        if query.dim() == 3 and key.dim() == 3:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
            if mask is not None and mask.dim() == 3:
                mask = mask.unsqueeze(1)
        elif query.dim() != 4 or key.dim() != 4:
            raise ValueError(
                f"{layer or 'the model'} calls scaled_dot_product_attention with query "
                f"{tuple(query.shape)}: traces read (batch, head, position, dim) or (batch, "
                "position, dim); reshape before the call"
            )
        elif _is_folded(query, key, module):
            query = query.flatten(1, 2).unsqueeze(2)
            if mask is not None and mask.dim() == 4 and mask.shape[1] > 1:
                mask = mask.flatten(1, 2).unsqueeze(2)
        is_causal = bool(given.get("is_causal", False))
        # by the mask object that all layers share, not by a view of it
        shape = (query.shape[0], query.shape[2], key.shape[2])
        visibility = _visibility(known, Visibility(mask, shape, is_causal, None, query.device))
        if mask is not None:
            mask = mask[(None,) * (4 - mask.dim())]
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
        """Make the call with these arguments and give the output the layout of the original
        call.
        """
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
        batch, _, queries, _ = self.query_BHQD.shape
        return out.reshape(batch, -1, queries, out.shape[-1])

    def for_query_heads(self, x_BK: Tensor) -> Tensor:
        """A tensor (B, K, …) of key/value heads as (B, H, …): repeated for the query heads that
        share each.
        """
        groups = self.query_BHQD.shape[1] // x_BK.shape[1]
        if groups == 1:
            return x_BK
        return x_BK.repeat_interleave(groups, 1)

    @property
    def masking(self) -> dict[str, Any]:
        """Arguments of the functions of `sinklab.core.attention` beside queries and keys."""
        return {"mask": self.mask, "is_causal": self.is_causal, "scale": self.scale}

    def scores(self, heads: Sequence[int] | None = None) -> Scores:
        """The scores from which statistics of this call, edits included, are computed; some query
        heads or all.
        """
        return Scores.of(
            self.query_BHQD,
            self.key_BKSD,
            self.mask,
            self.is_causal,
            self.scale,
            heads,
            self.known.get("lse_BHQ"),
        )

    def measured(
        self, names: Collection[str], heads: Sequence[int] | None = None, **options: Any
    ) -> dict[str, Tensor]:
        """`attention_statistics` of this call."""
        return attention_statistics(self.scores(heads), names, **options)

    @property
    def received_BHS(self) -> Tensor:
        """Column sums over the real queries of this call, edits included; computed once."""
        if "received_BHS" not in self.known:
            groups_BGQ = self.visibility.groups_BGQ
            received = self.measured(("received",), groups_BGQ=groups_BGQ)["received"]
            if groups_BGQ is not None:
                received = received[:, 0]
            self.known["received_BHS"] = received
        return self.known["received_BHS"]

    @cached_property
    def last_row_BHS(self) -> Tensor:
        """The attention row of the last real query of every batch row (how an autoregressive model
        is read).
        """
        batch, _, queries, dim = self.query_BHQD.shape
        real_BQ = self.visibility.real_BQ
        last_B = torch.full((batch,), queries - 1, device=self.query_BHQD.device)
        if real_BQ is not None:
            last_B = queries - 1 - real_BQ.flip(-1).long().argmax(-1).to(last_B.device)
        at_B111 = last_B.view(batch, 1, 1, 1)
        query_BH1D = self.query_BHQD.gather(2, at_B111.expand(-1, self.query_BHQD.shape[1], 1, dim))
        mask = self.mask
        keys = self.key_BKSD.shape[2]
        if mask is not None and mask.shape[2] > 1:
            mask = mask.expand(batch, -1, -1, -1)
            mask = mask.gather(2, at_B111.expand(-1, mask.shape[1], 1, mask.shape[3]))
        if self.is_causal:
            # Causal masks are top-left aligned, as in torch: query i sees the keys up to i.
            seen_B11S = torch.arange(keys, device=last_B.device) <= at_B111
            mask = narrowed(mask, seen_B11S)
        return attention_map(query_BH1D, self.key_BKSD, mask=mask, scale=self.scale)[:, :, 0]


def narrowed(mask: Tensor | None, keep: Tensor) -> Tensor:
    """A boolean or additive mask, or none, that also blocks every key that is not in `keep`."""
    if mask is None:
        return keep
    if mask.dtype == torch.bool:
        return mask & keep
    return mask.masked_fill(~keep, -math.inf)


def _visibility(known: dict[tuple, Any], found: Visibility) -> Visibility:
    """The visibility of this mask, shape and causality, kept for a forward: all layers are given
    the same one.
    """
    running = running_canvas()
    batch, queries, keys = found.shape
    key = (id(found.mask), id(running), *found.shape, found.is_causal, found.device)
    if key not in known:
        # Another model may run inside the block that announces a canvas.
        if (
            running is not None
            and len(running.ids_BS) == batch
            and running.ids_BS.shape[1] <= keys
            and len(running.columns_Q) == queries
        ):
            found = replace(found, running=running)
        # The canvas is kept beside it, so that its id cannot be taken by another while it is known.
        known[key] = running, found
    return known[key][1]


def _is_folded(query: Tensor, key: Tensor, module: nn.Module) -> bool:
    """Whether the query axis holds the query heads of one key head: so transformers decodes one
    token under a mask.
    """
    groups = stated(module, "num_key_value_groups", 1)
    folded = groups > 1 and query.shape[1] == key.shape[1] and query.shape[2] == groups
    return folded and config_value(module, "num_attention_heads") == query.shape[1] * groups


class Listener:
    """Hears of every forward of a model: it begins with the first attention call and ends by
    `finish` or `discard`.
    """

    tap: Any
    """The `Tap` that it listens to; there once it is `tapped`."""
    reads_scores = False
    """Whether it takes statistics from the scores of calls."""
    exact = True
    """Whether it hears of the model's own forward alone; False: of a fast decoder's as well, whose
    numbers are equal within rounding.
    """
    of_states = ""
    """Feature that needs hidden states here, as errors name it; empty if nothing does."""

    def __getstate__(self) -> dict[str, Any]:
        # a copy listens to no model
        return {**vars(self), "tap": None}

    def begin(self) -> None:
        """A forward begins."""

    def edit(self, call: AttentionCall) -> AttentionCall:
        """Return the call to make; the same object when nothing is to change."""
        return call

    def observe(self, call: AttentionCall, out: Tensor) -> None:
        """Observe the call as it was made, after every edit, and its output (`call.unrolled`);
        neither is to be changed.
        """

    def edit_states(self, calls: list[str], states_BQD: Tensor) -> Tensor:
        """The hidden states to leave a decoder layer, in which these attention calls were made; the
        same object when nothing is to change."""
        return states_BQD

    def observe_states(self, calls: list[str], states_BQD: Tensor) -> None:
        """The hidden states as they leave the layer, after every edit; not to be changed."""

    def finish(self) -> None:
        """The forward came to its end."""

    def discard(self) -> None:
        """Forget the observations of a forward that failed."""
