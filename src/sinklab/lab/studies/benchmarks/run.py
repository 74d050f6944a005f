"""Benchmarks through lm-eval, in one run folder each, and the cells of the analysis paper's Table
1.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from sinklab.core.probing.dose import Dose
from sinklab.core.probing.interventions.block_keys import BlockKeys
from sinklab.core.registry import interventions
from sinklab.lab.checkpoints.loading import Loaded, load
from sinklab.lab.records.info import read_info
from sinklab.lab.records.leases import FINISH
from sinklab.lab.records.reading import lost_files
from sinklab.lab.records.storage import PART_SUFFIX, RUN_FILE
from sinklab.lab.records.writing import RunWriter
from sinklab.lab.scoring.requests import scoring_edits, without_steps
from sinklab.lab.studies.base import describe, hidden_words
from sinklab.lab.studies.benchmarks import offline, tables, two_stage
from sinklab.lab.studies.benchmarks.asked import FEWSHOT_SEED, TOKENS, named, questions
from sinklab.lab.studies.benchmarks.study import LATER, TWO_STAGE, EvalSettings, Plan
from sinklab.lab.studies.processes import Processes, Progress, as_progress, refuse_taken
from sinklab.lab.studies.request_cache import RequestCache, request_key

if TYPE_CHECKING:
    from sinklab.lab.studies.benchmarks.harness_model import SinklabLM


@contextmanager
def quiet() -> Iterator[None]:
    """lm-eval without bars of its own and without processes for its resamples."""
    from lm_eval.api import metrics, task

    # our own bar shows the progress; a pool of processes would copy the model's memory; resampling
    # announces itself on standard output, where only results belong
    bar = partial(getattr(task, "tqdm"), disable=True)  # noqa: B009
    with (
        patch.object(task, "tqdm", bar),
        patch.dict(os.environ, DISABLE_MULTIPROC="1"),
        patch.object(metrics, "print", lambda *words, **options: None, create=True),
    ):
        yield


def write(folder: Path, results: dict[str, Any], model: Any) -> list[Path]:
    """Write results_<date>.json and samples_<task>_<date>.jsonl with lm-eval's own writer.

    They are written elsewhere and moved, so that a reader never meets half a file.

    Raises:
        OSError: if they cannot be written.
    """
    from lm_eval.loggers import EvaluationTracker
    from lm_eval.loggers.utils import add_tokenizer_info

    settings = model.settings
    loaded = model.loaded
    whole: dict[str, Any] = copy.deepcopy(results)
    samples = whole.pop("samples", {})
    given = {"pretrained": loaded.name}
    whole["config"] = {
        "model": "sinklab",
        "model_args": given,
        "model_num_parameters": loaded.model.num_parameters(),
        "model_dtype": str(loaded.model.dtype),
        "model_revision": loaded.revision,
        "batch_size": settings.batch,
        "device": str(loaded.model.device),
        "limit": settings.limit,
        "fewshot_seed": FEWSHOT_SEED,
        "sinklab": settings.kept(),
    }
    whole["date"] = time.time()
    for package in ("lm_eval", "transformers"):
        whole[f"{package}_version"] = metadata.version(package)
    add_tokenizer_info(whole, model)
    with tempfile.TemporaryDirectory(dir=folder, prefix=".lm_eval-", suffix=PART_SUFFIX) as beside:
        # given the name of a file, it puts everything beside that file
        tracker = EvaluationTracker(output_path=str(Path(beside) / "results.json"))
        template = model.tokenizer.chat_template if settings.chat else None
        tracker.general_config_tracker.log_experiment_args(
            "sinklab", given, None, template, settings.chat
        )
        tracker.save_results_aggregated(whole, samples)
        for task, rows in samples.items():
            tracker.save_results_samples(task, rows)
        written = sorted(Path(beside).iterdir())
        # its writer reports a failure as a warning and goes on
        if len(written) != 1 + len(samples):
            raise OSError(
                f"{folder}: lm-eval's result files could not be written; {len(written)} of them "
                "were"
            )
        return [Path(shutil.move(path, folder / path.name)) for path in written]


BOOTSTRAP = 1000
"""Resamples for the standard error of metrics that have no formula; means have one."""


def evaluate(
    settings: EvalSettings | None = None,
    model: str | Loaded | Callable[[], Loaded] = "tiny",
    out: str | Path = "runs/eval",
    *,
    task_objects: Sequence[Any] | None = None,
    progress: Progress | Callable[[str], object] | None = None,
    worker: Processes | None = None,
) -> Path:
    """Score a model on benchmarks, and keep everything in a run folder of kind "benchmark".

    Tables: ``scores`` (a row per task, metric and filter), ``samples`` (per task, filter and
    document: prompt, answer, target, right), ``sinks`` (per watched request and layer, see
    :meth:`SinkFacts.row`) and, if keys were blocked, ``doses`` (per task: the protocol, the edits
    as carried out, and the columns of `Dose`). Beside them lie lm-eval's own ``results_*.json`` and
    ``samples_*.jsonl``, and ``requests-*.jsonl`` with every answer, to continue an interrupted run.
    Several workers share the documents: all write into one folder, each answers requests that no
    other has in work, and one of them writes the tables.

    Args:
        settings: of the evaluation.
        model: loaded, an argument of :func:`sinklab.core.models.load`, or a function that loads it
            once the tasks are there.
        out: folder to write; it must be empty or absent, or hold this very run when
            ``settings.resume`` is set.
        task_objects: lm-eval tasks, or dicts of their configuration, to score in place of
            ``settings.tasks``.
        progress: shows how far it is; a function is called with a short text at each stage.
        worker: which of several that write into one folder; the environment says it when left out.

    Raises:
        ValueError: without lm-eval; for unknown tasks, data that are not there, code that is not to
            be run, a model that cannot serve the tasks, a folder that is taken, and a resumed run
            with other settings (the first difference is named).
    """
    offline.needs_lm_eval()
    path = Path(out)
    worker = worker or Processes.here()
    settings = settings or EvalSettings()
    progress = as_progress(progress if worker.is_first else None)
    resume = settings.resume or worker.joins
    if not resume:
        refuse_taken(path)
    # tasks first: their errors show before a large model is read
    settings, given, documents = questions(settings, task_objects)
    if isinstance(model, str):
        loaded = load(model)
    elif isinstance(model, Loaded):
        loaded = model
    else:
        loaded = model()

    from sinklab.lab.studies.benchmarks.harness_model import SinklabLM

    asked = SinklabLM(loaded, settings=settings, progress=progress, worker=worker)
    described = {
        name: value for name, value in describe(loaded).items() if not name.startswith("recorded_")
    }
    about: dict[str, Any] = {"kind": "benchmark", "model": described, "settings": settings.kept()}
    with (
        ExitStack() as last,
        RunWriter(path, **about, seed=settings.seed, resume=resume, shared=True) as run,
    ):
        asked.claims = run.claims
        concludes = cache(partial(_concludes, run, last))
        with RequestCache(path, run.claims, request_key(about)) as asked.cache:
            if documents:
                two_stage.answer_all(asked, documents)
            results = None if given is None else _scored(asked, given, concludes)
        if concludes():
            _conclude(asked, run, results, documents)
            worker.finished.append(path)
    return path


def _conclude(
    model: SinklabLM,
    run: RunWriter,
    results: dict[str, Any] | None,
    documents: list[dict[str, Any]],
) -> None:
    """Write the tables from the answers of all workers.

    Args:
        model: of lm-eval.
        run: the run folder, open.
        results: lm-eval's; None if it had nothing to do.
        documents: questions of the two-stage protocol, which is no task of lm-eval.
    """
    answers = model.told
    scores: list[dict[str, Any]] = []
    samples: list[dict[str, Any]] = []
    if results:
        scores, samples = tables.rows_of(results, answers)
    if documents:
        more = two_stage.rows(documents, answers, published=model.settings.published)
        scores += more[0]
        samples += more[1]
    doses = dose_rows(answers, model.settings, is_diffusion=model.is_diffusion)
    tables.write(run, scores, samples, answers, doses)
    if results is not None:
        files = write(run.path, results, model)
        for earlier in {
            *run.path.glob("results_*.json"),
            *run.path.glob("samples_*.jsonl"),
        }.difference(files):
            earlier.unlink()
        run.keep(files)


def dose_rows(
    told: tables.Told, settings: EvalSettings, *, is_diffusion: bool
) -> list[dict[str, Any]]:
    """A row per task with texts written or scored under blocked keys: the protocol, the edits as
    carried out, the `Dose` over all answers, the number of documents with a dose, and the number of
    them with a known share removed.
    """
    if not any(
        isinstance(edit, BlockKeys) and edit.keys.by_attention for edit in settings.interventions()
    ):
        return []
    rows = []
    for task in dict.fromkeys(task for task, _, _ in told):
        # answers of an older run say nothing of it
        some = {key: answer for key, answer in told.items() if key[0] == task and "dose" in answer}
        doses = [(document, Dose(answer["dose"])) for (_, document, _), answer in some.items()]
        is_likelihood = any("logprob" in answer for answer in some.values())
        edits = settings.interventions(by_last_row=not is_diffusion and not is_likelihood)
        protocol = ""
        if settings.mask_sinks is not None:
            protocol = settings.protocol
        if is_likelihood:
            edits = scoring_edits(without_steps(edits), is_diffusion=is_diffusion)
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
        if doses:
            rows.append(row)
    return rows


def _concludes(run: RunWriter, last: ExitStack) -> bool:
    # held until run.json says that all is there
    last.enter_context(run.claims.hold(FINISH))
    run.is_last = run.refresh().status != "complete"
    return run.is_last


class _Elsewhere(Exception):
    """Another worker has written the tables."""


def _scored(
    model: SinklabLM, tasks: dict[str, Any], concludes: Callable[[], bool]
) -> dict[str, Any] | None:
    """lm-eval's results; None if another worker concludes, which alone computes metrics."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.evaluator import evaluate as run_tasks

    usual = ConfigurableTask.apply_filters

    def filtered(task: Any) -> Any:
        # the first thing that happens when all requests are answered
        if not concludes():
            raise _Elsewhere
        return usual(task)

    settings = model.settings
    if settings.num_fewshot:
        for name, task in tasks["tasks"].items():
            if task.get_config("num_fewshot") == 0:
                model.progress.stage(
                    f"{name} keeps its 0 worked examples: lm-eval does not allow another number"
                )
    with (
        quiet(),
        suppress(_Elsewhere),
        patch.object(ConfigurableTask, "apply_filters", filtered),
    ):
        return run_tasks(
            model,
            tasks,
            limit=settings.limit,
            apply_chat_template=settings.chat,
            fewshot_as_multiturn=settings.chat,
            confirm_run_unsafe_code=settings.run_code,
            bootstrap_iters=BOOTSTRAP,
        )
    return None


def table1(
    models: Mapping[str, Callable[[], Loaded]],
    settings: EvalSettings,
    out: str | Path,
    plan: Plan | None = None,
    *,
    progress: Progress | Callable[[str], object] | None = None,
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
    todo = {
        folder: (name, cell)
        for folder, (name, cell) in cells.items()
        if not _is_done(folder, cell, plan.chat)
    }
    if todo:
        _check_tasks(settings)
    for model, loads in models.items():
        loaded = cache(loads)
        for folder, (name, cell) in todo.items():
            if name == model:
                what = "nothing masked"
                if cell.mask_sinks:
                    keys = f"{cell.mask_sinks} {hidden_words(cell.control, cell.protocol)}"
                    what = f"protocol {cell.protocol}, {keys} masked"
                progress.stage(f"{name}, {cell.tasks[0]}, {what}")
                has_chat = getattr(loaded().tokenizer, "chat_template", None) is not None
                chat = has_chat if plan.chat is None else plan.chat
                cell = dataclasses.replace(cell, chat=chat, resume=(folder / RUN_FILE).is_file())
                evaluate(cell, loaded, folder, progress=progress)
    return [*cells]


def cells_of(out: Path, settings: EvalSettings, plan: Plan) -> dict[Path, EvalSettings]:
    """The run folders of a model's cells below `out`, and their settings."""
    cells = plan.cells(settings.tasks, offline.LIKELIHOODS)
    return {out / cell_name(*cell): _cell(settings, plan.sink_rule, *cell) for cell in cells}


def _cell(
    settings: EvalSettings, sink_rule: Any, task: str, k: int, control: str, protocol: str
) -> EvalSettings:
    tokens = settings.new_tokens
    if tokens is None:
        tokens = TOKENS.get(task)
    # a cell does not depend on permissions for the sake of another
    runs_code = settings.run_code and task in offline.RUNS_CODE
    changes: dict[str, Any] = {"tasks": (task,), "new_tokens": tokens, "run_code": runs_code}
    if k:
        changes |= {
            "mask_sinks": k,
            "control": control,
            "protocol": protocol,
            "sink_rule": sink_rule,
        }
    return dataclasses.replace(settings, **changes)


def _check_tasks(settings: EvalSettings) -> None:
    offline.needs_lm_eval()
    names = [name for name in settings.tasks if name != TWO_STAGE]
    if names:
        named(settings, names)


def cell_name(task: str, k: int, control: str = "sinks", protocol: str = "paper") -> str:
    """The folder of a cell."""
    parts = [f"{task}-k{k}"]
    if k and protocol != "paper":
        parts.append(protocol)
    if k and control != "sinks":
        parts.append(control)
    return "-".join(parts)


def _is_done(folder: Path, cell: EvalSettings, chat: bool | None) -> bool:
    """Whether the cell is there, finished and with all its files. Raises ValueError for another
    run.
    """
    if not (folder / RUN_FILE).is_file():
        return False
    info = read_info(folder / RUN_FILE)
    if info.kind != "benchmark":
        raise ValueError(f"{folder} holds a run of kind {info.kind!r}; choose another --out")
    asked: dict[str, Any] = LATER | json.loads(json.dumps(cell.kept()))
    known = LATER | info.settings
    asked["chat"] = info.settings.get("chat") if chat is None else chat
    for name in sorted(asked):
        before = known.get(name)
        if before != asked[name]:
            raise ValueError(
                f"{folder} was scored with {name}={before!r}, and now it is {asked[name]!r}; give "
                "the same settings, or write the table into another --out"
            )
    return info.status == "complete" and not lost_files(folder, info)
