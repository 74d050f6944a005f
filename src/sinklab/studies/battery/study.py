"""The reasoning battery as a study: its command, and the function that Python calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.registry import studies
from sinklab.studies.base import Study, Work, columns_of
from sinklab.studies.battery.settings import BatterySettings, of_kind

if TYPE_CHECKING:
    from sinklab.checkpoints.loading import Loaded
    from sinklab.records.reading import Run
    from sinklab.studies.processes import Progress


@studies.register("battery")
class Battery(Study):
    """Score the reasoning battery, six skills at four levels, with and without sinks.

    Arithmetic, deduction, planning, rewriting, retrieval and copying: problems are made by rule, and their answers are
    known. Each is answered with nothing hidden, then with k columns hidden in every layer and head: the sinks, or as
    many random ones. What counts is the difference on the same problems, and only where the model is able at all:
    train one with `sinklab train battery`, and its autoregressive twin with `sinklab train battery-causal`; models
    that never saw such problems answer none. Writes a run folder per model below OUT, tables (CSV, Markdown) and
    figures into OUT/report. Of the conditions each model takes those of its kind.

    Try
        sinklab train battery-start && sinklab train battery && sinklab train battery-causal
        sinklab battery runs/battery/model runs/battery-causal/model
        sinklab battery runs/battery/model --conditions pure blocks-6 left_to_right random --ks 10 --levels 1 2
        sinklab battery tiny tiny-sink --skills copying --levels 1 --problems 4 --ks 5 --out runs/first
    """

    Settings = BatterySettings
    model = ()
    positional = True
    place = "battery-scores"
    parts = "answers"

    def of_models(self, models: Sequence[str], settings: BatterySettings) -> list[BatterySettings]:
        """To each model the conditions of its kind. Raises ValueError for one that none of the models can have."""
        if not settings.conditions:
            return [settings] * len(models)
        from sinklab.checkpoints.loading import describe

        found = [of_kind(describe(model).family, settings.conditions) for model in models]
        if untaken := set(settings.conditions).difference(*found):
            raise ValueError(
                f"every condition needs a model of its kind, but none of {', '.join(models)} can have "
                f"{', '.join(sorted(untaken))}: greedy is for autoregressive models, the others are for those that "
                "denoise; leave it out, or name such a model"
            )
        return [replace(settings, conditions=conditions) for conditions in found]

    def fit(self, loaded: Loaded, settings: BatterySettings) -> BatterySettings:
        """With a condition of the model's kind where none was given."""
        names = settings.conditions or of_kind(loaded.family, ("pure", "greedy"))
        return replace(settings, conditions=names)

    def prepare(self, loaded: Loaded, settings: BatterySettings, progress: Progress) -> Any:
        """The problems, and what is done with each."""
        from sinklab.studies.battery.run import prepared

        return prepared(loaded, settings)

    def samples(self, plan: Any) -> int:
        """One a (condition, control, k, skill, level)."""
        return len(plan.cells)

    def record(self, settings: BatterySettings) -> dict[str, Any]:
        """With the size of a batch where draws depend on it."""
        draws = any("random" in name for name in (*settings.controls, *settings.conditions))
        return super().record(settings) | ({"batch": settings.batch} if draws else {})

    def run(self, work: Work) -> None:
        """Answer the problems."""
        from sinklab.studies.battery.run import write_answers

        write_answers(work)

    def finish(self, work: Work) -> None:
        """Count right answers."""
        from sinklab.records.reading import open_run
        from sinklab.studies.battery.run import accuracy

        answers = open_run(work.run.path).table("answers").to_dict("records")
        work.run.table("accuracy", columns_of(accuracy(answers)))

    def sentences(self, runs: list[Run]) -> list[str]:
        """What each model can, what hiding columns does to it, and what was left out."""
        from sinklab.studies.battery.tables import battery_sentences

        lines = battery_sentences(runs)
        for run in runs:
            if "skipped" in run.tables:
                left, asked = len(run.table("skipped")), len(run.parts("answers"))
                lines.append(
                    f"{run.path.name}: {left} of {left + asked} parts left out, questions too short for so many columns"
                )
        return lines

    def draw(self, runs: list[Run], out: Path, options: Any) -> list[Path]:
        """Tables and figures of all models, in OUT/report."""
        from sinklab.studies.battery.figures import write_battery_figures
        from sinklab.studies.battery.tables import write_battery_tables

        return [*write_battery_tables(runs, out / "report"), *write_battery_figures(runs, out / "report")]

    def closing(self, runs: list[Run], drawn: list[Path]) -> list[str]:
        """Where they are."""
        return [f"tables and figures: {drawn[0].parent} ({len(drawn)} files)"]


def score_battery(
    loaded: Loaded,
    settings: BatterySettings,
    out: str | Path,
    progress: Progress | Callable[[str], object] | None = None,
    *,
    resume: bool = False,
) -> Path:
    """Write a run folder of kind "battery", one part a (condition, control, k, skill, level).

    Tables: ``answers``, every text that was written; ``accuracy``, shares with Wilson intervals (`low`, `high`), and
    the differences to nothing hidden (`delta`) and to as many random columns (`beyond`) on the same problems, each with
    its interval and `_p` of the exact McNemar test, by skill and level, over all levels (level 0) and all skills;
    ``removed``, the share of attention taken away, by layer; ``skipped``, where k columns do not fit a question.

    Args:
        loaded: a diffusion model, or an autoregressive one, which writes greedily.
        settings: what to ask and how.
        out: folder to write; it must be empty or absent, or hold this very run to resume.
        progress: shows how far it is; a function is called with a short text at each stage.
        resume: go on where an interrupted run stopped.

    Raises:
        ValueError: for a model without tokenizer or mask token, a condition of the other kind of model, questions that
            do not fit, and several processes.
    """
    return Battery()(loaded, out, settings, progress=progress, resume=resume)
