"""Writing a run folder: each file is written under a temporary name and renamed, so a reader never
sees half a file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import platform
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import cache, partial
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from sinklab import __version__
from sinklab.core.errors import known_fields
from sinklab.lab.files import refused
from sinklab.lab.records import storage
from sinklab.lab.records.info import RunInfo, read_info
from sinklab.lab.records.leases import CLAIMS, RUN, Claims, Lease
from sinklab.lab.records.reading import Run, as_written, lost_files, open_run
from sinklab.lab.records.storage import ARRAYS, KINDS, PART_SUFFIX, RUN_FILE, SCHEMA, TABLES, Kind

if TYPE_CHECKING:
    import pandas as pd


def begun_before(path: Path, given: RunInfo) -> RunInfo:
    """``given`` with the files that an unfinished run in ``path`` has already; ValueError naming
    the first difference if it is another run.
    """
    before = read_info(path / RUN_FILE)
    old_fields = dataclasses.asdict(before)
    new_fields = dataclasses.asdict(given)
    for field in ("kind", "seed", "model", "settings"):
        if old_fields[field] != new_fields[field]:
            name, old, new = _difference(field, old_fields[field], new_fields[field])
            raise ValueError(
                f"{path} can be resumed only with the same settings: its {name} is {old!r}, and "
                f"now it is {new!r}. Give the same settings, or write into another folder."
            )
    kept = ("created", "tables", "arrays", "parts", "checksums")
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

    Claims, and the half of a ``run.json`` that a run killed in its first write left, do not count.
    """
    if not path.is_dir():
        return []
    found = sorted(entry.name for entry in path.iterdir())
    half = (f".{RUN_FILE}.", PART_SUFFIX)
    return [
        name
        for name in found
        if name != CLAIMS and not (name.startswith(half[0]) and name.endswith(half[1]))
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

    A long run is written in parts, one a sample: `table` and `arrays` take ``part``, and with
    ``resume`` a later writer continues where an interrupted one stopped (`has` tells which are
    there). Files that are there are read and checked against their checksums first: a part with a
    lost file is dropped, and so are then the files written whole.

    A run has one writer at a time, or with ``shared`` several, each of which claims its work in
    ``claims``, and sets ``is_last`` to False if others go on when its block ends.

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
        overwrite: bool = False,
        resume: bool = False,
        shared: bool = False,
    ) -> None:
        if overwrite and resume:
            raise ValueError("overwrite=True starts afresh and resume=True continues: choose one.")
        self.path = Path(path)
        self.claims, self.is_last = Claims(self.path), True
        self._overwrite, self._resume, self._shared = overwrite, resume, shared
        self._open = False
        self._lease: Lease
        self._info = RunInfo(
            schema=SCHEMA,
            kind=storage.checked_name(kind, "kind of run"),
            model=_json_ready(dict(model), "model"),
            settings=_json_ready(dict(settings), "settings"),
            seed=seed,
            versions=_versions(),
            created=datetime.now(UTC).isoformat(timespec="seconds"),
        )

    def __enter__(self) -> Self:
        refuse_taken(self.path, overwrite=self._overwrite, resume=self._resume)
        self.path.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as held:
            lease = held.enter_context(self.claims.hold(RUN, wait=self._shared))
            self._begin()
            if self._shared:
                # of several workers each says that it is there: nobody clears up then
                self._lease = self.claims.hold(f"worker-{secrets.token_hex(8)}")
            else:
                self._lease = lease
                held.pop_all()
        self._open = True
        return self

    def _begin(self) -> None:
        """Write run.json, with the parts that are there, in order; remove leftovers and files of
        lost parts.
        """
        # another process may have begun since
        refuse_taken(self.path, overwrite=self._overwrite, resume=self._resume)
        gone: Iterable[str] = ()
        if self._overwrite:
            gone = names_in(self.path)
        is_begun = self._resume and (self.path / RUN_FILE).exists()
        if is_begun:
            self._info = begun_before(self.path, self._info)
        # if others work here, they have looked
        if self.claims.are_free():
            storage.remove_leftovers(self.path)
            if is_begun:
                gone = lost_files(self.path, self._info)
                self._info = self._info.without([*gone])
        # Should this be cut short, run.json says what the folder is, and nothing of what is not
        # there.
        self._info.save(self.path)
        for name in gone:
            if name.endswith((TABLES.suffix, ARRAYS.suffix, PART_SUFFIX)):
                (self.path / name).unlink(missing_ok=True)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._open = False
        status = "complete"
        cause = None
        if kind is not None:
            status = "interrupted"
        if error is not None:
            cause = f"{type(error).__name__}: {error}".removesuffix(": ")
        try:
            if self.is_last or error is not None:
                self._note(partial(dataclasses.replace, status=status, error=cause))
        except (OSError, ValueError) as failure:
            # The first error is the one to report; the folder stays readable with status "running".
            if error is None:
                raise
            error.add_note(
                f"The end of the run could not be noted in {self.path / RUN_FILE}: {failure}"
            )
        finally:
            self._lease.release()

    def _note(self, change: Callable[[RunInfo], RunInfo]) -> None:
        """Change run.json, in which other workers may have noted something since."""
        held: Any = contextlib.nullcontext(self._lease)
        if self._shared:
            held = self.claims.hold(RUN)
        with held as lease:
            changed = change(self.refresh())
            if not lease.is_held():
                raise ValueError(
                    f"{self.path} was taken over by another process while this one was stopped: "
                    "look what that one does"
                )
            self._info = changed
            changed.save(self.path)

    def refresh(self) -> RunInfo:
        """Reread a shared run.json and return it; `has` knows of other workers only from such
        reads, or from writing.
        """
        if self._shared:
            self._info = read_info(self.path / RUN_FILE)
        return self._info

    def has(self, name: str, part: int | None = None) -> bool:
        """Whether the table or arrays ``name`` (or this part of it) are written and listed."""
        if part is None:
            return name in [*self._info.tables, *self._info.arrays]
        return any(part in self._info.parts.get(kind.file(name), ()) for kind in KINDS)

    def keep(self, files: Iterable[Path]) -> None:
        """Note these files of the run folder, written by other means, so that a loss is noticed;
        files that they replace are forgotten.
        """
        sums = {str(file.relative_to(self.path)): storage.file_hash(file) for file in files}

        def kept(info: RunInfo) -> RunInfo:
            there = {
                file: one for file, one in info.checksums.items() if (self.path / file).exists()
            }
            return dataclasses.replace(info, checksums=there | sums)

        self._note(kept)

    def table(
        self,
        name: str,
        columns: Mapping[str, Any] | list[Any] | pd.DataFrame,
        part: int | None = None,
    ) -> Path:
        """Write (or replace) the table ``name``: a mapping of equally long columns, a list of rows
        (as for `columns_of`), or a DataFrame without its index.

        With ``part`` (0, 1, …) this is one part of the table, in a file of its own; readers see
        them joined. Returns the path of the Parquet file. Raises ValueError for unequal columns,
        values Parquet cannot hold, and a table that is written whole and in parts.
        """
        import pyarrow.parquet as pq

        with self._file("table", TABLES, name, part) as target:
            table = _as_table(name, columns)
            storage.write_beside(target, partial(pq.write_table, table))
        return target

    def arrays(
        self,
        name: str,
        arrays: Mapping[str, Any],
        dims: storage.Dims = None,
        *,
        dtype: str | Mapping[str, str] | None = None,
        part: int | None = None,
    ) -> Path:
        """Write (or replace) the file ``name`` of dense arrays or tensors, with ``dims`` naming the
        axes of each.

        Floats are stored as ``dtype``, one for all or one per key; None, or a key that is not
        named, means float16, or float32 with a warning if float16 would overflow. With ``part`` the
        file is one part of several. Returns the path of the safetensors file. Raises ValueError for
        missing or contradictory dims, for arrays of text, and when an explicit ``dtype`` would turn
        a finite number into infinity; OSError for a disk that refuses.
        """
        with self._file("arrays", ARRAYS, name, part) as target:
            dtypes: dict[str, Any] = dict.fromkeys(arrays, dtype)
            if isinstance(dtype, Mapping):
                dtypes = dict(dtype)
            known_fields(f"the file of arrays {name!r}", dtypes, arrays)
            storage.write_arrays(target, arrays, dims, dtypes)
        return target

    @contextlib.contextmanager
    def _file(self, method: str, kind: Kind, name: str, part: int | None) -> Iterator[Path]:
        """Path for a file, if it may be written; once the block has written it, it is listed in
        run.json.
        """
        if not self._open:
            raise ValueError(
                f"A run folder is written inside its with block: {method}({name!r}) was called "
                "outside. Use `with RunWriter(…) as run:`."
            )
        storage.checked_name(name, kind.what)
        if part is not None and part < 0:
            raise ValueError(f"Parts are numbered from 0: got part={part} of {name!r}.")
        in_parts = kind.file(name) in self._info.parts
        if name in self._info.names(kind) and in_parts == (part is None):
            ways = ["whole", "in parts"]
            before = ways[in_parts]
            now = ways[not in_parts]
            raise ValueError(
                f"{name!r} is already written {before} in {self.path} and cannot be written {now} "
                "too."
            )
        target = self.path / kind.file(name, part)
        yield target
        checksum = storage.file_hash(target)

        def listed(info: RunInfo) -> RunInfo:
            names = [*dict.fromkeys([*info.names(kind), name])]
            changes: dict[str, Any] = {
                kind.listed: names,
                "checksums": info.checksums | {target.name: checksum},
            }
            # of several workers one may have been interrupted since
            changes |= {"status": "running", "error": None}
            key = kind.file(name)
            if part is not None:
                changes["parts"] = {**info.parts, key: sorted({*info.parts.get(key, ()), part})}
            return dataclasses.replace(info, **changes)

        if listed(self._info) != self._info:
            self._note(listed)


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


@cache
def _versions() -> dict[str, str]:
    of_packages = {package: metadata.version(package) for package in ("torch", "transformers")}
    return {"python": platform.python_version()} | of_packages | {"sinklab": __version__}


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


def merge_runs(folders: Iterable[str | Path], out: str | Path) -> Run:
    """Move the parts of runs of the same kind, model, settings and seed into the run ``out``, and
    remove their folders.

    ``out`` may be absent, or hold some parts already, as one of the runs. Files that several
    folders hold are kept once. Cut short, the merge can be repeated: files are moved before they
    are listed, and folders removed last. The status is "complete" when that of every folder is.
    Returns the merged run. Raises ValueError when there is nothing to merge, when the runs differ
    (the first difference is named), when files of the same part or table differ, when one is
    written or lost, or when a folder is no run.
    """
    target = Path(out)
    # folders that will be emptied: once each, and never the target
    places = dict.fromkeys(Path(folder).resolve() for folder in folders)
    sources = [place for place in places if place != target.resolve()]
    if not sources:
        raise ValueError(f"merge_runs needs at least one folder to move into {target}: got none.")
    there = [*sources]
    if (target / RUN_FILE).exists():
        there.insert(0, target)
    infos = {folder: read_info(folder / RUN_FILE) for folder in there}
    for folder in infos:
        begun_before(folder, infos[sources[0]])
    with contextlib.ExitStack() as held:
        for folder in {target, *infos}:
            held.enter_context(Claims(folder).hold(RUN, wait=False))
        _merge(infos, sources, target)
    return open_run(target)


def _merge(infos: dict[Path, RunInfo], sources: list[Path], target: Path) -> None:
    owners: dict[str, Path] = {}
    for folder, info in infos.items():
        for _, file in info.all_files():
            # Absent in its folder and present in ours: an earlier merge moved it and was cut short.
            owner = folder
            if not (folder / file).exists() and (target / file).exists():
                owner = target
            as_written(owner, info, file)
            other = owners.setdefault(file, owner)
            if other != owner and storage.file_hash(other / file) != storage.file_hash(
                owner / file
            ):
                raise ValueError(
                    f"{other} and {owner} both hold {file}, and they differ: remove one of them."
                )
    for file, folder in owners.items():
        if folder != target:
            storage.moved(folder / file, target / file)
    _joined([*infos.values()]).save(target)
    for folder in sources:
        for _, file in infos[folder].all_files():
            (folder / file).unlink(missing_ok=True)
        (folder / RUN_FILE).unlink()
        storage.remove_leftovers(folder)
        if not any(path.name != CLAIMS for path in folder.iterdir()):
            shutil.rmtree(folder)


def _joined(infos: list[RunInfo]) -> RunInfo:
    facts = dataclasses.asdict(infos[0])
    for info in infos:
        for kind in KINDS:
            facts[kind.listed] = [*dict.fromkeys([*facts[kind.listed], *info.names(kind)])]
        for name, parts in info.parts.items():
            facts["parts"][name] = sorted({*facts["parts"].get(name, ()), *parts})
        facts["checksums"] |= info.checksums
    worst = next((info for info in infos if info.status != "complete"), infos[0])
    facts["status"] = worst.status
    facts["error"] = worst.error
    facts["created"] = min(info.created for info in infos)
    return RunInfo(**facts)
