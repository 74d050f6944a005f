"""What a benchmark run asks: lm-eval's tasks with their documents, and how much that is."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from statistics import mean
from typing import Any

from sinklab.studies.benchmarks import offline, two_stage
from sinklab.studies.benchmarks.requests import DEFAULT_TOKENS
from sinklab.studies.benchmarks.study import TWO_STAGE, EvalSettings
from sinklab.studies.benchmarks.two_stage import LENGTH
from sinklab.studies.processes import Amount

FEWSHOT_SEED = 1234
"""lm-eval's own, so that the worked examples in a prompt are the ones that others meet."""
TOKENS = {"gsm8k": 256, "humaneval": 512, "humaneval_instruct": 512}
"""Tokens to write per answer, as in the paper (section 4.3); other tasks say it themselves."""
SAMPLED = 16
"""Documents whose lengths stand for all."""
LETTERS, CHAT_LETTERS = 4, 160
"""Letters of a token of text, and of what a chat format puts around a question."""
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
    words = [f"{TWO_STAGE} ({len(documents)} documents)"] if documents else []
    # each of two stages takes its own steps over the whole length
    evaluations = 2 * LENGTH * math.ceil(len(documents) / settings.batch)
    positions = 2.0 * LENGTH * LENGTH * len(documents)
    for name, task in given["tasks"].items() if given else ():
        docs = min(len(task.eval_docs), settings.limit or len(task.eval_docs))
        words.append(f"{name} ({docs} documents)")
        count = _writing if task.OUTPUT_TYPE == "generate_until" else _scoring
        more = count(settings, info, name, task, docs)
        evaluations, positions = evaluations + more[0], positions + more[1]
    count = max(round(cells * evaluations), 1)
    first = 1 / max(cells * (len(words) or 1), 1)
    return Amount(f"{', '.join(words)} × {cells:g}", count, round(cells * positions / count) or 1, first=first)


def _letters(settings: EvalSettings, task: Any, docs: int) -> tuple[float, float, float]:
    """Of the first documents, means: letters of a prompt, of a continuation, and choices of a question."""
    prompts, answers, choices = [], [], []
    for document in itertools.islice(task.eval_docs, min(docs, SAMPLED)):
        is_choice = task.OUTPUT_TYPE == "multiple_choice"
        given = task.doc_to_choice(document) if is_choice else [task.doc_to_target(document)]
        prompts.append(len(str(task.doc_to_text(document))))
        answers.append(sum(len(str(one)) for one in given) / len(given))
        choices.append(len(given))
    shots = 1 + (task.get_config("num_fewshot") or 0)
    prompt, answer = mean(prompts), mean(answers)
    # the worked examples have their answers too
    return prompt * shots + answer * (shots - 1) + CHAT_LETTERS * settings.chat, answer, mean(choices)


def _writing(settings: EvalSettings, info: Any, name: str, task: Any, docs: int) -> tuple[float, float]:
    """Evaluations of a task that asks for texts, and their positions: every step of every answer."""
    asks = (task.get_config("generation_kwargs") or {}).get("max_gen_toks", DEFAULT_TOKENS)
    length = settings.new_tokens or TOKENS.get(name, asks)
    rows = docs * (settings.steps or length)
    prompt = _letters(settings, task, docs)[0] / LETTERS
    # an autoregressive model reads what it has read from its cache
    each = 1 if info.family != "diffusion" else prompt + length
    return rows / settings.batch, rows * each


def _scoring(settings: EvalSettings, info: Any, name: str, task: Any, docs: int) -> tuple[float, float]:
    """Evaluations of a task that asks for likelihoods, and their positions: every noisy copy of every continuation.

    Watched continuations are read by themselves; with edits all are, once more before, where these choose in a clean
    pass.
    """
    prompt, answer, choices = _letters(settings, task, docs)
    watched = docs if settings.record_sinks is None else min(docs, settings.record_sinks)
    # equal masks of a short continuation run once
    longest = 2.0 ** min(answer / LETTERS, 20)
    copies = min(settings.mc_samples, longest) if info.family == "diffusion" else 1
    passes = 2 if settings.mask_sinks else 1
    rows = choices * copies * passes
    evaluations = watched * choices * passes * math.ceil(copies / settings.likelihood_batch)
    evaluations += (docs - watched) * rows / settings.likelihood_batch
    return evaluations, docs * rows * (prompt + answer) / LETTERS
