"""Reading a run folder: refused by name when it is damaged, of another schema, or not a run."""

from __future__ import annotations

import dataclasses
import difflib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .storage import ARRAYS_SUFFIX, DIMS_KEY, RUN_FILE, SCHEMA, TABLE_SUFFIX

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    import xarray as xr

STATUSES = ("running", "complete", "interrupted")


@dataclasses.dataclass(frozen=True)
class RunInfo:
    """What ``run.json`` says."""

    schema: int
    """version of the layout of the folder"""
    kind: str
    """sort of run, for example "study" """
    model: dict[str, Any]
    """what was run: name, revision or hash of the weights, size, sink"""
    settings: dict[str, Any]
    """everything that was chosen"""
    seed: int | None
    """seed of the run's random numbers; None when it drew none"""
    versions: dict[str, str]
    """python, torch, transformers, sinklab"""
    created: str
    """ISO 8601 time of the start, UTC"""
    status: str
    """"running" (or killed), "complete" or "interrupted" """
    error: str | None
    """what interrupted the run"""
    tables: list[str]
    """names of the tables"""
    arrays: list[str]
    """names of the files of dense arrays"""


@dataclasses.dataclass(frozen=True)
class Run:
    """One run folder, open for reading; nothing is kept in memory."""

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

    def table(self, name: str) -> pd.DataFrame:
        """The table ``name``. Raises ValueError for an unknown name or a damaged file."""
        import pandas as pd

        path = self._file(name, self.tables, "table", TABLE_SUFFIX)
        try:
            return pd.read_parquet(path)
        except (OSError, ValueError) as error:
            raise _damaged(path, error) from error

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """The arrays of file ``name``, as stored (floats are usually float16: widen before summing)."""
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        path = self._file(name, self.array_files, "file of arrays", ARRAYS_SUFFIX)
        try:
            return load_file(path)
        except (OSError, SafetensorError) as error:
            raise _damaged(path, error) from error

    def dims(self, name: str) -> dict[str, tuple[str, ...]]:
        """Names of the axes of each array of file ``name``."""
        return _read_dims(self._file(name, self.array_files, "file of arrays", ARRAYS_SUFFIX))

    def to_xarray(self, name: str) -> xr.Dataset:
        """The arrays of file ``name`` as an ``xarray.Dataset``. Raises ImportError when xarray is not installed."""
        try:
            import xarray as xr
        except ImportError as error:
            raise ImportError(
                "to_xarray needs the optional package xarray: run `pip install xarray`, "
                f"or use run.arrays({name!r}) and run.dims({name!r})."
            ) from error
        dims = self.dims(name)
        return xr.Dataset({key: (dims[key], array) for key, array in self.arrays(name).items()})

    def _file(self, name: str, known: tuple[str, ...], what: str, suffix: str) -> Path:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise ValueError(
                f"{self.path} has no {what} {name!r}"
                + (f"; did you mean {near[0]!r}?" if near else "")
                + f" It has: {', '.join(known) or 'none'}."
            )
        return self.path / f"{name}{suffix}"


def open_run(path: str | Path) -> Run:
    """Open the run folder at ``path``.

    An interrupted run opens too (``info.status`` tells). Raises ValueError naming the file when the folder is not a
    run, is of another schema, or holds a missing, truncated or unreadable file.
    """
    folder = Path(path)
    info_path = folder / RUN_FILE
    if not info_path.is_file():
        what = "no such folder" if not folder.is_dir() else f"it has no {RUN_FILE}"
        raise ValueError(f"{folder} is not a run folder: {what}. Give the folder that a sinklab run wrote.")
    run = Run(folder, _read_info(info_path))
    for name in run.tables:
        _check_table(folder / f"{name}{TABLE_SUFFIX}")
    for name in run.array_files:
        _read_dims(folder / f"{name}{ARRAYS_SUFFIX}")
    return run


def _read_info(path: Path) -> RunInfo:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error
    if not isinstance(raw, dict) or "schema" not in raw:
        raise ValueError(f"{path} does not describe a run: it has no schema version. It is some other JSON file.")
    if raw["schema"] != SCHEMA or isinstance(raw["schema"], bool):
        raise ValueError(
            f"{path} has schema {raw['schema']!r}, and this version of sinklab reads schema {SCHEMA}. "
            'Read it with the version that wrote it (see "versions" in the file), or run again.'
        )
    fields = [field.name for field in dataclasses.fields(RunInfo)]
    if missing := [name for name in fields if name not in raw]:
        raise ValueError(f"{path} is damaged: it lacks {', '.join(missing)}. Run again or restore the file.")
    expected: dict[str, type | tuple[type, ...]] = {
        "kind": str,
        "model": dict,
        "settings": dict,
        "seed": (int, type(None)),
        "versions": dict,
        "created": str,
        "error": (str, type(None)),
        "tables": list,
        "arrays": list,
    }
    wrong = [name for name, types in expected.items() if not isinstance(raw[name], types)]
    wrong += ["status"] if raw["status"] not in STATUSES else []
    # A name with a path in it would lead out of the folder.
    wrong += [kind for kind in ("tables", "arrays") if not all(_is_plain(name) for name in raw[kind])]
    if wrong:
        raise ValueError(
            f"{path} is damaged: {wrong[0]} is {raw[wrong[0]]!r}, which a run never writes. "
            "Restore the file or run again."
        )
    return RunInfo(**{name: raw[name] for name in fields})


def _is_plain(name: Any) -> bool:
    return isinstance(name, str) and name == Path(name).name and name not in ("", ".", "..")


def _check_table(path: Path) -> None:
    import pyarrow.parquet as pq

    try:
        pq.read_metadata(path)
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error


def _read_dims(path: Path) -> dict[str, tuple[str, ...]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as handle:
            keys = set(handle.keys())
            dims = {key: tuple(axes) for key, axes in json.loads((handle.metadata() or {})[DIMS_KEY]).items()}
    except (OSError, SafetensorError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise _damaged(path, error) from error
    if set(dims) != keys:
        raise _damaged(path, ValueError(f"axes are named for {sorted(dims)}, arrays are {sorted(keys)}"))
    return dims


def _damaged(path: Path, error: Exception) -> ValueError:
    if isinstance(error, FileNotFoundError):
        return ValueError(f"{path} is missing, although the run wrote it. Restore the file or run again.")
    cause = str(error) or type(error).__name__
    return ValueError(f"{path} is damaged and cannot be read ({cause}). Restore the file or run again.")
