"""What a benchmark run asks: lm-eval's tasks with their documents, and how much that is."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from sinklab.studies.benchmarks import offline, two_stage
from sinklab.studies.benchmarks.requests import DEFAULT_TOKENS
from sinklab.studies.benchmarks.study import TWO_STAGE, EvalSettings
from sinklab.studies.processes import Amount

FEWSHOT_SEED = 1234
"""lm-eval's own, so that the worked examples in a prompt are the ones that others meet."""
TOKENS = {"gsm8k": 256, "humaneval": 512, "humaneval_instruct": 512}
"""Tokens to write per answer, as in the paper (section 4.3); other tasks say it themselves."""
_read: dict[EvalSettings, Any] = {}
"""What an estimate has read, for the run that follows it."""


def questions(
    settings: EvalSettings, task_objects: Sequence[Any] | None
) -> tuple[EvalSettings, Any, list[dict[str, Any]]]:
    """The settings with the names of given tasks; lm-eval's tasks, None without; and what is asked in two stages."""
    if task_objects is None and settings in _read:
        return _read.pop(settings)
    if task_objects is not None:
        names = [task["task"] if isinstance(task, dict) else task.task_name for task in task_objects]
        settings = dataclasses.replace(settings, tasks=tuple(names))
    wanted = list(task_objects or [name for name in settings.tasks if name != TWO_STAGE])
    has_two_stages = task_objects is None and TWO_STAGE in settings.tasks
    documents = two_stage.two_stage_documents(settings.data, settings.limit) if has_two_stages else []
    return settings, _tasks(settings, wanted) if wanted else None, documents


def _tasks(settings: EvalSettings, wanted: Sequence[Any]) -> dict[str, Any]:
    """The tasks as lm-eval's `evaluate` takes them, with their numbers of examples.

    Args:
        settings: of the run.
        wanted: names, or tasks and dicts of their configuration.
    """
    from lm_eval.tasks import TaskManager

    if all(isinstance(task, str) for task in wanted):
        wanted = named(settings, wanted)
    loaded: dict[str, Any] = TaskManager(include_defaults=False).load([*wanted])
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        if own is None or (settings.num_fewshot is not None and own != 0):
            task.set_config(key="num_fewshot", value=settings.num_fewshot or 0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    return loaded


def named(settings: EvalSettings, names: Sequence[str]) -> list[Any]:
    """Tasks of these names. Raises ValueError as `offline.tasks` does."""
    how: dict[str, Any] = {"run_code": settings.run_code, "num_fewshot": settings.num_fewshot}
    return offline.tasks(names, settings.data, include_path=settings.include_path, **how)[0]


def amount_of(settings: EvalSettings, info: Any, cells: float = 1) -> Amount:
    """What the tasks ask for, so many times: every step of every answer, and every noisy copy of every continuation.

    Raises ValueError as `questions` does.
    """
    _read.pop(settings, None)
    _read[settings] = _, given, documents = questions(settings, None)
    copies, evaluations, positions = settings.mc_samples if info.family == "diffusion" else 1, 0.0, 0.0
    words = [f"{TWO_STAGE} ({len(documents)} documents)"] if documents else []
    evaluations += len(documents) * DEFAULT_TOKENS
    for name, task in given["tasks"].items() if given else ():
        docs = min(len(task.eval_docs), settings.limit or len(task.eval_docs))
        words.append(f"{name} ({docs} documents)")
        # a token of text has some four letters, a question some four choices
        prompt = len(str(task.doc_to_text(task.eval_docs[0]))) // 4 * (1 + (task.get_config("num_fewshot") or 0))
        asks = (task.get_config("generation_kwargs") or {}).get("max_gen_toks", DEFAULT_TOKENS)
        length = settings.new_tokens or TOKENS.get(name, asks)
        writes = task.OUTPUT_TYPE == "generate_until"
        rows = docs * ((settings.steps or length) if writes else 4 * copies)
        evaluations += rows / (settings.batch if writes else settings.likelihood_batch)
        positions += rows * (1 if writes and info.family != "diffusion" else prompt + writes * length)
    count = max(round(cells * evaluations), 1)
    return Amount(f"{', '.join(words)} × {cells:g}", count, round(cells * positions / count) or 1)
