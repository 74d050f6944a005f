"""Rules that say which keys are sinks, and received attention as they read it.

The input is always the received attention a_j = sum over queries i of A_ij, keys on the last axis,
with any axes in front, and the number of queries that see each key: rules judge the mean weight, so
that causal maps are read as others are. NaN marks keys that do not exist (padding of ragged
arrays); they are never sinks. A rule is called with three arrays; see `Rule`, and
``examples/add_a_rule.py`` for one of your own.
"""

# N rows of keys, S keys; "..." stands for any axes in front of the key axis
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
"""Names of the states, by code: still to be written, written, given. A position that does not exist
has the code -1.
"""
MASKED = 0
"""Code of a position that is still to be written."""
COMMITTED = 1
"""Code of a position that was written at an earlier step."""
PROMPT = 2
"""Code of a position that was given."""

SCALES = ("sum", "mean", "percent", "zscore")


class Rule(Protocol):
    """Rule for sinks. Registered (``@rules.register("name")``), it can be written as text and as
    JSON.

    A function will do: ``def share(received, queries, exists, part=0.1)``. Optional: a rule that is
    a bound on a_j may have ``threshold(queries)``, the column sum to exceed if that many queries (a
    number, or an array) see the key; figures draw it.
    """

    def __call__(self, received: Any, queries: Any, exists: Any) -> Any:
        """Flags of sinks, boolean (..., key), numpy arrays or torch tensors as given (see
        `namespace`).

        Args:
            received: (..., key) column sums a_j in single or double precision; an even share is 1
                if all queries ran.
            queries: number of queries that see each key, broadcastable to ``received``: at least 1,
                and 1e-12 for a key that none sees, so that ``received / queries``, the mean weight,
                is always defined.
            exists: (..., key) keys that enough queries see to be judged; elsewhere ``received`` may
                be anything, NaN among it, and the answer there does not count.
        """
        ...


def alike(queries: Any) -> bool:
    """Whether one number of queries stands for all keys of a head: a number, or a last axis of
    one.
    """
    return np.shape(queries)[-1:] in ((), (1,))


@rules.register("excess")
@dataclass(frozen=True)
class Excess(Checked):
    """A sink receives more than the mean of other keys plus ``epsilon`` (Rulli et al., Eq. 3).

    With S queries that see every key, the column *sum* a_j has mean 1, and the rule is a_j > 1 +
    epsilon (S-1)/S. If keys are seen by different queries (a causal mask), it is S (w_j - e_j) >
    epsilon (S-1)/S, which is the same if they are not: w_j is the mean weight of the key, e_j the
    weight it would have if its queries weighed all keys they see alike (`even_weight`), and S the
    most queries that see any key. As printed (column *mean*, between 0 and 1) epsilon = 3 can never
    fire; "mean" warns then. Raises ValueError for an unknown scale or a negative epsilon.
    """

    epsilon: float = limited(3.0, at_least=0, remedy="it is a distance above the mean")
    """how far above the mean of the others, in units of ``scale`` """
    scale: str = limited("sum", one_of=SCALES)
    """"sum" (default), "mean" (literal Eq. 3), "percent" (100 times the mean), "zscore" (standard
    deviations)
    """

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

    def threshold(self, queries: Any) -> Any:
        """The a_j to exceed if ``queries`` (number or array) see every key. Raises ValueError for
        "zscore".
        """
        if self.scale == "zscore":
            raise ValueError(
                "The z-score threshold depends on the scores, not on S alone. Use find_sinks."
            )
        unit = {"sum": 1.0, "mean": queries, "percent": queries / 100}[self.scale]
        return 1 + self.epsilon * unit * (queries - 1) / queries

    def __call__(self, received: Any, queries: Any, exists: Any) -> Any:
        """Flags of keys that exceed the threshold."""
        if self.scale != "zscore":
            return received > self._limit(queries)
        xp = namespace(received)
        share = only(exists, received)
        # distances in standard deviations are the same for sums as for shares of one number
        if not alike(queries):
            share = share / queries
        count = exists.shape[-1]
        if xp is not np or not exists.all():
            count = exists.sum(-1, dtype=share.dtype)[..., None].clip(1)
        mean = share.sum(-1)[..., None] / count
        apart = only(exists, share - mean)
        deviation = (xp.linalg.vecdot(apart, apart)[..., None] / count) ** 0.5
        # Rounding leaves a deviation near 1e-8 where all shares are equal: nothing stands out of
        # such a row.
        return apart > xp.where(deviation > 1e-6 * mean, self.epsilon * deviation, float("inf"))

    def _limit(self, queries: Any) -> Any:
        """The a_j to exceed if the number of ``queries`` may differ from key to key (the last
        axis).
        """
        limit = self.threshold(queries)
        if alike(queries):
            return limit
        xp = namespace(queries)
        differs = differently_seen(queries)
        # on a GPU the question waits for the device, which costs more than to compute
        if xp is np and not differs.any():
            return limit
        most = xp.amax(queries, -1)[..., None]
        weight = even_weight(queries) + (self.threshold(most) - 1) / most
        return xp.where(differs, weight * queries, limit)


@rules.register("gu")
@dataclass(frozen=True)
class Gu(Checked):
    """A sink gets a mean weight above ``weight`` from its queries (Gu et al. 2410.10781, 3.2).

    The mean is over the queries that see the key: T - k + 1 of them for the k-th key of T under a
    causal mask, as the paper has it, and all T in a bidirectional model, in which the same weight
    keeps its meaning. Raises ValueError for a weight outside [0, 1).
    """

    weight: float = limited(0.3, at_least=0, below=1, remedy="it is a mean attention weight")
    """mean attention weight to exceed, between 0 and 1"""

    def threshold(self, queries: Any) -> Any:
        """The a_j to exceed if ``queries`` (number or array) see the key."""
        return self.weight * queries

    def __call__(self, received: Any, queries: Any, exists: Any) -> Any:
        """Flags of keys that exceed the threshold."""
        return received > self.threshold(queries)


DEFAULT = Excess(3.0)
"""The rule if none is named: that of the published figures."""


def find_sinks(received: Array, rule: Rule | str, seen_by: Any, positions: Any = None) -> Array:
    """Sinks under a rule: a boolean array of the shape of ``received`` (..., key).

    Time O(size) (Top: O(k size)). Beyond boolean arrays, "sum", "mean", "percent" and Gu need at
    most one copy of received.

    Args:
        received: column sums a_j, numpy array or torch tensor; the answer is of the same kind. Half
            precision is widened.
        rule: an object that is called as `Rule` says, or its text such as "excess:epsilon=5".
        seen_by: number of queries that may see each key, broadcastable to ``received``: of a
            recording ``recording.array("visible")[:, :, None, None]``; with full attention and
            neither padding nor added sinks the number of keys. Keys that no query sees are never
            sinks; if keys are seen by different numbers of queries, nor are those that too few see
            to be judged (`is_defined`).
        positions: number of canvas positions, broadcastable to ``received`` without its key axis.
            Given, both counts are first scaled as if all positions had run (``even_share``): needed
            under caches, which let only some queries run.

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
    a, queries = even_share(received, seen_by, positions)
    # A count that is NaN or 0 means that the key is not there for any query.
    exists = (queries > 0) & ~xp.isnan(a)
    return flagged(a, rules.parse(rule, Callable), queries, exists)


def flagged(received: Any, rule: Rule, queries: Any, exists: Any) -> Any:
    """Result of ``find_sinks`` for scores that ``even_share`` scaled, of keys that are known to
    exist.
    """
    xp = namespace(received)
    if not alike(queries):
        exists = exists & is_defined(queries)
    found = rule(received, xp.where(queries > 0, queries, xp.zeros_like(queries) + UNSEEN), exists)
    words = "compare received with a bound: received > …"
    check_tensor(f"what the rule {rule} returns", found, received.shape, "bool", words)
    return only(exists, found, False)


LAST = int(np.finfo(np.float16).max.view(np.uint16))
"""the bits of the greatest number of half precision; with more it is below 0, infinite or NaN"""


def namespace(array: Any) -> ModuleType:
    """numpy, or torch for a tensor: the functions used here have the same names in both."""
    if type(array).__module__.startswith("torch"):
        import torch

        return torch
    return np


def widened(array: Any, xp: ModuleType = np) -> Any:
    """``array`` in at least single precision: sums of float16 overflow. With xp = numpy a tensor
    becomes an array.
    """
    own = namespace(array)
    if own is np and xp is np:
        array = np.asarray(array)
        if array.dtype == np.float16:
            codes = array.view(np.uint16)
            if codes.max(initial=0) > LAST:
                return array.astype(np.float32)
            # The bits in their places give the number up to a power of two, in half of the time.
            bits = np.asarray(np.multiply(codes, 1 << 13, dtype=np.uint32)).view(np.float32)
            bits *= np.float32(2.0**112)
            return bits
        if array.dtype not in (np.float32, np.float64):
            array = array.astype(np.float32)
        return array
    import torch

    array = torch.as_tensor(array).detach()
    if array.dtype not in (torch.float32, torch.float64):
        array = array.float()
    if xp is np:
        return array.cpu().numpy()
    return array


def even_share(received: Array, visible: Any = None, positions: Any = None) -> tuple[Array, Any]:
    """(received, visible) scaled as if every position had run as a query, so that an even share is
    1 at every step.

    Under a cache, and in token by token decoding, only some positions run as queries; column sums
    are then small for want of queries, not of attention. Both counts are multiplied by positions /
    queries that ran; the queries that ran are the most that see any one key. The mean weight
    received / visible does not change.

    Args:
        received: (..., key) column sums a_j, numpy or torch (the same kind out, half precision
            widened).
        visible: number of queries that see each key, broadcastable to ``received``; None: all of
            them see every key, and all are ``positions`` or, without it, the keys that are not NaN.
        positions: number of canvas positions, broadcastable to ``received`` without its key axis;
            None: no scaling.

    Returns received of its own shape and visible broadcastable to it. Costs one copy of received
    when anything is scaled and none otherwise. Raises ValueError when the shapes do not fit.
    """
    xp = namespace(received)
    a = widened(received, xp)
    count: Any = None
    if positions is not None:
        count = fitted(widened(positions, xp)[..., None], a, xp, "positions")
    elif visible is None:
        count = (~xp.isnan(a)).sum(-1)[..., None] + xp.zeros_like(a[..., :1])
    if visible is None:
        return a, count
    seen = fitted(widened(visible, xp), a, xp, "seen_by")
    if count is None:
        return a, seen
    ran = xp.amax(xp.nan_to_num(seen), -1)[..., None]
    here = (ran > 0) & (count > 0)
    factor = xp.where(here, count, xp.ones_like(count)) / xp.where(here, ran, xp.ones_like(ran))
    # On a GPU the question waits for the device, which costs more than to multiply by one.
    if xp is np and bool((factor == 1).all()):
        return a, seen
    return a * factor, seen * factor


def fitted(array: Any, a: Any, xp: ModuleType, name: str) -> Any:
    """``array`` in the dtype and on the device of ``a``. Raises ValueError unless it broadcasts to
    it.
    """
    if xp is not np:
        array = array.to(a.device, a.dtype)
    elif array.dtype != a.dtype and a.dtype in (np.float32, np.float64):
        array = array.astype(a.dtype)
    shape = tuple(array.shape)
    whole = tuple(a.shape)
    with suppress(ValueError):
        if np.broadcast_shapes(shape, whole) == whole:
            return array
    if name == "positions":
        raise ValueError(
            f"positions must broadcast to received without its key axis: shapes {shape[:-1]} and "
            f"{whole[:-1]}. Insert the missing axes, for example positions[:, None, None]."
        )
    raise ValueError(
        f"{name} must broadcast to received: shapes {shape} and {whole}. Insert the missing axes, "
        f"for example {name}[:, :, None, None]."
    )


LEAST_QUERIES = 8
"""fewer queries than these say nothing about a key that others than they do not see"""
UNSEEN = 1e-12
"""queries of a key that none sees, to avoid division by 0"""
SINGLE_ROW = 3.0
"""the epsilon of the published figures: a key that fewer than S / epsilon queries see could be a
sink by one row
"""


def differently_seen(visible: Any) -> Any:
    """Whether the keys of a row are seen by different numbers of queries, boolean (..., 1); unseen
    keys apart.
    """
    xp = namespace(visible)
    seen = xp.nan_to_num(visible)
    most = xp.amax(seen, -1)[..., None]
    return ((seen > UNSEEN) & (seen < most)).any(-1)[..., None]


def is_defined(visible: Any) -> Any:
    """Keys (..., key) that enough queries see to be judged.

    If all keys of a row are seen by the same queries, all of them are. If not (a causal mask), a
    key takes at least max(8, S / 3) queries, S being the most that see any key: of fewer, one row
    that gives all of its weight away could make it a sink (epsilon = 3).
    """
    xp = namespace(visible)
    seen = xp.nan_to_num(visible)
    least = (xp.amax(seen, -1)[..., None] / SINGLE_ROW).clip(LEAST_QUERIES)
    return (seen > UNSEEN) & (~differently_seen(visible) | (seen >= least))


def even_weight(visible: Any) -> Any:
    """e_j (..., key): the weight that a key would get from the queries that may see it if each
    weighed all keys alike.

    It is the mean of 1 / (keys that the query sees) over these queries, and 1 / S if S queries see
    every key. The counts alone tell it if keys are seen from some query on, as under a causal or
    block-causal mask: there the q-th query from the end sees the keys that at least q queries see.
    A sliding window is not such a mask. NaN if no query sees the key.
    """
    xp = namespace(visible)
    seen = xp.nan_to_num(visible)
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
    return xp.where(differently_seen(visible), total, xp.ones_like(seen)) / divisor


def only(exists: Any, a: Array, other: float = 0.0) -> Array:
    """``a`` if ``exists``, else ``other``; in numpy ``a`` itself, no copy, if everything exists."""
    xp = namespace(a)
    if xp is np and exists.all():
        return a
    return xp.where(exists, a, xp.zeros_like(a) + other)
