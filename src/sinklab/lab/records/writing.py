"""Writing a run folder: each file is written under a temporary name and renamed, so a reader never
sees half a file.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
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
    RUN_FILE,
    SCHEMA,
    TABLES,
    Arrays,
    Contents,
    file_of,
)

if TYPE_CHECKING:
    import pandas as pd


LOCK = ".lock"
"""Ending of the names of locks; that of run.json has no other name."""


def refuse_other(path: Path, asked: Mapping[str, Any]) -> RunInfo:
    """The info of the run in ``path``. Raises ValueError naming the first difference unless it is
    the run that was asked for: kind, settings and so on, by the names of `RunInfo`.
    """
    info = read_info(path / RUN_FILE)
    for field, now in asked.items():
        before = getattr(info, field)
        if before != now:
            name, old, new = _difference(field, before, now)
            raise ValueError(
                f"{path} holds another run: its {name} is {old!r}, and now it is {new!r}; give the "
                "same, or another folder (--out)"
            )
    return info


def _difference(name: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    """First difference of two JSON values: its name, and both values there."""
    if isinstance(old, list) and isinstance(new, list):
        # of many prompts the first that is another one
        old, new = dict(enumerate(old)), dict(enumerate(new))
    if isinstance(old, dict) and isinstance(new, dict):
        pairs = {key: (old.get(key, "absent"), new.get(key, "absent")) for key in {*old, *new}}
        key = min(key for key, (one, other) in pairs.items() if one != other)
        return _difference(f"{name}[{key!r}]", *pairs[key])
    return name, old, new


def names_in(path: Path) -> list[str]:
    """Names of the entries of a folder, sorted, without hidden ones such as locks; none for an
    absent one.
    """
    if not path.is_dir():
        return []
    return sorted(entry.name for entry in path.iterdir() if not entry.name.startswith("."))


def refuse_taken(path: Path) -> None:
    """Raise ValueError unless a run may begin or go on here: in an empty or absent folder, or one
    with a run.
    """
    if path.exists() and not path.is_dir():
        raise ValueError(f"a run is a folder, but {path} is a file; choose another path")
    present = names_in(path)
    if present and RUN_FILE not in present:
        raise ValueError(
            f"a run is written into an empty or absent folder, but {path} is taken: it holds "
            f"{', '.join(present[:4])} and no {RUN_FILE}; choose another folder"
        )


class RunWriter:
    """Context manager that fills one run folder, or goes on with the run that is there.

    ``kind`` is the sort of run ("study", "training", …); ``model``, ``settings`` and ``seed`` are
    written to ``run.json`` on entering, with the library versions and status "running". On leaving,
    the status becomes "complete" unless parts are missing, or "interrupted" with the error when the
    block raised (Ctrl-C included); the files written so far stay readable.

    A long run has ``samples``, and is written in parts of ``part_size`` of them: `write` writes
    one, `missing` are those to write. Files that are there are held against their checksums first,
    a part with a lost file is dropped, and so are then the files written whole.

    A run has one writer at a time, or one for each of n shards, ``shard=(i, n)``, which writes the
    parts p with p mod n = i: each notes its parts in the one run.json under `lock`. The kernel lets
    go of the locks of a process that ends.

    Raises ValueError when the folder holds something that is not a run, or, unless ``overwrite``, a
    run of another kind, model, settings or seed (the first difference is named) or of a plug-in
    that has changed, when another process writes it, or when ``model``/``settings`` cannot be
    written as JSON.
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
        shard: tuple[int, int] = (0, 1),
    ) -> None:
        self.path = Path(path)
        """Path of the folder."""
        self.shard = shard
        """The shard that is written, and of how many."""
        self._overwrite = overwrite
        self.lock = FileLock(self.path / LOCK, thread_local=False)
        """Held while run.json is changed, and while results of all parts are written."""
        self._written = ""
        self._own = FileLock(self.path / f".shard-{shard[0]}{LOCK}", thread_local=False)
        self.info = RunInfo(
            schema=SCHEMA,
            kind=kind,
            model=_json_ready(model, "model"),
            settings=_json_ready(settings, "settings"),
            seed=seed,
            versions=_versions(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            samples=samples,
            part_size=part_size,
        )

    def __enter__(self) -> Self:
        refuse_taken(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        try:
            self._own.acquire(timeout=0)
        except Timeout:
            raise ValueError(
                f"one process at a time writes a run, or a shard of it, but {self.path} is being "
                "written by another one; wait until it has ended"
            ) from None
        with self.lock:
            try:
                self._begin()
            except BaseException:
                self._leave()
                raise
        return self

    def _begin(self) -> None:
        """Write run.json, with the parts that are there, in order; remove files of lost parts."""
        lost: Iterable[str] = ()
        if self._overwrite:
            lost = names_in(self.path)
        elif (self.path / RUN_FILE).exists():
            names = ("kind", "seed", "model", "settings", "samples", "part_size")
            before = refuse_other(self.path, {name: getattr(self.info, name) for name in names})
            for name in before.versions.keys() & self.info.versions.keys():
                if name.endswith(".py") and before.versions[name] != self.info.versions[name]:
                    raise ValueError(
                        f"the plug-in {name} has changed since {self.path} was begun; write into "
                        "another folder (--out)"
                    )
            lost = lost_files(self.path, before)
            self.info = before.without([*lost])
            if self.info.status != "complete":
                self.info = dataclasses.replace(self.info, status="running", error=None)
        # Should this be cut short, run.json says what the folder is, and nothing of what is not
        # there.
        self._written = self.info.save(self.path)
        for name in lost:
            if name.endswith((TABLES, ARRAYS)):
                (self.path / name).unlink(missing_ok=True)

    def _leave(self) -> None:
        """Let go of its shard. Locks are removed while they are held: filelock looks again."""
        for lock in (self._own, self.lock):
            Path(lock.lock_file).unlink(missing_ok=True)
        self._own.release()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        with self.lock:
            try:
                if error is not None:
                    cause = f"{type(error).__name__}: {error}".removesuffix(": ")
                    # the first error is the one to report
                    with suppress(OSError, ValueError):
                        self._note(status="interrupted", error=cause)
                elif not self.refresh().missing:
                    storage.remove_half_written(self.path)
                    self._note(status="complete", error=None)
            finally:
                self._leave()

    def _note(self, **changes: Any) -> None:
        """Change run.json, in which other processes may have noted something since."""
        with self.lock:
            before = self.refresh()
            for name in ("files", "others"):
                found = getattr(before, name) | changes.get(name, {})
                changes[name] = dict(sorted(found.items()))
            self.info = dataclasses.replace(before, **changes)
            self._written = self.info.save(self.path)

    def refresh(self) -> RunInfo:
        """Reread run.json and return it; ``info`` knows of other shards only from such reads, or
        from writing.
        """
        path = self.path / RUN_FILE
        # to check what this process itself wrote took longer than to write it
        if not path.is_file() or path.read_bytes() != self._written.encode():
            self.info = read_info(path)
        return self.info

    @property
    def missing(self) -> list[int]:
        """Parts of this shard that are not there."""
        place, shards = self.shard
        return [part for part in self.info.missing if part % shards == place]

    def keep(self, files: Iterable[Path]) -> None:
        """Note these files of the run folder, written by other means, so that a loss is noticed."""
        self._note(
            others={str(file.relative_to(self.path)): storage.file_hash(file) for file in files}
        )

    def write(self, part: int, contents: Mapping[int, Contents]) -> None:
        """Write one part: the tables and arrays of each of its samples. A reader sees all of it, or
        none.

        Each table needs a column ``sample`` to be read by sample, and every array is stored under
        the name ``SAMPLE/KEY``. Raises as `table` and `storage.dense`.
        """
        tables: dict[str, list[Any]] = {}
        arrays: dict[str, Arrays] = {}
        for sample, content in sorted(contents.items()):
            for name, columns in content.tables.items():
                tables.setdefault(name, []).append(_as_table(name, columns))
            for name, given in content.arrays.items():
                own, before = storage.dense(given), arrays.get(name, Arrays({}))
                values = {f"{sample}/{key}": value for key, value in own.values.items()}
                arrays[name] = Arrays({**before.values, **values}, {**before.dims, **own.dims})
        self._put(part, tables, arrays)

    def table(self, name: str, columns: Mapping[str, Any] | list[Any] | pd.DataFrame) -> None:
        """Write (or replace) the whole table ``name``: a mapping of equally long columns, a list of
        rows, of which each may lack some columns, or a DataFrame without its index.

        Raises ValueError for unequal columns, and values that Parquet cannot hold.
        """
        self._put(None, {name: [_as_table(name, columns)]}, {})

    def _put(
        self, part: int | None, tables: Mapping[str, list[Any]], arrays: Mapping[str, Arrays]
    ) -> None:
        """Write files, and then list them in run.json."""
        sums = {}
        written: list[Any] = [
            (TABLES, _write_tables, tables),
            (ARRAYS, storage.write_arrays, arrays),
        ]
        for suffix, write, found in written:
            for name, content in found.items():
                target = self.path / file_of(name, suffix, part)
                write(target, content)
                sums[target.name] = storage.file_hash(target)
        # another shard may have been interrupted since
        self._note(files=sums, status="running", error=None)


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


def _as_table(name: str, columns: Any) -> Any:
    # the commands are made without them
    import pyarrow as pa

    with refused(
        f"The columns of table {name!r} do not form a table", pa.ArrowInvalid, pa.ArrowTypeError
    ):
        if isinstance(columns, list):
            names = dict.fromkeys(name for row in columns for name in row)
            columns = {name: [row.get(name) for row in columns] for name in names}
        if isinstance(columns, Mapping):
            return pa.table(dict(columns))
        return pa.Table.from_pandas(columns, preserve_index=False)


def _versions() -> dict[str, str]:
    """Versions that numbers may hang on: programs, plug-ins by their hash, and CPU threads."""
    import torch

    found = {package: metadata.version(package) for package in ("torch", "transformers")}
    found |= {path.name: storage.file_hash(path) for path in plugins()}
    found |= {"python": platform.python_version(), "sinklab": __version__}
    return found | {"threads": str(torch.get_num_threads())}


def _json_ready(value: Mapping[str, Any], what: str) -> dict[str, Any]:
    with refused(f"{what} is written to {RUN_FILE} and must be made of JSON values"):
        return json.loads(json.dumps(value, allow_nan=False))
