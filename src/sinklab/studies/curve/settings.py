"""What a masking curve does: one frozen dataclass, written into its run folder."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

CONTROLS = ("sinks", "random", "lowest", "recent")


@dataclass(frozen=True)
class CurveSettings:
    """Which columns are hidden, from what text, and how sure the result has to be.

    Raises ValueError for unknown controls and for numbers that make no sense with any model.
    """

    ks: tuple[int, ...] = (0, 1, 2, 5, 10, 20)
    """Numbers of columns to hide per row, layer and query head; 0 is always scored."""
    controls: tuple[str, ...] = ("sinks", "random", "lowest")
    """Which columns: those that receive most, as many random others, those that receive least, the last (recent)."""
    heldout: str | None = None
    """Corpus to score; None takes the excerpt inside the package."""
    rows: int = 48
    """Rows of text."""
    length: int = 256
    """Tokens in a row."""
    draws: int = 1
    """Times each row is scored, each under noise and random columns of its own; the mean counts."""
    resamples: int = 2000
    """Bootstrap samples of the rows for the 95 % intervals."""
    batch: int = 16
    """Rows per forward."""
    seed: int = 0
    """Seed of the noise, the random columns and the bootstrap."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "ks", tuple(sorted({0, *self.ks})))
        object.__setattr__(self, "controls", tuple(dict.fromkeys(self.controls)))
        for control in self.controls:
            if control not in CONTROLS:
                near = difflib.get_close_matches(control, CONTROLS, n=1)
                hint = f"did you mean {near[0]}?" if near else "choose among them."
                raise ValueError(f"controls of a curve are {', '.join(CONTROLS)}, got {control!r}; {hint}")
        if not self.controls and self.ks != (0,):
            raise ValueError(f"a curve over ks {self.ks} needs at least one of the controls {', '.join(CONTROLS)}")
        if self.ks[0] < 0:
            raise ValueError(f"ks are numbers of hidden columns, at least 0, got {self.ks[0]}; leave it out")
        least = {"rows": 1, "length": 2, "draws": 1, "resamples": 100, "batch": 1}
        for name, floor in least.items():
            if (value := getattr(self, name)) < floor:
                raise ValueError(f"{name} of a curve must be at least {floor}, got {value}")
