"""What `sinklab trace` and `sinklab mask` do: prompts from files, one study, or two that differ in an intervention."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import tyro

from sinklab.cli.progress import working
from sinklab.cli.writing import Reading
from sinklab.studies.processes import refuse_taken
from sinklab.studies.trace.settings import PROMPTS, StudySettings

if TYPE_CHECKING:
    import numpy as np

    from sinklab.checkpoints.loading import Loaded
    from sinklab.records.reading import Run


Settings = TypeVar("Settings")


@dataclass(frozen=True)
class Study(StudySettings):
    """The settings of a study as the command line takes them: the prompts come as arguments or from a file."""

    prompts: tyro.conf.Suppress[tuple[str, ...]] = PROMPTS
    """Given as arguments or by a file."""

    def __post_init__(self) -> None:
        """Nothing is checked while arguments are parsed: `chosen` makes the study's own settings, and says what is
        wrong in one line.
        """


@dataclass(frozen=True)
class Inputs:
    """Where prompts come from, and where a run goes on."""

    prompts: Path | None = None
    """File of prompts: .txt (one a line), .jsonl, .json or .csv (field prompt, question or text)."""
    samples: int | None = None
    """Take the first so many prompts of the file; all when left out."""
    resume: bool = False
    """Go on with an interrupted run where it stopped; with the same settings."""


def prompts_of(prompt: tuple[str, ...], inputs: Inputs) -> tuple[str, ...]:
    """The prompts of the command line or of its file.

    Raises:
        ValueError: for prompts from both, and a number of samples without a file.
    """
    from sinklab.scoring.prompts import read_prompts

    if prompt and inputs.prompts is not None:
        raise ValueError(f"prompts come as arguments or from a file, but there are both: {prompt[0]!r} and --prompts")
    if inputs.samples is not None and inputs.prompts is None:
        raise ValueError("--samples takes the first prompts of a file; give it with --prompts FILE")
    return prompt if inputs.prompts is None else read_prompts(inputs.prompts, inputs.samples)


def chosen(settings: StudySettings, prompt: tuple[str, ...], inputs: Inputs, **changes: Any) -> StudySettings:
    """The settings with the prompts that were given. Raises ValueError as `prompts_of` does."""
    prompt = prompts_of(prompt, inputs)
    return run_settings(StudySettings, settings, **({"prompts": prompt} if prompt else {}) | changes)


def run_settings(kind: type[Settings], given: Any, **changes: Any) -> Settings:
    """Settings as the command line took them, unchecked, made into those of the run, which checks them.

    Raises:
        ValueError: for what makes no sense.
    """
    fields = dataclasses.fields(cast(Any, kind))
    return kind(**{field.name: getattr(given, field.name) for field in fields} | changes)


def loaded_here(model: str, reading: Reading) -> Loaded:
    """The model; of several processes on one machine each takes a GPU of its own."""
    from sinklab.checkpoints.loading import load

    device = reading.device
    if device == "cuda" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return load(model, **dataclasses.asdict(reading) | {"device": device})


def watch(settings: StudySettings, model: str, out: Path, reading: Reading, resume: bool) -> list[str]:
    """`sinklab trace`: the lines to print; none in a process that is not the first."""
    from sinklab.studies.trace.run import study

    if not resume:
        refuse_taken(out)
    with working() as progress:
        folder = study(loaded_here(model, reading), out, settings, progress=progress, resume=resume)
    return _first([f"run folder: {folder}", f"next: sinklab report {folder}"])


def compare_masked(settings: StudySettings, model: str, out: Path, reading: Reading, resume: bool) -> list[str]:
    """`sinklab mask`: a plain run and one under the settings' edits, and what the edits did."""
    from sinklab.records.reading import open_run
    from sinklab.registry import interventions
    from sinklab.studies.trace.run import check_study, study

    for spec in settings.edits:
        interventions.parse(spec)
    if not resume:
        refuse_taken(out)
    folders = {"plain": dataclasses.replace(settings, edits=()), "masked": settings}
    with working() as progress:
        loaded = loaded_here(model, reading)
        if loaded.family != "diffusion":
            folders["masked"] = dataclasses.replace(settings, edits=tuple(map(_by_last_row, settings.edits)))
        # the second run may be hours away: what is wrong with it shows now
        check_study(loaded, folders["masked"])
        for name, one in folders.items():
            progress.stage(f"the {name} run")
            study(loaded, out / name, one, progress=progress, resume=resume)
    if not _first(["speaks"]):
        return []
    plain, masked = open_run(out / "plain"), open_run(out / "masked")
    return [
        f"edits: {' '.join(masked.info.settings['edits'])}",
        *_removed(masked),
        *_texts(plain, masked),
        f"run folders: {out / 'plain'} and {out / 'masked'}",
        f"next: sinklab compare {out / 'plain'} {out / 'masked'}",
    ]


def _by_last_row(spec: str) -> str:
    """An autoregressive model is read by the last token's row, also where its first forward has a whole prompt."""
    return f"{spec},selector=last_row" if spec.startswith("mask_sinks:") and "selector" not in spec else spec


def _first(lines: list[str]) -> list[str]:
    from sinklab.studies.processes import Processes

    return lines if Processes.here().is_first else []


def _removed(masked: Run) -> list[str]:
    """What each edit took away, as means over forwards, layers and heads."""
    table = masked.table("removals")
    lines = []
    for edit, rows in table.groupby("edit", sort=False):
        facts = [f"{rows['removed'].mean():.3g} keys a head in {rows['forward'].nunique()} forwards"]
        for column, text in (
            ("mass", "that had held {:.1%} of the attention"),
            ("realised", "{:.1%} of the attention really taken away"),
            ("overlap", "overlap with the step before {:.2f}"),
        ):
            if column in rows and rows[column].notna().any():
                facts.append(text.format(rows[column].mean()))
        lines.append(f"removed by {edit}: {', '.join(facts)}")
    return lines or ["removed: nothing"]


def _texts(plain: Run, masked: Run) -> list[str]:
    from sinklab.studies.trace.writing import agreement

    agreements = []
    lines = []
    for one, other in zip(_written(plain), _written(masked), strict=True):
        agreements.append(agreement(one[1], other[1]))
        lines += [f"  plain:  {one[0]}", f"  masked: {other[0]}"]
    mean = sum(agreements) / len(agreements)
    return [f"agreement of the texts: {mean:.1%} of the tokens stand where they stood", *lines]


def _written(run: Run) -> list[tuple[str, np.ndarray]]:
    table = run.table("generations")
    table = table[table["masked_sinks"] == 0]
    texts = [" ".join(text.split()) for text in table["completion"]]
    return list(zip(texts, table["token_ids"], strict=True))


# the two runs are compared with each other; more texts and held-out loss are what `trace` is for
DEFAULTS = Study(mask_sinks=(), heldout="")


def mask(
    prompt: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    model: str = "tiny",
    out: Path = Path("runs/mask"),
    k: int | None = None,
    epsilon: float | None = None,
    removal: Literal["mask", "zero_value", "evict"] = "mask",
    source: Literal["closed_loop", "clean_pass", "carried"] = "closed_loop",
    control: Literal["sinks", "random", "recent", "lowest"] = "sinks",
    limit: int | None = None,
    also: tuple[str, ...] = (),
    inputs: tyro.conf.OmitArgPrefixes[Inputs] = Inputs(),
    reading: tyro.conf.OmitArgPrefixes[Reading] = Reading(),  # noqa: B008
    settings: tyro.conf.OmitArgPrefixes[Study] = DEFAULTS,
) -> None:
    """Take the sinks away while a model writes, and say what that did.

    Writes two run folders, OUT/plain and OUT/masked, and prints how much attention was removed, how far the selections
    of successive steps overlap, and how much of the text stayed. In each layer and head the keys that received most at
    the step before are hidden (closed loop; the first step is whole). A key that is hidden receives nothing, so the
    closed loop hides others at the next step and overlaps little; --source clean_pass or carried holds on to the sinks.

    Try
        sinklab mask "The house stood at the end of a" --k 5
        sinklab mask --k 5 --control random --out runs/control
        sinklab mask --epsilon 3 --removal zero_value --out runs/zero
        sinklab mask --k 1 --source carried --limit 8 --also window_attention:radius=16 --out runs/more

    Args:
        prompt: beginnings to continue, one sample each; three stock ones when left out.
        model: "tiny" or "tiny-sink" (inside the package), a folder, or a name on the Hub.
        out: folder for the two run folders; it must be empty or absent, but for --resume.
        k: hide this many keys per layer and head; 5 when neither --k nor --epsilon is given.
        epsilon: hide the keys that receive more than 1 + epsilon (S - 1) / S times an even share, in place of --k.
        removal: hide them before the softmax, set their values to zero after it, or evict them from the memory.
        source: choose from the edited run itself, from a second, whole forward, or carry over what was once chosen.
        control: what to hide: sinks, or as many random, most recent or least attended columns that are none.
        limit: with --source carried: the most keys a head may have lost at a time.
        also: further interventions, as text such as window_attention:radius=16.
        inputs: where the prompts come from.
        reading: how the weights are read.
        settings: what to write and watch.
    """
    if k is not None and epsilon is not None:
        raise ValueError(f"give --k or --epsilon, not both: got {k} and {epsilon}")
    amount = f"epsilon={epsilon}" if epsilon is not None else f"k={5 if k is None else k}"
    spec = f"mask_sinks:{amount},removal={removal},source={source},control={control}"
    spec += "" if limit is None else f",limit={limit}"
    both = chosen(settings, prompt, inputs, edits=(spec, *also, *settings.edits))
    for line in compare_masked(both, model, out, reading, inputs.resume):
        print(line)
