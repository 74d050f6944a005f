"""Received attention as rules and statements read it: mean weights, scores, the strongest key."""

# "..." stands for any axes in front of the key axis
from dataclasses import dataclass
from typing import Any

import numpy as np

from sinklab.core.registry import rules
from sinklab.core.sinks import (
    Array,
    Rule,
    apply_rule,
    at_least_single,
    broadcast_like,
    even_share,
    has_unequal_counts,
    is_judgeable,
    namespace,
    where_exists,
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
    """Scores of ``received`` (..., key), an array or a tensor of any precision.

    Args:
        visible: queries that see each key, broadcastable to received; when left out, every key that
            is there is a query too, and sees all others.
        positions: see `even_share`.
    """
    given = [received, visible, positions]
    for place, array in enumerate(given):
        if array is not None:
            xp = namespace(array)
            wide = at_least_single(array, xp)
            given[place] = wide if xp is np else wide.cpu().numpy()
    whole, seen, count = given
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
