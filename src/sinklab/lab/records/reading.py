"""Reading a run folder: refused by name when it is damaged, of another schema, or not a run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file

from sinklab.core.errors import near
from sinklab.lab.files import from_json
from sinklab.lab.records.info import RunInfo, read_info, undamaged
from sinklab.lab.records.storage import (
    ARRAYS,
    DIMS_KEY,
    KINDS,
    RUN_FILE,
    TABLES,
    Kind,
    checked_dims,
    file_hash,
)

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr


@dataclasses.dataclass(frozen=True)
class Run:
    """One run folder, open for reading; nothing is kept in memory.

    Each file is held against its checksum when it is first read (`as_written`).
    """

    path: Path
    """the folder"""
    info: RunInfo
    """contents of run.json"""

    @property
    def tables(self) -> tuple[str, ...]:
        """Names that ``table`` knows."""
        return tuple(self.info.tables)

    @property
    def array_files(self) -> tuple[str, ...]:
        """Names that ``arrays``, ``dims`` and ``to_xarray`` know."""
        return tuple(self.info.arrays)

    def parts(self, name: str) -> tuple[int, ...]:
        """Numbers of the parts of the table or arrays ``name``; empty if it is written whole."""
        for kind in KINDS:
            if name in self.info.names(kind):
                return tuple(self.info.parts.get(kind.file(name), ()))
        raise self._unknown(name, (*self.tables, *self.array_files), "table or file of arrays")

    def table(self, name: str, part: int | None = None) -> pd.DataFrame:
        """The table ``name``, its parts joined in order, or one part of it.

        Raises ValueError for an unknown name or part, and for a damaged file.
        """
        import pandas as pd

        frames = []
        for path in self._files(TABLES, name, part):
            with undamaged(path, REMEDY):
                # threads wait for one another longer than they read a small table
                frame = pd.read_parquet(path, use_threads=path.stat().st_size > LARGE)
            frames.append(frame)
        if len(frames) == 1:
            return frames[0]
        return pd.concat(frames, ignore_index=True)

    def arrays(self, name: str, part: int | None = None) -> dict[str, np.ndarray]:
        """The arrays of file ``name`` (of one part of it), as stored: floats are usually float16,
        widen before summing.

        Raises ValueError for an unknown name or part, a file in parts without ``part``, and a
        damaged file.
        """
        path = self._array_file(name, part)
        with undamaged(path, REMEDY):
            return load_file(path)

    def array(self, name: str, key: str, part: int | None = None) -> np.ndarray:
        """One array of a file; the others are not read. Raises ValueError like `arrays`, and for an
        unknown key.
        """
        with self._opened(name, key, part) as handle:
            return handle.get_tensor(key)

    def shape(self, name: str, key: str, part: int | None = None) -> tuple[int, ...]:
        """Shape of one array of a file, which is not read."""
        with self._opened(name, key, part) as handle:
            return tuple(handle.get_slice(key).get_shape())

    def rows(
        self, name: str, key: str, part: int | None, spans: Iterable[slice]
    ) -> Iterator[np.ndarray]:
        """Read an array in pieces, some places of its first axis after the others, each read when
        it is asked for.
        """
        with self._opened(name, key, part) as handle:
            rows = handle.get_slice(key)
            for span in spans:
                yield rows[span]

    @contextmanager
    def _opened(self, name: str, key: str, part: int | None) -> Iterator[Any]:
        path = self._array_file(name, part)
        with undamaged(path, REMEDY), safe_open(path, framework="numpy") as handle:
            keys = sorted(handle.keys())
            if key in keys:
                yield handle
                return
        raise self._unknown(key, keys, f"array in {path.name}")

    def dims(self, name: str, part: int | None = None) -> dict[str, tuple[str, ...]]:
        """Names of the axes of each array of file ``name`` (of one part of it)."""
        path = self._array_file(name, part)
        with undamaged(path, REMEDY):
            return _read_dims(path)

    def to_xarray(self, name: str, part: int | None = None) -> xr.Dataset:
        """The arrays of file ``name`` (of one part of it) with the names of their axes.

        Raises ValueError like `arrays`.
        """
        import xarray as xr

        dims = self.dims(name, part)
        arrays = self.arrays(name, part)
        return xr.Dataset({key: (dims[key], array) for key, array in arrays.items()})

    def _array_file(self, name: str, part: int | None) -> Path:
        parts = self.info.parts.get(ARRAYS.file(name))
        if part is None and parts is not None:
            raise ValueError(
                f"{name!r} of {self.path} is written in parts, which may differ in shape: read one "
                f"of {_shown(parts)}, e.g. part={parts[0]}."
            )
        return self._files(ARRAYS, name, part)[0]

    def _files(self, kind: Kind, name: str, part: int | None) -> list[Path]:
        known = self.info.names(kind)
        if name not in known:
            raise self._unknown(name, known, kind.what)
        parts = self.info.parts.get(kind.file(name), [])
        if part is not None and part not in parts:
            there = "is written whole"
            if parts:
                there = f"has the parts {_shown(parts)}"
            raise ValueError(f"{self.path} has no part {part} of {name!r}, which {there}.")
        files = [kind.file(name, part)]
        if part is None:
            files = self.info.files(kind, name)
        return [as_written(self.path, self.info, file) for file in files]

    def _unknown(self, name: str, known: Sequence[str], what: str) -> ValueError:
        hint = f"; {near(name, known)}".removesuffix("; ") or "."
        return ValueError(
            f"{self.path} has no {what} {name!r}{hint} It has: {', '.join(known) or 'none'}."
        )


def _shown(parts: list[int]) -> str:
    """Numbers as a short text: 0–29, or those there are."""
    if len(parts) > 2 and parts == list(range(parts[0], parts[-1] + 1)):
        return f"{parts[0]}–{parts[-1]}"
    return ", ".join(map(str, parts))


def open_run(path: str | Path) -> Run:
    """Open the run folder at ``path``.

    An interrupted run opens too (``info.status`` tells). Raises ValueError naming the file when the
    folder is not a run, is of another schema, or holds a missing, truncated or unreadable file.
    """
    folder = Path(path)
    info_path = folder / RUN_FILE
    if not info_path.is_file():
        what = f"it has no {RUN_FILE}"
        if not folder.is_dir():
            what = "no such folder"
        raise ValueError(
            f"{folder} is not a run folder: {what}. Give the folder that a sinklab run wrote."
        )
    _refuse_link(info_path)
    run = Run(folder, read_info(info_path))
    for kind, file in run.info.all_files():
        _check(kind, folder / file)
    return run


LARGE = 1 << 20
"""Bytes of a table from which on several threads read it."""
REMEDY = (
    "Restore it, or repeat the command of the run with --resume, which writes again what is "
    "damaged."
)


def as_written(folder: Path, info: RunInfo, file: str) -> Path:
    """The path of a file of a run, once its content was held against its checksum.

    All code that reads, copies or moves a file of a run asks for its path here. Each state of a
    file is read once a process.

    Raises:
        ValueError: naming the file, for one that is missing, a link, or different from the file the
            run wrote.
    """
    path = folder / file
    _refuse_link(path)
    with undamaged(path, REMEDY):
        if file in info.checksums and not _is_as_noted(folder, info, file):
            raise ValueError(f"its SHA-256 is not the one that {RUN_FILE} has")
    return path


def _is_as_noted(folder: Path, info: RunInfo, file: str) -> bool:
    if _hash_of(folder / file) == info.checksums[file]:
        return True
    # the run may have gone on since it was opened
    return read_info(folder / RUN_FILE).checksums.get(file) == _hash_of(folder / file)


def _hash_of(path: Path) -> str:
    state = path.stat()
    return _hash_of_state(path, state.st_ino, state.st_size, state.st_mtime_ns)


@functools.lru_cache(maxsize=1 << 16)
def _hash_of_state(path: Path, *_: int) -> str:
    """The hash of a file, kept for as long as its inode, size and time stay the same."""
    return file_hash(path)


def _refuse_link(path: Path) -> None:
    """Raises ValueError for a link, through which a folder from elsewhere would name files of this
    machine.
    """
    if path.is_symlink():
        raise ValueError(
            f"{path} is a link, which a run never writes. Put the file itself there: cp -rL "
            "copies it."
        )


def _check(kind: Kind, path: Path) -> None:
    """Look at the ends of a file. Raises ValueError for one that is missing, a link, truncated or
    unreadable.
    """
    import pyarrow.parquet as pq

    _refuse_link(path)
    with undamaged(path, REMEDY):
        if not path.is_file():
            # to open a pipe would wait for ever
            raise FileNotFoundError
        if kind is TABLES:
            pq.read_metadata(path)
        else:
            _read_dims(path)


def lost_files(folder: Path, info: RunInfo) -> set[str]:
    """Files of a run, by their paths in its folder, that are missing, unreadable, or changed since
    they were written.
    """
    lost = {file for file, known in info.checksums.items() if not _is(folder / file, known)}
    for kind, file in info.all_files():
        try:
            _check(kind, folder / file)
        except ValueError:
            lost.add(file)
    return lost


def _is(path: Path, checksum: str) -> bool:
    try:
        return file_hash(path) == checksum
    except OSError:
        return False


def _read_dims(path: Path) -> dict[str, tuple[str, ...]]:
    with safe_open(path, framework="numpy") as handle:
        # of their shapes, without memory
        arrays = {
            key: np.broadcast_to(0, handle.get_slice(key).get_shape())
            for key in handle.keys()  # noqa: SIM118 (no mapping)
        }
        noted = from_json((handle.metadata() or {}).get(DIMS_KEY, "{}"), dict)
    return checked_dims(arrays, noted)
