"""The files of a packaged benchmark: their places below a folder of data, and one form for all of
them.

tasks.toml lists the places searched and the fields that lm-eval's task of that name reads.
"""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sinklab.lab.data.corpora import json_object, placed_lines, text_lines

Row = dict[str, Any]

_PACKED = (".gz", ".bz2")
_LETTERS = "ABCDEFGH"


def rows_of(benchmark: str, paths: Sequence[Path]) -> list[Row]:
    """The documents of one split of a benchmark, with the fields that lm-eval's task of that name
    reads.

    Args:
        benchmark: name of a packaged task.
        paths: the file, or its parts in order: .jsonl, .parquet, or HellaSwag as text, each also
            .gz or .bz2.

    Raises:
        ValueError: for a file that cannot be read or lacks a field, naming the file, the row and
            the field.
    """
    source = SOURCES[benchmark]
    rows = [row for path in paths for row in _read(path)]
    if not rows:
        raise ValueError(
            f"a benchmark has at least one document, but {paths[0]} is empty; get the file again"
        )
    form: Callable[[Row, str], Row] = partial(_fields, source.fields, source.labels)
    if source.form:
        form = _FORMS[source.form]
    return [form(row, f"{paths[0]}, document {number}") for number, row in enumerate(rows, 1)]


def _kind(path: Path) -> str:
    if path.suffix in _PACKED:
        path = path.with_suffix("")
    return path.suffix


def _read(path: Path) -> list[Row]:
    if _kind(path) == ".parquet":
        return _parquet(path)
    if _kind(path) == ".txt":
        return _six_lines(path)
    rows = [json_object(*placed) for placed in placed_lines(path)]
    labels = path.with_name(f"{path.name.split('.')[0]}-labels.lst")
    if rows and "label" not in rows[0] and labels.is_file():
        given = "".join(text_lines(labels)).split()
        if len(given) != len(rows):
            raise ValueError(
                f"{labels} must hold a label for each of {len(rows)} rows of {path}, but has "
                f"{len(given)}"
            )
        rows = [{**row, "label": label} for row, label in zip(rows, given, strict=True)]
    return rows


def _parquet(path: Path) -> list[Row]:
    try:
        return [*pq.read_table(path).to_pylist()]
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"{path} cannot be read as Parquet: {error}; get the file again"
        ) from error


def _six_lines(path: Path) -> list[Row]:
    """Six lines a document: activity and context, number of the right ending, four endings."""
    lines = "".join(text_lines(path)).rstrip("\n").split("\n")
    if len(lines) % 6 or any(line.strip() not in ("0", "1", "2", "3") for line in lines[1::6]):
        raise ValueError(
            f"{path} must hold six lines a document (context, 0 to 3, four endings), but its "
            f"{len(lines)} lines do not"
        )
    rows = []
    for at in range(0, len(lines), 6):
        label, _, context = lines[at].partition(": ")
        begun = re.search(r"[.!?][\"')]*\s+([a-z][^.!?]*)$", context)
        # the sentence that the endings go on with, which lm-eval capitalises, is not set apart in
        # this form
        cut = len(context)
        if begun:
            cut = begun.start(1)
        row = {"activity_label": label, "ctx_a": context[:cut].rstrip(), "ctx_b": context[cut:]}
        rows.append(row | {"label": lines[at + 1].strip(), "endings": lines[at + 2 : at + 6]})
    return rows


def _taken(row: Row, where: str, *names: str) -> Row:
    missing = [name for name in names if row.get(name) is None]
    if missing:
        raise ValueError(
            f"{where} needs the field {missing[0]}, but has {', '.join(row)}; get the file again"
        )
    return {name: row[name] for name in names}


def _fields(fields: Sequence[str], labels: Sequence[Any] | None, row: Row, where: str) -> Row:
    if labels is None:
        return _taken(row, where, *fields)
    if row.get("label") is None:
        raise ValueError(
            f"{where} has no label, and no file NAME-labels.lst stands beside it; put the labels' "
            "file there"
        )
    known = {str(label): label for label in labels}
    if str(row["label"]) not in known:
        raise ValueError(
            f"{where}: label must be {labels[0]} to {labels[-1]}, but is {str(row['label'])!r}"
        )
    return {**_taken(row, where, *fields), "label": known[str(row["label"])]}


def _arc(row: Row, where: str) -> Row:
    if "query" in row:
        # llm-foundry's form: the prompt's first word stands in the data, answers have no letters
        given = _taken(row, where, "query", "choices", "gold")
        letters = list(_LETTERS[: len(given["choices"])])
        question = str(given["query"]).removeprefix("Question: ")
        choices = {"text": list(given["choices"]), "label": letters}
        return {"question": question, "choices": choices, "answerKey": letters[int(given["gold"])]}
    return _taken(row, where, "question", "choices", "answerKey")


def _lambada(row: Row, where: str) -> Row:
    if "continuation" in row:
        given = _taken(row, where, "context", "continuation")
        return {"text": f"{given['context'].rstrip()} {given['continuation'].strip()}"}
    return _taken(row, where, "text")


_FORMS: dict[str, Callable[[Row, str], Row]] = {"arc": _arc, "lambada": _lambada}


@dataclass(frozen=True)
class Source:
    """Places of a benchmark's files, and the data set on the Hub to get them from."""

    task: str
    include: str
    """lm-eval's own file of the task, in its package."""
    hub: str
    folders: Sequence[str]
    """Below the data folder."""
    files: Mapping[str, Sequence[str]]
    """Split -> patterns, relative to one of the folders; the first one that is there is taken."""
    config: str | None = None
    runs_code: bool = False
    writes: bool = False
    """Whether it asks for text, and for no likelihoods."""
    fields: Sequence[str] = ()
    labels: Sequence[Any] | None = None
    form: str | None = None

    @property
    def graded(self) -> str:
        """The split that is scored."""
        return "test" if "test" in self.files else "validation"

    def find(self, data: Path, split: str) -> list[Path]:
        """The parts of a split in order; none if no file is there."""
        # the folder may be that of the benchmark itself
        folders = [data / name for name in self.folders]
        if data.name in self.folders:
            folders.append(data)
        patterns = self.files.get(split, ())
        for folder, pattern, ending in product(folders, patterns, ("", *_PACKED)):
            found = sorted(path for path in folder.glob(pattern + ending) if path.is_file())
            if found:
                return found
        return []

    def needed(self, data: Path, split: str, why: str = "") -> list[Path]:
        """The result of `find`. Raises ValueError if no file is there, with the places searched and
        how to get it.
        """
        found = self.find(data, split)
        if found:
            return found
        patterns = ", ".join(self.files.get(split, ("no file of this split",)))
        raise ValueError(
            f"{self.task} needs its {split} split{why}, but looked for {patterns} in "
            f"{' or '.join(str(data / name) for name in self.folders)}, also as "
            f".gz and .bz2, and found none; get the Hub data set {self.hub} with "
            f"{self.command(data, split)}, or leave out the folder of data to let lm-eval download "
            "it"
        )

    def command(self, data: Path, split: str) -> str:
        """Command that writes the file of a split from the Hub."""
        names = [*self.files.get(split, ()), f"{split}.jsonl"]
        goal = data / self.folders[0] / next(name for name in names if name.endswith(".jsonl"))
        return (
            f'python -c "from datasets import load_dataset as get; get({self.hub!r}, '
            f"{self.config!r}, split={split!r}).to_json('{goal}')\""
        )


def _packaged() -> dict[str, Source]:
    """The sources of tasks.toml."""
    tables = tomllib.loads((files(__package__) / "tasks.toml").read_text("utf-8"))
    found = {}
    for name, own in tables.items():
        given = {"include": f"{name}/{name}.yaml", **tables.get(own.pop("like", ""), {}), **own}
        named = dict.fromkeys([name, given["hub"].rpartition("/")[2], *given.get("folders", ())])
        given["folders"] = [*named]
        words = {"task": name, "config": given.get("config")}
        given["files"] = {
            split: [pattern.format_map(words) for pattern in patterns]
            for split, patterns in given["files"].items()
        }
        found[name] = Source(name, **given)
    return found


SOURCES = _packaged()
"""The packaged benchmarks by name."""
