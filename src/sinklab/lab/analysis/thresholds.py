"""Sink rules side by side: how many heads, how many keys and how much attention each of them
flags.
"""

# E thresholds, B bins and those below and above them, L layers, H heads, K keys, N scores
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np

from sinklab.core.sinks import Excess, Gu, Rule
from sinklab.lab.analysis.counts import Counts, Slab, counted, one_pass, ratio, share, slabs
from sinklab.lab.analysis.rules import Top

Span = tuple[float, float] | None
"""first and last border of a histogram"""
EPSILONS = tuple(np.linspace(0, 10, 21).tolist())
"""thresholds of the published curve, 0 to 10 in halves"""


@dataclass(frozen=True)
class EpsilonCurve(Counts):
    """Share of tokens that are not sinks, over epsilon (Rulli et al., Fig. 10). Curves of several
    samples add up.
    """

    same = ("epsilon", "scale")
    epsilon: np.ndarray
    """(E,) thresholds, rising"""
    scale: str
    """unit of the threshold, see ``Excess``"""
    sinks_LE: np.ndarray
    """(layer, E) number of (step, head, key) that are sinks"""
    places_L: np.ndarray
    """(layer,) number of (step, head, key) there are"""

    @classmethod
    def empty(cls, layers: int, epsilons: Any = EPSILONS, scale: str = "sum") -> Self:
        """Nothing counted yet. Raises ValueError for thresholds that do not rise."""
        grid = np.asarray(epsilons, dtype=float).reshape(-1)
        if len(grid) == 0 or not (np.diff(grid) > 0).all() or not grid[0] >= 0:
            raise ValueError(f"epsilons must rise from at least 0: got {grid.tolist()}.")
        sinks_LE = np.zeros((layers, len(grid)), dtype=np.int64)
        return cls(grid, scale, sinks_LE, np.zeros(layers, dtype=np.int64))

    @cached_property
    def rules(self) -> list[Excess]:
        """The rule of each threshold."""
        return [Excess(epsilon, self.scale) for epsilon in self.epsilon.tolist()]

    def add(self, slab: Slab) -> None:
        """Count the keys of a slab above every threshold."""
        self.places_L[:] += counted(slab.exists).sum((0, 2))
        if slab.tally is None or self.scale == "zscore" or np.ptp(slab.queries):
            for place, rule in enumerate(self.rules):
                self.sinks_LE[:, place] += slab.found(rule).number.sum((0, 2))
            return
        values, upto_LV = slab.tally
        limits_E = [rule.threshold(float(slab.queries.flat[0])) for rule in self.rules]
        # no limit is below the first value, which is 0
        last_E = np.searchsorted(values, limits_E, side="right") - 1
        self.sinks_LE[:] += upto_LV[:, -1:] - upto_LV[:, last_E]

    @property
    def filtered(self) -> np.ndarray:
        """(E,) share of (step, layer, head, key) that are no sinks; NaN when nothing was
        counted.
        """
        return 1 - ratio(self.sinks_LE.sum(0), self.places_L.sum())

    @property
    def filtered_by_layer(self) -> np.ndarray:
        """(layer, E) the same in each layer."""
        return 1 - ratio(self.sinks_LE, self.places_L[:, None])

    def at(self, epsilon: float = 3.0) -> float:
        """Filtered share at a threshold that was counted. Raises ValueError for any other."""
        found = np.flatnonzero(np.isclose(self.epsilon, epsilon))
        if not len(found):
            raise ValueError(
                f"The curve was counted at epsilon {self.epsilon.tolist()}: got {epsilon}. "
                "Pass it to epsilon_curve(epsilons=...)."
            )
        return float(self.filtered[found[0]])


def epsilon_curve(
    received: Any,
    visible: Any = None,
    positions: Any = None,
    *,
    epsilons: Any = EPSILONS,
    scale: str = "sum",
) -> EpsilonCurve:
    """Count the sinks of ``Excess(epsilon, scale)`` over epsilon.

    received: (..., layer, head, key); visible, positions: see ``find_sinks``.
    Time O(size), whatever the number of thresholds; working memory a few (layer, head, key) slabs.
    Raises ValueError for fewer than three axes, thresholds that do not rise, or an unknown scale.
    """
    shape = np.shape(received)
    if len(shape) < 3:
        raise ValueError(f"epsilon_curve needs (..., layer, head, key): got shape {shape}.")
    curve = EpsilonCurve.empty(shape[-3], epsilons, scale)
    one_pass(slabs(received, visible, positions), curve)
    return curve


@dataclass(frozen=True)
class ScoreHistogram(Counts):
    """How the scores are spread (Rulli et al., Fig. 3 and 9). Histograms of several samples add
    up.
    """

    same = ("edges",)
    edges: np.ndarray
    """(bins + 1,) borders of the bins, in multiples of an even share"""
    cells: np.ndarray
    """(bins + 2,) number of (step, layer, head, key) with a score below the first border, in each
    bin, and at or above the last border"""

    @classmethod
    def empty(cls, bins: int = 64, span: Span = None, log: bool = False) -> Self:
        """Nothing counted yet. Raises ValueError for a span that is empty or has no logarithm."""
        if span is None:
            span = (2.0**-8, 2.0**12) if log else (0.0, 64.0)
        low, high = span
        if bins < 1 or not low < high or (log and low <= 0):
            raise ValueError(
                "A histogram needs bins of at least 1 and a span that rises, above 0 on a "
                f"logarithmic scale: got bins={bins}, span=({low:g}, {high:g}), log={log}."
            )
        spaced = np.geomspace if log else np.linspace
        return cls(spaced(low, high, bins + 1), np.zeros(bins + 2, dtype=np.int64))

    def add(self, slab: Slab) -> None:
        """Count the scores of a slab."""
        if slab.tally is None:
            place = np.searchsorted(self.edges, slab.score[slab.exists], side="right")
            self.cells[:] += np.bincount(place, minlength=len(self.cells))
            return
        values, upto_LV = slab.tally
        first_B = np.searchsorted(values, self.edges)
        below_B = np.where(first_B > 0, upto_LV[:, first_B - 1].sum(0), 0)
        self.cells[:] += np.diff(below_B, prepend=0, append=upto_LV[:, -1].sum())

    @property
    def counts(self) -> np.ndarray:
        """(bins,) number of (step, layer, head, key) with a score in the bin."""
        return self.cells[1:-1]

    @property
    def below(self) -> int:
        """Scores below the first border."""
        return int(self.cells[0])

    @property
    def above(self) -> int:
        """Scores at or above the last border."""
        return int(self.cells[-1])


def score_histogram(
    received: Any,
    visible: Any = None,
    positions: Any = None,
    *,
    bins: int = 64,
    span: Span = None,
    log: bool = False,
) -> ScoreHistogram:
    """Count the scores a_j as multiples of an even share, in equal bins (``log``: equal on a
    logarithmic scale).

    received: (..., key); visible, positions: see ``find_sinks``; keys that do not exist or that no
    query sees do not count. span: first and last border, by default 0 to 64, or 2**-8 to 2**12 with
    ``log``: fixed, so that histograms of samples of different lengths add up. Time O(size), working
    memory a few slabs. Raises ValueError when the span is empty or, with ``log``, begins at 0 or
    less.
    """
    histogram = ScoreHistogram.empty(bins, span, log)
    one_pass(slabs(received, visible, positions), histogram)
    return histogram


with warnings.catch_warnings():
    # Eq. 3 as printed is listed to show that it never fires.
    warnings.simplefilter("ignore")
    DEFAULT_RULES: Mapping[str, Rule] = {
        "excess, sum, 3": Excess(3.0),
        "excess, mean, 3 (as printed)": Excess(3.0, "mean"),
        "excess, percent, 3": Excess(3.0, "percent"),
        "excess, z-score, 3": Excess(3.0, "zscore"),
        "mean weight over 0.3 (Gu)": Gu(0.3),
        "top 1": Top(1),
    }
    """the rules of the literature; the first is the one the others are compared with"""


@dataclass(frozen=True)
class RuleRow(Counts):
    """Counts of the keys that one rule flags. Rows of the same rule from several samples add up."""

    same = ("name",)
    name: str
    heads: int = 0
    """number of (step, layer, head)"""
    keys: int = 0
    """number of (step, layer, head, key)"""
    sinks: int = 0
    """how many of the keys are sinks"""
    with_sink: int = 0
    """heads that have at least one"""
    received: float = 0.0
    """attention received by all keys"""
    absorbed: float = 0.0
    """attention received by the sinks"""
    both: int = 0
    """keys that this rule and the first one flag"""
    either: int = 0
    """keys that one of the two flags"""

    per_head = share("sinks", "heads")
    """mean number of sinks per head and step"""
    rate = share("with_sink", "heads")
    """share of heads that have a sink anywhere"""
    absorb = share("absorbed", "received")
    """share of all attention that lands on the sinks"""
    agreement = share("both", "either")
    """Jaccard overlap with the first rule, over all keys together; NaN when neither flags any"""

    @property
    def filtered(self) -> float:
        """Share of keys that are no sinks."""
        return 1 - float(ratio(self.sinks, self.keys))


def compare_rules(
    received: Any,
    visible: Any = None,
    positions: Any = None,
    rules: Mapping[str, Rule] = DEFAULT_RULES,
) -> list[RuleRow]:
    """One row per rule over ``received`` (..., key); the others are compared with the first rule.

    visible, positions: see ``find_sinks``. Time O(rules x size), working memory a few slabs. Raises
    ValueError when there is no rule.
    """
    counter = RuleCounter(rules)
    one_pass(slabs(received, visible, positions), counter)
    return counter.rows


class RuleCounter:
    """`compare_rules`, slab by slab."""

    def __init__(self, rules: Mapping[str, Rule] = DEFAULT_RULES) -> None:
        if not rules:
            raise ValueError("compare_rules needs at least one rule: got none.")
        self.rules = list(rules.values())
        self._sums: dict[str, Any] = {name: Counter() for name in rules}

    @property
    def rows(self) -> list[RuleRow]:
        """Counts so far, a row per rule."""
        return [RuleRow(name, **sums) for name, sums in self._sums.items()]

    def add(self, slab: Slab) -> None:
        """Count the keys that every rule flags in a slab."""
        heads = int(np.count_nonzero(slab.main >= 0))
        keys = int(np.count_nonzero(slab.exists))
        received = float(slab.total.sum(dtype=float))
        first = slab.found(self.rules[0])
        for rule, sums in zip(self.rules, self._sums.values(), strict=True):
            found = slab.found(rule)
            sinks = len(found.cells)
            both = int(np.count_nonzero(first.flags.reshape(-1)[found.cells]))
            sums.update(
                heads=heads,
                keys=keys,
                sinks=sinks,
                with_sink=int(np.count_nonzero(found.number)),
                received=received,
                absorbed=float(found.taken.sum(dtype=float)),
                both=both,
                either=sinks + len(first.cells) - both,
            )
