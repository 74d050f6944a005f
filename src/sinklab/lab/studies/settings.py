"""Settings of studies as commands and run folders have them, and the run that is there already."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.core.errors import known_fields
from sinklab.lab.files import free_fields, toml_of
from sinklab.lab.records import RUN_FILE, lost_files, read_info

if TYPE_CHECKING:
    from sinklab.lab.records import Run


def heldout_text(given: str | None) -> str:
    """The corpus of held-out text that was given, or the excerpt inside the package (None, "" or
    "excerpt").
    """
    if given and given != "excerpt":
        return given
    packaged = resources.files("sinklab.lab.checkpoints")
    return str(packaged.joinpath("packaged", "heldout.jsonl"))


def labels_of(study: str) -> dict[str, dict[str, Any]]:
    """Names in figures and tables of a study: its part of labels.toml."""
    return toml_of("sinklab.lab.studies", "labels.toml")[study]


def ascending(name: str, numbers: Iterable[Any]) -> tuple[Any, ...]:
    """Numbers of a field of settings, each once, the least first."""
    return tuple(sorted({*numbers}))


def shard_of(text: str | None) -> tuple[int, int]:
    """The numbers of "i/n"; (0, 1) if left out. Raises ValueError for those that make no sense."""
    if text is None:
        return 0, 1
    place, _, shards = text.partition("/")
    if not (place.isdigit() and shards.isdigit() and int(place) < int(shards)):
        raise ValueError(
            f"--shard is i/n with i from 0 to n - 1, such as 0/4, but got {text!r}; count from 0"
        )
    return int(place), int(shards)


def of_each(function: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """A function of one run as one of several runs: what it gives of each, one after the other."""

    @wraps(function)
    def of_runs(runs: Iterable[Run], *how: Any) -> list[Any]:
        return [one for run in runs for one in function(run, *how)]

    return of_runs


def as_record(settings: Any) -> dict[str, Any]:
    """Settings as ``run.json`` keeps them: one object, in which registered values are text."""
    record = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        registry = field.metadata.get("registry")
        if registry is None or value is None:
            record[field.name] = value
        elif isinstance(value, tuple):
            record[field.name] = [*map(registry.as_text, value)]
        else:
            record[field.name] = registry.as_text(value)
    return record


def kept_record(settings: Any) -> dict[str, Any]:
    """Settings as a run folder keeps them: not those that may differ when it is resumed."""
    free = free_fields(settings)
    return {name: value for name, value in as_record(settings).items() if name not in free}


def from_record(settings: Any, record: dict[str, Any]) -> Any:
    """The settings with the values of a record. Raises ValueError for names that they do not
    have.
    """
    names = [field.name for field in dataclasses.fields(settings)]
    known_fields(f"settings of {type(settings).__name__}", record, names)
    lists = {name: tuple(value) for name, value in record.items() if isinstance(value, list)}
    return dataclasses.replace(settings, **record | lists)


def is_there(path: Path, about: Mapping[str, Any]) -> bool:
    """Whether this very run is there, finished and with all its files. Raises ValueError for the
    run of something else, naming the first setting that differs.

    Args:
        path: of the folder, which may be absent.
        about: kind and settings of the run, and the model, if it is known, of which the weights
            count.
    """
    if not (path / RUN_FILE).is_file():
        return False
    info = read_info(path / RUN_FILE)
    if info.kind != about["kind"]:
        raise ValueError(f"{path} holds a run of kind {info.kind!r}; choose another --out")
    asked = json.loads(json.dumps(about["settings"]))
    weights = "weights_sha256"
    asked[weights] = about.get("model", info.model).get(weights)
    before = info.settings | {weights: info.model.get(weights)}
    for name in sorted(asked):
        if before.get(name) != asked[name]:
            raise ValueError(
                f"{path} holds a run of {name}={before.get(name)!r}, and now it is "
                f"{asked[name]!r}; give the same settings and model, or choose another --out"
            )
    return info.status == "complete" and not lost_files(path, info)
