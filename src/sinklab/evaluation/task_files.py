"""The task files inside this package: which of lm-eval's tasks each builds on, and where its data may lie."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

from sinklab.evaluation.benchmark_files import Source


def source_of(name: str) -> Source:
    """Where the files of a packaged benchmark are looked for."""
    given = packaged(name)["sinklab"]
    patterns = {split: tuple(some) for split, some in given["files"].items()}
    return Source(name, given["hub"], given.get("config"), tuple(given["folders"]), patterns)


class _Function(str):
    """The name of a function, marked so in a task file."""


def packaged(name: str) -> dict[str, Any]:
    """The task file of this package, its functions by their names."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: _Function(loader.construct_scalar(node)))
    text = (files("sinklab.evaluation") / "tasks" / f"{name}.yaml").read_text("utf-8")
    config: dict[str, Any] = yaml.load(text, Loader)
    return config


def dumped(config: dict[str, Any]) -> str:
    """A task as the text of a file that lm-eval reads."""
    import yaml

    class Dumper(yaml.SafeDumper):
        pass

    Dumper.add_representer(_Function, lambda dumper, name: dumper.represent_scalar("!function", str(name)))
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
