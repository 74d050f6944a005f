"""What every block cache shares: when all columns are computed anew."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BlockCache:
    """Computes everything where a block begins. Raises ValueError for a refresh_every below 1."""

    refresh_every: int | None = None
    """Recompute everything at every so manieth evaluation of a block as well; 1 is the same as no cache."""

    def __post_init__(self) -> None:
        if self.refresh_every is not None and self.refresh_every < 1:
            raise ValueError(
                f"refresh_every counts evaluations, at least 1, got {self.refresh_every}; leave it out to recompute "
                "everything only where a block begins."
            )

    def phase(self, nth: int) -> int:
        """Evaluations since everything was last due to be computed: 0 where it is due now."""
        return nth if self.refresh_every is None else nth % self.refresh_every
