"""Origin of the keys that an attention module reads: its own sequence or another, and a cache."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn

from sinklab.core.compat import seen_length, stated

OTHERS = (
    "key_value_states",
    "encoder_hidden_states",
    "cross_attention_states",
    "context",
    "memory",
    "kv",
)
"""Parameters of an attention's forward that hold other states to read."""
CACHES = ("past_key_values", "past_key_value", "layer_past")
"""Parameters that hold a cache of transformers."""


@dataclass(frozen=True, eq=False)
class KeyOrigin:
    """Origin of the keys that an attention module reads, by its arguments."""

    is_own: bool
    """Whether the keys belong to the sequence of the queries; False for cross attention."""
    cache: Any
    """Cache of keys; None without one."""
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
        """Raises ValueError if the cache has dropped keys."""
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
    """Whether the arguments of such a module may name other keys."""
    return not {*OTHERS, *CACHES, "key"}.isdisjoint(parameters(kind))


def _is_same(other: Tensor, first: Any) -> bool:
    """Whether both are one tensor, or views of it that show the same."""
    if other is first or not isinstance(first, Tensor):
        return other is first
    return other.data_ptr() == first.data_ptr() and (other.shape, other.stride()) == (
        first.shape,
        first.stride(),
    )
