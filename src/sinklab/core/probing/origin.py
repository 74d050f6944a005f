"""Origin of the keys of an attention call: the sequence of its queries or another one, and the
cache.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import cache
from typing import Any

from torch import Tensor, nn

from sinklab.core.compat import has_windows, seen_length, stated

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
    """Origin of the keys that an attention call reads, by the arguments of its module, and never by
    their number.

    Raises ValueError in `first_position` for a cache that has dropped keys and does not say which.
    """

    is_own: bool = True
    """Whether the keys belong to the sequence of the queries; False for cross attention."""
    cache: Any = None
    """Cache of the keys of the positions before; None without one."""
    layer_idx: int | None = None
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

    def first_position(self, layer: str, keys: int) -> int:
        """Position in the text of the first of this many keys: above 0 if a cache has dropped those
        before it.
        """
        layers = stated(self.cache, "layers")
        if not self.is_own or not layers or self.layer_idx is None:
            if self.is_own and has_windows(self.cache):
                raise ValueError(
                    f"{layer}: the cache {type(self.cache).__name__} has sliding windows, but the "
                    "layer has no layer_idx to look its own up by: run it with use_cache=False"
                )
            return 0
        # layers beyond those of the cache read the keys of an earlier one
        stores = layers[self.layer_idx : self.layer_idx + 1] or layers
        length = max(seen_length(store) for store in stores)
        if length <= keys:
            return 0
        if not any(stated(store, "is_sliding") for store in stores):
            raise ValueError(
                f"{layer}: the cache {type(stores[0]).__name__} has seen {length} positions and "
                f"gives {keys} keys, and does not say of which: traces and edits read caches that "
                "keep every key, and sliding windows (is_sliding); run it with another cache"
            )
        return length - keys


OWN = KeyOrigin()


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
