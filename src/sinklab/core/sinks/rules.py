"""Rules that say which keys are sinks.

The input is always the received attention a_j = sum over queries i of A_ij, keys on the last axis,
with any axes in front, and the number of queries that see each key: rules judge the mean weight, so
that causal maps are read as others are. NaN marks keys that do not exist (padding of ragged
arrays); they are never sinks. A rule is a frozen dataclass that is called with three arrays; see
`Rule`, and ``examples/add_a_rule.py`` for one of your own.
"""

# N rows of keys, S keys
import warnings
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from sinklab.core.errors import Checked, check_tensor, limited
from sinklab.core.registry import rules
from sinklab.core.sinks.normalize import (
    UNSEEN,
    Array,
    differently_seen,
    even_share,
    even_weight,
    is_defined,
    namespace,
    only,
)

SCALES = ("sum", "mean", "percent", "zscore")


class Rule(Protocol):
    """Rule for sinks. Registered (``@rules.register("name")``), it can be written as text and as
    JSON.

    Optional: a rule that is a bound on a_j may have ``threshold(queries)``, the column sum to
    exceed if that many queries (a number, or an array) see the key; figures draw it.
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


def bound(epsilon: Any, scale: str, queries: Any) -> Any:
    """The a_j to exceed under `Excess` if ``queries`` see the key, on any scale but "zscore"."""
    unit = {"sum": 1.0, "mean": queries, "percent": queries / 100}[scale]
    return 1 + epsilon * unit * (queries - 1) / queries


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
        return bound(self.epsilon, self.scale, queries)

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


def find_sinks(
    received: Array, rule: Rule | str, visible: Any = None, positions: Any = None
) -> Array:
    """Sinks under a rule: a boolean array of the shape of ``received`` (..., key).

    Time O(size) (Top: O(k size)). Beyond boolean arrays, "sum", "mean", "percent" and Gu need at
    most one copy of received.

    Args:
        received: column sums a_j, numpy array or torch tensor; the answer is of the same kind. Half
            precision is widened.
        rule: an object that is called as `Rule` says, or its text such as "excess:epsilon=5".
        visible: number of queries that may see each key, broadcastable to ``received``: of a
            recording ``recording.array("visible")[:, :, None, None]``. Keys that no query sees are
            never sinks; if keys are seen by different numbers of queries, nor are those that too
            few see to be judged (`is_defined`). None: S queries see every key, S being the number
            of keys that are not NaN, which is right for full attention without padding or added
            sink columns.
        positions: number of canvas positions, broadcastable to ``received`` without its key axis.
            Given, both counts are first scaled as if all positions had run (``even_share``): needed
            under caches, which let only some queries run.

    Raises:
        ValueError: for shapes that do not fit, an object that is no rule, and if a rule refuses;
            without ``visible``, for sums that such attention cannot give, and for those that a
            causal call may have given, if the answer would be another.
    """
    rule = rules.parsed(rule)
    if not callable(rule) or isinstance(rule, type):
        raise ValueError(
            f"A rule is Excess, Gu or another registered one: got {rule!r}. A rule of your own is "
            "an object that is called with "
            'received, queries and exists; text such as "excess:epsilon=5" is a rule too.'
        )
    xp = namespace(received)
    a: Any
    a, queries = even_share(received, visible, positions)
    # A count that is NaN or 0 means that the key is not there for any query.
    exists = (queries > 0) & ~xp.isnan(a)
    found: Any = flagged(a, rule, queries, exists)
    if visible is None:
        why = _why_not_alike(a, rule, queries, exists, found)
        if why:
            raise ValueError(
                f"without visible, as many queries as there are keys see every key; but {why}: "
                "pass recording.visible, with axes for layers and heads "
                "(visible[:, :, None, None])"
            )
    return found


def _why_not_alike(a: Any, rule: Rule, queries: Any, exists: Any, found: Any) -> str:
    """Evidence against all queries seeing every key; empty if there is none, or the answer is the
    same.
    """

    def differs(other: Any) -> bool:
        # of fewer than eight keys none could be judged then: there is no other answer
        judged = is_defined(other).any(-1)[..., None]
        return bool(((flagged(a, rule, other, exists) != found) & judged).any())

    xp = namespace(a)
    left = only(exists, a)
    total = left.sum(-1)[..., None]
    # less than one for each key was given away; padding receives nothing, and asks for nothing
    # either
    short = total < queries - 0.5
    if bool(((a == 0) & short).any()):
        return (
            "some keys received exactly nothing, and all together less than that, as where "
            "there is padding"
        )
    if bool(short.any()) and differs(xp.where(short, total, queries)):
        return (
            "they received less than that, as with added sinks or a cache, and the answer "
            "would be another"
        )
    # causal queries give the last n keys n at most, and so may others; the cheapest question first
    if bool(((left[..., 0] > 1.01) & (left[..., -1] < 1.01)).all()):
        behind, most = (
            x.sum(-1)[..., None] - x.cumsum(-1) + x for x in (left, only(exists, xp.ones_like(a)))
        )
        if bool((behind < 1.002 * most + 0.01).all()) and differs(most):
            return "a causal call may have left these sums too, and the answer would be another"
    return ""


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
