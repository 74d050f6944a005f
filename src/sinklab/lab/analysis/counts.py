"""Shared parts of the counting analyses: counts that add up over samples, their ratios, and
received attention by slabs.
"""

# T steps, L layers, H heads, K keys, N scores
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Protocol, Self

import numpy as np

from sinklab.core.registry import rules
from sinklab.core.sinks import (
    Array,
    Rule,
    apply_rule,
    at_least_single,
    broadcast_like,
    even_share,
    is_judgeable,
    namespace,
    where_exists,
)
from sinklab.lab.analysis.rules import Top, threshold

SLAB = 1 << 21
"""numbers that steps taken together have at most: in single precision they stay in the cache of a
processor
"""
LAST = int(np.finfo(np.float16).max.view(np.uint16))
"""the bits of the greatest number of half precision; with more it is below 0, infinite or NaN"""


def widened(array: Any) -> np.ndarray:
    """Numbers of a recording in at least single precision, in numpy; from half precision by its
    bits, in half of numpy's time.
    """
    xp = namespace(array)
    if xp is not np:
        return at_least_single(array, xp).cpu().numpy()
    array = np.asarray(array)
    if array.dtype != np.float16:
        return at_least_single(array, np)
    codes = array.view(np.uint16)
    if codes.max(initial=0) > LAST:
        return array.astype(np.float32)
    # the bits in their places give the number up to a power of two
    bits = np.asarray(np.multiply(codes, 1 << 13, dtype=np.uint32)).view(np.float32)
    bits *= np.float32(2.0**112)
    return bits


@dataclass(frozen=True)
class Counts:
    """Base of frozen dataclasses of counts: the sum of two adds numbers and arrays field by field.

    Raises ValueError for two that count different things: unequal fields of ``same``, or different
    numbers of layers.
    """

    same: ClassVar[tuple[str, ...]] = ()
    """Fields that are no counts: names, units, bins."""

    def __add__(self, other: Self) -> Self:
        mine, theirs = (
            {part.name: getattr(one, part.name) for part in fields(one)} for one in (self, other)
        )
        for name in self.same:
            if not np.array_equal(mine.pop(name), theirs.pop(name)):
                texts = " and ".join(_as_text(getattr(one, name)) for one in (self, other))
                raise ValueError(
                    f"{type(self).__name__} add up when they have the same {name}: got {texts}."
                )
        for name, count in mine.items():
            if np.shape(count) != np.shape(theirs[name]):
                layers = f"{len(count)} and {len(theirs[name])} layers"
                raise ValueError(
                    f"{type(self).__name__} add up when they have the same layers: got {layers}."
                )
        return replace(self, **{name: count + theirs[name] for name, count in mine.items()})


def _as_text(value: Any) -> str:
    return (
        f"{len(value)} from {value[0]:g} to {value[-1]:g}"
        if isinstance(value, np.ndarray)
        else repr(value)
    )


def ratio(top: Any, bottom: Any) -> Any:
    """``top / bottom`` element by element, NaN if bottom is 0."""
    return top / np.where(np.asarray(bottom) > 0, bottom, np.nan)


def mean_weight(received: Any, visible: Any) -> Any:
    """w_j (..., key): the mean weight that a key gets from the queries that may see it; NaN if it
    is not defined.

    Of a causal map it is the alpha of Gu et al. (2410.10781, 3.2), and if all queries see every key
    the column mean of Rulli et al.; see `is_judgeable` for the keys that have none.
    """
    xp = namespace(received)
    a = at_least_single(received, xp)
    seen = broadcast_like(at_least_single(visible, xp), a, "visible")
    nothing = xp.zeros_like(seen) + float("nan")
    return a / xp.where(is_judgeable(seen), seen, nothing)


def main_sink(received: Array, visible: Any = None) -> Array:
    """Index of the strongest key, over the last axis (..., key) -> (...); -1 if no key is defined.

    The strongest key has the greatest mean weight (`mean_weight`); without ``visible`` all queries
    see every key, and it is the one that receives most. numpy array or torch tensor, the same kind
    out; ties go to the earlier key. A copy of ``received`` or two. Raises ValueError when there is
    no key.
    """
    xp = namespace(received)
    a: Any
    if visible is None:
        a = at_least_single(received, xp)
    else:
        a = mean_weight(received, visible)
    if a.shape[-1] == 0:
        raise ValueError(f"main_sink needs at least one key: received has shape {tuple(a.shape)}.")
    position = a.argmax(-1)
    if xp is np and not np.isnan(np.take_along_axis(a, position[..., None], -1)).any():
        # argmax stops at NaN, so there is none
        return position
    absent = xp.isnan(a)
    position = xp.where(absent, xp.zeros_like(a) - float("inf"), a).argmax(-1)
    return xp.where(absent.all(-1), xp.zeros_like(position) - 1, position)


def share(top: str, bottom: str) -> Any:
    """A property: the ratio of two counts of an object, a float or an array; NaN if the second is
    0.
    """

    def value(counts: Any) -> Any:
        found = ratio(getattr(counts, top), getattr(counts, bottom))
        return found if np.ndim(found) else float(found)

    return property(value)


@dataclass(eq=False)
class Found:
    """The sinks of a slab under a rule. They are few: statistics of them are found from their
    places.
    """

    received: np.ndarray
    """(..., key) of the slab"""
    cells: np.ndarray
    """flat places of the sinks, rising"""

    @cached_property
    def flags(self) -> np.ndarray:
        """(..., key)"""
        flags = np.zeros(self.received.shape, dtype=bool)
        flags.reshape(-1)[self.cells] = True
        return flags

    @cached_property
    def number(self) -> np.ndarray:
        """(...) how many a head has"""
        return self.by_head(None)

    @cached_property
    def taken(self) -> np.ndarray:
        """(...) attention that they receive together"""
        return self.by_head(self.received.reshape(-1)[self.cells])

    def by_head(self, weights: np.ndarray | None) -> np.ndarray:
        """(...) sum of a weight of every sink; their number for None."""
        *shape, keys = self.received.shape
        return np.bincount(self.cells // keys, weights, math.prod(shape)).reshape(shape)


@dataclass(eq=False)
class Slab:
    """Received attention of successive steps of one sample. Statistics that several counters need
    are computed once.
    """

    at: tuple[Any, ...]
    """place on the axes before the last three: a slice of the steps, behind the numbers of the
    others
    """
    received: np.ndarray
    """(step, layer, head, key) a_j as `even_share` scales it; axes that were not there have one
    place
    """
    visible: np.ndarray
    """queries that see the key, broadcastable to it, for each step"""
    halves: np.ndarray | None = None
    """``received`` as it was stored in half precision, before one ``factor`` scaled it; None if it
    was not
    """
    factor: Any = 1.0
    _found: list[tuple[Rule, Any, Found]] = field(default_factory=list)

    @cached_property
    def whole(self) -> bool:
        """Whether every key is there and defined."""
        return bool(is_judgeable(self.visible).all() and not np.isnan(self.received.max(initial=0)))

    @cached_property
    def exists(self) -> np.ndarray:
        """Keys that enough queries see to be judged (`is_judgeable`)."""
        if self.whole:
            return np.ones(self.received.shape, dtype=bool)
        return ~np.isnan(self.received) & is_judgeable(self.visible)

    @cached_property
    def known(self) -> np.ndarray:
        """Received attention, 0 if the key does not exist."""
        return where_exists(self.exists, self.received)

    @cached_property
    def total(self) -> np.ndarray:
        """(step, layer, head) attention that all keys receive, also those that too few queries see
        to be judged.
        """
        known = (
            self.known
            if self.whole
            else where_exists(~np.isnan(self.received) & (self.visible > 0), self.received)
        )
        # as a product, quicker than as a sum
        return np.asarray(known @ np.ones(known.shape[-1], known.dtype))

    @cached_property
    def score(self) -> np.ndarray:
        """Mean weight of the keys in multiples of an even share, S w_j with S the most queries that
        see any key; NaN if the key does not exist. If all keys are seen by as many queries, it is
        the attention they receive.
        """
        if self.queries is not None:
            return where_exists(self.exists, self.received, np.nan)
        most = np.fmax.reduce(self.visible, axis=-1, keepdims=True, initial=0)
        return where_exists(self.exists, mean_weight(self.received, self.visible) * most, np.nan)

    @cached_property
    def main(self) -> np.ndarray:
        """(step, layer, head) strongest key, -1 if none exists."""
        return main_sink(self.score)

    def at_main(self, values: np.ndarray) -> np.ndarray:
        """(step, layer, head) the value at the strongest key of every head, from (step, layer,
        head, key); that of the first key if none exists.
        """
        flat = values.reshape(-1)
        main = np.maximum(self.main, 0).reshape(-1)
        return flat[np.arange(0, flat.size, values.shape[-1]) + main].reshape(self.main.shape)

    @cached_property
    def tally(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Rising scores (value,) from 0, and how many keys have this one or less, (layer, value);
        None if scores were not stored in half precision, which has few values.
        """
        if self.halves is None or not self.whole or self.queries is None:
            return None
        codes_LTN = self.halves.view(np.uint16).reshape(*self.halves.shape[:2], -1).swapaxes(0, 1)
        most = int(codes_LTN.max(initial=0))
        if most > LAST:
            return None
        upto_LV = np.empty((len(codes_LTN), most + 1), dtype=np.int64)
        for codes_TN, upto_V in zip(codes_LTN, upto_LV, strict=True):
            np.cumsum(np.bincount(codes_TN.ravel(), minlength=most + 1), out=upto_V)
        codes = np.arange(most + 1, dtype=np.uint16)
        return codes.view(np.float16).astype(np.float32) * self.factor, upto_LV

    @cached_property
    def queries(self) -> Any:
        """`alike`, if that is a number at every step; None otherwise."""
        found = alike(self.visible)
        return None if np.isnan(found).any() else found

    def sinks(self, rule: Rule | str) -> np.ndarray:
        """Flags of the keys that are sinks under the rule."""
        return self.found(rule).flags

    def found(self, rule: Rule | str) -> Found:
        """The sinks under the rule, or the rule of this text, and the counts of them."""
        named: Any = rules.parse(rule, object)
        # rules need not be hashable
        for known, _, found in self._found:
            if known == named:
                return found
        queries, received = self.visible if self.queries is None else self.queries, self.received
        bound: Any = (
            np.nan
            if self.queries is None
            else np.broadcast_to(threshold(named, queries), queries.shape)
        )
        above = (found.cells for _, lower, found in self._found if np.all(lower <= bound))
        more = min(above, key=len, default=None)
        flags = None
        if more is not None:
            # a value above a bound is above a lower one
            limit = (
                bound.flat[0]
                if (bound == bound[0]).all()
                else bound.ravel()[more // received[0].size]
            )
            cells = more[received.reshape(-1)[more] > limit]
        elif named == Top(1) and self.queries is not None:
            # the strongest key of every head, which is known without another pass
            heads = np.flatnonzero(self.main >= 0)
            cells = heads * received.shape[-1] + self.main.reshape(-1)[heads]
        else:
            flags = apply_rule(received, named, queries, self.exists)
            cells = np.flatnonzero(flags)
        found = Found(received, cells)
        if flags is not None:
            found.flags = flags
        self._found.append((named, bound, found))
        return found


class Counter(Protocol):
    """Something that is found slab by slab, so that one pass over the attention finds many."""

    def add(self, slab: Slab) -> None:
        """Count the next slab."""
        ...


def one_pass(slabs: Iterable[Slab], *counters: Counter) -> None:
    """Give every slab to every counter."""
    # Once a block of this size was freed, glibc keeps smaller ones: else every step would fault in
    # its pages anew.
    np.empty(1 << 24, dtype=np.uint8)
    for slab in slabs:
        for counter in counters:
            counter.add(slab)


def counted(flags: np.ndarray) -> np.ndarray:
    """Number of flags that are set on the last axis; five times as quick as their sum."""
    return np.bitwise_count(np.packbits(flags, axis=-1)).sum(-1, dtype=np.int64)


def alike(visible: np.ndarray) -> np.ndarray:
    """(step, 1, 1, 1) the number of queries that see the keys of a step, 1 without any; NaN if it
    is not one.
    """
    some = visible > 0
    least, most = (
        of.reduce(visible, (1, 2, 3), where=some, initial=edge, keepdims=True)
        for of, edge in ((np.minimum, np.inf), (np.maximum, -np.inf))
    )
    return np.where(least < most, np.nan, np.where(most > 0, most, 1)).astype(visible.dtype)


def spans(steps: int, size: int) -> list[slice]:
    """The steps, of ``size`` numbers each, as many together as `SLAB` lets."""
    stride = max(1, SLAB // max(1, size))
    return [slice(start, min(start + stride, steps)) for start in range(0, steps, stride)]


def apart(
    at: tuple[Any, ...],
    received: np.ndarray,
    visible: np.ndarray,
    stored: np.ndarray | None = None,
    factor_T: Any = (1.0,),
) -> Iterator[Slab]:
    """Slabs of successive steps: steps at which all keys are seen by one number of queries are
    apart from the others.

    stored: ``received`` as it was read, before ``factor_T`` scaled every step.
    """
    is_half = stored is not None and stored.dtype == np.float16 and np.ptp(factor_T) == 0
    uneven_T = np.isnan(alike(visible)).ravel()
    cuts = [0, *(np.flatnonzero(uneven_T[1:] != uneven_T[:-1]) + 1).tolist(), len(received)]
    for start, end in pairwise(cuts):
        steps = slice(at[-1].start + start, at[-1].start + end)
        slab = Slab((*at[:-1], steps), received[start:end], visible[start:end])
        if is_half and stored is not None:
            slab.halves, slab.factor = stored[start:end], factor_T[0]
        yield slab


def slabs(received: Any, visible: Any = None, positions: Any = None) -> Iterator[Slab]:
    """Every slab, in numpy: going slab by slab keeps the working memory at a few, however long the
    run is.
    """
    # A tensor of half precision has no numpy kind if it is bfloat16, so tensors widen whole,
    # arrays slab by slab.
    own = np.asarray(received) if namespace(received) is np else widened(received)
    whole = np.array(own, copy=None, ndmin=4)
    like = np.broadcast_to(np.zeros((), np.promote_types(own.dtype, np.float32)), own.shape)

    def by_step(given: Any, name: str) -> np.ndarray:
        array = np.array(broadcast_like(given, like, name), copy=None, ndmin=whole.ndim)
        return np.broadcast_to(array, (*whole.shape[:-3], *array.shape[-3:]))

    seen = None if visible is None else by_step(widened(visible), "visible")
    count = None if positions is None else by_step(widened(positions)[..., None], "positions")
    for index in np.ndindex(whole.shape[:-4]):
        for steps in spans(whole.shape[-4], math.prod(whole.shape[-3:])):
            at = (*index, steps)
            some = widened(whole[at])
            ran = None if count is None else count[at]
            if seen is not None:
                scaled = even_share(some, seen[at], None if ran is None else ran[..., 0])
            elif ran is not None:
                scaled = even_share(some, ran)
            else:
                # every key that is there is also a query, and sees all others
                scaled = even_share(some, (~np.isnan(some)).sum(-1)[..., None])
            yield from apart(at, *scaled)
