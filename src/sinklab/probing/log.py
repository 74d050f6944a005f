"""What an intervention did: the log that `intervene` hands out."""

# B batch, L layers, H query heads, M columns taken away
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sinklab.probing.call import AttentionCall
from sinklab.probing.tap import Tap


@dataclass(frozen=True)
class Removal:
    """What one edit took away in one forward."""

    forward: int
    """Index of the forward since the last reset; the first one, which nothing precedes, has no entry."""
    edit: Any
    layers: tuple[str, ...]
    """Module paths of the layers, the L axis below."""
    columns_BLHM: Tensor
    """The keys that were taken away, by falling score, int64."""
    mass_BLH: Tensor
    """The share of attention (0 to 1) these keys held in the forward they were chosen in: what they would have held."""
    overlap_BLH: Tensor
    """Jaccard overlap with the keys taken away one step before; NaN where there was no step before."""


@dataclass
class InterventionLog:
    """Filled while the block runs."""

    removals: list[Removal] = field(default_factory=list)
    forwards: int = 0
    """Forwards that ran with the edits in place, the unedited first ones included."""
    prefix: int | None = None
    """Sink columns in front of the keys: keys minus queries of the first forward since the last reset."""
    on_reset: list[Callable[[], None]] = field(default_factory=list, repr=False)
    is_probing: bool = False
    _tap: Tap | None = field(default=None, repr=False)

    def reset(self) -> None:
        """A new sequence or batch begins: forget every selection. What was logged stays."""
        if self._tap is not None:
            self._tap.flush()
        self.prefix = None
        for forget in self.on_reset:
            forget()

    @contextmanager
    def probing(self) -> Iterator[None]:
        """Forwards inside run as if the intervention were not there; `source="clean_pass"` chooses in them.

        They are no steps: a trace does not record them.
        """
        tap = self._tap
        assert tap is not None
        tap.flush()
        self.is_probing = True
        tap.suspended += 1
        try:
            yield
        finally:
            tap.flush()
            tap.suspended -= 1
            self.is_probing = False

    def summary(self) -> dict[str, float | int]:
        """Means over everything that was removed: share of attention, overlap of successive steps; and the counts."""
        masses = [removal.mass_BLH.mean().item() for removal in self.removals]
        overlaps = [removal.overlap_BLH.mean().item() for removal in self.removals]
        overlaps = [value for value in overlaps if value == value]
        nan = float("nan")
        return {
            "forwards": self.forwards,
            "removals": len(self.removals),
            "removed_mass": sum(masses) / len(masses) if masses else nan,
            "overlap": sum(overlaps) / len(overlaps) if overlaps else nan,
        }

    def add(self, removal: Removal | None) -> None:
        """Used by editors: what they took away in the forward that just ended."""
        if removal is not None:
            self.removals.append(removal)

    def note_prefix(self, call: AttentionCall) -> int:
        """Used by editors: the number of sink columns, read off the first call since the last reset."""
        if self.prefix is None:
            self.prefix = call.key_BKSD.shape[2] - call.query_BHQD.shape[2]
        return self.prefix
