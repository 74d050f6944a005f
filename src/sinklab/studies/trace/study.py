"""The trace as a study: a model recorded while it writes; and `mask`, two such runs of which one loses its sinks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.registry import studies
from sinklab.studies.base import Study, Work, describe
from sinklab.studies.processes import Processes, Progress, as_progress, refuse_taken
from sinklab.studies.trace.settings import MaskSettings, StudySettings

if TYPE_CHECKING:
    from sinklab.checkpoints.loading import Loaded
    from sinklab.records.reading import Run


@studies.register("trace")
class Trace(Study):
    """Record the attention every token receives at every denoising step while a model writes, in a run folder.

    The run folder holds run.json, Parquet tables and safetensors arrays; `sinklab report` turns it into a page, pandas
    reads it as it is. Each sample is saved when it is complete: an interrupted run can be read, and --resume continues
    it. Autoregressive models are traced too, on top of their own KV cache. Under `accelerate launch` the prompts are
    sharded over the processes and their folders merged.

    Try
        sinklab trace "The house stood at the end of a" --out runs/house && sinklab report runs/house
        sinklab trace --model tiny-sink --new-tokens 96 --rule random --out runs/sink
        sinklab trace --model tiny-sink --cache dual --statistics all --layers 0 -1 --every 4 --out runs/dual
        sinklab trace --prompts questions.jsonl --samples 30 --chat --model /models/LLaDA-8B-Instruct --dtype bfloat16
        sinklab trace "The house" --edits mask_sinks:k=5 window_attention:radius=16 --maps 3:5:2 --out runs/edited
        accelerate launch --num_processes 4 -m sinklab trace --prompts questions.jsonl --device cuda --resume
    """

    Settings = StudySettings
    kind = "study"
    parts = "generations"
    shards = True

    def prepare(self, loaded: Loaded, settings: StudySettings, progress: Progress) -> Any:
        """The texts to write and the text to score."""
        from sinklab.studies.trace.run import prepared

        return prepared(loaded, settings, progress)

    def samples(self, plan: Any) -> int:
        """One a prompt."""
        return len(plan.tasks)

    def about(self, loaded: Loaded, plan: Any) -> dict[str, Any]:
        """The model, with the layers and heads that are recorded."""
        return describe(loaded, plan.selection.layers, plan.selection.heads)

    def run(self, work: Work) -> None:
        """Write the samples."""
        from sinklab.studies.trace.run import write_samples

        write_samples(work)

    def finish(self, work: Work) -> None:
        """Score the held-out text."""
        from sinklab.studies.trace.run import score

        score(work)

    def closing(self, runs: list[Run], drawn: list[Path]) -> list[str]:
        """The command that shows the run."""
        return [f"next: sinklab report {runs[0].path}"]


@studies.register("mask")
class Mask(Study):
    """Ablate the sinks of a model while it writes, and report what changed.

    Writes two run folders, OUT/plain and OUT/masked, and prints the attention mass removed, the overlap of the
    selections at successive steps, and the token agreement of the two texts. In each layer and head the keys that
    received most at the previous step are hidden (closed loop; the first step is unedited). A hidden key receives
    nothing, so the closed loop hides other keys at the next step; --source clean_pass or carried hides the same ones.

    Try
        sinklab mask "The house stood at the end of a" --k 5
        sinklab mask --k 5 --control random --out runs/control
        sinklab mask --epsilon 3 --removal zero_value --out runs/zero
        sinklab mask --k 1 --source carried --limit 8 --also window_attention:radius=16 --out runs/more
    """

    Settings = MaskSettings
    kind = "study"
    parts = "generations"
    shards = True

    def settings_of(self, folder: str | Path) -> Any:
        """Two runs have no settings in one. Raises ValueError."""
        raise ValueError(
            f"`mask` writes two runs, and each is reproduced by itself: sinklab trace --reproduce {folder}/masked"
        )

    def __call__(
        self,
        loaded: Loaded | Callable[[], Loaded],
        out: str | Path,
        settings: MaskSettings | None = None,
        *,
        progress: Progress | Callable[[str], object] | None = None,
        resume: bool = False,
        overwrite: bool = False,
    ) -> Path:
        """Write OUT/plain and OUT/masked: see `Study.__call__`."""
        path, processes, trace = Path(out), Processes.here(), Trace()
        say, settings = as_progress(progress if processes.is_first else None), settings or MaskSettings()
        if not (resume or overwrite):
            refuse_taken(path)
        loaded = loaded() if callable(loaded) else loaded
        study = trace.seeded(settings.study, path / "plain", processes, resume)
        masked = replace(settings, study=study).edited(by_last_row=loaded.family != "diffusion")
        # the second run may be hours away: its settings are checked now
        last = trace.prepare(loaded, masked, say)
        first = trace.prepare(loaded, replace(study, edits=()), say)
        for name, one, plan in (("plain", replace(study, edits=()), first), ("masked", masked, last)):
            say.stage(f"the {name} run")
            trace.write(loaded, path / name, one, plan, say, resume=resume, overwrite=overwrite)
        return path

    def folders(self, out: Path) -> list[Path]:
        """Without and with the interventions."""
        return [out / "plain", out / "masked"]

    def sentences(self, runs: list[Run]) -> list[str]:
        """What each intervention removed, and how the texts changed."""
        from sinklab.studies.trace.writing import agreement

        plain, masked = runs
        table = masked.table("removals")
        lines = [f"edits: {' '.join(masked.info.settings['edits'])}"]
        for edit, rows in table.groupby("edit", sort=False):
            facts = [f"{rows['removed'].mean():.3g} keys per head in {rows['forward'].nunique()} forwards"]
            for column, text in (
                ("mass", "attention mass of the selected keys {:.1f} %"),
                ("realised", "mass actually removed {:.1f} %"),
            ):
                if column in rows and rows[column].notna().any():
                    facts.append(text.format(100 * rows[column].mean()))
            if "overlap" in rows and rows["overlap"].notna().any():
                facts.append(f"overlap with the selection of the step before {rows['overlap'].mean():.2f}")
            lines.append(f"removed by {edit}: {'; '.join(facts)}")
        if table.empty:
            lines.append("removed: nothing")
        pairs = list(zip(_written(plain), _written(masked), strict=True))
        mean = sum(agreement(one["token_ids"], other["token_ids"]) for one, other in pairs) / len(pairs)
        lines.append(f"token agreement with the unedited run: {100 * mean:.1f} %")
        for one, other in pairs:
            lines += [f"  plain:  {' '.join(one['completion'].split())}"]
            lines += [f"  masked: {' '.join(other['completion'].split())}"]
        return lines

    def closing(self, runs: list[Run], drawn: list[Path]) -> list[str]:
        """The command that compares the runs."""
        return [f"next: sinklab compare {runs[0].path} {runs[1].path}"]


def _written(run: Run) -> list[dict[Any, Any]]:
    table = run.table("generations")
    return table[table["masked_sinks"] == 0].to_dict("records")


def study(
    loaded: Loaded,
    out: str | Path,
    settings: StudySettings | None = None,
    *,
    progress: Progress | Callable[[str], object] | None = None,
    resume: bool = False,
) -> Path:
    """Trace a model while it writes, score it with its sinks hidden, and keep everything: one part per sample.

    Arrays ``attention`` (and ``maps``); tables ``tokens``, ``steps``, ``generations`` (``removals`` under edits,
    ``truncation`` and ``truncated`` with ``truncate``), and ``heldout`` for diffusion models. Under ``accelerate
    launch`` the samples are sharded over the processes and their folders merged at the end.

    Args:
        loaded: a diffusion model, or an autoregressive one, which writes through its own cache.
        out: folder to write; it must be empty or absent, or hold this very run to resume.
        settings: what to do.
        progress: shows the progress; a function is called with a short text at each stage.
        resume: continue where an interrupted run stopped; the result is that of an uninterrupted one.

    Raises:
        ValueError: for a prompt that does not fit, and settings that the model or the decoder refuse.
    """
    return Trace()(loaded, out, settings, progress=progress, resume=resume)
