"""Received attention as rules and statements read it: mean weights, scores, the strongest key."""

# "..." stands for any axes in front of the key axis
from dataclasses import dataclass
from typing import Any

import numpy as np

from sinklab.core.registry import rules
from sinklab.core.sinks import (
    Rule,
    apply_rule,
    at_least_single,
    even_share,
    has_unequal_counts,
    is_judgeable,
    where_exists,
)


def ratio(top: Any, bottom: Any) -> Any:
    """``top / bottom`` element by element, NaN if bottom is 0."""
    return top / np.where(np.asarray(bottom) > 0, bottom, np.nan)


def mean_weight(received: Any, visible: Any) -> np.ndarray:
    """w_j (..., key): the mean weight that a key gets from the queries that may see it; NaN if it
    is not defined.

    Of a causal map it is the alpha of Gu et al. (2410.10781, 3.2), and if all queries see every key
    the column mean of Rulli et al.; see `is_judgeable` for the keys that have none.
    """
    a, seen = at_least_single(received, np), np.asarray(visible)
    return np.asarray(a / np.where(is_judgeable(seen), seen, np.nan).astype(a.dtype))


def main_sink(strength: np.ndarray) -> np.ndarray:
    """Index of the strongest key, over the last axis (..., key) -> (...); -1 if no key is defined
    (NaN). Ties go to the earlier key.
    """
    position = strength.argmax(-1)
    # argmax stops at NaN
    if not np.isnan(np.take_along_axis(strength, position[..., None], -1)).any():
        return position
    absent = np.isnan(strength)
    return np.where(absent.all(-1), -1, np.where(absent, -np.inf, strength).argmax(-1))


@dataclass(frozen=True, eq=False)
class Scored:
    """Received attention of numpy arrays (..., key), scaled as if every position had run."""

    received: np.ndarray
    """column sums a_j: an even share is 1"""
    seen_by: np.ndarray
    """queries that see the key, broadcastable to it"""
    exists: np.ndarray
    """keys that enough queries see to be judged (`is_judgeable`)"""
    score: np.ndarray
    """mean weight in multiples of an even share, S w_j with S the most queries that see any key: if
    all keys are seen by as many, the attention they receive. NaN if the key does not exist.
    """
    most: np.ndarray
    """(...) that S, 1 where no key is seen"""

    def flags(self, rule: Rule | str) -> np.ndarray:
        """Keys that are sinks under a rule, or the rule of this text."""
        parsed: Any = rules.parse(rule, object)
        return np.asarray(apply_rule(self.received, parsed, self.seen_by, self.exists))


def scored(received: Any, visible: Any = None, positions: Any = None) -> Scored:
    """Scores of ``received`` (..., key).

    Args:
        visible: queries that see each key, broadcastable to received; when left out, every key that
            is there is a query too, and sees all others.
        positions: see `even_share`.
    """
    whole: Any
    seen: Any
    count: Any
    whole, seen, count = (
        None if one is None else at_least_single(one, np) for one in (received, visible, positions)
    )
    if seen is None:
        seen = (~np.isnan(whole)).sum(-1)[..., None] if count is None else count[..., None]
    a, seen_by = even_share(whole, seen, count)
    exists = ~np.isnan(a) & is_judgeable(seen_by)
    most = np.nan_to_num(seen_by).max(-1, initial=0)
    most = np.where(most > 0, most, 1)
    score = a
    uneven = has_unequal_counts(seen_by)
    if uneven.any():
        score = np.where(uneven, mean_weight(a, seen_by) * most[..., None], a)
    return Scored(a, seen_by, exists, where_exists(exists, score, np.nan), most)
