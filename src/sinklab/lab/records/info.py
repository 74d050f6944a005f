"""Content of run.json, and errors for a file that no run wrote."""

import contextlib
import dataclasses
import json
import types
import typing
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError

from sinklab.lab.files import read_json
from sinklab.lab.records.storage import KINDS, RUN_FILE, SCHEMA, TABLES, Kind, write_text

STATUSES = ("running", "complete", "interrupted")


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """Content of ``run.json``."""

    schema: int
    """version of the layout of the folder"""
    kind: str
    """sort of run, for example "study" """
    model: dict[str, Any]
    """model of the run: name, revision or hash of the weights, size, sink"""
    settings: dict[str, Any]
    """everything that was chosen"""
    seed: int | None
    """seed of the run's random numbers; None when it drew none"""
    versions: dict[str, str]
    """python, torch, transformers, sinklab"""
    created: str
    """ISO 8601 time of the start, UTC"""
    status: str = "running"
    """"running" (or killed), "complete" or "interrupted" """
    error: str | None = None
    """error that interrupted the run"""
    tables: list[str] = dataclasses.field(default_factory=list)
    """names of the tables"""
    arrays: list[str] = dataclasses.field(default_factory=list)
    """names of the files of dense arrays"""
    parts: dict[str, list[int]] = dataclasses.field(default_factory=dict)
    """numbers of the parts of tables and arrays written in parts, by name with suffix
    ("tokens.parquet")
    """
    checksums: dict[str, str] = dataclasses.field(default_factory=dict)
    """SHA-256 of each file, by its path in the folder"""

    def files(self, kind: Kind, name: str) -> list[str]:
        """The files of one table or of one name of arrays, in the order of their parts."""
        return [kind.file(name, part) for part in self.parts.get(kind.file(name), [None])]

    def all_files(self) -> Iterator[tuple[Kind, str]]:
        """Every file that the run lists."""
        for kind in KINDS:
            for name in self.names(kind):
                yield from ((kind, file) for file in self.files(kind, name))

    def names(self, kind: Kind) -> list[str]:
        """Names of the tables, or of the files of arrays."""
        if kind is TABLES:
            return self.tables
        return self.arrays

    def without(self, lost: Collection[str]) -> Self:
        """This info without these files: without the parts that they belong to, in all tables and
        arrays, and without the files written whole, which may rest on them.
        """
        if not lost:
            return self
        names = [(kind, name) for kind in KINDS for name in self.names(kind)]
        gone = {
            part
            for kind, name in names
            for part in self.parts.get(kind.file(name), ())
            if kind.file(name, part) in lost
        }
        left = {
            key: [part for part in numbers if part not in gone]
            for key, numbers in self.parts.items()
        }
        parts = {key: numbers for key, numbers in left.items() if numbers}
        kept: dict[str, Any] = {
            kind.listed: [one for of, one in names if of is kind and kind.file(one) in parts]
            for kind in KINDS
        }
        found = dataclasses.replace(self, **kept, parts=parts)
        files = {file for _, file in found.all_files()}
        return dataclasses.replace(
            found, checksums={file: one for file, one in self.checksums.items() if file in files}
        )

    def save(self, folder: Path) -> None:
        """Write the run.json of ``folder``."""
        text = json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"
        write_text(folder / RUN_FILE, text)


ALL_QUERIES = "all queries"
SO_FAR = "all queries so far"
OWN = "the model's own forward"
FAST = "a fast decoder"
"""Names of the forward that a trace measured, in the field "forward" of its model."""


def reading_of(info: RunInfo) -> str:
    """Queries whose attention a study sums: "all queries" of the canvas, or "all queries so far" of
    an autoregressive text.
    """
    return str(info.model.get("reading", ALL_QUERIES))


def read_info(path: Path) -> RunInfo:
    """Read the run.json at ``path``; ValueError naming it when it is damaged, foreign or of another
    schema.
    """
    with undamaged(path):
        raw = read_json(path)
    if not isinstance(raw, dict) or "schema" not in raw:
        raise ValueError(
            f"{path} does not describe a run: it has no schema version. It is some other JSON file."
        )
    if raw["schema"] != SCHEMA:
        raise ValueError(
            f"{path} has schema {raw['schema']!r}, and this version of sinklab reads schema "
            f"{SCHEMA}. Read it with the "
            'version that wrote it (see "versions" in the file), or run again: the settings are '
            "in the file."
        )
    fields = [field.name for field in dataclasses.fields(RunInfo)]
    with undamaged(path):
        missing = [name for name in fields if name not in raw]
        if missing:
            raise ValueError(f"it lacks {', '.join(missing)}")
        wrong = next(_wrong_fields(raw), None)
        if wrong:
            raise ValueError(f"{wrong} is {raw[wrong]!r}, which a run never writes")
    return RunInfo(**{name: raw[name] for name in fields})


def _wrong_fields(raw: dict[str, Any]) -> Iterator[str]:
    """Fields of a run.json that hold what a run never writes; those that follow a wrong one may not
    be asked for.
    """
    for name, hint in typing.get_type_hints(RunInfo).items():
        # dict for dict[str, Any]; int | None as it is
        if not isinstance(hint, types.UnionType):
            hint = typing.get_origin(hint) or hint
        if not isinstance(raw[name], hint):
            yield name
    for kind in KINDS:
        names = raw[kind.listed]
        # a name with a path in it would lead out of the folder
        plain = all(isinstance(name, str) and name == Path(name).name for name in names)
        if not plain or {"", ".", ".."} & {*names} or len({*names}) < len(names):
            yield kind.listed
    if raw["status"] not in STATUSES:
        yield "status"
    known = {kind.file(name) for kind in KINDS for name in raw[kind.listed]}
    if not raw["parts"].keys() <= known:
        yield "parts"
    for numbers in raw["parts"].values():
        are_numbers = isinstance(numbers, list) and all(
            type(one) is int and one >= 0 for one in numbers
        )
        if not are_numbers or not numbers or numbers != sorted({*numbers}):
            yield "parts"
    for file, checksum in raw["checksums"].items():
        # they are read when a run goes on: a path that leads out of the folder is none of ours
        places = Path(file).parts
        if not places or {"..", "/"} & {*places} or not isinstance(checksum, str):
            yield "checksums"


@contextlib.contextmanager
def undamaged(path: Path, remedy: str = "Restore the file or run again.") -> Iterator[None]:
    """Around the reading of a file that a run wrote: if it is missing or cannot be read, a
    ValueError that names it.
    """
    try:
        yield
    except FileNotFoundError as error:
        raise ValueError(f"{path} is missing, although the run wrote it. {remedy}") from error
    except (OSError, ValueError, TypeError, KeyError, SafetensorError) as error:
        cause = str(error) or type(error).__name__
        raise ValueError(f"{path} is damaged and cannot be read ({cause}). {remedy}") from error


_BY_STATE = (
    "main_by_state",
    "share_by_state",
    "row_entropy",
    "row_logsumexp",
    "output_norm",
    "noop_bound",
)
STUDY_DIMS: dict[str, tuple[str, ...]] = {
    "received": ("step", "layer", "head", "key"),
    "visible": ("step", "key"),
    "positions": ("step",),
    "step_number": ("step",),
    "received_from_masked": ("step", "layer", "head", "key"),
    "received_by_state": ("step", "state", "layer", "head", "key"),
    **dict.fromkeys(("value_norm", "key_norm"), ("step", "layer", "key")),
    "window_received": ("window", "layer", "head", "key"),
    "last_row_main": ("step", "layer", "head"),
    **dict.fromkeys(_BY_STATE, ("step", "state", "layer", "head")),
}
"""Axes of the arrays "attention"; only the first four are in every study."""


def of_twin(name: str, twin: str) -> str:
    """Name of an untrained control's table or file of arrays; ``name`` itself if ``twin`` is
    empty.
    """
    return "-".join(filter(None, (name, twin)))
