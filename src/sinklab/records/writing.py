"""Writing a run folder: each file is written beside its place and renamed, so a reader never meets half a file."""

from __future__ import annotations

import dataclasses
import json
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from .storage import (
    ARRAYS_SUFFIX,
    DIMS_KEY,
    PART_SUFFIX,
    RUN_FILE,
    SCHEMA,
    TABLE_SUFFIX,
    checked_dims,
    checked_name,
    stored,
    to_numpy,
    write_beside,
)

if TYPE_CHECKING:
    import pandas as pd

DTYPES = ("float16", "float32", "float64")


class RunWriter:
    """Context manager that fills one run folder.

    ``kind`` says what sort of run it is ("study", "training", …); ``model``, ``settings`` and ``seed`` are written to
    ``run.json`` on entering, with the library versions and status "running". On leaving, the status becomes "complete",
    or "interrupted" with the error when the block raised (Ctrl-C included); what was written so far stays readable.

    Raises ValueError when the folder holds anything and ``overwrite`` is false, when it holds something that is not a
    run even with ``overwrite``, or when ``model``/``settings`` cannot be written as JSON.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        kind: str,
        model: Mapping[str, Any],
        settings: Mapping[str, Any],
        seed: int | None,
        overwrite: bool = False,
    ) -> None:
        self.path = Path(path)
        self._overwrite = overwrite
        self._open = False
        self._info: dict[str, Any] = {
            "schema": SCHEMA,
            "kind": checked_name(kind, "kind of run"),
            "model": _json_ready(dict(model), "model"),
            "settings": _json_ready(dict(settings), "settings"),
            "seed": seed,
            "versions": _versions(),
            "created": _now(),
            "status": "running",
            "error": None,
            "tables": [],
            "arrays": [],
        }

    def __enter__(self) -> Self:
        _make_room(self.path, overwrite=self._overwrite)
        self._save_info()
        self._open = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open = False
        self._info["status"] = "complete" if kind is None else "interrupted"
        if error is not None:
            self._info["error"] = f"{type(error).__name__}: {error}".removesuffix(": ")
        try:
            self._save_info()
        except OSError as failure:
            # The first error is the one to report; the folder stays readable with status "running".
            if error is None:
                raise
            error.add_note(f"The end of the run could not be noted in {self.path / RUN_FILE}: {failure}")

    def table(self, name: str, columns: Mapping[str, Any] | pd.DataFrame) -> Path:
        """Write (or replace) the table ``name``: a mapping of equally long columns, or a DataFrame without its index.

        Returns the path of the Parquet file. Raises ValueError for unequal columns and values Parquet cannot hold.
        """
        self._must_be_open("table", name)
        import pyarrow as pa
        import pyarrow.parquet as pq

        checked_name(name, "table")
        try:
            if isinstance(columns, Mapping):
                table = pa.table({key: _listed(values) for key, values in columns.items()})
            else:
                table = pa.Table.from_pandas(columns, preserve_index=False)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise ValueError(f"The columns of table {name!r} do not form a table: {error}") from error
        target = self.path / f"{name}{TABLE_SUFFIX}"
        write_beside(target, lambda part: pq.write_table(table, part))
        self._note("tables", name)
        return target

    def arrays(
        self,
        name: str,
        arrays: Mapping[str, Any],
        dims: Mapping[str, tuple[str, ...]] | None = None,
        *,
        dtype: str | None = None,
    ) -> Path:
        """Write (or replace) the file ``name`` of dense arrays or tensors, with ``dims`` naming the axes of each.

        Floats are stored as ``dtype``; None means float16, or float32 with a warning where float16 would overflow.
        Returns the path of the safetensors file. Raises ValueError for missing or contradictory dims, for arrays of
        text, and when an explicit ``dtype`` would turn a finite number into infinity.
        """
        self._must_be_open("arrays", name)
        from safetensors.numpy import save_file

        checked_name(name, "file of arrays")
        if dtype not in (None, *DTYPES):
            raise ValueError(f"Floats are stored as one of {', '.join(DTYPES)}: got dtype={dtype!r}.")
        dense = {key: to_numpy(value, key) for key, value in arrays.items()}
        names = checked_dims(dense, dims)
        dense = {key: stored(array, key, dtype) for key, array in dense.items()}
        target = self.path / f"{name}{ARRAYS_SUFFIX}"
        write_beside(target, lambda part: save_file(dense, part, metadata={DIMS_KEY: json.dumps(names)}))
        self._note("arrays", name)
        return target

    def _must_be_open(self, method: str, name: str) -> None:
        if not self._open:
            raise ValueError(
                f"A run folder is written inside its with block: {method}({name!r}) was called outside. "
                "Use `with RunWriter(…) as run:`."
            )

    def _note(self, kind: str, name: str) -> None:
        if name not in self._info[kind]:
            self._info[kind].append(name)
            self._save_info()

    def _save_info(self) -> None:
        text = json.dumps(self._info, indent=2, ensure_ascii=False) + "\n"
        write_beside(self.path / RUN_FILE, lambda part: part.write_text(text, encoding="utf-8"))


def _make_room(path: Path, *, overwrite: bool) -> None:
    if path.exists() and not path.is_dir():
        raise ValueError(f"A run is a folder: {path} is a file. Choose another path.")
    path.mkdir(parents=True, exist_ok=True)
    present = sorted(entry.name for entry in path.iterdir())
    if not present:
        return
    if not overwrite:
        raise ValueError(
            f"A run folder is written once: {path} already holds {', '.join(present[:4])}"
            f"{', …' if len(present) > 4 else ''}. Choose an empty folder or pass overwrite=True."
        )
    if RUN_FILE not in present:
        raise ValueError(
            f"overwrite=True replaces a run and nothing else: {path} holds {', '.join(present[:4])} but no {RUN_FILE}. "
            "Choose another folder or empty this one yourself."
        )
    # The data goes first: should this be cut short, run.json still says what the folder was.
    for name in present:
        if name.endswith((TABLE_SUFFIX, ARRAYS_SUFFIX, PART_SUFFIX)):
            (path / name).unlink()


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("torch", "transformers", "sinklab"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    # run from a source tree nothing is installed, yet the version is known
    source = sys.modules.get("sinklab")
    if found["sinklab"] == "not installed" and source is not None:
        found["sinklab"] = f"{source.__version__} (source tree)"
    return found


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _listed(values: Any) -> Any:
    return values.tolist() if hasattr(values, "detach") else values


def _json_ready(value: dict[str, Any], what: str) -> dict[str, Any]:
    try:
        return json.loads(json.dumps(value, default=_plain, allow_nan=False))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{what} is written to {RUN_FILE} and must be made of JSON values: {error}. "
            "Use strings, finite numbers, booleans, lists and dictionaries."
        ) from error


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if type(value).__module__ == "torch" and type(value).__name__ in ("dtype", "device"):
        return str(value)
    if getattr(value, "ndim", None) == 0:
        return value.item()
    raise TypeError(f"{value!r} is a {type(value).__name__}")
