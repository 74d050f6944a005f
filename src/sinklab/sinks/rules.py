"""Rules that say which keys are sinks.

The input is always the received attention a_j = sum over queries i of A_ij, keys on the last axis, with any axes in
front. NaN marks keys that do not exist (padding of ragged arrays); they are never sinks.
"""

from __future__ import annotations

import difflib
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np

from sinklab.sinks.normalize import Array, even_share, namespace

SCALES = ("sum", "mean", "percent", "zscore")


@dataclass(frozen=True)
class Excess:
    """A key is a sink when it receives more than the mean of the other keys plus ``epsilon`` (Rulli et al., Eq. 3).

    With S queries that see the key, the column *sum* a_j has mean 1, and the rule is a_j > 1 + epsilon (S-1)/S. As
    printed (column *mean*, between 0 and 1) epsilon = 3 can never fire; "mean" warns then. Raises ValueError for an
    unknown scale or a negative epsilon.
    """

    epsilon: float = 3.0
    """how far above the mean of the others, in units of ``scale`` """
    scale: str = "sum"
    """"sum" (default), "mean" (literal Eq. 3), "percent" (100 times the mean), "zscore" (standard deviations)"""

    def __post_init__(self) -> None:
        if self.scale not in SCALES:
            near = difflib.get_close_matches(self.scale, SCALES, n=1)
            raise ValueError(
                f"Excess knows the scales {', '.join(SCALES)}: got {self.scale!r}."
                + (f" Did you mean {near[0]!r}?" if near else "")
            )
        if not self.epsilon >= 0:
            raise ValueError(f"epsilon is a distance above the mean and at least 0: got {self.epsilon}.")
        if self.scale == "mean" and self.epsilon >= 1:
            warnings.warn(
                f"The column mean lies between 0 and 1, so epsilon={self.epsilon} on scale 'mean' can never fire. "
                "Use scale='sum' (the reading that fits the published figures) or epsilon < 1.",
                UserWarning,
                stacklevel=3,
            )

    def threshold(self, queries: Any) -> Any:
        """The a_j to exceed where ``queries`` (number or array) queries see the key. ValueError for "zscore"."""
        if self.scale == "zscore":
            raise ValueError("The z-score threshold depends on the scores, not on S alone. Use find_sinks.")
        unit = {"sum": 1.0, "mean": queries, "percent": queries / 100}[self.scale]
        return 1 + self.epsilon * unit * (queries - 1) / queries


@dataclass(frozen=True)
class Gu:
    """A key is a sink when the mean weight its queries give it exceeds ``threshold`` (Gu et al. 2410.10781, 3.2).

    The mean is over the queries that see the key: T - k + 1 of them for the k-th key of T under a causal mask, as the
    paper has it, and all T in a bidirectional model, where the same threshold keeps its meaning.
    """

    threshold: float = 0.3
    """mean attention weight, between 0 and 1"""

    def __post_init__(self) -> None:
        if not 0 <= self.threshold < 1:
            raise ValueError(f"Gu's threshold is a mean attention weight in [0, 1): got {self.threshold}.")


@dataclass(frozen=True)
class Top:
    """The ``k`` keys that receive most, however little that is; ties go to the earlier key. Costs k passes."""

    k: int = 1
    """number of keys, fewer than there are"""

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"Top needs k of at least 1: got {self.k}.")


Rule = Excess | Gu | Top


def find_sinks(received: Array, rule: Rule, visible: Any = None, positions: Any = None) -> Array:
    """Boolean array of the shape of ``received`` (..., key): which keys are sinks under ``rule``.

    received: column sums a_j, numpy array or torch tensor; the answer is of the same kind. Half precision is widened.
    visible: number of queries that may see each key, broadcastable to ``received`` (insert axes for layers and heads:
    ``visible[:, :, None, None]``); keys that no query sees are never sinks. None means S queries see every key, where S
    is the number of keys that are not NaN: right for full attention without added sink columns.
    positions: number of canvas positions, broadcastable to ``received`` without its key axis; given, both counts are
    first scaled as if all positions had run (``even_share``): needed under caches, where only some queries run.
    Time O(size) (Top: O(k size)). Beyond the answer, "sum", "mean", "percent" and Gu need at most one copy of received.
    Raises ValueError when the shapes do not fit or Top asks for as many keys as there are.
    """
    if not isinstance(rule, Excess | Gu | Top):
        raise ValueError(f"A rule is one of Excess, Gu, Top: got {rule!r}.")
    xp = namespace(received)
    a: Any
    a, queries = even_share(received, visible, positions)
    # A count that is NaN or 0 means that the key is not there for any query.
    seen = queries > 0
    if isinstance(rule, Top) or (isinstance(rule, Excess) and rule.scale == "zscore"):
        exists = ~xp.isnan(a) & seen
        if isinstance(rule, Top):
            return _top(a, exists, rule.k, xp)
        share = xp.where(exists, a, xp.zeros_like(a)) / xp.where(seen, queries, xp.ones_like(queries))
        return exists & _far(share, exists, rule.epsilon)
    queries = xp.where(seen, queries, xp.ones_like(queries))
    limit = rule.threshold * queries if isinstance(rule, Gu) else rule.threshold(queries)
    # Comparing with NaN is false: padding falls out of itself.
    return a > xp.where(seen, limit, xp.zeros_like(limit) + float("inf"))


def _top(a: Any, exists: Any, k: int, xp: Any) -> Any:
    keys = a.shape[-1]
    if k >= keys:
        raise ValueError(f"Top must leave at least one key: k={k} of {keys} keys. Choose k < {keys}.")
    left = xp.where(exists, a, xp.zeros_like(a[..., :1]) - float("inf"))
    chosen = xp.zeros_like(exists)
    for _ in range(k):
        # argmax gives ties to the first.
        best = left.argmax(-1)[..., None]
        for array, value in ((chosen, True), (left, -float("inf"))):
            if hasattr(array, "scatter_"):
                array.scatter_(-1, best, value)
            else:
                np.put_along_axis(array, best, value, -1)
    return exists & chosen


def _far(share: Any, exists: Any, epsilon: float) -> Any:
    weight = exists * 1.0
    count = weight.sum(-1)[..., None].clip(1)
    mean = (share * weight).sum(-1)[..., None] / count
    deviation = (((share - mean) ** 2 * weight).sum(-1)[..., None] / count) ** 0.5
    # Rounding leaves a deviation near 1e-8 where all shares are equal: nothing stands out of such a row.
    return (share - mean > epsilon * deviation) & (deviation > 1e-6 * mean)
