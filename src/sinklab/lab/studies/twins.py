"""Controls of a study, untrained twins of its model: run if that costs little or is asked for; and
their results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sinklab.lab.analysis.answers import CONTROLS, beside
from sinklab.lab.studies.base import Work, columns_of

if TYPE_CHECKING:
    from sinklab.lab.checkpoints.loading import Loaded
    from sinklab.lab.records.reading import Run

LITTLE = 60.0
"""Seconds: twins that take less are made without being asked for."""
MAKING = 1e-7
"""Seconds that it takes to initialise or permute a parameter."""


def write_twins(
    work: Work, seconds: Callable[[], float], write: Callable[[Loaded, str], None]
) -> None:
    """Make both twins of the model, one after the other, and write their results; then the table
    ``twins``: which there are, or why not. Does nothing if none is wanted, or those that can be
    made are there.

    Args:
        work: of the run, open. settings.twin is the choice; None runs both if they take little.
        seconds: measures the time of one twin, without making it; called only if it matters.
        write: takes a twin and its name, of which `of_twin` makes the names of its tables.
    """
    from sinklab.lab.checkpoints.controls import UNTRAINED
    from sinklab.lab.records import open_run, weights_hash

    run = work.run
    wanted = work.settings.twin
    if wanted is False:
        return
    if run.has("twins") and (not wanted or open_run(run.path).table("twins")["made"].all()):
        return
    hindrance = ""
    if not wanted:
        hindrance = _too_long(work, seconds())
    seed = work.settings.seed or 0
    rows = []
    for kind, make in UNTRAINED.items():
        row = {"twin": kind, "made": False, "seed": seed, "weights_sha256": None, "why": hindrance}
        if not hindrance:
            work.progress.stage(f"a control ({CONTROLS[kind]}) reads the same canvases")
            try:
                twin = make(work.loaded, seed)
            except ValueError as error:
                row["why"] = str(error)
            else:
                row |= {"made": True, "weights_sha256": weights_hash(twin.model.state_dict())}
                write(twin, kind)
        if row["why"]:
            work.progress.stage(f"no control ({CONTROLS[kind]}): {row['why']}")
        rows.append(row)
    run.table("twins", columns_of(rows))


def _too_long(work: Work, one: float) -> str:
    """Reason why no controls are run that nobody asked for, in words; empty if they take little."""
    seconds = 2 * (one + MAKING * work.loaded.model.num_parameters())
    if seconds < LITTLE:
        return ""
    return (
        f"both would take about {seconds / 60:.0f} min; pass --twin to run them, in Python "
        "twin=True"
    )


def twins_of(run: Run) -> list[str]:
    """Names of the twins that a run has."""
    if "twins" not in run.tables:
        return []
    return run.table("twins").query("made")["twin"].tolist()


def no_twins(runs: Mapping[str, Run]) -> list[str]:
    """Sentence on those of these models that have no controls; nothing if all have."""
    alone = {label: run for label, run in runs.items() if not twins_of(run)}
    tables = [run.table("twins") for run in alone.values() if "twins" in run.tables]
    if not alone:
        return []
    why = ""
    if tables:
        why = f" ({tables[0]['why'].iloc[0]})"
    return [f"No untrained control of {' and '.join(alone)} was run{why}."]


def shown_by(
    texts: Mapping[str, str], own: Any = (), theirs: Mapping[str, Any] | None = None
) -> str:
    """Results of controls, in brackets behind a number; empty without any. See
    `sinklab.lab.analysis.answers.beside`.
    """
    words = beside(texts, own, theirs)
    if not words:
        return ""
    return f" ({words})"
