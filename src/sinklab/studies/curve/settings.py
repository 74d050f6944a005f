"""What a masking curve does: one frozen dataclass, kept in its run folder."""

from __future__ import annotations

from dataclasses import dataclass

from sinklab.errors import Checked, limited

CONTROLS = ("sinks", "random", "lowest", "recent")


@dataclass(frozen=True)
class CurveSettings(Checked):
    """Which columns are hidden, from what text, and how sure the result has to be.

    Raises ValueError for unknown controls and for numbers that make no sense with any model.
    """

    ks: tuple[int, ...] = limited((0, 1, 2, 5, 10, 20), at_least=0)
    """Numbers of columns to hide per row, layer and query head; 0 is always scored."""
    controls: tuple[str, ...] = limited(("sinks", "random", "lowest"), one_of=CONTROLS)
    """Which columns: those that receive most (sinks), random others, the least attended, the last (recent)."""
    heldout: str | None = None
    """Corpus to score; None uses the excerpt in the package."""
    rows: int = limited(48, at_least=1)
    """Rows of text."""
    length: int = limited(256, at_least=2)
    """Tokens in a row."""
    draws: int = limited(1, at_least=1)
    """Repetitions per row, each with its own noise and random columns; the mean counts."""
    resamples: int = limited(2000, at_least=100)
    """Bootstrap samples of the rows for the 95 % intervals."""
    batch: int = limited(16, at_least=1)
    """Rows per forward pass."""
    seed: int = 0
    """Seed of the noise, the random columns and the bootstrap."""

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "ks", tuple(sorted({0, *self.ks})))
        object.__setattr__(self, "controls", tuple(dict.fromkeys(self.controls)))
        if not self.controls and self.ks != (0,):
            raise ValueError(f"a curve over ks {self.ks} needs at least one of the controls {', '.join(CONTROLS)}")
