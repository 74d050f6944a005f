"""Sink rules side by side: how many heads, how many keys and how much attention each of them
flags.
"""

# E thresholds, B bins and those below and above them, L layers, H heads, K keys, N scores
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from sinklab.core.sinks.normalize import even_weight
from sinklab.core.sinks.rules import Excess, Gu, Rule, Top, bound
from sinklab.lab.analysis.counts import Counts, Slab, below, one_pass, ranked, ratio, share, slabs

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
    counter = CurveCounter(shape[-3], epsilons, scale)
    one_pass(slabs(received, visible, positions), counter)
    return counter.curve


class CurveCounter:
    """`epsilon_curve`, slab by slab."""

    def __init__(self, layers: int, epsilons: Any = EPSILONS, scale: str = "sum") -> None:
        grid = np.asarray(epsilons, dtype=float).reshape(-1)
        if len(grid) == 0 or not (np.diff(grid) > 0).all() or not grid[0] >= 0:
            raise ValueError(f"epsilons must rise from at least 0: got {grid.tolist()}.")
        # Below 1 even the literal mean does not warn; this only checks the scale.
        Excess(0.0, scale)
        sinks_LE, places_L = (
            np.zeros((layers, len(grid)), dtype=np.int64),
            np.zeros(layers, dtype=np.int64),
        )
        self.curve = EpsilonCurve(grid, scale, sinks_LE, places_L)

    def add(self, slab: Slab) -> None:
        """Count the keys of a slab above every threshold."""
        curve = self.curve
        # A threshold that is met exactly is not exceeded. Below NaN are all.
        grid_E = np.append(curve.epsilon, np.nan)
        if curve.scale == "zscore" or slab.queries is None:
            excess = _excess(slab.received, slab.visible, slab.exists, curve.scale)
            rising_TLN = ranked(np.where(slab.exists, excess, np.nan))
            fewer_LE = below(rising_TLN, np.nextafter(grid_E, np.inf)).sum(0)
        else:
            bounds_T1E = bound(grid_E, curve.scale, slab.queries[..., 0].astype(float))
            fewer_LE = slab.below(np.nextafter(bounds_T1E, np.inf))
        curve.sinks_LE[:] += fewer_LE[:, -1:] - fewer_LE[:, :-1]
        curve.places_L[:] += fewer_LE[:, -1]


def _excess(a: np.ndarray, visible: np.ndarray, exists: np.ndarray, scale: str) -> np.ndarray:
    """The epsilon at which a key stops being a sink: ``Excess`` solved for its threshold."""
    seen = np.where(visible > 0, visible, 1)
    if scale == "zscore":
        share, weight = np.where(exists, a / seen, 0), exists.sum(-1, keepdims=True).clip(1)
        mean = share.sum(-1, keepdims=True) / weight
        deviation = np.sqrt(
            (np.where(exists, share - mean, 0) ** 2).sum(-1, keepdims=True) / weight
        )
        flat = deviation <= 1e-6 * mean
        return np.where(flat, -1, (share - mean) / np.where(flat, 1, deviation))
    most = seen.max(-1, keepdims=True)
    unit = {"sum": 1.0, "mean": most, "percent": most / 100}[scale]
    room = unit * (most - 1) / most
    # One query alone gives its whole weight away: the threshold is then 1 whatever epsilon is.
    return most * (a / seen - even_weight(visible)) / np.where(room > 0, room, 1)


@dataclass(frozen=True)
class ScoreHistogram(Counts):
    """How the scores are spread (Rulli et al., Fig. 3 and 9). Histograms of several samples add
    up.
    """

    same = ("edges",)
    counts: np.ndarray
    """(bins,) number of (step, layer, head, key) with a score in the bin"""
    edges: np.ndarray
    """(bins + 1,) borders of the bins, in multiples of an even share"""
    below: int
    """scores below the first border"""
    above: int
    """scores at or above the last one"""


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
    counter = HistogramCounter(bins, span, log)
    one_pass(slabs(received, visible, positions), counter)
    return counter.histogram


class HistogramCounter:
    """`score_histogram`, slab by slab."""

    def __init__(self, bins: int = 64, span: Span = None, log: bool = False) -> None:
        low, high = span or ((2.0**-8, 2.0**12) if log else (0.0, 64.0))
        if bins < 1 or not low < high or (log and low <= 0):
            raise ValueError(
                "A histogram needs bins of at least 1 and a span that rises, above 0 on a "
                f"logarithmic scale: got bins={bins}, span=({low:g}, {high:g}), log={log}."
            )
        self.edges = np.geomspace(low, high, bins + 1) if log else np.linspace(low, high, bins + 1)
        self.fewer_B = np.zeros(bins + 2, dtype=np.int64)

    def add(self, slab: Slab) -> None:
        """Count the scores of a slab below the end of every bin."""
        self.fewer_B += slab.below(np.append(self.edges, np.inf)[None, None]).sum(0)

    @property
    def histogram(self) -> ScoreHistogram:
        """Counts so far."""
        counts_B = np.diff(self.fewer_B, prepend=0)
        return ScoreHistogram(counts_B[1:-1], self.edges, int(counts_B[0]), int(counts_B[-1]))


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
        self.rules, self.names = list(rules.values()), list(rules)
        self.counts_RN = np.zeros((len(rules), len(fields(RuleRow)) - 1))
        """counts of `RuleRow` for each rule, in its order"""

    def add(self, slab: Slab) -> None:
        """Count the keys that every rule flags in a slab."""
        heads, keys = np.count_nonzero(slab.main >= 0), np.count_nonzero(slab.exists)
        total, first = slab.total.sum(dtype=float), slab.found(self.rules[0])
        for rule, counts_N in zip(self.rules, self.counts_RN, strict=True):
            found = slab.found(rule)
            cells, sinks = found.cells, len(found.cells)
            with_sink = np.count_nonzero(np.diff(cells // slab.received.shape[-1], prepend=-1))
            taken = slab.received.reshape(-1)[cells].sum(dtype=float)
            both = sinks if found is first else np.count_nonzero(first.flags.reshape(-1)[cells])
            counts_N += np.array(
                [heads, keys, sinks, with_sink, total, taken, both, sinks + len(first.cells) - both]
            )

    @property
    def rows(self) -> list[RuleRow]:
        """Counts so far, a row per rule."""
        kinds: Any = [type(one.default) for one in fields(RuleRow)[1:]]
        return [
            RuleRow(name, *(kind(count) for kind, count in zip(kinds, counts_N, strict=True)))
            for name, counts_N in zip(self.names, self.counts_RN.tolist(), strict=True)
        ]
