"""The analysis paper's Table 1: benchmarks with 0, 1, 5 and 10 sinks masked; a run folder for each cell."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from sinklab.checkpoints.loading import Loaded
from sinklab.records.info import read_info
from sinklab.records.storage import RUN_FILE
from sinklab.studies.benchmarks import offline, run
from sinklab.studies.benchmarks.offline import RUNS_CODE
from sinklab.studies.benchmarks.settings import TWO_STAGE, EvalSettings, Plan
from sinklab.studies.processes import Processes, Progress, as_progress

TOKENS = {"gsm8k": 256, "humaneval": 512, "humaneval_instruct": 512}
"""Tokens to write per answer, as in the paper (section 4.3); other tasks say it themselves."""


def table1(
    models: Mapping[str, Callable[[], Loaded]],
    settings: EvalSettings,
    out: str | Path,
    plan: Plan | None = None,
    *,
    progress: Progress | Callable[[str], object] | None = None,
) -> list[Path]:
    """Score every model on every task, unmasked and with sinks masked: OUT/<model>/<task>-k<K>, one run folder a cell.

    Everything is as in the paper where it says so: blocks of 32, 256 new tokens for GSM8K and 512 for HumanEval, one
    token a step, temperature 0, the top K per layer and head of step t − 1 of the masked run itself. Cells that are
    there are left alone, and an unfinished one goes on. A model is loaded when the first of its cells is to be written,
    and let go before the next.

    Args:
        models: name of a folder -> what loads the model.
        settings: of every cell; its tasks are the table's, and mask_sinks and control those of the cell.
        out: folder for the cells.
        plan: which cells.
        progress: shows how far it is.

    Returns:
        the folders, in the order of the table.

    Raises:
        ValueError: for a folder that holds another run, and what `evaluate` refuses; cells that are finished are kept.
    """
    plan = plan or Plan()
    if settings.mask_sinks is not None or settings.control != "sinks":
        raise ValueError("what is masked differs from cell to cell: leave out mask_sinks and control, and give ks")
    progress = as_progress(progress)
    cells = {
        Path(out) / name / cell_name(*cell): (name, _cell(settings, *cell))
        for name in models
        for cell in plan.cells(settings.tasks)
    }
    # what is wrong with a folder or a task shows before anything is scored
    todo = {folder: (name, cell) for folder, (name, cell) in cells.items() if not _is_done(folder, cell, plan.chat)}
    if todo:
        _check_tasks(settings)
    for model, load in models.items():
        loaded = cache(load)
        for folder, (name, cell) in todo.items():
            if name == model:
                what = f"{cell.mask_sinks} {cell.control} masked" if cell.mask_sinks else "nothing masked"
                progress.stage(f"{name}, {cell.tasks[0]}, {what}")
                has_chat = getattr(loaded().tokenizer, "chat_template", None) is not None
                chat = has_chat if plan.chat is None else plan.chat
                cell = dataclasses.replace(cell, chat=chat, resume=(folder / RUN_FILE).is_file())
                run.evaluate(cell, loaded, folder, progress=progress)
    return [*cells]


def _cell(settings: EvalSettings, task: str, k: int, control: str) -> EvalSettings:
    tokens = TOKENS.get(task) if settings.new_tokens is None else settings.new_tokens
    # a cell does not depend on what is allowed for the sake of another
    runs_code = settings.run_code and task in RUNS_CODE
    changes = {"tasks": (task,), "new_tokens": tokens, "run_code": runs_code}
    return dataclasses.replace(settings, mask_sinks=k or None, control=control, **changes)


def _check_tasks(settings: EvalSettings) -> None:
    offline.needs_lm_eval()
    if names := [name for name in settings.tasks if name != TWO_STAGE]:
        offline.tasks(names, settings.data, run_code=settings.run_code, num_fewshot=settings.num_fewshot)


def cell_name(task: str, k: int, control: str = "sinks") -> str:
    """The folder of a cell."""
    return f"{task}-k{k}" if control == "sinks" or not k else f"{task}-k{k}-{control}"


def _is_done(folder: Path, cell: EvalSettings, chat: bool | None) -> bool:
    """Whether the cell is there, finished; agreed between all processes. Raises ValueError for another run."""
    processes = Processes.here()
    problem, done = processes.agreed(_looked_at(folder, cell, chat) if processes.is_first else None)
    if problem:
        raise ValueError(problem)
    return bool(done)


def _looked_at(folder: Path, cell: EvalSettings, chat: bool | None) -> tuple[str, bool]:
    """What is wrong with the folder, and whether it holds the finished cell."""
    if not (folder / RUN_FILE).is_file():
        return "", False
    info = read_info(folder / RUN_FILE)
    if info.kind != "benchmark":
        return f"{folder} holds a run of kind {info.kind!r}; choose another --out", False
    asked: dict[str, Any] = json.loads(json.dumps(cell.kept()))
    asked["chat"] = info.settings.get("chat") if chat is None else chat
    for name in sorted(asked):
        if (before := info.settings.get(name)) != asked[name]:
            return (
                f"{folder} was scored with {name}={before!r}, and now it is {asked[name]!r}; give the same settings, "
                "or write the table into another --out"
            ), False
    return "", info.status == "complete"
