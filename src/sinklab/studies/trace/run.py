"""A study: let a model write under observation, score it with its sinks hidden, and keep everything in a run folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from sinklab.caching.policies import EvictingCache
from sinklab.checkpoints.loading import Loaded
from sinklab.checkpoints.special_tokens import special_roles
from sinklab.records.info import read_info
from sinklab.records.merging import merge_runs
from sinklab.records.storage import RUN_FILE, weights_hash
from sinklab.records.writing import RunWriter
from sinklab.registry import interventions
from sinklab.scoring.decoding import Task
from sinklab.scoring.heldout import HeldoutRows, check_heldout, heldout_curve, heldout_rows
from sinklab.scoring.prompts import encode
from sinklab.studies.processes import Meter, Processes, Progress, as_progress, rank_folders
from sinklab.studies.trace.recording import Selection
from sinklab.studies.trace.settings import StudySettings
from sinklab.studies.trace.writing import sample_seed, seeded, write_sample


def study(
    loaded: Loaded,
    out: str | Path,
    settings: StudySettings | None = None,
    *,
    progress: Progress | Callable[[str], object] | None = None,
    resume: bool = False,
) -> Path:
    """Write a study run folder, one part a sample.

    Arrays ``attention`` (and ``maps``); tables ``tokens``, ``steps``, ``generations`` (``removals`` under edits,
    ``truncation`` and ``truncated`` where asked for), and ``heldout`` for diffusion models. Under ``accelerate launch``
    the samples are dealt to the processes and their folders joined at the end.

    Args:
        loaded: a diffusion model, or an autoregressive one, which writes through its own cache.
        out: folder to write; it must be empty or absent, or hold this very run to resume.
        settings: what to do.
        progress: told how far it is; a function is called with a short text at each stage.
        resume: go on where an interrupted run stopped. What comes out is what an uninterrupted one gives.

    Raises:
        ValueError: for a prompt that does not fit, and settings that the model or the decoder refuse.
    """
    path, processes = Path(out), Processes.here()
    settings = settings or StudySettings()
    seed = processes.agreed(_seed(path, settings, resume) if processes.is_first else None)
    settings = dataclasses.replace(settings, seed=seed)
    teller = as_progress(progress if processes.is_first else None)
    # what can be wrong with the input shows here, before a folder is taken
    selection = Selection.of(loaded.model.config, settings)
    tasks = _tasks(loaded, settings)
    text = _heldout_rows(loaded, settings, teller)
    missing = processes.missing(path, len(tasks), resume=resume)
    about: dict[str, Any] = {"model": describe(loaded, selection), "settings": dataclasses.asdict(settings)}
    about |= {"kind": "study", "seed": settings.seed}
    with RunWriter(processes.folder(path), **about, resume=resume) as run:
        _write_samples(run, tasks, processes.share(missing), selection, teller)
        if text is not None and processes.world == 1 and not run.has("heldout"):
            _score(run, loaded, text, settings, teller)
    if processes.world > 1:
        _join(processes, path)
        if text is not None and processes.is_first:
            with RunWriter(path, **about, resume=True) as run:
                if not run.has("heldout"):
                    _score(run, loaded, text, settings, teller)
    return path


def check_study(loaded: Loaded, settings: StudySettings) -> None:
    """Refuse what `study` would refuse, without running the model or taking a folder. Raises ValueError."""
    Selection.of(loaded.model.config, settings)
    _tasks(loaded, settings)


def _seed(path: Path, settings: StudySettings, resume: bool) -> int:
    """The seed that was given, that of the run that is resumed, or a new one."""
    if settings.seed is not None:
        return settings.seed
    for folder in (path, *rank_folders(path).values()):
        if resume and (folder / RUN_FILE).is_file() and (before := read_info(folder / RUN_FILE).seed) is not None:
            return before
    return int(torch.randint(2**31, ()))


def _tasks(loaded: Loaded, settings: StudySettings) -> list[Task]:
    """The texts to write. Raises ValueError for what can be refused without running the model."""
    if not settings.prompts:
        raise ValueError(
            "a study needs at least one prompt; an empty string is allowed and lets the model start by itself"
        )
    if isinstance(settings.values()["cache"], EvictingCache):
        raise ValueError(
            f"a study records keys that all layers see alike, and cache={settings.cache} keeps others in each layer "
            "and head; record with another cache, or use trace() and recording.visible_by_layer"
        )
    edits = tuple(interventions.parse(spec) for spec in settings.edits)
    seed = settings.seed or 0
    tasks = []
    for sample, text in enumerate(settings.prompts):
        prompt = encode(loaded, text, settings.chat)
        task = Task(loaded, prompt, settings, sample_seed(seed, sample), seeded(edits, sample))
        task.check()
        _check_hidden(task, text)
        last = task.most_steps - 1
        if late := [place for place in settings.map_places() if place[0] > last]:
            raise ValueError(
                f"maps are kept of steps 0 to {last}, but {':'.join(map(str, late[0]))} asks for step {late[0][0]}"
            )
        if settings.only_steps and max(settings.only_steps) > last:
            raise ValueError(f"only_steps are steps 0 to {last} of this run, but {max(settings.only_steps)} is none")
        tasks.append(task)
    return tasks


def _check_hidden(task: Task, text: str) -> None:
    """Refuse to hide as many keys as there are: of a causal model, as many as its first step reads."""
    settings, config = task.settings, task.loaded.model.config
    keys = task.positions + getattr(config, "sink_count", 0) if task.is_diffusion else len(task.started())
    asked = [("mask_sinks", k) for k in settings.mask_sinks]
    for spec, edit in zip(settings.edits, task.edits, strict=True):
        if (k := getattr(edit, "k", None)) is not None:
            # as many other columns must be left to be the controls
            asked.append((spec, k if getattr(edit, "control", "sinks") == "sinks" else 2 * k))
    for name, k in asked:
        if not 1 <= k < keys:
            raise ValueError(
                f"{name} hides at least 1 and fewer than all keys, but asks for {k} of the {keys} keys of {text!r} "
                + (f"with {settings.new_tokens} new tokens" if task.is_diffusion else "at the first step")
                + "; choose smaller numbers, or none at all"
            )


def _heldout_rows(loaded: Loaded, settings: StudySettings, teller: Progress) -> HeldoutRows | None:
    """The text to score; None, and a word about it, where there is nothing to score."""
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
        teller.stage(f"no held-out loss: {why[0]}")
        return None
    check_heldout(loaded, rows=settings.heldout_rows, length=settings.heldout_length, ks=settings.ks)
    source = settings.heldout or str(resources.files("sinklab.checkpoints").joinpath("packaged", "heldout.jsonl"))
    return heldout_rows(loaded, source, rows=settings.heldout_rows, length=settings.heldout_length)


def _write_samples(
    run: RunWriter, tasks: list[Task], samples: list[int], selection: Selection, teller: Progress
) -> None:
    if not samples:
        return
    settings, roles = tasks[0].settings, special_roles(tasks[0].loaded)
    steps = settings.steps or settings.new_tokens
    meter = Meter(teller, len(samples) * (1 + len(settings.mask_sinks) + settings.truncate), steps)
    for sample in samples:
        meter.stage(f"writing sample {sample + 1} of {len(tasks)} under observation")
        write_sample(run, tasks[sample], sample, selection, roles, meter)


def _score(run: RunWriter, loaded: Loaded, text: HeldoutRows, settings: StudySettings, teller: Progress) -> None:
    teller.stage("scoring held-out text with sinks hidden")
    total, done = 1 + 2 * len(set(settings.ks) - {0}), 0

    def count() -> None:
        nonlocal done
        done += 1
        teller.count(done, total)

    teller.count(0, total)
    run.table("heldout", heldout_curve(loaded, text, ks=settings.ks, seed=settings.seed or 0, progress=count))


def _join(processes: Processes, path: Path) -> None:
    processes.wait()
    if processes.is_first:
        merge_runs(rank_folders(path).values(), path)
    processes.wait()


def describe(loaded: Loaded, selection: Selection | None = None) -> dict[str, Any]:
    """The model as ``run.json`` records it, and which of its layers and heads were recorded."""
    config: Any = loaded.model.config
    backbone = getattr(config, "backbone", config)
    selection = selection or Selection.of(config, StudySettings())
    sink = {
        key: getattr(config, key, default)
        for key, default in (("sink_kind", "none"), ("sink_count", 0), ("sink_side", "front"))
    }
    return {
        "name": loaded.name,
        "revision": loaded.revision,
        "family": loaded.family,
        "layers": backbone.num_hidden_layers,
        "heads": backbone.num_attention_heads,
        "recorded_layers": list(selection.layers),
        "recorded_heads": list(selection.heads),
        "hidden_size": backbone.hidden_size,
        "parameters": loaded.model.num_parameters(),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        # of several processes each may have a device of its own, of the same type
        "device": loaded.model.device.type,
        "gate": getattr(config, "gate", "none"),
        "weights_sha256": weights_hash(loaded.model.state_dict()),
        **sink,
    }
