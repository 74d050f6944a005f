"""Models that learned nothing, beside the model of a study: no finding stands without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sinklab.lab.records import open_run

if TYPE_CHECKING:
    from sinklab.lab.checkpoints import Loaded
    from sinklab.lab.records import Run
    from sinklab.lab.studies.base import Work

LITTLE = 1e12
"""Parameters times tokens that a twin reads: both are made without being asked for where it is not
more, half a minute on two cores.
"""


def write_twins(work: Work, write: Callable[[Loaded, str], None], tokens: int) -> None:
    """Make both twins of the model, one after the other, and write their results; then the table
    ``twins``: which there are, or why not. Does nothing if none is wanted, or those that can be
    made are there.

    Args:
        work: of the run, open. settings.twin is the choice; None runs both if they do `LITTLE`.
        write: takes a twin and its name, of which `of_twin` makes the names of its tables.
        tokens: that it reads.
    """
    from sinklab.lab.analysis.words import CONTROLS
    from sinklab.lab.checkpoints.controls import UNTRAINED
    from sinklab.lab.records import weights_hash

    run, done = work.run, open_run(work.run.path)
    wanted = work.settings.twin
    if wanted is False:
        return
    if "twins" in done.tables and (not wanted or done.table("twins")["made"].all()):
        return
    hindrance = ""
    if not wanted and run.info.model["parameters"] * tokens > LITTLE:
        hindrance = f"each would read {tokens / 1e6:.1f} M tokens; the setting `twin` runs them"
    seed = work.settings.seed or 0
    rows: list[dict[str, Any]] = []
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
            work.progress.note(f"no control ({CONTROLS[kind]}): {row['why']}")
        rows.append(row)
    run.table("twins", rows)


def twins_of(run: Run) -> list[str]:
    """Names of the twins that a run has."""
    if "twins" not in run.tables:
        return []
    return run.table("twins").query("made")["twin"].tolist()
