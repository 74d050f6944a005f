"""What the counting analyses share: counts that add up over samples, their ratios, and received attention by slabs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

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


def slabs(received: Any, visible: Any, positions: Any, axes: int) -> Iterator[tuple[tuple[int, ...], Any, Any]]:
    """Index, ``even_share`` received and visible of every slab of the last ``axes`` axes, in numpy.

    Going slab by slab keeps the working memory at a few slabs, however long the run is.
    """
    # A tensor of half precision has no numpy kind where it is bfloat16, so tensors widen whole, arrays slab by slab.
    whole = widened(received) if hasattr(received, "detach") else np.asarray(received)
    seen = None if visible is None else fitted(widened(visible), whole, np, "visible")
    count = None if positions is None else fitted(widened(positions)[..., None], whole, np, "positions")
    seen = None if seen is None else _leading(seen, whole.shape, axes)
    count = None if count is None else _leading(count, whole.shape, axes)
    for index in np.ndindex(whole.shape[:-axes]):
        part_seen = None if seen is None else seen[index]
        part_count = None if count is None else count[index][..., 0]
        yield (index, *even_share(whole[index], part_seen, part_count))


def _leading(array: np.ndarray, shape: tuple[int, ...], axes: int) -> np.ndarray:
    """``array`` with the leading axes of ``shape``; the last ``axes`` keep their length 1, which saves work."""
    array = array.reshape((1,) * (len(shape) - array.ndim) + array.shape)
    return np.broadcast_to(array, (*shape[:-axes], *array.shape[-axes:]))
