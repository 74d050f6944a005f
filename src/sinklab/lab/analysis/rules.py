"""The rule `Top`, and the bounds of rules that figures draw."""

# N rows of keys
from dataclasses import dataclass
from typing import Any

from sinklab.core.errors import Checked, limited
from sinklab.core.registry import rules
from sinklab.core.sinks import has_unequal_counts, namespace, same_count, where_exists


@rules.register("top")
@dataclass(frozen=True)
class Top(Checked):
    """The ``k`` strongest keys, however weak they are; ties go to the earlier key. Costs k passes.

    Strength is the mean weight of the queries that see the key; if all see every key, the attention
    it receives.
    """

    k: int = limited(1, at_least=1)
    """number of keys, fewer than there are"""

    def __call__(self, received: Any, seen_by: Any, exists: Any) -> Any:
        """Flags of the first k keys. Raises ValueError unless there are more than k."""
        xp = namespace(received)
        keys = received.shape[-1]
        if self.k >= keys:
            raise ValueError(
                f"Top must leave at least one key: k={self.k} of {keys} keys. Choose k < {keys}."
            )
        chosen = xp.zeros(received.shape, dtype=exists.dtype, device=received.device)
        strength = received
        if not same_count(seen_by):
            strength = xp.where(has_unequal_counts(seen_by), received / seen_by, received)
        rows_NS = chosen.reshape(-1, keys)
        left = where_exists(exists, strength, -float("inf"))
        row_N = xp.arange(len(rows_NS), device=received.device)
        for number in range(self.k):
            if number:  # nothing is chosen yet in the first
                left = where_exists(~chosen, left, -float("inf"))
            # argmax gives ties to the first.
            rows_NS[row_N, left.argmax(-1).reshape(-1)] = True
        return chosen


def threshold(rule: Any, seen_by: Any) -> Any:
    """The a_j to exceed if so many queries see the key; NaN under a rule that is no such bound."""
    try:
        return rules.parse(rule, object).threshold(seen_by)
    except (AttributeError, ValueError):
        return float("nan")
