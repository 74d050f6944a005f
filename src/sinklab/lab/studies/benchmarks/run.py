"""Benchmarks through lm-eval, in one run folder each, and the cells of the analysis paper's Table
1.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from datetime import timedelta
from functools import cache
from itertools import groupby, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.core.instrument import BlockKeys, Dose
from sinklab.core.registry import interventions
from sinklab.lab.checkpoints import Loaded
from sinklab.lab.records import Contents, RunWriter, open_run
from sinklab.lab.studies import Audience, Progress, Row, Work, as_progress
from sinklab.lab.studies.benchmarks import offline, tables, two_stage
from sinklab.lab.studies.benchmarks.requests import PLACE, place_of
from sinklab.lab.studies.benchmarks.study import (
    FEWSHOT_SEED,
    TOKENS,
    TWO_STAGE,
    EvalSettings,
    Evaluation,
    Plan,
)

if TYPE_CHECKING:
    from sinklab.lab.studies.benchmarks.harness_model import SinklabLM

BOOTSTRAP = 1000
"""Resamples for the standard error of metrics that have no formula; means have one."""


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
        wanted = [
            two_stage.task(settings.data) if name == TWO_STAGE else offline.task(name, settings)
            for name in settings.tasks
        ]
    loaded: dict[str, Any] = TaskManager(include_defaults=False).load([*wanted])
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        if own is None or (settings.num_fewshot is not None and own != 0):
            task.set_config(key="num_fewshot", value=settings.num_fewshot or 0)
    return loaded


def contents(model: SinklabLM, requests: list[Any], progress: Progress) -> Contents:
    """Answers to the requests of a part, a row of JSON each, and facts of the sinks of those that
    are watched.
    """
    task = requests[0].task_name
    progress.stage(task)
    done = 0.0
    began = time.monotonic()

    def tick(more: float) -> None:
        nonlocal done
        done = min(done + more, len(requests))
        progress.count(done, len(requests))

    rows, sinks = [], []
    for request, given in zip(requests, model.answered(requests, tick), strict=True):
        about = dict(zip(PLACE, place_of(request), strict=True))
        sinks += [about | fact for fact in given["sinks"]]
        rows.append(about | {"answer": json.dumps(given | {"sinks": []})})
    seconds, documents = model.spent.get(task, (0.0, 0))
    seconds += time.monotonic() - began
    model.spent[task] = seconds, documents + len({one.doc_id for one in requests})
    if sinks:
        return Contents({"answers": rows, "sinks": sinks})
    return Contents({"answers": rows})


def time_of_all(model: SinklabLM) -> float:
    """Seconds that all documents of the tasks take at the rate of those that were answered here; 0
    if there is no rate, or no limit.
    """
    sizes = {name: len(task.eval_docs) for name, task in model.tasks["tasks"].items()}
    limit = model.settings.limit
    if limit is None or limit >= max(sizes.values()) or model.spent.keys() != sizes.keys():
        return 0.0
    return sum(seconds * sizes[name] / many for name, (seconds, many) in model.spent.items())


def conclude(work: Work) -> None:
    """Write the tables ``scores`` (a row per task, metric and filter), ``samples`` (per task,
    filter and document: prompt, answer, target, right) and, if keys were blocked, ``doses`` from
    the answers.
    """
    from lm_eval.evaluator import evaluate as run_tasks

    if work.run.info.status == "complete":
        return
    model, settings = work.plan, work.settings
    model.told = {
        (row.task, row.doc_id, row.request): json.loads(row.answer)
        for row in open_run(work.run.path).table("answers").itertuples()
    }
    for name, task in model.tasks["tasks"].items():
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
        if settings.num_fewshot and task.get_config("num_fewshot") == 0:
            work.progress.note(
                f"{name} keeps its 0 worked examples: lm-eval does not allow another number"
            )
    # resampling announces itself on standard output, where only results belong
    with redirect_stdout(io.StringIO()):
        results = run_tasks(
            model,
            model.tasks,
            limit=settings.limit,
            apply_chat_template=settings.chat,
            fewshot_as_multiturn=settings.chat,
            confirm_run_unsafe_code=settings.run_code,
            bootstrap_iters=BOOTSTRAP,
        )
    scores, samples = tables.rows_of(results, model.told)
    samples.sort(key=lambda row: (row["task"], row["filter"], row["doc_id"]))
    for name, rows in {"scores": scores, "samples": samples, "doses": dose_rows(model)}.items():
        if rows:
            work.run.table(name, rows)
    seconds = time_of_all(model)
    if seconds:
        time_needed = timedelta(seconds=math.ceil(seconds))
        work.progress.note(f"at this rate the whole takes {time_needed}")


def score(folder: str | Path) -> list[str]:
    """Run the programs that a run folder keeps, and write their scores into it; they come back in
    words. Raises ValueError where bubblewrap cannot be had.
    """
    run, box = open_run(folder), offline.sandbox()
    if run.info.kind != Evaluation.kind:
        raise ValueError(f"{run.path} is of kind {run.info.kind!r}; give a run of sinklab eval")
    samples, scores = run.table("samples"), run.table("scores")
    kept = samples["task"].isin(offline.RUNS_CODE) & samples["right"].isna()
    if not kept.any():
        raise ValueError(f"{run.path} keeps no programs: their scores are there")
    why = box.why_not()
    if why:
        raise ValueError(f"the programs of {run.path} are not run here: {why}")
    fates = box.run([json.loads(answer)[0] for answer in samples.loc[kept, "answer"]])
    samples.loc[kept, "answer"] = [json.dumps([fate]) for fate in fates]
    samples.loc[kept, "right"] = [float(fate == "passed") for fate in fates]
    for task in samples.loc[kept, "task"].unique():
        right = samples.loc[samples["task"] == task, "right"]
        row = scores["task"] == task
        scores.loc[row, ["value", "stderr", "kept"]] = right.mean(), right.sem(), 0
    names = ("kind", "model", "settings", "seed", "samples", "part_size")
    about = {name: getattr(run.info, name) for name in names}
    with RunWriter(run.path, **about) as writer:
        writer.table("samples", samples)
        writer.table("scores", scores)
    return tables.score_sentences(open_run(run.path))


def dose_rows(model: SinklabLM) -> list[Row]:
    """A row per task with texts written or scored under blocked keys: the protocol, the edits as
    carried out, the `Dose` over all answers, the number of documents with a dose, and the number of
    them with a known share removed.
    """
    settings = model.settings
    if not any(isinstance(edit, BlockKeys) and edit.keys.by_attention for edit in model.edits):
        return []
    rows = []
    for task, places in groupby(model.told, lambda place: place[0]):
        doses = [(place[1], model.told[place]) for place in places]
        protocol = ""
        if settings.mask_sinks:
            protocol = settings.protocol
        edits = model.edits
        if "logprob" in doses[0][1]:
            edits = model.scored_edits
            if protocol != "rule":
                protocol = protocol and "clean"
        found = [(document, Dose(answer["dose"])) for document, answer in doses]
        row = {
            "task": task,
            "protocol": protocol,
            "edits": " ".join(map(interventions.as_text, edits)),
            **Dose.pooled(dose for _, dose in found).row(),
            "documents": len({document for document, _ in found}),
            "measured": len({one for one, dose in found if not math.isnan(dose.removed)}),
        }
        rows.append(row)
    return rows


def table1(
    models: Mapping[str, Callable[[], Loaded]],
    settings: EvalSettings,
    out: str | Path,
    plan: Plan | None = None,
    *,
    progress: Audience = None,
) -> list[Path]:
    """Score every model on every task, unmasked and masked: OUT/<model>/<task>-k<K>, one run folder
    a cell.

    Everything that the paper states is as in the paper: blocks of 32, 256 new tokens for GSM8K and
    512 for HumanEval, one token a step, temperature 0; by the protocol "paper" the top K per layer
    and head of step t − 1 of the masked run itself. All models are masked alike. What is there of a
    cell is not made again. A model is let go before the next is loaded.

    Args:
        models: name of a folder -> function that loads the model.
        settings: of every cell; its tasks are the table's; each cell sets the keys to block.
        out: folder for the cells.
        plan: which cells.
        progress: shows how far it is.

    Returns:
        the folders, in the order of the table.

    Raises:
        ValueError: for a folder that holds another run, and as `Evaluation` does; cells that are
            finished are kept.
    """
    if settings.mask_sinks is not None:
        raise ValueError(
            "what is masked differs from cell to cell: leave out mask_sinks and control, and give "
            "ks"
        )
    progress, folders = as_progress(progress), []
    # errors of a task show before anything is scored
    read_tasks(settings)
    for name, loads in models.items():
        loaded = cache(loads)
        for folder, cell in cells_of(Path(out) / name, settings, plan or Plan()).items():
            what = "nothing blocked"
            if cell.mask_sinks:
                keys = f"{cell.mask_sinks} {tables.KEYS[cell.control]}"
                what = f"protocol {cell.protocol}, {keys} blocked"
            progress.stage(f"{name}, {cell.tasks[0]}, {what}")
            folders.append(Evaluation()(loaded, folder, cell, progress=progress))
    return folders


def cells_of(out: Path, settings: EvalSettings, plan: Plan) -> dict[Path, EvalSettings]:
    """The run folders of a model's cells below `out`, and their settings."""
    found = {}
    for task in settings.tasks:
        tokens = settings.new_tokens
        if tokens is None:
            tokens = TOKENS.get(task)
        # a cell does not depend on permissions for the sake of another
        runs_code = settings.run_code and task in offline.RUNS_CODE
        plain = dataclasses.replace(settings, tasks=(task,), new_tokens=tokens, run_code=runs_code)
        found[out / f"{task}-k0"] = plain
        protocols: Sequence[str] = plan.protocols
        if task in offline.LIKELIHOODS:
            # without a step before, all but "rule" are the clean pass, and stand under the
            # default's name
            protocols = [{"rule": "rule"}.get(name, "paper") for name in protocols]
        for protocol, control, k in product(protocols, plan.controls, filter(None, plan.ks)):
            parts = [f"{task}-k{k}", protocol, control]
            usual = ("paper", "sinks")
            folder = out / "-".join(part for part in parts if part not in usual)
            found[folder] = dataclasses.replace(
                plain, mask_sinks=k, control=control, protocol=protocol, sink_rule=plan.sink_rule
            )
    return found
