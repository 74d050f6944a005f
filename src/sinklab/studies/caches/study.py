"""The comparison of block caches as a study: its command, and the function that Python calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.registry import studies
from sinklab.studies.base import Study, Work
from sinklab.studies.caches.settings import CacheSettings

if TYPE_CHECKING:
    from sinklab.checkpoints.loading import Loaded
    from sinklab.records.reading import Run
    from sinklab.studies.processes import Progress


@studies.register("caches")
class Caches(Study):
    """Compare block caches, with and without protected sinks, at equal budgets.

    Text the model has not seen is revealed block by block, and every cache is asked for the tokens still masked: how
    far are its probabilities from those computed without a cache? Also written: whole texts, time and memory. Prints a
    line per cache and a verdict per budget; writes a run folder and a figure.

    Try
        sinklab caches
        sinklab caches --model tiny-sink --keep 0.25 0.1 --sinks 8 --out runs/caches-sink
        sinklab caches --rows 32 --batch 16 --prompt-tokens 160 --new-tokens 64 --sparse --out runs/caches-long
    """

    Settings = CacheSettings
    parts = "rows"

    def prepare(self, loaded: Loaded, settings: CacheSettings, progress: Progress) -> Any:
        """The caches, and the text."""
        from sinklab.studies.caches.run import prepared

        progress.stage("reading text")
        return prepared(loaded, settings)

    def samples(self, plan: Any) -> int:
        """One a batch of rows."""
        return plan.batches

    def run(self, work: Work) -> None:
        """Measure every cache."""
        from sinklab.studies.caches.run import compare

        compare(work)

    def finish(self, work: Work) -> None:
        """Means over rows, and what protection does."""
        from sinklab.studies.caches.run import conclude

        conclude(work)

    def sentences(self, runs: list[Run]) -> list[str]:
        """A line per cache and a verdict per budget."""
        from sinklab.studies.caches.figures import caches_sentences

        return [line for run in runs for line in caches_sentences(run)]

    def draw(self, runs: list[Run], out: Path, options: Any) -> list[Path]:
        """caches.png in the run folder."""
        from sinklab.studies.caches.figures import draw_caches

        return [draw_caches(run, run.path / "caches.png") for run in runs]

    def closing(self, runs: list[Run], drawn: list[Path]) -> list[str]:
        """Where the figure is."""
        return [f"figure: {path}" for path in drawn]


def cache_fidelity(
    loaded: Loaded,
    out: str | Path,
    settings: CacheSettings | None = None,
    *,
    progress: Progress | Callable[[str], object] | None = None,
    resume: bool = False,
) -> Path:
    """Write a run folder of kind "caches".

    Tables: ``rows`` (a line per policy and row: loss, divergence from uncached, same first token), ``texts`` (share of
    written tokens that uncached decoding writes too), ``policies`` (means of both with 95 % bootstrap intervals over
    rows), ``protection`` (protected less unprotected at equal budget, paired over rows), ``costs`` (time, memory).

    Args:
        loaded: a diffusion model.
        out: folder to write; it must be empty or absent, or hold this very run to resume.
        settings: what to compare.
        progress: shows how far it is; a function is called with a short text at each stage.
        resume: go on where an interrupted run stopped, batch by batch and policy by policy.

    Raises:
        ValueError: for a model that does not denoise, rows that do not fit it, and settings that make no sense.
    """
    return Caches()(loaded, out, settings, progress=progress, resume=resume)
