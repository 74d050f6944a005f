"""Requests of a benchmark run: lm-eval's tasks with their documents, and their amount."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import mean
from typing import Any

from sinklab.lab.studies.benchmarks import offline, two_stage
from sinklab.lab.studies.benchmarks.requests import DEFAULT_TOKENS
from sinklab.lab.studies.benchmarks.study import TOKENS, TWO_STAGE, EvalSettings
from sinklab.lab.studies.benchmarks.two_stage import LENGTH
from sinklab.lab.studies.processes import Amount

FEWSHOT_SEED = 1234
"""lm-eval's own, so that the worked examples in a prompt are the ones that others meet."""
SAMPLED = 16
"""Number of documents that an estimate of lengths reads."""
LETTERS = 4
CHAT_LETTERS = 160
"""Letters of a token of text, and letters that a chat format adds around a question."""


def read_tasks(settings: EvalSettings, given: Sequence[Any] | None = None) -> dict[str, Any]:
    """Tasks as lm-eval's `evaluate` takes them, with their numbers of worked examples.

    Args:
        settings: of the run; name the tasks.
        given: tasks in place of them, or dicts of their configuration.

    Raises:
        ValueError: without lm-eval, for unknown tasks, data that are not there, and code that is
            not to be run.
    """
    offline.needs_lm_eval()
    from lm_eval.tasks import TaskManager

    wanted = given
    if wanted is None:
        wanted = []
        names = [name for name in settings.tasks if name != TWO_STAGE]
        if names:
            how: dict[str, Any] = {
                "run_code": settings.run_code,
                "num_fewshot": settings.num_fewshot,
            }
            wanted = offline.tasks(names, settings.data, **how)
        if TWO_STAGE in settings.tasks:
            wanted.append(two_stage.task(settings.data, published=settings.published))
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
    tasks = read_tasks(settings)["tasks"]
    runs: Sequence[EvalSettings] = [settings]
    times = 1.0
    if cells is not None:
        runs = cells
        times = len(cells) / len(settings.tasks)
    # a group has tasks of other names than its own
    counted = [
        _of_task(one, info, name, task)
        for one in runs
        for name, task in tasks.items()
        if name in one.tasks or tasks.keys().isdisjoint(one.tasks)
    ]
    evaluations = sum(number for number, _ in counted)
    positions = sum(number for _, number in counted)
    words = [f"{name} ({_documents(settings, task)} documents)" for name, task in tasks.items()]
    count = max(round(evaluations), 1)
    # tasks are counted one after the other, and so are cells
    first = counted[0][0] / evaluations if counted else 1.0
    return Amount(
        f"{', '.join(words)} × {times:g}", count, round(positions / count) or 1, first=first
    )


def _documents(settings: EvalSettings, task: Any) -> int:
    return min(len(task.eval_docs), settings.limit or len(task.eval_docs))


def _of_task(settings: EvalSettings, info: Any, name: str, task: Any) -> tuple[float, float]:
    """Evaluations of a task, and their positions, from the requests of its first documents.

    Every step of every text is an evaluation, and so is every noisy copy of every continuation.
    Watched continuations are read by themselves; with edits each is also read once before, because
    edits choose in a clean pass.
    """
    documents = _documents(settings, task)
    if name == TWO_STAGE:
        # each of two stages takes its own steps over the whole length
        return 2 * LENGTH * math.ceil(documents / settings.batch), 2 * LENGTH**2 * documents
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
