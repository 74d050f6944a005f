"""lm-eval's tasks on local files: its own prompts and metrics, with the data set replaced by files on disk."""

from __future__ import annotations

import hashlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sinklab.errors import near
from sinklab.studies.benchmarks.rows import FunctionName, converted, packaged, source_of, write_text
from sinklab.studies.benchmarks.settings import TWO_STAGE


def dumped(config: dict[str, Any]) -> str:
    """A task as the text of a file that lm-eval reads."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    Dumper.add_representer(FunctionName, lambda dumper, name: dumper.represent_scalar("!function", str(name)))
    return str(yaml.dump(config, Dumper=Dumper, sort_keys=False, allow_unicode=True))


def base(name: str) -> dict[str, Any]:
    """The packaged task on top of lm-eval's own file of it; the data set is lm-eval's still.

    Raises:
        ValueError: where the installed lm-eval has no such file.
    """
    import lm_eval
    from lm_eval.tasks._yaml_loader import load_yaml

    config = packaged(name)
    del config["sinklab"]
    own = Path(lm_eval.__file__).parent / "tasks" / (config.get("include") or config["inherit"])
    if not own.is_file():
        raise ValueError(f"{name} needs lm-eval's own {own.name}, but {own} is not there; install lm-eval 0.4.13")
    if "include" in config:
        return {**config, "include": str(own)}
    # functions of the included file are never imported: lm-eval's HumanEval asks the network on import
    del config["inherit"]
    return {**load_yaml(own, resolve_func=False), **config}


OFFLINE = (
    "gsm8k",
    "humaneval",
    "humaneval_instruct",
    "hellaswag",
    "arc_easy",
    "arc_challenge",
    "piqa",
    "social_iqa",
    "race",
    "lambada_openai",
    "lambada_standard",
)
"""Benchmarks that can be read from local files."""
RUNS_CODE = ("humaneval", "humaneval_instruct")


def tasks(
    names: Sequence[str],
    data: str | Path | None,
    *,
    run_code: bool = False,
    num_fewshot: int | None = None,
    cache: str | Path | None = None,
) -> tuple[list[Any], Any]:
    """Tasks for ``lm_eval.simple_evaluate(tasks=…, task_manager=…)``, checked and with their data loaded.

    With ``data``, the tasks of :data:`OFFLINE` read files below that folder; prompts, metrics and filters are those of
    lm-eval's own task of that name, taken from the installed package. Without it they are lm-eval's own altogether,
    and any of its tasks and groups will do. HumanEval's completions run in a process of their own either way
    (:mod:`~sinklab.studies.benchmarks.code`); give ``confirm_run_unsafe_code=True`` to ``simple_evaluate`` for it.

    Args:
        names: of tasks.
        data: folder of benchmark files; None for lm-eval's data sets from the Hub.
        run_code: allow tasks that run what a model wrote.
        num_fewshot: examples in each prompt, where they are not the task's own number: they need a training split.
        cache: folder for converted files and task files; by default below the user's cache. The task files in it serve
            plain ``lm_eval --include_path`` too.

    Raises:
        ValueError: without lm-eval, for an unknown task (with near names), data that are not there or cannot be read
            (what was looked for and how to get it), and a task that runs code where that is not allowed.
    """
    needs_lm_eval()
    wanted = list(dict.fromkeys(names))
    if not wanted:
        raise ValueError(f"at least one task is needed, but there is none; known are {', '.join(OFFLINE)}")
    _refuse_code(wanted, run_code)
    # task files name the converted ones, whatever folder they are read from
    root = (Path(cache) if cache is not None else _user_cache()).absolute()
    if data is None:
        return _from_hub(wanted, root)
    if unknown := [name for name in wanted if name not in OFFLINE]:
        raise ValueError(unknown_task(unknown[0], (*OFFLINE, TWO_STAGE), "tasks on local files"))
    folder = Path(data)
    if not folder.is_dir():
        raise ValueError(f"benchmark files lie in a folder, but {folder} is none; give the folder that holds them")
    # apart from what another process makes of other data at the same time
    asked = hashlib.sha256(repr((str(folder.resolve()), num_fewshot)).encode()).hexdigest()[:12]
    manager = _manager(root / f"tasks-{asked}", {name: _on_files(name, folder, root, num_fewshot) for name in wanted})
    return _loaded(manager, wanted), manager


def _manager(folder: Path, configs: dict[str, dict[str, Any]]) -> Any:
    """lm-eval's manager of these tasks alone, their files written into the folder."""
    from lm_eval.tasks import TaskManager

    for name, config in configs.items():
        write_text(folder / f"{name}.yaml", dumped(config))
    return TaskManager(include_path=str(folder) if configs else None, include_defaults=False)


def needs_lm_eval() -> None:
    """Raises ValueError, with the remedy, where lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("benchmarks need lm-eval, which is not installed; pip install 'sinklab[eval]'")


def unknown_task(name: str, known: Sequence[str], what: str) -> str:
    """The message for a task that does not exist."""
    listed = ", ".join(known) if len(known) < 20 else f"{len(known)} names, listed by lm_eval ls tasks"
    return f"unknown task {name!r}; {f'{near(name, known)} '.lstrip()}{what} are {listed}"


def _refuse_code(names: Sequence[str], run_code: bool) -> None:
    for name in names:
        if name in RUNS_CODE and not run_code:
            raise ValueError(
                f"{name} runs programs that the model wrote, on this machine, as this user, though in a process of "
                "their own with limits on time, memory and files; allow it with --run-code (in Python run_code=True), "
                "best inside a container"
            )


def _user_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sinklab" / "benchmarks"


def _on_files(name: str, data: Path, cache: Path, num_fewshot: int | None) -> dict[str, Any]:
    from lm_eval.tasks._yaml_loader import load_yaml

    source, config = source_of(name), base(name)
    whole = {**(load_yaml(config["include"], resolve_func=False) if "include" in config else {}), **config}
    graded = source.graded
    shots = whole.get("num_fewshot") or 0
    # lm-eval leaves a task's own 0 as it is, whatever is asked for
    if num_fewshot is not None and whole.get("num_fewshot") != 0:
        shots = num_fewshot
    splits = {graded: source.needed(data, graded)}
    examples = source.needed(data, "train", f" for {shots} examples in each prompt") if shots else []
    if examples := examples or source.find(data, "train"):
        splits["train"] = examples
    paths = {split: str(converted(source, split, found, cache)) for split, found in splits.items()}
    config |= {
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": paths, "cache_dir": str(cache / "datasets")},
        "training_split": "train" if examples else None,
        "fewshot_split": whole.get("fewshot_split") if examples else None,
    }
    config |= {f"{split}_split": split if split == graded else None for split in ("validation", "test")}
    return config


def _from_hub(names: Sequence[str], cache: Path) -> tuple[list[Any], Any]:
    from lm_eval.tasks import TaskManager

    ours = sorted(set(names) & set(OFFLINE))
    made = cache / f"hub-tasks-{hashlib.sha256(repr(ours).encode()).hexdigest()[:12]}"
    manager = _manager(made, {name: base(name) for name in ours})
    if len(ours) == len(names):
        return _loaded(manager, names), manager
    # lm-eval reads thousands of files to know all of its tasks
    whole = TaskManager()
    if unknown := [name for name in names if name not in ours and name not in whole.task_index]:
        raise ValueError(unknown_task(unknown[0], [*OFFLINE, TWO_STAGE, *whole.all_tasks], "lm-eval's tasks"))
    return [task for name in names for task in _loaded(manager if name in ours else whole, [name])], whole


def _loaded(manager: Any, names: Sequence[str]) -> list[Any]:
    found: list[Any] = []
    for name in names:
        config = manager.task_index[name].cfg or {}
        _refuse_others([name] if config.get("unsafe_code") else [])
        try:
            with _quiet():
                loaded = manager.load(name)
        except Exception as error:
            # data sets, the Hub and their clients fail in dozens of ways
            raise ValueError(hub_failure(name, error)) from error
        group = loaded.get("groups", {}).get(name)
        found.extend([group] if group is not None else loaded["tasks"].values())
        _refuse_others([task.task_name for task in loaded["tasks"].values() if getattr(task, "UNSAFE_CODE", False)])
    return found


def _refuse_others(unsafe: Sequence[str]) -> None:
    if others := [name for name in unsafe if name not in RUNS_CODE]:
        raise ValueError(
            f"{others[0]} runs programs that the model wrote inside the evaluating process, without limits, and "
            f"sinklab runs code for {' and '.join(RUNS_CODE)} alone; use lm_eval itself for it"
        )


def hub_failure(name: str, error: Exception) -> str:
    """The message for a task whose data set could not be had: which, why, and what to do."""
    fact = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
    if name not in OFFLINE:
        return f"{name} needs its data set from the Hub, but it could not be loaded ({fact}); connect, or give a folder"
    source = source_of(name)
    return (
        f"{name} needs the Hub data set {source.hub}, but it could not be loaded ({fact}); on a machine with a network "
        f"run {source.command(Path('DATA'), source.graded)} and give the folder DATA (--data, in Python data=)"
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars of reading a few thousand rows."""
    import datasets

    hidden = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if not hidden:
            datasets.enable_progress_bars()
