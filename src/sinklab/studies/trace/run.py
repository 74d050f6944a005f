"""A trace, run: texts are written under observation, and held-out text is scored with sinks hidden."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sinklab.caching.policies import EvictingCache
from sinklab.checkpoints.loading import Loaded
from sinklab.checkpoints.tokens import special_roles
from sinklab.records.reading import Run
from sinklab.registry import interventions
from sinklab.scoring.heldout import HeldoutRows, check_heldout, heldout_curve, heldout_rows
from sinklab.scoring.prompts import encode
from sinklab.scoring.task import Task
from sinklab.scoring.writing import sample_seed, seeded
from sinklab.studies.base import Work, heldout_text
from sinklab.studies.processes import Meter, Progress
from sinklab.studies.trace.recording import Selection
from sinklab.studies.trace.study import StudySettings
from sinklab.studies.trace.writing import agreement, write_sample


@dataclass(frozen=True)
class Plan:
    """What is to be done, known before a folder is taken."""

    selection: Selection
    tasks: list[Task]
    text: HeldoutRows | None
    """The text to score."""


def prepare(loaded: Loaded, settings: StudySettings, progress: Progress) -> Plan:
    """The texts to write and the text to score. Raises ValueError for what can be refused without running the model."""
    selection = Selection.of(loaded.model.config, settings)
    return Plan(selection, _tasks(loaded, settings), _heldout_rows(loaded, settings, progress))


def _tasks(loaded: Loaded, settings: StudySettings) -> list[Task]:
    if not settings.prompts:
        raise ValueError(
            "a study needs at least one prompt; an empty string is allowed and lets the model start by itself"
        )
    if isinstance(settings.values()["cache"], EvictingCache):
        raise ValueError(
            f"a study records keys that all layers see alike, and cache={settings.cache} keeps others in each layer "
            "and head; record with another cache, or use trace() and recording.visible_by_layer"
        )
    seed = settings.seed or 0
    tasks = []
    for sample, text in enumerate(settings.prompts):
        prompt = encode(loaded, text, settings.chat)
        task = Task(loaded, prompt, settings, sample_seed(seed, sample), seeded(settings.edits, sample))
        task.check()
        _check_hidden(task, text)
        last = task.most_steps - 1
        if late := [key for key in settings.map_keys if key[0] > last]:
            raise ValueError(
                f"maps are recorded of steps 0 to {last}, but {':'.join(map(str, late[0]))} names step {late[0][0]}"
            )
        if settings.only_steps and max(settings.only_steps) > last:
            raise ValueError(f"only_steps are steps 0 to {last} of this run, but {max(settings.only_steps)} is none")
        tasks.append(task)
    return tasks


def _check_hidden(task: Task, text: str) -> None:
    """Refuse to hide as many keys as there are: of a causal model, as many as its first step reads."""
    settings, config = task.settings, task.loaded.model.config
    keys = task.positions + getattr(config, "sink_count", 0) if task.is_diffusion else len(task.started())
    named = [("mask_sinks", k) for k in settings.mask_sinks]
    for edit in task.settings.edits:
        if (k := getattr(edit, "k", None)) is not None:
            # as many other columns must be left to be the controls
            named.append((interventions.as_text(edit), k if getattr(edit, "control", "sinks") == "sinks" else 2 * k))
    for name, k in named:
        if not 1 <= k < keys:
            raise ValueError(
                f"{name} hides at least 1 and fewer than all keys, but is to hide {k} of the {keys} keys of {text!r} "
                + (f"with {settings.new_tokens} new tokens" if task.is_diffusion else "at the first step")
                + "; choose smaller numbers, or none at all"
            )


def _heldout_rows(loaded: Loaded, settings: StudySettings, progress: Progress) -> HeldoutRows | None:
    """The text to score; None, which is reported, where there is nothing to score."""
    if settings.heldout == "":
        return None
    reasons = {
        "it is defined for diffusion models": loaded.family != "diffusion",
        "the model has no tokenizer files": loaded.tokenizer is None,
        "the run is written under edits": bool(settings.edits),
    }
    if why := [reason for reason, holds in reasons.items() if holds]:
        if settings.heldout is not None:
            raise ValueError(f"the held-out loss cannot be computed, because {why[0]}; leave out heldout")
        progress.stage(f"no held-out loss: {why[0]}")
        return None
    check_heldout(loaded, rows=settings.heldout_rows, length=settings.heldout_length, ks=settings.ks)
    source = heldout_text(settings.heldout)
    return heldout_rows(loaded, source, rows=settings.heldout_rows, length=settings.heldout_length)


def write_samples(work: Work) -> None:
    """Write this process's samples."""
    if not work.samples:
        return
    settings, tasks, roles = work.settings, work.plan.tasks, special_roles(work.loaded)
    texts = len(work.samples) * (1 + len(settings.mask_sinks) + settings.truncate)
    meter = Meter(work.progress, texts, settings.steps or settings.new_tokens)
    for sample in work.samples:
        meter.stage(f"writing sample {sample + 1} of {len(tasks)} under observation")
        write_sample(work.run, tasks[sample], sample, work.plan.selection, roles, meter)


def score(work: Work) -> None:
    """Score the held-out text with sinks hidden."""
    settings = work.settings
    if work.plan.text is None or work.run.has("heldout"):
        return
    work.progress.stage("scoring held-out text with sinks hidden")
    count = work.progress.counter(1 + 2 * len(set(settings.ks) - {0}))
    table = heldout_curve(work.loaded, work.plan.text, ks=settings.ks, seed=settings.seed or 0, progress=count)
    work.run.table("heldout", table)


def mask_sentences(runs: list[Run]) -> list[str]:
    """What each intervention of `mask` removed, and how the texts changed."""
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


def _written(run: Run) -> list[dict[Any, Any]]:
    table = run.table("generations")
    return table[table["masked_sinks"] == 0].to_dict("records")
