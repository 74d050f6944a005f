"""What the counting analyses share: counts that add up over samples, their ratios, and received attention by slabs."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import numpy as np

from sinklab.sinks.normalize import even_share, fitted, main_sink, only, widened
from sinklab.sinks.rules import Rule, flagged, threshold


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


class Found(NamedTuple):
    """The sinks of a slab under a rule. They are few: what is asked of them is found from their places."""

    flags: np.ndarray
    """(..., key)"""
    cells: np.ndarray
    """flat places of those set, rising"""
    number: np.ndarray
    """(...) how many a head has"""
    taken: np.ndarray
    """(...) what they receive together"""

    @classmethod
    def of(cls, flags: np.ndarray, received: np.ndarray) -> Self:
        """From flags."""
        cells, shape = np.flatnonzero(flags), flags.shape[:-1]
        row = cells // flags.shape[-1]
        sums = (np.bincount(row, of, math.prod(shape)).reshape(shape) for of in (None, received.reshape(-1)[cells]))
        return cls(flags, cells, *sums)

    def among(self, other: np.ndarray) -> np.ndarray:
        """Which of the sinks are set in ``other`` flags, in the order of ``cells``."""
        return other.reshape(-1)[self.cells]


@dataclass(eq=False)
class Slab:
    """Received attention on the last three axes, or fewer where there are no more, at one place of those before.

    What several counters ask of it is found once.
    """

    at: tuple[int, ...]
    received: np.ndarray
    """a_j as `even_share` scales it"""
    visible: np.ndarray
    """queries that see the key, broadcastable to it"""
    _found: list[tuple[Rule, Any, Found]] = field(default_factory=list)

    @cached_property
    def whole(self) -> bool:
        """Whether every key exists."""
        return bool((self.visible > 0).all() and not np.isnan(self.received.max(initial=0)))

    @cached_property
    def exists(self) -> np.ndarray:
        """Keys that some query sees."""
        if self.whole:
            return np.ones(self.received.shape, dtype=bool)
        return ~np.isnan(self.received) & (self.visible > 0)

    @cached_property
    def known(self) -> np.ndarray:
        """Received attention, 0 where the key does not exist."""
        return only(self.exists, self.received)

    @cached_property
    def total(self) -> np.ndarray:
        """(...) what all keys receive."""
        # as a product, quicker than as a sum
        return np.asarray(self.known @ np.ones(self.known.shape[-1], self.known.dtype))

    @cached_property
    def main(self) -> np.ndarray:
        """(...) key that receives most, -1 where none exists."""
        return self.received.argmax(-1) if self.whole else main_sink(only(self.exists, self.received, np.nan))

    @cached_property
    def ranked(self) -> np.ndarray:
        """(layer, head * key) all scores of a layer, rising, NaN last: of any threshold, a search tells the number."""
        return ranked(only(self.exists, self.received, np.nan))

    @cached_property
    def queries(self) -> Any:
        """How many queries see a key, where that is one number for all that exist; None where it is not."""
        counts = self.visible[self.visible > 0]
        return counts[0] if counts.size and (counts == counts[0]).all() else None

    def sinks(self, rule: Rule) -> np.ndarray:
        """Which keys are sinks under the rule."""
        return self.found(rule).flags

    def found(self, rule: Rule) -> Found:
        """The sinks under the rule, and what is counted of them."""
        # rules need not be hashable
        for known, _, found in self._found:
            if known == rule:
                return found
        bound, received = np.nan if self.queries is None else threshold(rule, self.queries), self.received
        more = next((found.cells for _, lower, found in self._found if lower <= bound), None)
        if more is None:
            same = self.whole and self.queries is not None
            flags = flagged(received, rule, self.visible[..., :1] if same else self.visible, self.exists)
        else:
            # what exceeds a bound exceeds a lower one
            flags = np.zeros(received.shape, dtype=bool)
            flags.reshape(-1)[more] = received.reshape(-1)[more] > bound
        self._found.append((rule, bound, Found.of(flags, received)))
        return self._found[-1][2]


class Counter(Protocol):
    """Something that is found slab by slab, so that one pass over the attention finds many."""

    def add(self, slab: Slab) -> None:
        """Count what the next slab has."""
        ...


def one_pass(slabs: Iterable[Slab], *counters: Counter) -> None:
    """Give every slab to every counter."""
    # Once a block of this size was freed, glibc keeps smaller ones: else every step would fault in its pages anew.
    np.empty(1 << 24, dtype=np.uint8)
    for slab in slabs:
        for counter in counters:
            counter.add(slab)


def ranked(scores: np.ndarray) -> np.ndarray:
    """Scores on the last two axes in rising order, as one axis."""
    return np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)


def below(rising: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """(..., bound) how many of the rising numbers (..., N) lie below each bound, in double precision (bound,).

    Below NaN is every number.
    """
    # the least number of their own precision that is no less
    own = bounds.astype(rising.dtype)
    own = np.where(own < bounds, np.nextafter(own, rising.dtype.type(np.inf)), own)
    found = [row.searchsorted(own) for row in rising.reshape(-1, rising.shape[-1])]
    return np.array(found).reshape(*rising.shape[:-1], len(own))


def counted(flags: np.ndarray) -> np.ndarray:
    """Number of flags that are set on the last axis; five times as quick as their sum."""
    return np.bitwise_count(np.packbits(flags, axis=-1)).sum(-1, dtype=np.int64)


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
        ran = None if count is None else count[index][..., 0]
        yield Slab(index, *even_share(whole[index], None if seen is None else seen[index], ran))
