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

    module: nn.Module
    is_own: bool
    """Whether the keys belong to the sequence of the queries; False for cross attention."""
    cache: Any
    """Cache of keys; None without one."""

    @classmethod
    def of(cls, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> KeyOrigin:
        """Read the origin from the arguments of the module's forward."""
        kind: Any = type(module)
        names = parameters(kind)
        given = dict(zip(names, args, strict=False)) | kwargs
        others = [given.get(name) for name in OTHERS if name in names]
        if "query" in names and "key" in names:
            others.append(given.get("key"))
        first = next(iter(given.values()), None)
        is_own = not any(isinstance(other, Tensor) and other is not first for other in others)
        found = next((given[name] for name in CACHES if given.get(name) is not None), None)
        return cls(module, is_own, found)

    def check(self, layer: str, keys: int) -> None:
        """Raises ValueError for cross attention, and if the cache has dropped keys."""
        if not self.is_own:
            raise ValueError(
                f"{layer or 'the model'} attends to another sequence, and traces and edits read "
                "self-attention: watch a part that has no other, such as model.encoder"
            )
        layers = stated(self.cache, "layers")
        if not layers:
            return
        stores = layers
        number = stated(self.module, "layer_idx")
        if number is not None:
            # layers beyond those of the cache read the keys of an earlier one
            stores = layers[number : number + 1] or layers
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
