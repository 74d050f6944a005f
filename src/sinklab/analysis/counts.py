"""Counts of several samples that add up, and the ratios they come to."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Self

import numpy as np


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
