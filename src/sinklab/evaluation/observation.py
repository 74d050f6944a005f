"""A study: let a model write under observation, score it with its sinks hidden, and keep everything in a run folder."""

# B batch, S canvas, steps T, layers L, heads H, keys K
from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sinklab.evaluation.heldout import check_heldout, heldout_curve, heldout_rows
from sinklab.evaluation.settings import StudySettings
from sinklab.models import Loaded
from sinklab.probing import MaskSinks, intervene, trace
from sinklab.records import RunWriter, weights_hash
from sinklab.sampling import Canvas, Step

DIMS = {
    "received": ("sample", "step", "layer", "head", "key"),
    "value_norm": ("sample", "step", "layer", "key"),
    "visible": ("sample", "step", "key"),
}


def study(
    loaded: Loaded,
    out: str | Path,
    settings: StudySettings | None = None,
    *,
    progress: Callable[[str], object] | None = None,
) -> Path:
    """Write a study run folder for one diffusion model (arrays ``attention``; tables tokens, steps, generations,
    heldout).

    Args:
        loaded: a diffusion model.
        out: folder to write; it must be empty or absent.
        settings: what to do.
        progress: called with a short text before each stage.

    Raises:
        ValueError: for a model that is not a diffusion model, a prompt that does not fit, or settings the decoder
            refuses.
    """
    settings = settings or StudySettings()
    seed = int(torch.randint(2**31, ())) if settings.seed is None else settings.seed
    settings = dataclasses.replace(settings, seed=seed)
    if loaded.family != "diffusion":
        raise ValueError(
            f"a study follows denoising, but {loaded.name} is {loaded.family}; load a diffusion model such as 'tiny'"
        )
    say = progress or (lambda text: None)
    # what can be wrong with the input shows here, before a folder is taken
    _check(loaded, settings)
    text = None
    if settings.heldout != "":
        source = settings.heldout or str(resources.files("sinklab.models").joinpath("packaged", "heldout.jsonl"))
        text = heldout_rows(loaded, source, rows=settings.heldout_rows, length=settings.heldout_length)
    path = Path(out)
    with RunWriter(path, kind="study", model=describe(loaded), settings=dataclasses.asdict(settings), seed=seed) as run:
        _write_samples(run, loaded, settings, say)
        if text is not None:
            say("scoring held-out text with sinks hidden")
            run.table("heldout", heldout_curve(loaded, text, ks=settings.ks, seed=seed))
    return path


def _check(loaded: Loaded, settings: StudySettings) -> None:
    """What can be refused without running the model."""
    config: Any = loaded.model.config
    if config.mask_token_id is None:
        raise ValueError(
            f"a study needs a model with a mask token, but {loaded.name} has mask_token_id None; set it in its config"
        )
    loaded.needed_tokenizer()
    if not settings.prompts:
        raise ValueError(
            "a study needs at least one prompt; an empty string is allowed and lets the model start by itself"
        )
    for prompt in settings.prompts:
        canvas = _canvas(loaded, prompt, settings)
        _steps(loaded, canvas, settings)
        keys = canvas.ids_BS.shape[1] + config.sink_count
        if wrong := [k for k in settings.mask_sinks if not 1 <= k < keys]:
            raise ValueError(
                f"mask_sinks hides at least 1 and fewer than all keys, but asks for {wrong[0]} of the {keys} keys of "
                f"{prompt!r} with {settings.new_tokens} new tokens; choose smaller numbers"
            )
    if settings.heldout != "":
        check_heldout(loaded, rows=settings.heldout_rows, length=settings.heldout_length, ks=settings.ks)


def _write_samples(run: RunWriter, loaded: Loaded, settings: StudySettings, say: Callable[[str], object]) -> None:
    """All samples, watched, then again with sinks hidden; after an interruption those that were finished."""
    watched: list[dict[str, Any]] = []
    generations: list[dict[str, Any]] = []
    try:
        for sample, prompt in enumerate(settings.prompts):
            say(f"writing sample {sample + 1} of {len(settings.prompts)} under observation")
            watched.append(_watch(loaded, prompt, sample, settings))
            generations.append(watched[-1]["generation"])
        for k in settings.mask_sinks:
            say(f"writing again with {k} sinks hidden")
            for sample, prompt in enumerate(settings.prompts):
                generations.append(_write_masked(loaded, prompt, sample, k, settings))
    finally:
        if watched:
            run.arrays("attention", _stacked(watched), dims=DIMS)
            for table in ("tokens", "steps"):
                run.table(table, _joined([watch[table] for watch in watched]))
            run.table("generations", {key: [row[key] for row in generations] for key in generations[0]})


def describe(loaded: Loaded) -> dict[str, Any]:
    """The model as ``run.json`` records it."""
    config: Any = loaded.model.config
    backbone = getattr(config, "backbone", config)
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
        "hidden_size": backbone.hidden_size,
        "parameters": loaded.model.num_parameters(),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "gate": getattr(config, "gate", "none"),
        "weights_sha256": weights_hash(loaded.model.state_dict()),
        **sink,
    }


def _canvas(loaded: Loaded, prompt: str, settings: StudySettings) -> Canvas:
    model: Any = loaded.model
    ids = loaded.needed_tokenizer()(prompt, add_special_tokens=False)["input_ids"]
    return Canvas.from_prompts(
        [ids],
        new_tokens=settings.new_tokens,
        mask_id=model.config.mask_token_id,
        pad_id=loaded.needed_tokenizer().pad_token_id,
        context=model.config.text_positions,
    )


def _steps(loaded: Loaded, canvas: Canvas, settings: StudySettings) -> Iterator[Step]:
    model: Any = loaded.model
    return model.denoise(canvas.to(model.device), settings)


def _watch(loaded: Loaded, prompt: str, sample: int, settings: StudySettings) -> dict[str, Any]:
    """One sample, written under a trace."""
    canvas = _canvas(loaded, prompt, settings)
    steps: list[Step] = []
    with trace(loaded.model, statistics=("received", "value_norm")) as recording:
        for step in _steps(loaded, canvas, settings):
            recording.mark(step)
            steps.append(step)
    return {
        "received": recording.array("received")[:, 0],
        "value_norm": recording.array("value_norm")[:, 0],
        "visible": recording.array("visible")[:, 0],
        "tokens": _token_table(loaded, canvas, steps, sample),
        "steps": {
            "sample": [sample] * len(steps),
            "step": [step.index for step in steps],
            "block": [step.block for step in steps],
            "masked": [int(step.masked_BS.sum()) for step in steps],
            "committed": [int(step.committed_BS.sum()) for step in steps],
        },
        "generation": _generation(loaded, canvas, steps[-1].ids_BS, prompt, sample, 0, settings),
    }


def _write_masked(loaded: Loaded, prompt: str, sample: int, k: int, settings: StudySettings) -> dict[str, Any]:
    """One sample, written with the top-k sinks of the previous step hidden (closed loop)."""
    canvas = _canvas(loaded, prompt, settings)
    with intervene(loaded.model, MaskSinks(k=k), forwards_per_step=2 if settings.cfg_scale else 1):
        *_, last = _steps(loaded, canvas, settings)
    return _generation(loaded, canvas, last.ids_BS, prompt, sample, k, settings)


def _generation(
    loaded: Loaded, canvas: Canvas, ids_BS: Tensor, prompt: str, sample: int, k: int, settings: StudySettings
) -> dict:
    written = ids_BS[0][canvas.open_BS[0].to(ids_BS.device)]
    completion = loaded.needed_tokenizer().decode(written, skip_special_tokens=True)
    return {"sample": sample, "prompt": prompt, "completion": completion, "rule": settings.rule, "masked_sinks": k}


def _token_table(loaded: Loaded, canvas: Canvas, steps: list[Step], sample: int) -> dict[str, list[Any]]:
    table: dict[str, list[Any]] = {key: [] for key in ("sample", "step", "position", "token_id", "text", "state")}
    texts: dict[int, str] = {}
    for step in steps:
        ids = step.before_BS[0].tolist()
        masked = step.masked_BS[0].tolist()
        is_open = canvas.open_BS[0].tolist()
        for position, token_id in enumerate(ids):
            state = "masked" if masked[position] else "committed" if is_open[position] else "prompt"
            text = texts.setdefault(token_id, str(loaded.needed_tokenizer().decode([token_id])))
            row = (sample, step.index, position, token_id, text, state)
            for key, value in zip(table, row, strict=True):
                table[key].append(value)
    return table


def _joined(tables: list[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    return {key: [value for table in tables for value in table[key]] for key in tables[0]}


def _stacked(watched: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Arrays of all samples on a common grid, NaN where a sample has no such step or key."""
    arrays = {}
    for name in ("received", "value_norm", "visible"):
        parts = [np.asarray(watch[name]) for watch in watched]
        shape = (len(parts), *np.max([part.shape for part in parts], axis=0))
        full = np.full(shape, np.nan, dtype=np.float32)
        for sample, part in enumerate(parts):
            full[sample][tuple(slice(size) for size in part.shape)] = part
        arrays[name] = full
    return arrays
