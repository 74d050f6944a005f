"""Sink rules side by side: how many heads, how many keys and how much attention each of them flags."""

# L layers, H heads, K keys
from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from .rules import Excess, Gu, Rule, Top, find_sinks
from .scale import slabs

_GU = Gu()


def sink_rate(
    received: Any, rule: Rule = _GU, visible: Any = None, positions: Any = None, *, key: int | None = 0
) -> float:
    """Percentage of heads that have a sink at ``key`` (None: at any key), over all leading axes.

    With the rule ``Gu`` this is the Sink_k^eps of Gu et al. (2410.10781): threshold 0.3 and the first key in their
    tables, 0.8 in Barbero et al. (2504.02732).
    received: (..., key); visible, positions: as in ``find_sinks``. Heads and steps that do not exist do not count; NaN
    when there is none. Time O(size). Raises ValueError for a key that is not there.
    """
    keys = np.shape(received)[-1]
    if key is not None and not -keys <= key < keys:
        raise ValueError(f"sink_rate counts sinks at one of {keys} keys (or None: any): got {key}.")
    hits = heads = 0
    for _, a, seen in slabs(received, visible, positions, min(3, np.ndim(received))):
        flagged = find_sinks(a, rule, np.broadcast_to(seen, a.shape))
        exists = (~np.isnan(a) & (seen > 0)).any(-1)
        hits += int((flagged.any(-1) if key is None else flagged[..., key]).sum())
        heads += int(exists.sum())
    return 100 * hits / heads if heads else float("nan")


def absorb_rate(received: Any, visible: Any, sinks: Any) -> np.ndarray:
    """Share of all attention that lands on the flagged keys, (...,) from (..., key); NaN where nothing is received.

    received: column sums; visible: queries that see each key, or None (keys that nobody sees do not count);
    sinks: boolean, broadcastable to received. One copy of received per (layer, head, key) slab.
    """
    whole = np.shape(received)
    flags = np.broadcast_to(np.asarray(sinks.cpu() if hasattr(sinks, "cpu") else sinks, dtype=bool), whole)
    found = np.full(whole[:-1], np.nan)
    for index, a, seen in slabs(received, visible, None, min(3, len(whole))):
        known = np.where(~np.isnan(a) & (seen > 0), a, 0)
        total = known.sum(-1, dtype=float)
        taken = np.where(flags[index], known, 0).sum(-1, dtype=float)
        found[index] = np.where(total > 0, taken / np.where(total > 0, total, 1), np.nan)
    return found


def _defaults() -> dict[str, Rule]:
    with warnings.catch_warnings():
        # It is listed to show that it never fires.
        warnings.simplefilter("ignore")
        printed = Excess(3.0, "mean")
    return {
        "excess, sum, 3": Excess(3.0),
        "excess, mean, 3 (as printed)": printed,
        "excess, percent, 3": Excess(3.0, "percent"),
        "excess, z-score, 3": Excess(3.0, "zscore"),
        "mean weight over 0.3 (Gu)": Gu(0.3),
        "top 1": Top(1),
    }


DEFAULT_RULES: Mapping[str, Rule] = _defaults()
"""the rules of the literature; the first is the one the others are compared with"""


@dataclass(frozen=True)
class RuleRow:
    """What one rule flags. Rows of the same rule from several samples add up."""

    name: str
    heads: int
    """number of (step, layer, head)"""
    keys: int
    """number of (step, layer, head, key)"""
    sinks: int
    """how many of the keys are sinks"""
    with_sink: int
    """heads that have at least one"""
    received: float
    """attention received by all keys"""
    absorbed: float
    """attention received by the sinks"""
    both: int
    """keys that this rule and the first one flag"""
    either: int
    """keys that one of the two flags"""

    @property
    def per_head(self) -> float:
        """Mean number of sinks per head and step."""
        return self.sinks / self.heads if self.heads else float("nan")

    @property
    def rate(self) -> float:
        """Share of heads that have a sink anywhere."""
        return self.with_sink / self.heads if self.heads else float("nan")

    @property
    def filtered(self) -> float:
        """Share of keys that are no sinks."""
        return 1 - self.sinks / self.keys if self.keys else float("nan")

    @property
    def absorb(self) -> float:
        """Share of all attention that lands on the sinks."""
        return self.absorbed / self.received if self.received else float("nan")

    @property
    def agreement(self) -> float:
        """Jaccard overlap with the first rule, over all keys together; NaN when neither flags any."""
        return self.both / self.either if self.either else float("nan")

    def __add__(self, other: RuleRow) -> RuleRow:
        if self.name != other.name:
            raise ValueError(f"Rows of one rule add up: got {self.name!r} and {other.name!r}.")
        counts = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "name"}
        return replace(self, **counts)


def compare_rules(
    received: Any, visible: Any = None, positions: Any = None, rules: Mapping[str, Rule] = DEFAULT_RULES
) -> list[RuleRow]:
    """One row per rule over ``received`` (..., key); the first rule is the one the others are held against.

    visible, positions: as in ``find_sinks``. Time O(rules x size), working memory a few slabs.
    Raises ValueError when there is no rule.
    """
    if not rules:
        raise ValueError("compare_rules needs at least one rule: got none.")
    rows = {name: RuleRow(name, 0, 0, 0, 0, 0.0, 0.0, 0, 0) for name in rules}
    for _, a, seen in slabs(received, visible, positions, min(3, np.ndim(received))):
        counts = np.broadcast_to(seen, a.shape)
        exists = ~np.isnan(a) & (counts > 0)
        known = np.where(exists, a, 0)
        heads, keys, total = int(exists.any(-1).sum()), int(exists.sum()), float(known.sum(dtype=float))
        first = None
        for name, rule in rules.items():
            flagged = find_sinks(a, rule, counts)
            first = flagged if first is None else first
            taken = float(known[flagged].sum(dtype=float))
            both, either = int((flagged & first).sum()), int((flagged | first).sum())
            numbers = (heads, keys, int(flagged.sum()), int(flagged.any(-1).sum()), total, taken, both, either)
            rows[name] += RuleRow(name, *numbers)
    return list(rows.values())
