"""Requests of a benchmark run: lm-eval's tasks with their documents, and their amount."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from statistics import mean
from typing import Any

from sinklab.lab.studies.benchmarks import offline, two_stage
from sinklab.lab.studies.benchmarks.requests import DEFAULT_TOKENS
from sinklab.lab.studies.benchmarks.study import TWO_STAGE, EvalSettings
from sinklab.lab.studies.benchmarks.two_stage import LENGTH
from sinklab.lab.studies.processes import Amount

FEWSHOT_SEED = 1234
"""lm-eval's own, so that the worked examples in a prompt are the ones that others meet."""
TOKENS = {"gsm8k": 256, "humaneval": 512, "humaneval_instruct": 512}
"""Tokens to write per answer, as in the paper (section 4.3); other tasks say it themselves."""
SAMPLED = 16
"""Number of documents that an estimate of lengths reads."""
LETTERS = 4
CHAT_LETTERS = 160
"""Letters of a token of text, and letters that a chat format adds around a question."""
_read: dict[EvalSettings, tuple[dict[str, Any] | None, list[dict[str, Any]]]] = {}
"""Results of `tasks_of`, read before a model was loaded, by settings without a seed."""


def read_tasks(settings: EvalSettings, given: Sequence[Any] | None = None) -> EvalSettings:
    """Read tasks, given ones or those of the settings, for the run that follows; returns the
    settings with their names.

    Raises:
        ValueError: without lm-eval, for unknown tasks, data that are not there, and code that is
            not to be run.
    """
    offline.needs_lm_eval()
    if given is not None:
        settings = dataclasses.replace(settings, tasks=tuple(map(_name_of, given)))
    key = dataclasses.replace(settings, seed=None)
    if given is None and key in _read:
        return settings
    wanted = given or [name for name in settings.tasks if name != TWO_STAGE]
    documents = []
    if given is None and TWO_STAGE in settings.tasks:
        documents = two_stage.two_stage_documents(settings.data, settings.limit)
    tasks = None
    if wanted:
        tasks = _tasks(settings, wanted)
    _read[key] = tasks, documents
    return settings


def tasks_of(settings: EvalSettings) -> tuple[dict[str, Any] | None, list[dict[str, Any]]]:
    """lm-eval's tasks as its `evaluate` takes them, None without; and the documents of the
    two-stage task, after `read_tasks`.
    """
    return _read.pop(dataclasses.replace(settings, seed=None))


def _name_of(task: Any) -> str:
    if isinstance(task, dict):
        return task["task"]
    return task.task_name


def _tasks(settings: EvalSettings, wanted: Sequence[Any]) -> dict[str, Any]:
    """The tasks as lm-eval's `evaluate` takes them, with their numbers of examples.

    Args:
        settings: of the run.
        wanted: names, or tasks and dicts of their configuration.
    """
    from lm_eval.tasks import TaskManager

    if all(isinstance(task, str) for task in wanted):
        wanted = offline.tasks(
            wanted, settings.data, run_code=settings.run_code, num_fewshot=settings.num_fewshot
        )
    loaded: dict[str, Any] = TaskManager(include_defaults=False).load([*wanted])
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        if own is None or (settings.num_fewshot is not None and own != 0):
            task.set_config(key="num_fewshot", value=settings.num_fewshot or 0)
    return loaded


def amount_of(
    settings: EvalSettings, info: Any, cells: Sequence[EvalSettings] | None = None
) -> Amount:
    """Amount of the tasks: every step of every answer, and every noisy copy of every continuation.

    Args:
        settings: with the tasks to read.
        info: of the model.
        cells: settings of the runs that ask for it, of a task each; these settings, once, when left
            out.

    Raises:
        ValueError: as `read_tasks` does.
    """
    key = dataclasses.replace(settings, seed=None)
    _read.pop(key, None)
    read_tasks(settings)
    given, documents = _read[key]
    tasks = {}
    if given is not None:
        tasks = given["tasks"]
    runs: Sequence[EvalSettings] = [settings]
    if cells is not None:
        runs = cells
    counted = [_of_run(one, info, tasks, len(documents)) for one in runs]
    evaluations = sum(number for number, _ in counted)
    positions = sum(number for _, number in counted)
    words = [f"{TWO_STAGE} ({len(documents)} documents)"] if documents else []
    for name, task in tasks.items():
        words.append(f"{name} ({_documents(settings, task)} documents)")
    count = max(round(evaluations), 1)
    # tasks are counted one after the other, and so are cells
    times = 1.0
    first = 1 / len(words)
    if cells is not None:
        times = len(cells) / len(settings.tasks)
        first = counted[0][0] / evaluations if cells else 1.0
    return Amount(
        f"{', '.join(words)} × {times:g}", count, round(positions / count) or 1, first=first
    )


def _documents(settings: EvalSettings, task: Any) -> int:
    return min(len(task.eval_docs), settings.limit or len(task.eval_docs))


def _of_run(
    settings: EvalSettings, info: Any, tasks: dict[str, Any], documents: int
) -> tuple[float, float]:
    """Evaluations of one run, and their positions together."""
    evaluations = positions = 0.0
    if TWO_STAGE in settings.tasks:
        # each of two stages takes its own steps over the whole length
        evaluations += 2 * LENGTH * math.ceil(documents / settings.batch)
        positions += 2 * LENGTH**2 * documents
    # a group has tasks of other names than its own
    own = {name: task for name, task in tasks.items() if name in settings.tasks} or tasks
    for name, task in own.items():
        if settings.tasks != (TWO_STAGE,):
            more, of_more = _of_task(settings, info, name, task)
            evaluations += more
            positions += of_more
    return evaluations, positions


def _of_task(settings: EvalSettings, info: Any, name: str, task: Any) -> tuple[float, float]:
    """Evaluations of a task, and their positions, from the requests of its first documents.

    Every step of every text is an evaluation, and so is every noisy copy of every continuation.
    Watched continuations are read by themselves; with edits each is also read once before, because
    edits choose in a clean pass.
    """
    documents = _documents(settings, task)
    task.set_fewshot_seed(seed=FEWSHOT_SEED)
    task.build_all_requests(limit=SAMPLED)
    requests = [request.args for request in task.instances]
    chat = CHAT_LETTERS * settings.chat
    if task.OUTPUT_TYPE == "generate_until":
        asks = requests[0][1].get("max_gen_toks", DEFAULT_TOKENS)
        length = settings.new_tokens or TOKENS.get(name, asks)
        rows = documents * (settings.steps or length)
        each = 1.0
        # an autoregressive model reads what it has read from its cache
        if info.family == "diffusion":
            each = (mean(len(prompt) for prompt, _ in requests) + chat) / LETTERS + length
        return rows / settings.batch, rows * each
    texts = mean(sum(map(len, parts)) for parts in requests) + chat
    choices = len(requests) / min(SAMPLED, len(task.eval_docs))
    copies = 1.0
    if info.family == "diffusion":
        # equal masks of a short continuation run once
        tokens = mean(len(parts[-1]) for parts in requests) / LETTERS
        copies = min(settings.mc_samples, 2.0 ** min(tokens, 20))
    passes = choices * (2 if settings.mask_sinks else 1)
    watched = documents
    if settings.record_sinks is not None:
        watched = min(documents, settings.record_sinks)
    evaluations = watched * passes * math.ceil(copies / settings.likelihood_batch)
    evaluations += (documents - watched) * passes * copies / settings.likelihood_batch
    return evaluations, documents * passes * copies * texts / LETTERS
