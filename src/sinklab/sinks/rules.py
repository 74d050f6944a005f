"""Rules that say which keys are sinks.

The input is always the received attention a_j = sum over queries i of A_ij, keys on the last axis, with any axes in
front. NaN marks keys that do not exist (padding of ragged arrays); they are never sinks.
"""

from __future__ import annotations

import difflib
import warnings
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeVar

import numpy as np

Array = TypeVar("Array")

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
    """A key is a sink when the mean weight its queries give it exceeds ``threshold`` (Gu et al. 2410.10781)."""

    threshold: float = 0.3
    """mean attention weight, between 0 and 1"""

    def __post_init__(self) -> None:
        if not 0 <= self.threshold < 1:
            raise ValueError(f"Gu's threshold is a mean attention weight in [0, 1): got {self.threshold}.")


@dataclass(frozen=True)
class Top:
    """The ``k`` keys that receive most, however little that is; ties go to the earlier key."""

    k: int = 1
    """number of keys, fewer than there are"""

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"Top needs k of at least 1: got {self.k}.")


Rule = Excess | Gu | Top


def find_sinks(received: Array, rule: Rule, visible: Any = None) -> Array:
    """Boolean array of the shape of ``received`` (..., key): which keys are sinks under ``rule``.

    received: column sums a_j, numpy array or torch tensor; the answer is of the same kind. Half precision is widened.
    visible: number of queries that may see each key, broadcastable to ``received`` (insert axes for layers and heads:
    ``visible[:, :, None, None]``); keys that no query sees are never sinks. None means S queries see every key, where S
    is the number of keys that are not NaN: right for full attention without added sink columns.
    Raises ValueError when the shapes do not fit or Top asks for as many keys as there are.
    """
    xp = namespace(received)
    a = widened(received, xp)
    exists = ~xp.isnan(a)
    if visible is None:
        queries = exists.sum(-1)[..., None] + xp.zeros_like(a)
    else:
        queries = _fitted(widened(visible, xp), a, xp)
        # Where the count itself is padding, the key does not exist.
        exists = exists & ~xp.isnan(queries)
    exists = exists & (queries > 0)
    a = xp.where(exists, a, xp.zeros_like(a))
    queries = xp.where(exists, queries, xp.ones_like(queries))
    if isinstance(rule, Top):
        return _top(a, exists, rule.k, xp)
    if isinstance(rule, Gu):
        return exists & (a / queries > rule.threshold)
    if isinstance(rule, Excess) and rule.scale == "zscore":
        return exists & _far(a / queries, exists, rule.epsilon)
    if isinstance(rule, Excess):
        return exists & (a > rule.threshold(queries))
    raise ValueError(f"A rule is one of Excess, Gu, Top: got {rule!r}.")


def namespace(array: Any) -> ModuleType:
    """numpy, or torch for a tensor: the functions used here have the same names in both."""
    if type(array).__module__.startswith("torch"):
        import torch

        return torch
    return np


def widened(array: Any, xp: ModuleType) -> Any:
    """``array`` in at least single precision: sums of float16 overflow."""
    if xp is np:
        array = np.asarray(array.detach().cpu() if hasattr(array, "detach") else array)
        return array if array.dtype in (np.float32, np.float64) else array.astype(np.float32)
    array = xp.as_tensor(array)
    return array if array.dtype in (xp.float32, xp.float64) else array.float()


def _fitted(visible: Any, a: Any, xp: ModuleType) -> Any:
    visible = visible if xp is np else visible.to(a.device)
    try:
        return xp.broadcast_to(visible, tuple(a.shape))
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            f"visible must broadcast to received: shapes {tuple(visible.shape)} and {tuple(a.shape)}. "
            "Insert the missing axes, for example visible[:, :, None, None]."
        ) from error


def _top(a: Any, exists: Any, k: int, xp: ModuleType) -> Any:
    keys = a.shape[-1]
    if k >= keys:
        raise ValueError(f"Top must leave at least one key: k={k} of {keys} keys. Choose k < {keys}.")
    score = xp.where(exists, a, xp.zeros_like(a) - float("inf"))
    # A stable sort gives ties to the earlier key in numpy and torch alike.
    order = (-score).argsort(axis=-1, kind="stable") if xp is np else xp.argsort(-score, dim=-1, stable=True)
    rank = order.argsort(axis=-1) if xp is np else xp.argsort(order, dim=-1)
    return exists & (rank < k)


def _far(share: Any, exists: Any, epsilon: float) -> Any:
    weight = exists * 1.0
    count = weight.sum(-1)[..., None].clip(1)
    mean = (share * weight).sum(-1)[..., None] / count
    deviation = (((share - mean) ** 2 * weight).sum(-1)[..., None] / count) ** 0.5
    # Rounding leaves a deviation near 1e-8 where all shares are equal: nothing stands out of such a row.
    return (share - mean > epsilon * deviation) & (deviation > 1e-6 * mean)
