"""lm-eval's tasks on local files: its own prompts and metrics, with the data set replaced by files
on disk.
"""

import importlib.util
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from sinklab.core.errors import near
from sinklab.core.registry import sandboxes
from sinklab.lab.studies.benchmarks.rows import SOURCES, Source, rows_of
from sinklab.lab.studies.benchmarks.study import TWO_STAGE

OFFLINE = tuple(SOURCES)
"""Benchmarks that can be read from local files."""
LIKELIHOODS = frozenset(name for name, source in SOURCES.items() if not source.writes)
"""Benchmarks that ask for likelihoods, and for no text."""
RUNS_CODE = tuple(name for name, source in SOURCES.items() if source.runs_code)


def tasks(
    names: Sequence[str],
    data: str | Path | None,
    *,
    run_code: bool = False,
    num_fewshot: int | None = None,
) -> list[Any]:
    """Tasks for ``lm_eval.simple_evaluate(tasks=…)``, checked and with their data loaded.

    With ``data``, the tasks of :data:`OFFLINE` read files below it, with prompts, metrics and
    filters of lm-eval's own task. Without it they are lm-eval's own altogether, and any of its
    tasks and groups will do. HumanEval's completions run in processes of their own either way; give
    ``confirm_run_unsafe_code=True`` to ``simple_evaluate`` for it.

    Args:
        names: of tasks.
        data: folder of benchmark files; None for lm-eval's data sets from the Hub.
        run_code: allow tasks that run programs written by the model.
        num_fewshot: examples in each prompt, in place of the task's own number: they need a
            training split.

    Raises:
        ValueError: without lm-eval, for an unknown task (with near names), data that are not there
            or cannot be read (how to get it), and code that is not allowed or that nothing would
            hold (`boundary`).
    """
    needs_lm_eval()
    wanted = list(dict.fromkeys(names))
    if not wanted:
        raise ValueError(
            f"at least one task is needed, but there is none; known are {', '.join(OFFLINE)}"
        )
    unsafe = [name for name in wanted if name in RUNS_CODE]
    if unsafe and not run_code:
        raise ValueError(
            f"{unsafe[0]} runs programs that the model wrote, on this machine, though in processes "
            "of their own with limits, and behind a boundary where the system has one; allow it "
            "with --run-code (in Python run_code=True)"
        )
    if unsafe:
        sandbox().boundary()
    others = [name for name in wanted if name not in OFFLINE]
    if data is not None and others:
        raise _unknown_task(others[0], (*OFFLINE, TWO_STAGE), "tasks on local files")
    if data is not None and not Path(data).is_dir():
        raise ValueError(
            f"benchmark files lie in a folder, but {data} is none; give the folder that holds them"
        )
    found: list[Any] = []
    changes = {}
    if num_fewshot is not None:
        changes["num_fewshot"] = num_fewshot
    for name in wanted:
        if name in OFFLINE:
            found.append(packaged(SOURCES[name], data, **changes))
        else:
            found += _of_lm_eval(name)
    return found


def sandbox() -> Any:
    """Place to run programs that a model wrote. Raises ValueError if its extra is not there."""
    if "humaneval" not in sandboxes:
        raise ValueError(
            f"{' and '.join(RUNS_CODE)} run programs that a model wrote in the extra "
            "sinklab.extras.sandbox, which is not there; put its folder back, or leave these tasks "
            "out"
        )
    return sandboxes.make("humaneval")


def needs_lm_eval() -> None:
    """Raises ValueError, with the remedy, if lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(
            "benchmarks need lm-eval, which is not installed; pip install 'sinklab[eval]'"
        )


def _unknown_task(name: str, known: Sequence[str], what: str) -> ValueError:
    listed = f"{len(known)} names, listed by lm_eval ls tasks"
    if len(known) < 20:
        listed = ", ".join(known)
    return ValueError(
        f"unknown task {name!r}; {f'{near(name, known)} '.lstrip()}{what} are {listed}"
    )


def packaged(source: Source, data: str | Path | None, **changes: Any) -> Any:
    """The task of a packaged benchmark: lm-eval's own with these changes of its fields, with local
    files as its data set if `data` is given.

    Raises:
        ValueError: if the installed lm-eval has no such task, and for files that are not there.
    """
    import datasets
    import lm_eval
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    class FileTask(ConfigurableTask):
        """lm-eval's task on documents in files."""

        def download(self, dataset_kwargs: dict[str, Any] | None = None, **_: Any) -> None:
            """Read the files of each split."""
            self.dataset = {
                split: datasets.Dataset.from_list(rows_of(source.task, [*map(Path, paths)]))
                for split, paths in self.config.dataset_kwargs["data_files"].items()
            }

    own = Path(lm_eval.__file__).parent / "tasks" / source.include
    if not own.is_file():
        raise ValueError(
            f"{source.task} needs lm-eval's own {own.name}, but {own} is not there; install "
            "lm-eval 0.4.13"
        )
    # functions of HumanEval's own file are never imported: it asks the network on import
    config: dict[str, Any] = load_yaml(own, resolve_func=not source.runs_code)
    if source.runs_code:
        config |= load_yaml(sandbox().task_file())
    # lm-eval leaves a task's own 0 as it is, whatever is asked for
    if config.get("num_fewshot") == 0:
        changes.pop("num_fewshot", None)
    config |= {"task": source.task, **changes}
    config.pop("tag", None)
    if data is None:
        return _quietly(source.task, lambda: ConfigurableTask(config=config))
    folder = Path(data)
    graded = source.graded
    shots = config.get("num_fewshot")
    paths = {graded: source.needed(folder, graded)}
    if shots:
        examples = source.needed(folder, "train", f" for {shots} examples in each prompt")
    else:
        examples = source.find(folder, "train")
    config |= dict.fromkeys(("training_split", "validation_split", "test_split"))
    if examples:
        paths["train"] = examples
        config["training_split"] = "train"
    else:
        config["fewshot_split"] = None
    config[f"{graded}_split"] = graded
    files = {split: [*map(str, some)] for split, some in paths.items()}
    return FileTask(config=config | {"dataset_kwargs": {"data_files": files}})


def _of_lm_eval(name: str) -> list[Any]:
    """lm-eval's own tasks of this name, one or those of a group, with their data."""
    from lm_eval.tasks import TaskManager

    # it reads thousands of files to know all of its tasks
    manager = TaskManager()
    if name not in manager.task_index:
        raise _unknown_task(name, [*OFFLINE, TWO_STAGE, *manager.all_tasks], "lm-eval's tasks")
    _refuse_others([name] if (manager.task_index[name].cfg or {}).get("unsafe_code") else [])
    loaded = _quietly(name, lambda: manager.load(name))
    _refuse_others(
        [task.task_name for task in loaded["tasks"].values() if getattr(task, "UNSAFE_CODE", False)]
    )
    group = loaded.get("groups", {}).get(name)
    if group is not None:
        return [group]
    return [*loaded["tasks"].values()]


def _quietly(name: str, load: Callable[[], Any]) -> Any:
    """A task with its data set, loaded without bars. Raises ValueError if it cannot be had."""
    import datasets

    with ExitStack() as quiet:
        if not datasets.are_progress_bars_disabled():
            datasets.disable_progress_bars()
            quiet.callback(datasets.enable_progress_bars)
        try:
            return load()
        except Exception as error:
            # data sets, the Hub and their clients fail in dozens of ways
            raise ValueError(hub_failure(name, error)) from error


def _refuse_others(unsafe: Sequence[str]) -> None:
    others = [name for name in unsafe if name not in RUNS_CODE]
    if others:
        raise ValueError(
            f"{others[0]} runs programs that the model wrote inside the evaluating process, "
            "without limits, and "
            f"sinklab runs code for {' and '.join(RUNS_CODE)} alone; use lm_eval itself for it"
        )


def hub_failure(name: str, error: Exception) -> str:
    """The message for a task without its data set: the task, the cause, and the remedy."""
    first = (str(error).splitlines() or ["no message"])[0]
    fact = f"{type(error).__name__}: {first}"
    if name not in OFFLINE:
        return (
            f"{name} needs its data set from the Hub, but it could not be loaded ({fact}); "
            "connect, or give a folder"
        )
    source = SOURCES[name]
    return (
        f"{name} needs the Hub data set {source.hub}, but it could not be loaded ({fact}); on a "
        f"machine with a network run {source.command(Path('DATA'), source.graded)} and give the "
        "folder DATA (--data, in Python data=)"
    )
