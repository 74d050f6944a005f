"""Writing a run folder: each file is written under a temporary name and renamed, so a reader never
sees half a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from filelock import FileLock, Timeout

from sinklab import __version__
from sinklab.lab.files import plugins, refused
from sinklab.lab.records import storage
from sinklab.lab.records.info import RunInfo, read_info
from sinklab.lab.records.reading import lost_files
from sinklab.lab.records.storage import (
    ARRAYS,
    PART_SUFFIX,
    RUN_FILE,
    SCHEMA,
    TABLES,
    Arrays,
    Contents,
    Kind,
)

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd


LOCK = ".lock"
"""Ending of the names of locks; that of the whole folder has no other name."""
PATIENCE = 600.0
"""Seconds that a run waits at its start for a process that writes results of all parts."""


def begun_before(path: Path, given: RunInfo) -> RunInfo:
    """``given`` with the files that an unfinished run in ``path`` has already; ValueError naming
    the first difference if it is another run.
    """
    before = read_info(path / RUN_FILE)
    old_fields = dataclasses.asdict(before)
    new_fields = dataclasses.asdict(given)
    for field in ("kind", "seed", "model", "settings", "samples", "part_size"):
        if old_fields[field] != new_fields[field]:
            name, old, new = _difference(field, old_fields[field], new_fields[field])
            raise ValueError(
                f"{path} can be resumed only with the same settings: its {name} is {old!r}, and "
                f"now it is {new!r}. Give the same settings, or write into another folder."
            )
    kept = ("created", "files", "others")
    return dataclasses.replace(given, **{name: old_fields[name] for name in kept})


def _difference(name: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    """First difference of two JSON values: its name, and both values there."""
    if isinstance(old, list) and isinstance(new, list):
        if old[: len(new)] == new[: len(old)]:
            return f"len({name})", len(old), len(new)
        # of many prompts the first that is another one
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, dict) and isinstance(new, dict):
        pairs = {key: (old.get(key, "absent"), new.get(key, "absent")) for key in {*old, *new}}
        key = min(key for key, (one, other) in pairs.items() if one != other)
        return _difference(f"{name}[{key!r}]", *pairs[key])
    return name, old, new


def names_in(path: Path) -> list[str]:
    """Names of the entries of a folder, sorted; none for an absent one.

    Locks, and the half of a ``run.json`` that a run killed in its first write left, do not count.
    """
    if not path.is_dir():
        return []
    found = sorted(entry.name for entry in path.iterdir())
    half = f".{RUN_FILE}."
    return [
        name
        for name in found
        if not (name.startswith(".") and name.endswith(LOCK))
        and not (name.startswith(half) and name.endswith(PART_SUFFIX))
    ]


def refuse_taken(path: Path, *, overwrite: bool = False, resume: bool = False) -> None:
    """Raise ValueError unless a run may begin here: in an empty or absent folder, or one with a run
    that goes on or is removed.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"A run is a folder: {path} is a file. Choose another path.")
    present = names_in(path)
    if present and RUN_FILE not in present and (overwrite or resume):
        shown = ", ".join(present[:4])
        does = "resume=True continues"
        if overwrite:
            does = "overwrite=True replaces"
        raise ValueError(
            f"{does} a run and nothing else: {path} holds {shown} but no {RUN_FILE}. Choose "
            "another folder or empty this one yourself."
        )
    if present and not (overwrite or resume):
        raise ValueError(
            "A run folder is written once: a run is written into an empty or absent folder, but "
            f"{path} is taken; choose another folder, or continue the run that is there (--resume, "
            "in Python resume=True; there overwrite=True starts afresh)"
        )


class RunWriter:
    """Context manager that fills one run folder.

    ``kind`` is the sort of run ("study", "training", …); ``model``, ``settings`` and ``seed`` are
    written to ``run.json`` on entering, with the library versions and status "running". On leaving,
    the status becomes "complete", or "interrupted" with the error when the block raised (Ctrl-C
    included); the files written so far stay readable.

    A long run has ``samples``, and is written in parts of ``part_size`` of them: `write` writes
    one, `missing` are those to write. With ``resume`` a later writer continues where an interrupted
    one stopped: files that are there are held against their checksums first, a part with a lost
    file is dropped, and so are then the files written whole.

    A run has one writer at a time, or one for each of n shards, ``shard=(i, n)``, which writes the
    parts p with p mod n = i: each notes its parts in the one run.json under the folder's lock, and
    sets ``is_whole`` to False if others have still to write when its block ends. The kernel lets go
    of the locks of a process that ends.

    Raises ValueError when the folder holds anything and neither ``overwrite`` nor ``resume`` is
    set, when it holds something that is not a run, when the run to resume had another kind, model,
    settings or seed (the first difference is named), when another process writes it, or when
    ``model``/``settings`` cannot be written as JSON.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        kind: str,
        model: Mapping[str, Any],
        settings: Mapping[str, Any],
        seed: int | None,
        samples: int = 0,
        part_size: int = 1,
        overwrite: bool = False,
        resume: bool = False,
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        if overwrite and resume:
            raise ValueError("overwrite=True starts afresh and resume=True continues: choose one.")
        self.path = Path(path)
        """Path of the folder."""
        self.is_whole = True
        self._overwrite, self._resume, self._shard = overwrite, resume, shard
        self._open = False
        self.lock = FileLock(self.path / LOCK, thread_local=False)
        place, shards = shard
        self._own = FileLock(self.path / f".{place}-of-{shards}{LOCK}", thread_local=False)
        self.info = RunInfo(
            schema=SCHEMA,
            kind=storage.checked_name(kind, "kind of run"),
            model=_json_ready(dict(model), "model"),
            settings=_json_ready(dict(settings), "settings"),
            seed=seed,
            versions=_versions(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            samples=samples,
            part_size=part_size,
        )

    def __enter__(self) -> Self:
        refuse_taken(self.path, overwrite=self._overwrite, resume=self._resume)
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self.lock.acquire(timeout=PATIENCE)
        except Timeout:
            raise self._in_use() from None
        try:
            self._begin(self._others())
            self._open = True
        except BaseException:
            self._leave()
            raise
        finally:
            self.lock.release()
        return self

    def _in_use(self) -> ValueError:
        return ValueError(
            f"one process at a time writes a run, or a shard of it, but {self.path} is being "
            "written by another one; wait until it has ended, and continue with --resume if "
            "something is missing"
        )

    def _others(self) -> bool:
        """Whether other processes write other shards. Takes the lock of its own; ValueError if
        another process has it, or divides the run otherwise.
        """
        is_alone = True
        for path in self.path.glob(f".*{LOCK}"):
            lock = FileLock(path)
            if path.name == LOCK or path == Path(self._own.lock_file):
                continue
            with contextlib.suppress(Timeout), lock.acquire(timeout=0):
                path.unlink()
                continue
            is_alone = False
            if not path.name.endswith(f"-of-{self._shard[1]}{LOCK}"):
                raise self._in_use()
        try:
            self._own.acquire(timeout=0)
        except Timeout:
            raise self._in_use() from None
        return not is_alone

    def _leave(self) -> None:
        """Let go of its shard; the folder's lock is held. Locks are removed while they are held:
        filelock looks again.
        """
        if self._own.is_locked:
            Path(self._own.lock_file).unlink(missing_ok=True)
            self._own.release()
        if not [path for path in self.path.glob(f".*{LOCK}") if path.name != LOCK]:
            Path(self.lock.lock_file).unlink(missing_ok=True)

    def _begin(self, has_others: bool) -> None:
        """Write run.json, with the parts that are there, in order; remove leftovers and files of
        lost parts.
        """
        # another process may have begun since
        refuse_taken(self.path, overwrite=self._overwrite, resume=self._resume)
        lost: Iterable[str] = ()
        if self._overwrite:
            lost = names_in(self.path)
        is_begun = self._resume and (self.path / RUN_FILE).exists()
        if is_begun:
            self.info = begun_before(self.path, self.info)
        # if others work here, they have looked
        if not has_others:
            storage.remove_leftovers(self.path)
            if is_begun:
                lost = lost_files(self.path, self.info)
                self.info = self.info.without([*lost])
        # Should this be cut short, run.json says what the folder is, and nothing of what is not
        # there.
        self.info.save(self.path)
        for name in lost:
            if name.endswith((TABLES.suffix, ARRAYS.suffix, PART_SUFFIX)):
                (self.path / name).unlink(missing_ok=True)

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._open = False
        changes: dict[str, Any] = {"status": "complete", "error": None}
        if error is not None:
            cause = f"{type(error).__name__}: {error}".removesuffix(": ")
            changes = {"status": "interrupted", "error": cause}
        try:
            with self.lock:
                try:
                    if self.is_whole or error is not None:
                        self._note(lambda info: dataclasses.replace(info, **changes))
                finally:
                    self._leave()
        except (OSError, ValueError) as failure:
            # The first error is the one to report; the folder stays readable with status "running".
            if error is None:
                raise
            error.add_note(
                f"The end of the run could not be noted in {self.path / RUN_FILE}: {failure}"
            )

    def _note(self, change: Callable[[RunInfo], RunInfo]) -> None:
        """Change run.json, in which other processes may have noted something since."""
        with self.lock:
            self.info = change(self.refresh())
            self.info.save(self.path)

    def refresh(self) -> RunInfo:
        """Reread the run.json of a run in shards and return it; ``info`` knows of other shards only
        from such reads, or from writing.
        """
        if self._shard[1] > 1:
            self.info = read_info(self.path / RUN_FILE)
        return self.info

    @property
    def missing(self) -> list[int]:
        """Parts of this shard that are not there."""
        place, shards = self._shard
        return [part for part in self.info.missing if part % shards == place]

    def has(self, name: str) -> bool:
        """Whether the table ``name`` is there."""
        return name in self.info.names(TABLES)

    def keep(self, files: Iterable[Path]) -> None:
        """Note these files of the run folder, written by other means, so that a loss is noticed;
        files that they replace are forgotten.
        """
        sums = {str(file.relative_to(self.path)): storage.file_hash(file) for file in files}

        def kept(info: RunInfo) -> RunInfo:
            there = {name: one for name, one in info.others.items() if (self.path / name).exists()}
            return dataclasses.replace(info, others=there | sums)

        self._note(kept)

    def write(self, part: int, contents: Mapping[int, Contents]) -> None:
        """Write one part: the tables and arrays of each of its samples. A reader sees all of it, or
        none.

        Each table needs a column ``sample`` to be read by sample, and every array is stored under
        the name ``SAMPLE/KEY``. Raises like `table` and `arrays`.
        """
        self._needs_block(f"write({part})")
        tables: dict[str, list[Any]] = {}
        arrays: dict[str, dict[str, np.ndarray]] = {}
        dims: dict[str, dict[str, tuple[str, ...]]] = {}
        for sample, content in sorted(contents.items()):
            for name, columns in content.tables.items():
                tables.setdefault(name, []).append(_as_table(name, columns))
            for name, given in content.arrays.items():
                values, axes = storage.dense(name, given)
                dims.setdefault(name, {}).update(axes)
                own = {f"{sample}/{key}": value for key, value in values.items()}
                arrays.setdefault(name, {}).update(own)
        sums: dict[str, str] = {}
        for name, frames in tables.items():
            sums |= self._file(TABLES, name, part, partial(_write_tables, frames=frames))
        for name, values in arrays.items():
            write = partial(storage.write_arrays, arrays=values, dims=dims[name])
            sums |= self._file(ARRAYS, name, part, write)
        self._list(sums)

    def table(self, name: str, columns: Mapping[str, Any] | list[Any] | pd.DataFrame) -> Path:
        """Write (or replace) the whole table ``name``: a mapping of equally long columns, a list of
        rows (as for `columns_of`), or a DataFrame without its index.

        Returns the path of the Parquet file. Raises ValueError for unequal columns, and values that
        Parquet cannot hold.
        """
        self._needs_block(f"table({name!r})")
        frames = [_as_table(name, columns)]
        self._list(self._file(TABLES, name, None, partial(_write_tables, frames=frames)))
        return self.path / TABLES.file(name)

    def arrays(
        self,
        name: str,
        values: Mapping[str, Any],
        dims: Mapping[str, tuple[str, ...]],
        dtype: str | Mapping[str, str] | None = None,
    ) -> Path:
        """Write (or replace) the whole file ``name`` of dense `Arrays`.

        Returns the path of the safetensors file. Raises ValueError as `storage.dense`; OSError for
        a disk that refuses.
        """
        self._needs_block(f"arrays({name!r})")
        values, dims = storage.dense(name, Arrays(values, dims, dtype))
        write = partial(storage.write_arrays, arrays=values, dims=dims)
        self._list(self._file(ARRAYS, name, None, write))
        return self.path / ARRAYS.file(name)

    def _needs_block(self, call: str) -> None:
        if not self._open:
            raise ValueError(
                f"A run folder is written inside its with block: {call} was called outside. Use "
                "`with RunWriter(…) as run:`."
            )

    def _file(
        self, kind: Kind, name: str, part: int | None, write: Callable[[Path], object]
    ) -> dict[str, str]:
        """Write a file; its checksum by its name."""
        target = self.path / kind.file(storage.checked_name(name, kind.what), part)
        write(target)
        return {target.name: storage.file_hash(target)}

    def _list(self, sums: Mapping[str, str]) -> None:
        """List files in run.json; another shard may have been interrupted since."""
        changes: dict[str, Any] = {"status": "running", "error": None}
        self._note(lambda info: dataclasses.replace(info, files=info.files | dict(sums), **changes))


def _write_tables(target: Path, frames: list[Any]) -> None:
    """Write tables as one, each as a group of rows, which is read without the others."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    whole = pa.concat_tables(frames, promote_options="permissive")

    def write(beside: Path) -> None:
        with pq.ParquetWriter(beside, whole.schema) as file:
            start = 0
            for frame in frames:
                file.write_table(whole.slice(start, len(frame)))
                start += len(frame)

    storage.write_beside(target, write)


def columns_of(rows: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Rows as the columns of a table; None if a row lacks one."""
    rows = list(rows)
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [row.get(name) for row in rows] for name in names}


def _as_table(name: str, columns: Any) -> Any:
    # the commands are made without them
    import pyarrow as pa

    with refused(
        f"The columns of table {name!r} do not form a table", pa.ArrowInvalid, pa.ArrowTypeError
    ):
        if isinstance(columns, list):
            columns = columns_of(columns)
        if isinstance(columns, Mapping):
            return pa.table(
                {
                    key: one.tolist() if hasattr(one, "detach") else one
                    for key, one in columns.items()
                }
            )
        return pa.Table.from_pandas(columns, preserve_index=False)


def _versions() -> dict[str, str]:
    """Versions that numbers may hang on: programs, plug-ins by their hash, and CPU threads."""
    import torch

    found = {package: metadata.version(package) for package in ("torch", "transformers")}
    found |= {path.name: storage.file_hash(path) for path in plugins()}
    found |= {"python": platform.python_version(), "sinklab": __version__}
    return found | {"threads": str(torch.get_num_threads())}


def _json_ready(value: dict[str, Any], what: str) -> dict[str, Any]:
    fault = f"{what} is written to {RUN_FILE} and must be made of JSON values"
    with refused(
        f"{fault} (strings, finite numbers, booleans, lists, dictionaries)", TypeError, ValueError
    ):
        return json.loads(json.dumps(value, default=_plain, allow_nan=False))


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, Path) or str(type(value)) in (
        "<class 'torch.dtype'>",
        "<class 'torch.device'>",
    ):
        return str(value)
    if getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"{value!r} is a {type(value).__name__}")
