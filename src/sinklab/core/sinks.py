"""Rules that say which keys are sinks, and received attention as they read it.

A rule judges the mean weight of a key, the attention that it receives over the number of queries
that see it, so that causal maps and cached steps are read as full ones are. Keys are on the last
axis of numpy arrays or torch tensors; NaN marks keys that do not exist.
"""

# S keys; "..." stands for any axes in front of the key axis
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol, TypeVar

import numpy as np

from sinklab.core.errors import Checked, check_tensor, limited
from sinklab.core.registry import rules

Array = TypeVar("Array")

STATES = ("masked", "committed", "prompt")
"""Names of the states by code: to be written, written, given; padding has the code -1."""
MASKED, COMMITTED, PROMPT = range(3)

SCALES = ("sum", "mean", "percent", "zscore")
LEAST_QUERIES = 8
"""fewer queries say nothing about a key that others do not see"""
UNSEEN = 1e-12
"""queries of a key that none sees, to avoid division by 0"""
SINGLE_ROW = 3.0
"""epsilon of the published figures: seen by fewer than S / epsilon queries, a key needs only one"""


class Rule(Protocol):
    """Rule for sinks; a registered one may be a function.

    One that is a bound on a_j may have ``threshold(seen_by)``, which figures draw.
    """

    def __call__(self, received: Any, seen_by: Any, exists: Any) -> Any:
        """Flags of sinks, boolean (..., key), of the kind given (see `namespace`).

        Args:
            received: (..., key) column sums a_j; an even share is 1.
            seen_by: number of queries that see each key, broadcastable to ``received``; 1e-12 for a
                key that none sees, so that ``received / seen_by`` is defined.
            exists: (..., key) keys to be judged; others may be anything.
        """
        ...


@rules.register("excess")
@dataclass(frozen=True)
class Excess(Checked):
    """A sink receives more than the mean of other keys plus ``epsilon`` (Rulli et al., Eq. 3).

    If S queries see every key, the column *sum* a_j has mean 1, and the rule is a_j > 1 + epsilon
    (S-1)/S. Otherwise it is S (w_j - e_j) > epsilon (S-1)/S: w_j is the mean weight of the key, e_j
    its `even_weight`, S the most queries that see any key. As printed (column *mean*) epsilon = 3
    can never fire.
    """

    epsilon: float = limited(3.0, at_least=0, remedy="it is a distance above the mean")
    """how far above the mean of the others, in units of ``scale`` """
    scale: str = limited("sum", one_of=SCALES)
    """"sum" (default), "mean" (literal Eq. 3), "percent" (of the mean), "zscore" (deviations)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale == "mean" and self.epsilon >= 1:
            warnings.warn(
                f"The column mean lies between 0 and 1, so epsilon={self.epsilon} on scale 'mean' "
                "can never fire. "
                "Use scale='sum' (the reading that fits the published figures) or epsilon < 1.",
                UserWarning,
                stacklevel=3,
            )

    def threshold(self, seen_by: Any) -> Any:
        """The a_j to exceed if so many queries see every key. Raises ValueError for "zscore"."""
        if self.scale == "zscore":
            raise ValueError(
                "The z-score threshold depends on the scores, not on S alone. Use find_sinks."
            )
        unit = {"sum": 1.0, "mean": seen_by, "percent": seen_by / 100}[self.scale]
        return 1 + self.epsilon * unit * (seen_by - 1) / seen_by

    def __call__(self, received: Any, seen_by: Any, exists: Any) -> Any:
        """Flags of keys that exceed the threshold."""
        if self.scale == "zscore":
            return self._stands_out(received, seen_by, exists)
        limit = self.threshold(seen_by)
        if not same_count(seen_by):
            xp = namespace(seen_by)
            most = xp.amax(seen_by, -1)[..., None]
            weight = even_weight(seen_by) + (self.threshold(most) - 1) / most
            limit = xp.where(has_unequal_counts(seen_by), weight * seen_by, limit)
        return received > limit

    def _stands_out(self, received: Any, seen_by: Any, exists: Any) -> Any:
        xp = namespace(received)
        share = where_exists(exists, received)
        if not same_count(seen_by):
            share = share / seen_by
        count = exists.sum(-1, dtype=share.dtype)[..., None].clip(1)
        mean = share.sum(-1)[..., None] / count
        apart = where_exists(exists, share - mean)
        deviation = (xp.linalg.vecdot(apart, apart)[..., None] / count) ** 0.5
        # where all shares are equal, rounding leaves a deviation near 1e-8
        return apart > xp.where(deviation > 1e-6 * mean, self.epsilon * deviation, float("inf"))


@rules.register("gu")
@dataclass(frozen=True)
class Gu(Checked):
    """A sink gets a mean weight above ``weight`` from its queries (Gu et al. 2410.10781, 3.2).

    The mean is over the queries that see the key: T - k + 1 for the k-th of T under a causal mask.
    """

    weight: float = limited(0.3, at_least=0, below=1, remedy="it is a mean attention weight")
    """mean attention weight to exceed, between 0 and 1"""

    def threshold(self, seen_by: Any) -> Any:
        """The a_j to exceed if so many queries see the key."""
        return self.weight * seen_by

    def __call__(self, received: Any, seen_by: Any, exists: Any) -> Any:
        """Flags of keys that exceed the threshold."""
        return received > self.threshold(seen_by)


DEFAULT = Excess(3.0)
"""The rule of the published figures."""


def find_sinks(received: Array, rule: Rule | str, seen_by: Any, positions: Any = None) -> Array:
    """Sinks under a rule: a boolean array of the shape and kind of ``received``.

    Args:
        received: (..., key) column sums a_j, numpy array or torch tensor.
        rule: an object that is called as `Rule` says, or its text such as "excess:epsilon=5".
        seen_by: number of queries that may see each key, broadcastable to ``received``
            (``recording.array("visible")[:, :, None, None]``); the number of keys if all see all.
        positions: number of canvas positions, for `even_share`: needed under caches.

    Raises:
        ValueError: for shapes that do not fit, an object that is no rule, and if a rule refuses.
    """
    xp = namespace(received)
    a: Any
    if seen_by is None:
        raise ValueError(
            "seen_by says how many queries may see each key: pass recording.visible, or the number "
            "of keys where all queries see all keys"
        )
    if np.ndim(seen_by) == 0:
        given: Any = received
        seen_by = xp.zeros((1,) * max(np.ndim(given), 1)) + float(seen_by)
    a, seen_by = even_share(received, seen_by, positions)
    exists = (seen_by > 0) & ~xp.isnan(a)
    return apply_rule(a, rules.parse(rule, Callable), seen_by, exists)


def apply_rule(received: Any, rule: Rule, seen_by: Any, exists: Any) -> Any:
    """Result of `find_sinks` for scores that `even_share` scaled, and keys that are there."""
    xp = namespace(received)
    exists = exists & is_judgeable(seen_by)
    found = rule(received, xp.where(seen_by > 0, seen_by, xp.zeros_like(seen_by) + UNSEEN), exists)
    words = "compare received with a bound: received > …"
    check_tensor(f"what the rule {rule} returns", found, received.shape, "bool", words)
    return where_exists(exists, found, False)


def namespace(array: Any) -> ModuleType:
    """numpy, or torch for a tensor: functions used here have the same names in both."""
    if type(array).__module__.startswith("torch"):
        import torch

        return torch
    return np


def at_least_single(array: Any, xp: ModuleType) -> Any:
    """An array or tensor in at least single precision: sums of float16 overflow."""
    if xp is np:
        array = np.asarray(array)
        if array.dtype in (np.float32, np.float64):
            return array
        return array.astype(np.float32)
    array = xp.as_tensor(array).detach()
    return array.to(xp.promote_types(array.dtype, xp.float32))


def even_share(received: Array, seen_by: Any, positions: Any = None) -> tuple[Array, Any]:
    """(received, seen_by) scaled as if every position had run as a query: under a cache only some
    do, and an even share would not be 1.

    Both are multiplied by ``positions`` (``received`` without its key axis) over the most queries
    that see any one key. Raises ValueError when shapes do not fit.
    """
    xp = namespace(received)
    a = at_least_single(received, xp)
    seen = broadcast_like(at_least_single(seen_by, xp), a, "seen_by")
    if positions is None:
        return a, seen
    count = broadcast_like(at_least_single(positions, xp)[..., None], a, "positions")
    ran = xp.amax(xp.nan_to_num(seen), -1)[..., None]
    here = (ran > 0) & (count > 0)
    factor = xp.where(here, count, xp.ones_like(count)) / xp.where(here, ran, xp.ones_like(ran))
    # on a GPU the question would wait for the device
    if xp is np and bool((factor == 1).all()):
        return a, seen
    return a * factor, seen * factor


def broadcast_like(array: Any, a: Any, name: str) -> Any:
    """``array`` in the dtype and on the device of ``a``. Raises ValueError unless it broadcasts."""
    if namespace(a) is np:
        array = array.astype(a.dtype, copy=False)
    else:
        array = array.to(a.device, a.dtype)
    shape = tuple(array.shape)
    whole = tuple(a.shape)
    with suppress(ValueError):
        if np.broadcast_shapes(shape, whole) == whole:
            return array
    where = "received"
    if name == "positions":
        where = "received without its key axis"
        shape = shape[:-1]
        whole = whole[:-1]
    raise ValueError(
        f"{name} must broadcast to {where}: shapes {shape} and {whole}. Insert the missing axes, "
        f"for example {name}[:, None, None]."
    )


def same_count(seen_by: Any) -> bool:
    """Whether one number of queries stands for all keys: a number, or a last axis of one."""
    return np.shape(seen_by)[-1:] in ((), (1,))


def has_unequal_counts(seen_by: Any) -> Any:
    """Whether keys of a row are seen by different numbers, boolean (..., 1); unseen keys apart."""
    xp = namespace(seen_by)
    seen = xp.nan_to_num(seen_by)
    most = xp.amax(seen, -1)[..., None]
    return ((seen > UNSEEN) & (seen < most)).any(-1)[..., None]


def is_judgeable(seen_by: Any) -> Any:
    """Keys (..., key) that enough queries see: any number if all keys of a row have as many, else
    (a causal mask) max(8, S / 3), S being the most that see any key.
    """
    xp = namespace(seen_by)
    seen = xp.nan_to_num(seen_by)
    least = (xp.amax(seen, -1)[..., None] / SINGLE_ROW).clip(LEAST_QUERIES)
    return (seen > UNSEEN) & (~has_unequal_counts(seen_by) | (seen >= least))


def even_weight(seen_by: Any) -> Any:
    """e_j (..., key): the weight of a key if each query that sees it weighed its keys alike, the
    mean of 1 / (keys that the query sees); NaN if none sees it.

    Counts say it under a causal or block-causal mask: the q-th query from the end sees the keys
    that at least q see.
    """
    xp = namespace(seen_by)
    seen = xp.nan_to_num(seen_by)
    order = xp.argsort(seen)
    place = xp.argsort(order)
    if xp is np:
        take = np.take_along_axis
    else:
        take = xp.take_along_dim
    rising = take(seen, order, -1)
    steps = xp.diff(rising, 1, -1, rising[..., :1] * 0)
    numbers = xp.arange(seen.shape[-1], 0, -1, device=seen.device)
    total = take((steps / numbers).cumsum(-1), place, -1)
    divisor = xp.where(seen > UNSEEN, seen, xp.zeros_like(seen) + float("nan"))
    return xp.where(has_unequal_counts(seen_by), total, xp.ones_like(seen)) / divisor


def where_exists(exists: Any, a: Array, other: float = 0.0) -> Array:
    """``a`` if ``exists``, else ``other``; no copy of numpy's ``a`` if everything exists."""
    xp = namespace(a)
    if xp is np and exists.all():
        return a
    return xp.where(exists, a, xp.zeros_like(a) + other)
