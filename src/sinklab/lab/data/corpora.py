"""Documents from files or from the Hub."""

import bz2
import gzip
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from sinklab.lab.files import from_json, refused

HUB = "hub:"
FIELD = "text"
"""Field that holds the text in JSON lines, Parquet files and datasets."""
_SUFFIXES = (
    *(kind + zipped for zipped in ("", ".gz") for kind in (".txt", ".md", ".jsonl")),
    ".parquet",
)


def read_corpus(source: str | Path, *, only: str | None = None) -> Iterator[str]:
    """Yield the documents of a corpus, in a fixed order, without the blank ones.

    Args:
        source: a folder or a file (.txt, .md, .jsonl, each also .gz; .parquet), or ``"hub:NAME"``
            or ``"hub:NAME:CONFIG"``, the split ``train`` of a dataset of the Hub (or a folder that
            `datasets` reads), which is streamed.
        only: leave out documents but those of which this holds: ``"FIELD=VALUE"`` or
            ``"FIELD!=VALUE"``, of a field, or of one inside it (``"meta.source!=web"``), compared
            as text.

    Raises:
        ValueError: if the source does not exist, holds no readable file or no text, has no such
            field, or needs `datasets`, which is not installed.
    """
    empty = True
    for text in corpus_documents(source, only=only):
        if text.strip():
            empty = False
            yield text
    if empty:
        raise ValueError(
            f"the corpus {source} holds no text; training needs at least one document that is not "
            "blank"
        )


def corpus_documents(
    source: str | Path, *, only: str | None = None, start: int = 0
) -> Iterator[str]:
    """Yield every document of a corpus from number ``start`` on, so that numbers stay places: blank
    ones too, and a blank one for each that ``only`` leaves out.

    Skipped documents are neither parsed nor decoded if their kind allows it.

    Raises:
        ValueError: as :func:`read_corpus`, but for a corpus without text.
    """
    if source == "":
        raise ValueError("a corpus is needed; name a folder, a file, or a dataset as hub:NAME")
    if str(source).startswith(HUB):
        yield from _from_hub(str(source), only, start)
        return
    for read in islice(_from_files(Path(source), only), start, None):
        yield read()


def _files(source: Path) -> list[Path]:
    if not source.exists():
        raise ValueError(
            f"the corpus {source} does not exist; name a folder or a file, or a dataset as hub:NAME"
        )
    found = [source]
    if source.is_dir():
        found = sorted(source.rglob("*"))
    files = [path for path in found if path.is_file() and path.name.endswith(_SUFFIXES)]
    if not files:
        raise ValueError(
            f"the corpus {source} holds no file of a known kind ({', '.join(_SUFFIXES)})"
        )
    return files


def _from_files(source: Path, only: str | None) -> Iterator[Callable[[], str]]:
    for path in _files(source):
        if path.name.endswith(".parquet"):
            yield from _from_parquet(path, only)
        elif ".jsonl" in path.name:
            for line, where in placed_lines(path):
                yield partial(_from_line, line, where, only)
        else:
            yield partial(_from_text, path, only)


def text_lines(path: Path) -> Iterator[str]:
    """The lines of a UTF-8 file, unpacked if its name says so (.gz, .bz2).

    Raises:
        ValueError: if it cannot be read, naming it.
    """
    opener: Any = {".gz": gzip.open, ".bz2": bz2.open}.get(path.suffix, open)
    fault = f"{path} cannot be read as UTF-8 text: get the file again"
    kinds = (OSError, UnicodeDecodeError, EOFError, zlib.error)
    # utf-8-sig: a byte-order mark is no text
    with refused(fault, *kinds), opener(path, "rt", encoding="utf-8-sig") as lines:
        yield from lines


def placed_lines(path: Path) -> Iterator[tuple[str, str]]:
    """The lines of a file that are not blank, each with a name for its place. Raises as
    :func:`text_lines`.
    """
    yield from (
        (line, f"{path}, line {number}")
        for number, line in enumerate(text_lines(path), 1)
        if line.strip()
    )


def json_object(line: str, where: str) -> dict[str, Any]:
    """The object on a line of JSON.

    Raises:
        ValueError: if it is none, naming the place.
    """
    with refused(f"{where}: each line must be one JSON object"):
        return from_json(line, dict)


def _from_text(path: Path, only: str | None) -> str:
    return text_of({FIELD: "".join(text_lines(path))}, FIELD, str(path), only)


def _from_line(line: str, where: str, only: str | None) -> str:
    return text_of(json_object(line, where), FIELD, where, only)


def text_of(row: Mapping[str, Any], name: str, where: str, only: str | None = None) -> str:
    """The text in a field of a row; none of a row that ``only`` leaves out.

    Raises:
        ValueError: if the row has no such field, naming those it has, or the field holds no text.
    """
    if only is not None and not _is_kept(row, only, where):
        return ""
    if name not in row:
        raise ValueError(
            f"{where}: no field {name!r} (it has {', '.join(row)}); name the field that "
            "holds the text"
        )
    if not isinstance(row[name], str):
        raise ValueError(
            f"{where}: field {name!r} must be text, but is a {type(row[name]).__name__}"
        )
    return row[name]


def _is_kept(row: Mapping[str, Any], only: str, where: str) -> bool:
    name, sign, value = only.partition("!=")
    if not sign:
        name, sign, value = only.partition("=")
    found: Any = row
    for part in name.split("."):
        if not isinstance(found, Mapping) or part not in found:
            raise ValueError(
                f"{where}: only={only!r} chooses documents by FIELD=VALUE or FIELD!=VALUE, but "
                "there is no field "
                f"{name!r} (it has {', '.join(row) or 'none'}); name another, or leave it out"
            )
        found = found[part]
    return (str(found) == value) != (sign == "!=")


def _from_parquet(path: Path, only: str | None) -> Iterator[Callable[[], str]]:
    import pyarrow
    import pyarrow.parquet

    fault = f"{path} cannot be read as Parquet"
    with (
        refused(fault, OSError, pyarrow.ArrowException),
        pyarrow.parquet.ParquetFile(path) as table,
    ):
        names = table.schema_arrow.names
        # the row's other fields are named where the text is missing, but not read
        read = {FIELD, (only or FIELD).partition("=")[0].rstrip("!").partition(".")[0]}
        columns = [*read] if read <= {*names} else names
        batches = table.iter_batches(batch_size=256, columns=columns)
        for number, row in enumerate(row for batch in batches for row in batch.to_pylist()):
            yield partial(text_of, row, FIELD, f"{path}, row {number}", only)


def _from_hub(source: str, only: str | None, start: int) -> Iterator[str]:
    name, _, config = source.removeprefix(HUB).partition(":")
    if not name:
        raise ValueError(
            "a dataset of the Hub is named as hub:NAME or hub:NAME:CONFIG, but the corpus is "
            f"{source!r}"
        )
    fault = (
        f"{source} needs the package datasets, which is not installed; pip install 'sinklab[train]'"
    )
    with refused(fault, ImportError):
        import datasets
    with refused(
        f"the corpus {source} must be a dataset with a split train, but", OSError, ValueError
    ):
        rows = datasets.load_dataset(name, config or None, split="train", streaming=True)
    for number, row in enumerate(rows.skip(start), start):
        yield text_of(row, FIELD, f"{source}, row {number}", only)
