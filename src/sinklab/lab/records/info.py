"""Content of run.json, and errors for a file that no run wrote."""

import contextlib
import dataclasses
import json
import re
import types
import typing
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError

from sinklab.lab.files import read_json
from sinklab.lab.records.storage import RUN_FILE, SCHEMA, Kind, write_text

_FILE = re.compile(r"[a-z0-9][a-z0-9_-]*\.(parquet|safetensors)")
_PART = re.compile(r"-(\d{4,})\.\w+")
"""End of the name of a file that belongs to a part."""
STATUSES = ("running", "complete", "interrupted")


def part_of(file: str) -> int | None:
    """The number of the part that a file belongs to; None if it belongs to none."""
    found = _PART.search(file)
    if found is None:
        return None
    return int(found[1])


def _count(samples: int, part_size: int) -> int:
    """Number of parts."""
    return -(-samples // part_size)


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
    """of python, torch, transformers, sinklab; hashes of plug-ins; number of CPU threads"""
    created: str
    """ISO 8601 time of the start, UTC"""
    status: str = "running"
    """"running" (or killed), "complete" or "interrupted" """
    error: str | None = None
    """error that interrupted the run"""
    samples: int = 0
    """samples of a run that is written in parts; 0 of one that is written whole"""
    part_size: int = 1
    """samples of a part: part p holds those from p times this on"""
    files: dict[str, str] = dataclasses.field(default_factory=dict)
    """SHA-256 of each table and file of arrays, by its name in the folder"""
    others: dict[str, str] = dataclasses.field(default_factory=dict)
    """SHA-256 of each file that was written by other means, by its path in the folder"""

    @property
    def parts(self) -> list[int]:
        """Numbers of the parts that are there."""
        numbers = {part_of(file) for file in self.files}
        return sorted(number for number in numbers if number is not None)

    @property
    def missing(self) -> list[int]:
        """Numbers of the parts that are not there."""
        return sorted({*range(_count(self.samples, self.part_size))}.difference(self.parts))

    def part(self, number: int) -> range:
        """The samples of a part."""
        first = number * self.part_size
        return range(first, min(first + self.part_size, self.samples))

    def names(self, kind: Kind) -> list[str]:
        """Names of the tables, or of the files of arrays."""
        files = [file for file in self.files if file.endswith(kind.suffix)]
        names = (_PART.sub("", file).removesuffix(kind.suffix) for file in files)
        return [*dict.fromkeys(names)]

    def of(self, kind: Kind, name: str) -> list[str]:
        """The files of one table or of one name of arrays, in the order of their parts."""
        numbers: list[int | None] = [None, *self.parts]
        files = [kind.file(name, number) for number in numbers]
        return [file for file in files if file in self.files]

    def without(self, lost: Collection[str]) -> Self:
        """This info without these files: without the parts that they belong to, in all tables and
        arrays, and without the files written whole, which may rest on them.
        """
        if not lost:
            return self
        left = {*self.parts} - {part_of(file) for file in lost}
        files = {file: one for file, one in self.files.items() if part_of(file) in left}
        return dataclasses.replace(self, files=files, others={})

    def save(self, folder: Path) -> None:
        """Write the run.json of ``folder``."""
        fields = dataclasses.asdict(self)
        for name in ("files", "others"):
            fields[name] = dict(sorted(fields[name].items()))
        write_text(folder / RUN_FILE, json.dumps(fields, indent=2, ensure_ascii=False) + "\n")


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
    if raw["status"] not in STATUSES:
        yield "status"
    if raw["samples"] < 0 or raw["part_size"] < 1:
        yield "samples"
    count = _count(raw["samples"], raw["part_size"])
    numbers = {part_of(file) for file in raw["files"]} - {None}
    if any(number is not None and number >= count for number in numbers):
        yield "files"
    if raw["status"] == "complete" and len(numbers) < count:
        # parts are lacking
        yield "status"
    for name in ("files", "others"):
        for file, checksum in raw[name].items():
            # a name that leads out of the folder is none of ours
            places = Path(file).parts
            is_inside = bool(places) and not {"..", "/"} & {*places}
            if name == "files":
                is_inside = _FILE.fullmatch(file) is not None
            if not is_inside or not isinstance(checksum, str):
                yield name


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
