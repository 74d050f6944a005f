"""`sinklab probe`: what the sinks of a model carry."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from sinklab.cli.command import Reading
from sinklab.cli.progress import working
from sinklab.cli.watching import Inputs, loaded_here, prompts_of, run_settings
from sinklab.studies.contents.settings import ContentsSettings


@dataclass(frozen=True)
class Contents(ContentsSettings):
    """The settings as the command line takes them: the prompts come as arguments or from a file."""

    prompts: tyro.conf.Suppress[tuple[str, ...]] = ()
    """Given as arguments or by a file."""

    def __post_init__(self) -> None:
        """Nothing is checked while arguments are parsed: `probe` makes the settings themselves."""


def probe(
    prompt: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    model: str = "tiny",
    out: Path = Path("runs/probe"),
    inputs: tyro.conf.OmitArgPrefixes[Inputs] = Inputs(),  # noqa: B008 (a frozen record)
    reading: tyro.conf.OmitArgPrefixes[Reading] = Reading(),  # noqa: B008
    settings: tyro.conf.OmitArgPrefixes[Contents] = Contents(),
) -> None:
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

    Args:
        prompt: beginnings to continue, one text each; taken from a corpus when left out.
        model: "tiny" or "tiny-sink" (inside the package), a folder, or a name on the Hub.
        out: folder to write; it must be empty or absent, but for --resume.
        inputs: where the prompts come from.
        reading: how the weights are read.
        settings: what to write, which states to keep, and how to read them.
    """
    for line in probed(settings, prompt, model, out, inputs, reading):
        print(line)


def probed(
    settings: ContentsSettings, prompt: tuple[str, ...], model: str, out: Path, inputs: Inputs, reading: Reading
) -> list[str]:
    """The lines that `sinklab probe` prints.

    Raises:
        ValueError: for prompts from both arguments and a file, and what `sink_contents` refuses.
    """
    from sinklab.records.reading import open_run
    from sinklab.studies.contents.figures import contents_sentences, save_contents_figures
    from sinklab.studies.contents.run import sink_contents
    from sinklab.studies.processes import refuse_taken

    prompt = prompts_of(prompt, inputs)
    whole = run_settings(ContentsSettings, settings, **({"prompts": prompt} if prompt else {}))
    if not inputs.resume:
        refuse_taken(out)
    with working() as progress:
        folder = sink_contents(loaded_here(model, reading), out, whole, progress=progress, resume=inputs.resume)
    run = open_run(folder)
    figures = save_contents_figures(run, folder)
    lines = [*contents_sentences(run), f"run folder: {folder}"]
    return lines + ([f"figures: {', '.join(path.name for path in figures)}"] if figures else [])
