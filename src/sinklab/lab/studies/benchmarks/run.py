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
from functools import cache, partial
from itertools import groupby, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.core.instrument import BlockKeys, Dose
from sinklab.core.registry import interventions
from sinklab.lab.checkpoints import Loaded, load
from sinklab.lab.records import RUN_FILE, Contents, RunWriter, open_run, read_info
from sinklab.lab.scoring.requests import scoring_edits
from sinklab.lab.studies import (
    Audience,
    Progress,
    Row,
    Work,
    as_progress,
    duration,
    is_there,
    kept_record,
)
from sinklab.lab.studies.benchmarks import offline, tables, two_stage
from sinklab.lab.studies.benchmarks.requests import places_of
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
PLACE = ("task", "doc_id", "request", "repeat")
"""Columns that say which request an answer is to."""


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
            wanted.append(two_stage.task(settings.data))
    loaded: dict[str, Any] = TaskManager(include_defaults=False).load([*wanted])
    for task in loaded["tasks"].values():
        own = task.get_config("num_fewshot")
        if own is None or (settings.num_fewshot is not None and own != 0):
            task.set_config(key="num_fewshot", value=settings.num_fewshot or 0)
    return loaded


if TYPE_CHECKING:
    from sinklab.lab.studies.benchmarks.harness_model import SinklabLM


def evaluate(
    settings: EvalSettings | None = None,
    model: str | Loaded | Callable[[], Loaded] = "tiny",
    out: str | Path = "runs/eval",
    *,
    task_objects: Sequence[Any] | None = None,
    **how: Any,
) -> Path:
    """Score a model on benchmarks, and keep everything in a run folder of kind "benchmark".

    Tables: ``scores`` (a row per task, metric and filter), ``samples`` (per task, filter and
    document: prompt, answer, target, right), ``sinks`` (per watched request and layer, see
    :func:`sink_columns`) and, if keys were blocked, ``doses`` (per task: the protocol, the edits as
    carried out, and the columns of `Dose`). ``answers`` has a row of JSON per request, to continue
    an interrupted run.

    Args:
        settings: of the evaluation.
        model: loaded, an argument of :func:`sinklab.load`, or a function that loads it
            once the tasks are there.
        out: folder to write; it must be empty or absent, or hold this very run to resume.
        task_objects: lm-eval tasks, or dicts of their configuration, to score in place of
            ``settings.tasks``.
        how: progress, resume, overwrite and shard, as of every `Study`.

    Raises:
        ValueError: without lm-eval; for unknown tasks, data that are not there, code that is not to
            be run, a model that cannot serve the tasks, a folder that is taken, and a resumed run
            with other settings (the first difference is named).
    """
    loaded = model
    if isinstance(model, str):
        loaded = partial(load, model)
    return Evaluation(task_objects)(loaded, out, settings, **how)


def answer(work: Work) -> None:
    """Answer the requests of some parts; each part is kept when it is done."""
    model, progress = work.plan, work.progress
    tasks = model.tasks["tasks"]
    for task, some in groupby(work.run.missing, lambda part: model.asked[part][0].task_name):
        parts = {part: model.asked[part] for part in some}
        total = sum(map(len, parts.values()))
        progress.stage(f"{task}: {total} answers")
        progress.count(0, total)
        began, done, documents = time.perf_counter(), 0, set()
        for part, requests in parts.items():
            made = contents(model, requests, _counter(progress, done, len(requests), total))
            work.run.write(part, {part: made})
            done += len(requests)
            progress.count(done, total)
            documents |= {request.doc_id for request in requests}
        if model.settings.limit is not None:
            spent = (time.perf_counter() - began) / work.shard[1]
            progress.whole += spent * len(tasks[task].eval_docs) / len(documents)


def contents(model: SinklabLM, requests: list[Any], tick: Callable[[float], object]) -> Contents:
    """Answers to requests, a row of JSON each, and facts of the sinks of those that are watched."""
    rows, sinks = [], []
    answers = model.answered(requests, tick)
    for place, given in zip(places_of(requests), answers, strict=True):
        about = dict(zip(PLACE, place, strict=True))
        sinks += [about | fact for fact in given["sinks"]]
        rows.append(about | {"answer": json.dumps(given | {"sinks": []})})
    if sinks:
        return Contents({"answers": rows, "sinks": sinks})
    return Contents({"answers": rows})


def _counter(progress: Progress, before: int, most: int, total: int) -> Callable[[float], None]:
    """A function that counts what is done of a part, a part of an answer too."""
    done = 0.0

    def tick(more: float) -> None:
        nonlocal done
        done = min(done + more, most)
        progress.count(before + done, total)

    return tick


def conclude(work: Work) -> None:
    """Write the tables ``scores``, ``samples`` and ``doses`` (if keys were blocked) from the
    answers.
    """
    from lm_eval.evaluator import evaluate as run_tasks

    model, settings = work.plan, work.settings
    model.told = {
        (row.task, row.doc_id, row.request, row.repeat): json.loads(row.answer)
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


def score_only(settings: EvalSettings) -> list[str]:
    """Run the programs that a run folder keeps, and write their scores into it; none if the
    settings name no folder. Raises ValueError where bubblewrap cannot be had.
    """
    if settings.score_only is None:
        return []
    run, box = open_run(settings.score_only), offline.sandbox()
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
    with RunWriter(run.path, **about, resume=True) as writer:
        writer.table("samples", samples)
        writer.table("scores", scores)
    return tables.score_sentences([open_run(run.path)])


def dose_rows(model: SinklabLM) -> list[Row]:
    """A row per task with texts written or scored under blocked keys: the protocol, the edits as
    carried out, the `Dose` over all answers, the number of documents with a dose, and the number of
    them with a known share removed.
    """
    settings = model.settings
    if not any(isinstance(edit, BlockKeys) and edit.keys.by_attention for edit in model.edits):
        return []
    rows = []
    for task in dict.fromkeys(place[0] for place in model.told):
        some = [(place[1], answer) for place, answer in model.told.items() if place[0] == task]
        doses = [(document, Dose(answer["dose"])) for document, answer in some]
        is_likelihood = any("logprob" in answer for _, answer in some)
        edits = model.edits
        protocol = ""
        if settings.mask_sinks is not None:
            protocol = settings.protocol
        if is_likelihood:
            edits = scoring_edits(model.scored_edits, is_diffusion=model.is_diffusion)
            if protocol not in ("", "rule"):
                protocol = "clean"
        measured = {document for document, dose in doses if not math.isnan(dose.removed)}
        row = {
            "task": task,
            "protocol": protocol,
            "edits": " ".join(map(interventions.as_text, edits)),
            **Dose.pooled(dose for _, dose in doses).row(),
            "documents": len({document for document, _ in doses}),
            "measured": len(measured),
            "is_likelihood": is_likelihood,
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
    and head of step t − 1 of the masked run itself. All models are masked alike. Cells that are
    there are left alone, and an unfinished one is continued. A model is loaded when the first of
    its cells is to be written, and let go before the next.

    Args:
        models: name of a folder -> function that loads the model.
        settings: of every cell; its tasks are the table's; each cell sets the keys to block.
        out: folder for the cells.
        plan: which cells.
        progress: shows how far it is.

    Returns:
        the folders, in the order of the table.

    Raises:
        ValueError: for a folder that holds another run, and as `evaluate` does; cells that are
            finished are kept.
    """
    plan = plan or Plan()
    if settings.mask_sinks is not None:
        raise ValueError(
            "what is masked differs from cell to cell: leave out mask_sinks and control, and give "
            "ks"
        )
    progress = as_progress(progress)
    cells = {
        folder: (name, cell)
        for name in models
        for folder, cell in cells_of(Path(out) / name, settings, plan).items()
    }
    # errors of a folder or a task show before anything is scored
    todo = {}
    for folder, (name, cell) in cells.items():
        settings_of = kept_record(cell)
        if plan.chat is not None:
            settings_of["chat"] = plan.chat
        elif (folder / RUN_FILE).is_file():
            # whichever form it was asked in
            settings_of["chat"] = read_info(folder / RUN_FILE).settings.get("chat")
        if not is_there(folder, {"kind": "benchmark", "settings": settings_of}):
            todo[folder] = name, cell
    if todo:
        read_tasks(settings)
    for model, loads in models.items():
        loaded = cache(loads)
        for folder, (name, cell) in todo.items():
            if name == model:
                what = "nothing blocked"
                if cell.mask_sinks:
                    keys = f"{cell.mask_sinks} {tables.key_words(cell.control, cell.protocol)}"
                    what = f"protocol {cell.protocol}, {keys} blocked"
                progress.stage(f"{name}, {cell.tasks[0]}, {what}")
                has_chat = getattr(loaded().tokenizer, "chat_template", None) is not None
                chat = has_chat if plan.chat is None else plan.chat
                cell = dataclasses.replace(cell, chat=chat)
                begun = (folder / RUN_FILE).is_file()
                evaluate(cell, loaded, folder, progress=progress, resume=begun)
    # cells that were there have no rate
    if progress.whole and len(todo) == len(cells):
        progress.note(f"at this rate the whole takes {duration(progress.whole)}")
    return [*cells]


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
        protocols = dict.fromkeys(plan.protocols)
        if task in offline.LIKELIHOODS:
            # without a step before, all but "rule" are the clean pass, and stand under the
            # default's name
            protocols = dict.fromkeys({"rule": "rule"}.get(name, "paper") for name in protocols)
        for protocol, control, k in product(protocols, plan.controls, filter(None, plan.ks)):
            parts = [f"{task}-k{k}", protocol, control]
            usual = ("paper", "sinks")
            folder = out / "-".join(part for part in parts if part not in usual)
            found[folder] = dataclasses.replace(
                plain, mask_sinks=k, control=control, protocol=protocol, sink_rule=plan.sink_rule
            )
    return found
