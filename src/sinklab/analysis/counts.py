"""What the counting analyses share: counts that add up over samples, their ratios, and received attention by slabs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from sinklab.sinks.normalize import even_share, fitted, widened


@dataclass(frozen=True)
class Counts:
    """Base of frozen dataclasses of counts: the sum of two adds numbers, arrays and tuples of numbers field by field.

    Raises ValueError for two that count different things: unequal fields of ``same``, or different numbers of layers.
    """

    same: ClassVar[tuple[str, ...]] = ()
    """Fields that are no counts: names, units, bins."""

    def __add__(self, other: Self) -> Self:
        mine, theirs = ({part.name: getattr(one, part.name) for part in fields(one)} for one in (self, other))
        for name in self.same:
            if not np.array_equal(mine.pop(name), theirs.pop(name)):
                texts = " and ".join(_as_text(getattr(one, name)) for one in (self, other))
                raise ValueError(f"{type(self).__name__} add up when they have the same {name}: got {texts}.")
        for name, count in mine.items():
            if np.shape(count) != np.shape(theirs[name]):
                layers = f"{len(count)} and {len(theirs[name])} layers"
                raise ValueError(f"{type(self).__name__} add up when they have the same layers: got {layers}.")
        return replace(self, **{name: _sum(count, theirs[name]) for name, count in mine.items()})


def _sum(one: Any, other: Any) -> Any:
    return tuple(np.add(one, other).tolist()) if isinstance(one, tuple) else one + other


def _as_text(value: Any) -> str:
    return f"{len(value)} from {value[0]:g} to {value[-1]:g}" if isinstance(value, np.ndarray) else repr(value)


def ratio(top: Any, bottom: Any) -> Any:
    """``top / bottom`` element by element, NaN where bottom is 0."""
    return top / np.where(np.asarray(bottom) > 0, bottom, np.nan)


def share(top: str, bottom: str) -> Any:
    """A property: the ratio of two counts of an object, a float or an array; NaN where the second is 0."""

    def value(counts: Any) -> Any:
        found = ratio(getattr(counts, top), getattr(counts, bottom))
        return found if np.ndim(found) else float(found)

    return property(value)


class Slab(NamedTuple):
    """Received attention on the last three axes, or fewer where there are no more, at one place of those before."""

    at: tuple[int, ...]
    received: np.ndarray
    """a_j as `even_share` scales it"""
    visible: np.ndarray
    """queries that see the key, broadcastable to it"""

    @property
    def exists(self) -> np.ndarray:
        """Keys that some query sees."""
        return ~np.isnan(self.received) & (self.visible > 0)


def slabs(received: Any, visible: Any = None, positions: Any = None) -> Iterator[Slab]:
    """Every slab, in numpy: going slab by slab keeps the working memory at a few, however long the run is."""
    # A tensor of half precision has no numpy kind where it is bfloat16, so tensors widen whole, arrays slab by slab.
    whole = widened(received) if hasattr(received, "detach") else np.asarray(received)
    lead, axes = whole.shape[:-3], min(3, whole.ndim)

    def by_slab(given: Any, name: str) -> np.ndarray:
        array = np.array(fitted(given, whole, np, name), copy=None, ndmin=whole.ndim)
        return np.broadcast_to(array, (*lead, *array.shape[-axes:]))

    seen = None if visible is None else by_slab(widened(visible), "visible")
    count = None if positions is None else by_slab(widened(positions)[..., None], "positions")
    for index in np.ndindex(lead):
        counted = None if count is None else count[index][..., 0]
        yield Slab(index, *even_share(whole[index], None if seen is None else seen[index], counted))
