"""Untrained twins in a study: made where that costs little or is asked for, listed in the run, and what they show."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from sinklab.studies.base import Work, columns_of

if TYPE_CHECKING:
    import pandas as pd

    from sinklab.checkpoints.loading import Loaded
    from sinklab.records.reading import Run

LITTLE = 60.0
"""Seconds: twins that take less are made without being asked for."""
MAKING = 1e-7
"""Seconds that it takes to initialise or permute a parameter."""
SHARED = " (an untrained twin shows as much)"
"""Behind what a sentence says, where that is so."""


def too_long(work: Work, one: float) -> str:
    """Why no twins are made, as far as time goes, in words; empty where they are asked for, or take little.

    Args:
        work: settings.twin says what was asked for; None is where it costs little.
        one: seconds that all takes with one twin, once that is made.
    """
    if work.settings.twin:
        return ""
    seconds = 2 * (one + MAKING * work.loaded.model.num_parameters())
    if seconds < LITTLE:
        return ""
    return (
        f"both would take about {seconds / 60:.0f} min; they are made where they are asked for (--twin, in Python "
        "twin=True)"
    )


def write_twins(work: Work, hindrance: str, write: Callable[[Loaded, str], None]) -> None:
    """Make both twins of the model, one after the other, and write what they show; then the table ``twins``: which
    there are, or why not. Nothing where none is wanted.

    Args:
        work: of the run, open.
        hindrance: why none is made; empty where nothing speaks against it.
        write: takes a twin and its name, of which `of_twin` makes the names of its tables.
    """
    from sinklab.checkpoints.loading import UNTRAINED
    from sinklab.records.storage import weights_hash

    if work.settings.twin is False:
        return
    rows, seed = [], work.settings.seed or 0
    for kind, make in UNTRAINED.items():
        why, own_hash = hindrance, None
        if not why:
            work.progress.stage(f"measuring an untrained twin ({kind}) on the same canvases")
            try:
                twin = make(work.loaded, seed)
            except ValueError as error:
                why = str(error)
            else:
                own_hash = weights_hash(twin.model.state_dict())
                write(twin, kind)
        if why:
            work.progress.stage(f"no untrained twin ({kind}): {why}")
        rows.append({"twin": kind, "made": not why, "seed": seed, "weights_sha256": own_hash, "why": why})
    work.run.table("twins", columns_of(rows))


def twins_of(run: Run) -> list[str]:
    """Names of the twins that a run has."""
    made = run.table("twins") if "twins" in run.tables else None
    return [] if made is None else made.loc[made["made"], "twin"].tolist()


def no_twins(names: str, made: pd.DataFrame | None) -> str:
    """What is said of models without twins; made: the table ``twins``."""
    why = "" if made is None else f" ({made['why'].iloc[0]})"
    return f"No untrained twin of {names} was measured{why}: what is said may be true of untrained weights as well."


def shared(own: float, others: Iterable[float]) -> str:
    """`SHARED` where what some twin shows is, in whichever direction, at least a third of what the model shows."""
    from sinklab.reports.findings import AS_MUCH

    return SHARED if any(abs(other) >= AS_MUCH * abs(own) > 0 for other in others if not math.isnan(other)) else ""
