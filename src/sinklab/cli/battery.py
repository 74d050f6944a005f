"""`sinklab battery`: problems with known answers, with and without sinks, for one model or several."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from sinklab.cli.command import Reading
from sinklab.cli.progress import working
from sinklab.cli.watching import loaded_here, run_settings
from sinklab.studies.battery.settings import BatterySettings, Condition

if TYPE_CHECKING:
    from sinklab.checkpoints.loading import Loaded


@dataclass(frozen=True)
class Battery(BatterySettings):
    """The settings as the command line takes them."""

    def __post_init__(self) -> None:
        """Nothing is checked while arguments are parsed: `battery` makes the settings, and says what is wrong in one
        line.
        """


DEFAULTS = Battery()


def battery(
    models: Annotated[tuple[str, ...], tyro.conf.Positional],
    out: Path = Path("runs/battery-scores"),
    resume: bool = False,
    reading: tyro.conf.OmitArgPrefixes[Reading] = Reading(),  # noqa: B008 (a frozen record)
    settings: tyro.conf.OmitArgPrefixes[Battery] = DEFAULTS,
) -> None:
    """Score the reasoning battery, six skills at four levels, with and without sinks.

    Arithmetic, deduction, planning, rewriting, retrieval and copying: problems are made by rule, and their answers are
    known. Each is answered with nothing hidden, then with k columns hidden in every layer and head: the sinks, or as
    many random ones. What counts is the difference on the same problems, and only where the model is able at all:
    train one with `sinklab train battery`, and its autoregressive twin with `sinklab train battery-causal`; models
    that never saw such problems answer none. Writes a run folder per model below OUT, tables (CSV, Markdown) and
    figures into OUT/report.

    Try
        sinklab train battery-start && sinklab train battery && sinklab train battery-causal
        sinklab battery runs/battery/model runs/battery-causal/model
        sinklab battery runs/battery/model --conditions pure blocks-6 left_to_right random --ks 10 --levels 1 2
        sinklab battery tiny tiny-sink --skills copying --levels 1 --problems 4 --ks 5 --out runs/first

    Args:
        models: folders, names on the Hub, or "tiny" and "tiny-sink"; diffusion or autoregressive.
        out: folder for the run folders and the report.
        resume: go on with interrupted runs where they stopped; with the same settings.
        reading: how the weights are read.
        settings: what to ask, how to answer, and what to hide. Of the conditions each model takes those of its kind.
    """
    from sinklab.records.reading import open_run
    from sinklab.studies.battery.figures import write_battery_figures
    from sinklab.studies.battery.run import score_battery
    from sinklab.studies.battery.tables import battery_sentences, write_battery_tables

    if not models:
        raise ValueError("battery needs at least one model, e.g. sinklab battery runs/battery/model")
    chosen = run_settings(BatterySettings, settings)
    folders = [out / label for label in labels(models)]
    with working() as progress:
        untaken = set(chosen.conditions)
        for left, model, folder in zip(reversed(range(len(models))), models, folders, strict=True):
            progress.stage(f"loading {model}")
            loaded = loaded_here(model, reading)
            own = dataclasses.replace(chosen, conditions=of_its_kind(loaded, chosen.conditions))
            untaken -= set(own.conditions)
            if untaken and not left:
                raise ValueError(
                    f"every condition needs a model of its kind, but none of {', '.join(models)} can have "
                    f"{', '.join(sorted(untaken))}: greedy is for autoregressive models, the others are for those that "
                    "denoise; leave it out, or name such a model"
                )
            score_battery(loaded, own, folder, progress, resume=resume)
        progress.stage("drawing")
        runs = [open_run(folder) for folder in folders]
        written = [*write_battery_tables(runs, out / "report"), *write_battery_figures(runs, out / "report")]
    print("\n".join(battery_sentences(runs)))
    for run in runs:
        if "skipped" in run.tables:
            left, asked = len(run.table("skipped")), len(run.parts("answers"))
            print(f"{run.path.name}: {left} of {left + asked} parts left out, questions too short for so many columns")
    print(f"run folders: {', '.join(map(str, folders))}")
    print(f"tables and figures: {out / 'report'} ({len(written)} files)")


def labels(models: Sequence[str]) -> list[str]:
    """A folder name for each model: the last part of its name, but that of the run where it is called "model"."""
    found: list[str] = []
    for model in models:
        path = Path(model)
        name = path.parent.name if path.name == "model" and path.parent.name else path.name
        count = sum(label == name or label.startswith(f"{name}-again-") for label in found)
        found.append(f"{name}-again-{count}" if count else name)
    return found


def of_its_kind(loaded: Loaded, conditions: Sequence[str]) -> tuple[str, ...]:
    """The conditions that a model can have: orders of decoding are for those that denoise."""
    denoises = loaded.family == "diffusion"
    return tuple(name for name in conditions if (Condition.named(name).order is not None) == denoises)
