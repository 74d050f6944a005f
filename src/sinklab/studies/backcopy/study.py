"""Bigram-Backcopy as a study: its command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.registry import studies
from sinklab.studies.backcopy.settings import BackcopySettings
from sinklab.studies.base import Study, Work

if TYPE_CHECKING:
    from sinklab.checkpoints.loading import Loaded
    from sinklab.records.reading import Run
    from sinklab.studies.processes import Progress


@studies.register("backcopy")
class Backcopy(Study):
    """Train causal and diffusion twins on Bigram-Backcopy and see which of them grow a sink: seconds a model.

    32 tokens and a start token; after one of 4 triggers comes the token before it, after any other a draw from its row
    of a transition matrix (arXiv 2410.13835). The best possible loss is computed, and no contrast is drawn unless every
    twin comes within 5 % of it. Writes a run folder, backcopy.md and a figure.

    Try
        sinklab backcopy --seeds 0 --objectives causal
        sinklab backcopy --objectives causal --variants plain sink zero gate logit
        sinklab backcopy --layers 2 --steps 2500 --resume
    """

    Settings = BackcopySettings
    model = ""
    parts = "heads"
    shards = True

    def prepare(self, loaded: Loaded | None, settings: BackcopySettings, progress: Progress) -> Any:
        """Seed, objective and variant of every model."""
        if settings.width % (2 * settings.heads):
            raise ValueError(
                f"a head's width must be whole and even, but width is {settings.width} for {settings.heads} heads; "
                f"make it a multiple of {2 * settings.heads}"
            )
        return [(s, o, v) for s in settings.seeds for o in settings.objectives for v in settings.variants]

    def samples(self, plan: Any) -> int:
        """One a model."""
        return len(plan)

    def about(self, loaded: Loaded | None, plan: Any) -> dict[str, Any]:
        """The models are made here."""
        return {"name": "backcopy", "family": "diffusion"}

    def run(self, work: Work) -> None:
        """Train and measure the models."""
        from sinklab.studies.backcopy.run import train_and_measure

        train_and_measure(work)

    def sentences(self, runs: list[Run]) -> list[str]:
        """The precondition, the distance to the floor, and the contrasts that may be drawn."""
        from sinklab.studies.backcopy.figures import backcopy_sentences

        return [line for run in runs for line in backcopy_sentences(run)]

    def draw(self, runs: list[Run], out: Path, options: Any) -> list[Path]:
        """backcopy.md and backcopy.png in the run folder."""
        from sinklab.studies.backcopy.figures import draw_backcopy

        return [path for run in runs for path in draw_backcopy(run)]
