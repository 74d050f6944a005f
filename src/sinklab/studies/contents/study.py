"""What sinks carry, as a study: its command, and the function that Python calls."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.registry import studies
from sinklab.studies.base import Study, Work
from sinklab.studies.contents.settings import ContentsSettings

if TYPE_CHECKING:
    from sinklab.checkpoints.loading import Loaded
    from sinklab.records.reading import Run
    from sinklab.studies.processes import Progress


@studies.register("probe")
class Probe(Study):
    """Ask what the sinks of a model carry, those among the still-masked positions above all.

    While the model writes, states of sinks are kept beside states of positions that are like them: of the same step,
    layer and place (prompt, committed, block, future), with the same token where there is one, as near as can be. The
    logit lens says what the model's own head reads in them; ridge probes, tested on texts they have not seen, say what
    else can be: the token finally written there, how much is still masked, the position, the block, what is written,
    what comes next. Everything is in a run folder, with a figure a place beside it; intervals are over texts.

    Sinks are few: where none is found among the masked positions, --choose strongest takes in each head the key of each
    place that receives most.

    Try
        sinklab probe --texts 16 --out runs/probe
        sinklab probe --model tiny-sink --choose strongest --texts 24 --every 8 --out runs/strongest
        sinklab probe --texts 12 --layers 0 3 6 --block-length 16 --new-tokens 48 --every 2 --out runs/some
        sinklab probe --prompts questions.jsonl --samples 64 --chat --temperature 0 --layers 0 8 16 24 32
            --model /models/LLaDA-8B-Instruct --dtype bfloat16 --device cuda --out runs/llada
    """

    Settings = ContentsSettings
    kind = "contents"
    parts = "texts"

    def check(self, settings: ContentsSettings) -> None:
        """Refuse a cache, and an unknown way to choose sinks."""
        from sinklab.studies.contents.run import check

        check(settings)

    def prepare(self, loaded: Loaded, settings: ContentsSettings, progress: Progress) -> Any:
        """The texts, the layers and the lens."""
        from sinklab.studies.contents.run import prepared

        return prepared(loaded, settings)

    def samples(self, plan: Any) -> int:
        """One a text."""
        return len(plan.tasks)

    def run(self, work: Work) -> None:
        """Write the texts."""
        from sinklab.studies.contents.run import write_texts

        write_texts(work)

    def finish(self, work: Work) -> None:
        """Read the states of all texts."""
        from sinklab.studies.contents.run import read_states

        read_states(work)

    def sentences(self, runs: list[Run]) -> list[str]:
        """What was found at each place."""
        from sinklab.studies.contents import figures

        return figures.contents_sentences(runs[0])

    def draw(self, runs: list[Run], out: Path, options: Any) -> list[Path]:
        """A figure a place, in the run folder."""
        from sinklab.studies.contents import figures

        return figures.save_contents_figures(runs[0], out)

    def closing(self, runs: list[Run], drawn: list[Path]) -> list[str]:
        """Their names."""
        return [f"figures: {', '.join(path.name for path in drawn)}"] if drawn else []


def sink_contents(
    loaded: Loaded,
    out: str | Path,
    settings: ContentsSettings | None = None,
    *,
    progress: Progress | Callable[[str], object] | None = None,
    resume: bool = False,
) -> Path:
    """Write a run folder of kind "contents": what the logit lens and linear probes read at sinks and beside them.

    Tables ``samples`` (a row a sampled state), ``looks`` (sinks of each place, step and layer), ``texts``, ``lens`` and
    ``probes`` (means and scores with 95 % intervals over texts; "difference" is sinks less matched positions), and
    ``added`` for models with added sinks; arrays ``states``, one part a text. A state of layer l is what enters it: the
    keys and values of its attention are made of it; the last one leaves the last layer.

    Args:
        loaded: a diffusion model.
        out: folder to write; it must be empty or absent, or hold this very run to resume.
        settings: what to write and read.
        progress: shows how far it is; a function is called with a short text at each stage.
        resume: go on where an interrupted run stopped.

    Raises:
        ValueError: for an autoregressive model, a cache, fewer texts than folds, and what the decoder refuses.
    """
    return Probe()(loaded, out, settings, progress=progress, resume=resume)
