"""The command of a study, made of its settings and its docstring; settings that all commands with a
model share.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.lab.cli.options import MARK, WORDS, checked
from sinklab.lab.cli.progress import say as say
from sinklab.lab.cli.progress import show as show
from sinklab.lab.cli.progress import spelt as spelt
from sinklab.lab.cli.progress import working as working
from sinklab.lab.files import launched
from sinklab.lab.records.writing import refuse_taken
from sinklab.lab.studies.base import Study, as_record, folder_names
from sinklab.lab.studies.processes import Processes, duration

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
    allow_pickle: bool = False
    """Also read .bin and .pth files, without running code in them."""
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
        """The model, which must have a mask token if it denoises and fills masks; of several
        processes on one machine each takes a GPU of its own.
        """
        from sinklab.lab.checkpoints.loading import load
        from sinklab.lab.scoring.requests import needs_mask

        device = self.device
        if device == "cuda" and launched()[1] > 1:
            device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
        loaded = load(model, **dataclasses.asdict(self) | {"device": device})
        if fills_masks:
            needs_mask(loaded, "this command")
        if self.dtype == "machine" and Processes.here().is_first:
            say(f"{model}: {loaded.model.dtype}", stream=sys.stderr)
        return loaded


@dataclass(frozen=True)
class Inputs:
    """Source of prompts."""

    prompts: Path | None = None
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

        if prompt and self.prompts is not None:
            raise ValueError(
                f"prompts come as arguments or from a file, but there are both: {prompt[0]!r} and "
                "--prompts"
            )
        if self.samples is not None and self.prompts is None:
            raise ValueError(
                "--samples takes the first prompts of a file; give it with --prompts FILE"
            )
        if self.prompts is None:
            return prompt
        return read_prompts(self.prompts, self.samples)


def _arguments(name: str, study: Study) -> dict[str, tuple[Any, Any]]:
    """Types and defaults of the arguments of ``sinklab NAME``, groups of settings behind the
    others.
    """
    settings = study.Settings()
    takes_prompts = "prompts" in as_record(settings)
    kinds: dict[str, tuple[Any, Any]] = {}
    if takes_prompts:
        kinds["prompt"] = MARK.Positional[tuple[str, ...]], ()
    if isinstance(study.model, tuple):
        kinds["model"] = tuple[str, ...], study.model
    elif study.model != "":
        kinds["model"] = str, study.model
    kinds["out"] = Path, Path("runs") / name
    if (study.parts or study.shards) and not study.keeps:
        kinds["resume"] = bool, False
    if study.shards:
        kinds["shard"] = str | None, None
    groups: dict[str, Any] = {}
    if takes_prompts:
        groups["inputs"] = Inputs()
    if study.model != "":
        groups["reading"] = Reading()
    groups |= {"drawing": study.Options(), "settings": settings}
    for group, value in groups.items():
        if dataclasses.fields(value):
            kinds[group] = type(value), value
    return kinds


def command(name: str, study: Study) -> Callable[..., None]:
    """The function that `options` and tyro turn into ``sinklab NAME``."""
    kinds = _arguments(name, study)

    def call(**given: Any) -> None:
        models = given.get("model", "")
        if not isinstance(study.model, tuple):
            models = (models,)
        changes = {}
        if "inputs" in kinds:
            found = given["inputs"].read(given["prompt"])
            if found:
                changes["prompts"] = found
        chosen = checked(given["settings"], **changes)
        lines = study.instead(chosen)
        if lines:
            say("\n".join(lines))
            return
        reading = given.get("reading", Reading())
        lines = conduct(
            study,
            models,
            given["out"],
            chosen,
            reading=reading,
            options=given.get("drawing"),
            resume=given.get("resume", study.keeps),
            worker=Processes.here(given.get("shard")),
        )
        for line in lines:
            say(line)

    call.__name__ = name
    arguments = "".join(f"    {part}: {WORDS['arguments'][part]}\n" for part in kinds)
    call.__doc__ = f"{inspect.cleandoc(study.__doc__ or '')}\n\nArgs:\n{arguments}"
    call.__annotations__ = {part: kind for part, (kind, _) in kinds.items()}
    parameters = [
        inspect.Parameter(part, inspect.Parameter.KEYWORD_ONLY, annotation=kind, default=default)
        for part, (kind, default) in kinds.items()
    ]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def conduct(
    study: Study,
    models: Sequence[str],
    out: Path,
    settings: Any,
    *,
    resume: bool = False,
    reading: Reading = Reading(),
    options: Any = None,
    worker: Processes | None = None,
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
    worker = worker or Processes.here()
    # of several workers another one may have begun already
    if not (worker.joins or resume):
        for place in places:
            refuse_taken(place)
    study, settings = study.resolved(settings)
    reading.check(models)
    with working() as progress:
        for model, place in zip(models, places, strict=True):
            loaded = None
            if study.model != "":
                loaded = partial(reading.load, model)
            study(loaded, place, settings, progress=progress, resume=resume, worker=worker)
        elsewhere = sorted({*places}.difference(worker.finished))
        if elsewhere:
            names = ", ".join(map(str, elsewhere))
            return [f"all samples are written; another worker finishes {names}"]
        runs = [open_run(place) for place in places]
        drawn = study.draw(runs, out, options or study.Options())
    folders = ", ".join(str(run.path) for run in runs)
    named = f"run folder: {folders}"
    if several:
        named = f"run folders: {folders}"
    lines = [*study.sentences(runs), named, *study.closing(runs, drawn)]
    if progress.whole:
        lines.append(f"at this rate the whole takes {duration(progress.whole)}")
    return lines
