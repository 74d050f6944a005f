"""Content of run.json, and errors for a file that no run wrote."""

import dataclasses
import json
import re
import typing
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self

from typeguard import CollectionCheckStrategy, check_type

from sinklab.lab.files import read_json, refused
from sinklab.lab.records.storage import RUN_FILE, SCHEMA, file_of, write_text

_PART = re.compile(r"-(\d{4,})\.\w+")
"""End of the name of a file that belongs to a part."""
REMEDY = "Restore it, or repeat the command of the run, which writes again what is damaged"


def part_of(file: str) -> int | None:
    """The number of the part that a file belongs to; None if it belongs to none."""
    found = _PART.search(file)
    if found is None:
        return None
    return int(found[1])


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
        return sorted({*range(-(-self.samples // self.part_size))}.difference(self.parts))

    def part(self, number: int) -> range:
        """The samples of a part."""
        first = number * self.part_size
        return range(first, min(first + self.part_size, self.samples))

    def names(self, suffix: str) -> list[str]:
        """Names of the tables, or of the files of arrays."""
        files = [file for file in self.files if file.endswith(suffix)]
        return [*dict.fromkeys(_PART.sub("", file).removesuffix(suffix) for file in files)]

    def of(self, name: str, suffix: str) -> list[str]:
        """The files of one table or of one name of arrays, in the order of their parts."""
        numbers: list[int | None] = [None, *self.parts]
        files = [file_of(name, suffix, number) for number in numbers]
        return [file for file in files if file in self.files]

    def without(self, lost: Collection[str]) -> Self:
        """This info without these files: without the parts that they belong to, in all tables and
        arrays, and without the files written whole, which may rest on them.
        """
        if not lost:
            return self
        left = {*self.parts} - {part_of(file) for file in lost}
        files = {file: one for file, one in self.files.items() if part_of(file) in left}
        return dataclasses.replace(self, files=files, others={}, status="running")

    def save(self, folder: Path) -> str:
        """Write the run.json of ``folder``, and return it."""
        text = json.dumps(vars(self), indent=2, ensure_ascii=False) + "\n"
        write_text(folder / RUN_FILE, text)
        return text


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
        raw = read_json(path, dict)
    if raw.get("schema") != SCHEMA:
        raise ValueError(
            f"{path} has schema {raw.get('schema')!r}, and this version of sinklab reads schema "
            f'{SCHEMA}. Read it with the version that wrote it (see "versions" in the file), or '
            "run again: the settings are in the file."
        )
    with undamaged(path):
        for name, hint in typing.get_type_hints(RunInfo).items():
            check_type(raw[name], hint, collection_check_strategy=CollectionCheckStrategy.ALL_ITEMS)
        info = RunInfo(**raw)
        if any({"..", "/"} & {*Path(file).parts} for file in info.files | info.others):
            raise ValueError("it names files outside the folder")
        if info.status == "complete" and info.samples > len(info.parts) * info.part_size:
            raise ValueError("it is complete, but lacks parts")
    return info


def undamaged(path: Path, remedy: str = REMEDY) -> AbstractContextManager[None]:
    """Around the reading of a file that a run wrote: if it is missing or cannot be read, a
    ValueError that names it.
    """
    return refused(f"{path} is damaged or missing. {remedy}")


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
    **dict.fromkeys(_BY_STATE, ("step", "state", "layer", "head")),
}
"""Axes of the arrays "attention"; only the first four are in every study."""


def of_twin(name: str, twin: str) -> str:
    """Name of an untrained control's table or file of arrays; ``name`` itself if ``twin`` is
    empty.
    """
    return "-".join(filter(None, (name, twin)))
