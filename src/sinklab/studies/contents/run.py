"""What the sinks of a model carry: states at sinks beside states at positions that are like them, along its writing."""

# N added sinks, D hidden size, L layers
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch

from sinklab.checkpoints.loading import Loaded
from sinklab.data.corpora import read_corpus
from sinklab.data.rows import pack
from sinklab.records.reading import Run, open_run
from sinklab.scoring.prompts import Prompt, encode
from sinklab.scoring.task import Task
from sinklab.scoring.writing import sample_seed
from sinklab.studies.base import Work, columns_of, heldout_text, text_of
from sinklab.studies.contents.lens import LogitLens, residual_states
from sinklab.studies.contents.samples import Sampled, sample_text
from sinklab.studies.contents.study import ContentsSettings
from sinklab.studies.contents.tables import contents_tables
from sinklab.studies.processes import Meter, Progress


@dataclass(frozen=True)
class Plan:
    """What is written and read."""

    tasks: list[Task]
    layers: tuple[int, ...]
    lens: LogitLens


def prepare(loaded: Loaded, settings: ContentsSettings, progress: Progress) -> Plan:
    """The texts, the layers and the lens.

    Raises:
        ValueError: for an autoregressive model, a cache, fewer texts than folds, and what the decoder refuses.
    """
    layers, config = _layers(loaded, settings), cast(Any, loaded.model.config)
    vocabulary = config.text_vocab_size if settings.text_only else None
    tasks = _tasks(loaded, settings)
    return Plan(tasks, layers, LogitLens.of(loaded.model, hidden_ids=(config.mask_token_id,), vocabulary=vocabulary))


def _layers(loaded: Loaded, settings: ContentsSettings) -> tuple[int, ...]:
    if loaded.family != "diffusion":
        raise ValueError(
            f"what a future sink carries is asked of models that denoise, but {loaded.name} is {loaded.family}: it has "
            "no positions that are still to come"
        )
    with residual_states(loaded.model) as states:
        last = states.layers
    if wrong := [layer for layer in settings.layers if not 0 <= layer <= last]:
        raise ValueError(f"layers are numbers from 0 to {last}, which leaves the last layer, but {wrong[0]} is not")
    return tuple(sorted(set(settings.layers))) or tuple(range(last + 1))


def _tasks(loaded: Loaded, settings: ContentsSettings) -> list[Task]:
    if settings.prompts:
        prompts = [encode(loaded, text, settings.chat) for text in settings.prompts]
    else:
        prompts = _beginnings(loaded, settings)
    if len(prompts) < settings.folds:
        raise ValueError(
            f"probes are tested on texts they have not seen, and {settings.folds} folds need as many texts, but there "
            f"are {len(prompts)}; give more prompts or fewer folds"
        )
    tasks = [
        Task(loaded, prompt, settings, sample_seed(settings.seed or 0, text)) for text, prompt in enumerate(prompts)
    ]
    for task in tasks:
        task.check()
    return tasks


def _beginnings(loaded: Loaded, settings: ContentsSettings) -> list[Prompt]:
    """Beginnings from a corpus, spread evenly over it. Raises ValueError for one that is too short."""
    if settings.chat:
        raise ValueError("chat puts prompts into a chat format, but the beginnings come from a corpus; give prompts")
    if settings.prompt_tokens == 0:
        return [Prompt("", (), ())] * settings.texts
    source = heldout_text(settings.corpus)
    rows_RS = pack(read_corpus(source), loaded.needed_tokenizer(), settings.prompt_tokens)
    if len(rows_RS) < settings.texts:
        raise ValueError(
            f"{source} holds {len(rows_RS)} beginnings of {settings.prompt_tokens} tokens, but texts={settings.texts} "
            "are to be written; give another corpus, fewer texts or shorter beginnings"
        )
    chosen = np.linspace(0, len(rows_RS) - 1, settings.texts).round().astype(int)
    texts = loaded.needed_tokenizer().batch_decode(rows_RS[chosen].tolist())
    return [
        Prompt(text, tuple(row), (False,) * len(row)) for text, row in zip(texts, rows_RS[chosen].tolist(), strict=True)
    ]


def write_texts(work: Work) -> None:
    """Write the texts that are missing, and what was sampled of each as its part."""
    settings, tasks = work.settings, work.plan.tasks
    meter = Meter(work.progress, len(work.samples), settings.steps or settings.new_tokens)
    for text in work.samples:
        meter.stage(f"writing text {text + 1} of {len(tasks)} and sampling states")
        random = np.random.default_rng([settings.seed or 0, text])
        kept = sample_text(tasks[text], settings, work.plan.layers, random, meter.step)
        meter.end()
        _write_text(work, text, kept)


def _write_text(work: Work, text: int, kept: Sampled) -> None:
    """Everything about one text; the text itself last, so that it marks the end."""
    task, run = work.plan.tasks[text], work.run
    if kept.rows:
        arrays, dims = kept.arrays()
        run.arrays("states", arrays, dims, dtype="float32", part=text)
        shift = int(bool(task.loaded.model.config.logit_shift))
        run.table("samples", kept.table(text, work.plan.lens, shift), part=text)
    for name, rows in {"looks": kept.looks, "added": kept.added}.items():
        if rows:
            run.table(name, columns_of({"text": text, **row} for row in rows), part=text)
    written = kept.final_S[kept.open_S]
    whole = {"text": text, "prompt": task.prompt.text, "completion": text_of(task.loaded, written), "seed": task.seed}
    run.table("texts", columns_of([whole | {"token_ids": written.tolist()}]), part=text)


def read_states(work: Work) -> None:
    """Write what the lens and probes read in all texts."""
    run, plan, done = work.run, work.plan, open_run(work.run.path)
    if "added" in done.tables and not run.has("added_sinks"):
        run.table("added_sinks", _added_sinks(done, work.loaded, plan.lens))
    if not (run.has("lens") and run.has("probes")):
        work.progress.stage("reading the states")
        count = work.progress.counter(len(plan.layers))
        for name, columns in contents_tables(done, work.settings, plan.layers, len(plan.tasks), count).items():
            run.table(name, columns)


def _added_sinks(run: Run, loaded: Loaded, lens: LogitLens) -> dict[str, list[Any]]:
    """A row per layer and added sink: the attention it gets, how its state differs between texts, what it reads as."""
    share = run.table("added").groupby(["layer", "sink"])["share"].mean()
    parts = run.parts("states") if "states" in run.array_files else ()
    seen = [run.array("states", "added", part) for part in parts if "added" in run.dims("states", part)]
    rows = []
    for (layer, sink), value in share.items():
        row: dict[str, Any] = {"layer": int(layer), "sink": int(sink), "share": float(value), "texts": len(seen)}
        row |= dict.fromkeys(("norm", "spread", "entropy", "top_probability"), float("nan")) | {"top_token": ""}
        if seen:
            states_TD = torch.from_numpy(np.stack([one[layer, sink] for one in seen]))
            row["norm"] = float(states_TD[0].norm())
            row["spread"] = float((states_TD - states_TD[0]).abs().max())
            log_V = lens.log_probabilities(lens.logits(states_TD[:1]))[0]
            row["entropy"] = float(torch.special.entr(log_V.exp()).sum())
            row["top_probability"] = float(log_V.max().exp())
            row["top_token"] = text_of(loaded, log_V.argmax()[None].cpu().numpy())
        rows.append(row)
    return columns_of(rows)
