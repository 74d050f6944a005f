"""The dose of an intervention: the keys and the attention it really removed, to stand beside every
score measured under it.
"""

# B batch, L layers, H query heads, E entries (layers and heads)
from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

MEASURED = {
    "keys": "Keys that were blocked, per head; of a window the mean over queries.",
    "held": "Share of attention (0 to 1) that these keys held in the forward that chose them; of "
    'keys that stay blocked (``when="kept"``), that of the newly chosen. Not known if attention '
    "did not choose, and once a limit is reached.",
    "removed": "Share of attention (0 to 1) that was really taken away, from the call as it was "
    "given; of other values that of the keys that have them. Not known with "
    "`intervene(…, measure=False)`, and if an edit changes the scores themselves.",
    "overlap": "Jaccard overlap (0 to 1) of what was blocked in one step and the next.",
    "left": "Keys that stay for a query; mean over those that are not padding.",
    "chosen": "Keys newly chosen, per head; not known if attention did not choose.",
    "sinks": "Number of the chosen keys that the rule calls sinks: the edit's own, or `DEFAULT`.",
    "matched": "1 if the head has a control of equal mass, 0 if it has none and loses nothing.",
    "alone": "Queries (padding apart) that lost every other key that they saw: they keep their "
    "own, or without `queries` all that they had. Not known for windows and rows.",
    "strongest": "Share of attention (0 to 1) of a head's strongest key after all edits: whether a "
    "new sink has grown.",
    "strongest_at": "Index of that key, sink columns included.",
}
"""Measures of every head in a `RemovalRecord`, NaN where they are not known."""


def by_row(record: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """Sums over layers and heads of a `RemovalRecord`, and the numbers of entries they are over,
    each (B,), by name.
    """
    found = {}
    for name, part_BLH in record.numbers.items():
        part_BE = part_BLH.flatten(1).double()
        found[name] = part_BE.nansum(1), (~part_BE.isnan()).sum(1).double()
    # a share of the chosen keys, however they are spread over heads
    found["sinks"] = found["sinks"][0], found["chosen"][0]
    return found


@dataclass(frozen=True)
class Dose:
    """Means over the forwards, rows, layers and heads in which edits had an opportunity to act.

    No key that passed the rule is a dose of zero, which is a result. A measure that was not taken,
    or has no meaning for an edit (a share of sinks if none was chosen), is NaN.
    """

    totals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Totals by name, as in `MEASURED`: a sum, and the number of entries it is over."""

    @classmethod
    def pooled(cls, doses: Iterable[Dose]) -> Dose:
        """The dose of several together, every entry with equal weight."""
        totals: dict[str, tuple[float, float]] = {}
        for dose in doses:
            for name, (total, entries) in dose.totals.items():
                before, known = totals.get(name, (0.0, 0.0))
                totals[name] = (before + total, known + entries)
        return cls(totals)

    def mean(self, measure: str) -> float:
        """The mean of one of `MEASURED`; NaN if it was not taken."""
        total, entries = self.totals.get(measure, (0.0, 0.0))
        if not entries:
            return math.nan
        return total / entries

    def __getattr__(self, name: str) -> float:
        """The mean of a measure, such as `removed`; of `sinks` the share (0 to 1) of the chosen
        keys.
        """
        if name not in MEASURED:
            raise AttributeError(f"a dose has no {name!r}; measures are {', '.join(MEASURED)}")
        return self.mean(name)

    @property
    def weight(self) -> int:
        """Number of entries: heads, layers, rows and forwards."""
        return int(self.totals.get("keys", (0, 0))[1])

    def row(self) -> dict[str, float]:
        """The numbers of the dose as columns of a table, by the names in `DOSE_COLUMNS`."""
        return {name: self.mean(name) for name in DOSE_COLUMNS}

    def __str__(self) -> str:
        """Text that stands beside a score: 1.00 keys a head (48 % sinks), held 4.8 % of the
        attention, 3.4 % removed.
        """
        if not self.weight:
            return "nothing blocked"
        sinks = ""
        if not math.isnan(self.sinks):
            sinks = f" ({100 * self.sinks:.0f}\u00a0% sinks)"
        shares = [
            ("held", self.held, " of the attention"),
            ("", self.removed, " removed"),
            ("matched in", self.matched, " of heads"),
        ]
        told = [
            f"{before} {100 * share:.1f}\u00a0%{after}".strip()
            for before, share, after in shares
            if share == share
        ]
        return ", ".join([f"{self.keys:.2f} keys a head{sinks}", *told])


DOSE_COLUMNS = ("keys", "sinks", "held", "removed", "overlap", "matched")
"""Columns of a table that says the dose beside a score."""
