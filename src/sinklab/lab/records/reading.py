"""Reading a run folder: refused by name when it is damaged, of another schema, or not a run."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors import safe_open

from sinklab.core.errors import one_of
from sinklab.lab.files import from_json
from sinklab.lab.records.info import RunInfo, read_info, undamaged
from sinklab.lab.records.storage import ARRAYS, DIMS_KEY, RUN_FILE, TABLES, file_hash, file_of

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr


@dataclasses.dataclass(frozen=True)
class Run:
    """One run folder, open for reading; nothing is kept in memory.

    A table is written whole, or in parts of some samples as arrays are; then ``sample`` chooses
    one. Each file is held against its checksum when it is first read (`as_written`).
    """

    path: Path
    """the folder"""
    info: RunInfo
    """contents of run.json"""

    @property
    def tables(self) -> tuple[str, ...]:
        """Names that ``table`` knows."""
        return tuple(self.info.names(TABLES))

    @property
    def array_files(self) -> tuple[str, ...]:
        """Names that ``arrays``, ``dims`` and ``to_xarray`` know."""
        return tuple(self.info.names(ARRAYS))

    @property
    def samples(self) -> tuple[int, ...]:
        """Numbers of the samples that are there; none of a run that is written whole."""
        return tuple(sample for part in self.info.parts for sample in self.info.part(part))

    def has(self, name: str, sample: int) -> bool:
        """Whether there are a table or arrays of this name of a sample."""
        part = sample // self.info.part_size
        if file_of(name, TABLES, part) in self.info.files:
            return True
        if file_of(name, ARRAYS, part) not in self.info.files:
            return False
        with self._opened(name, sample) as (_, keys):
            return bool(keys)

    def table(self, name: str, sample: int | None = None) -> pd.DataFrame:
        """The table ``name``, its parts joined in order, or its rows of one sample.

        Raises ValueError for an unknown name or sample, and for a damaged file.
        """
        import pandas as pd

        rows = None
        if sample is not None:
            rows = [("sample", "==", sample)]
        frames = []
        for path in self._files(TABLES, name, sample):
            with undamaged(path):
                # threads wait for one another longer than they read
                frames.append(pd.read_parquet(path, use_threads=False, filters=rows))
        if len(frames) == 1:
            return frames[0]
        return pd.concat(frames, ignore_index=True)

    def arrays(self, name: str, sample: int) -> dict[str, np.ndarray]:
        """The arrays of file ``name`` of one sample, as stored: those of a trace usually as
        float16, to be widened before summing.

        Raises ValueError for an unknown name or sample, and a damaged file.
        """
        with self._opened(name, sample) as (handle, keys):
            return {key: handle.get_tensor(place) for key, place in keys.items()}

    def array(self, name: str, key: str, sample: int) -> np.ndarray:
        """One array of a file; the others are not read. Raises ValueError like `arrays`, and for an
        unknown key.
        """
        with self._opened(name, sample) as (handle, keys):
            if key in keys:
                return handle.get_tensor(keys[key])
        raise ValueError(f"{name} of {self.path} has no array {key!r}; it has {', '.join(keys)}")

    def dims(self, name: str, sample: int) -> dict[str, tuple[str, ...]]:
        """Names of the axes of each array of file ``name`` of one sample."""
        with self._opened(name, sample) as (handle, keys):
            noted = from_json(handle.metadata()[DIMS_KEY])
            return {key: tuple(noted[key]) for key in keys}

    def to_xarray(self, name: str, sample: int) -> xr.Dataset:
        """The arrays of file ``name`` of one sample with the names of their axes.

        Raises ValueError like `arrays`.
        """
        import xarray as xr

        dims = self.dims(name, sample)
        arrays = self.arrays(name, sample)
        return xr.Dataset({key: (dims[key], array) for key, array in arrays.items()})

    @contextmanager
    def _opened(self, name: str, sample: int) -> Iterator[tuple[Any, dict[str, str]]]:
        """A file of arrays, open, and the keys of the arrays of a sample in it."""
        (file,) = self._files(ARRAYS, name, sample)
        head = f"{sample}/"
        with undamaged(file), safe_open(file, framework="numpy") as handle:
            names = handle.keys()
            stored = sorted(name for name in names if name.startswith(head))
            yield handle, {name.removeprefix(head): name for name in stored}

    def _files(self, suffix: str, name: str, sample: int | None) -> list[Path]:
        what = {TABLES: "a table", ARRAYS: "a file of arrays"}[suffix]
        one_of(f"{what} of {self.path}", name, self.info.names(suffix))
        files = self.info.of(name, suffix)
        if sample is not None:
            file = file_of(name, suffix, sample // self.info.part_size)
            if file not in files or sample not in self.samples:
                raise ValueError(
                    f"{self.path} has no sample {sample} of {name!r}; it has {[*self.samples]}"
                )
            files = [file]
        return [as_written(self.path, self.info, file) for file in files]


def open_run(path: str | Path) -> Run:
    """Open the run folder at ``path``.

    An interrupted run opens too (``info.status`` tells). Raises ValueError naming the file when the
    folder is not a run, is of another schema, or lacks a file; a damaged one is refused when it is
    read.
    """
    folder = Path(path)
    info_path = folder / RUN_FILE
    if not info_path.is_file():
        raise ValueError(
            f"{folder} is not a run folder: it has no {RUN_FILE}; give one that sinklab wrote"
        )
    _check_file(info_path)
    run = Run(folder, read_info(info_path))
    for file in run.info.files:
        _check_file(folder / file)
    return run


def as_written(folder: Path, info: RunInfo, file: str) -> Path:
    """The path of a file of a run, once its content was held against its checksum.

    All code that reads, copies or moves a file of a run asks for its path here. Each state of a
    file is read once a process.

    Raises:
        ValueError: naming the file, for one that is missing, a link, or different from the file the
            run wrote.
    """
    path = folder / file
    _check_file(path)
    with undamaged(path):
        state = path.stat()
        found = _hash_of_state(path, state.st_ino, state.st_size, state.st_mtime_ns)
        # the run may have gone on since it was opened
        known = info.files | info.others
        if found != known[file] and found != read_info(folder / RUN_FILE).files.get(file):
            raise ValueError(f"its SHA-256 is not the one that {RUN_FILE} has")
    return path


@functools.lru_cache(maxsize=1 << 16)
def _hash_of_state(path: Path, *_: int) -> str:
    """The hash of a file, kept for as long as its inode, size and time stay the same."""
    return file_hash(path)


def _check_file(path: Path) -> None:
    """Raises ValueError for a link, through which a folder from elsewhere would name files of this
    machine, and for what is no file.
    """
    if path.is_symlink():
        raise ValueError(
            f"{path} is a link, which a run never writes. Put the file itself there: cp -rL "
            "copies it."
        )
    with undamaged(path):
        # to open a pipe would wait for ever
        if not path.is_file():
            raise FileNotFoundError("there is no such file")


def lost_files(folder: Path, info: RunInfo) -> set[str]:
    """Files of a run, by their paths in its folder, that are missing, unreadable, or changed since
    they were written.
    """
    lost = set()
    for file in info.files | info.others:
        try:
            as_written(folder, info, file)
        except ValueError:
            lost.add(file)
    return lost
