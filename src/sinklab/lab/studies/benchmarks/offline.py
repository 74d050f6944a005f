"""lm-eval's tasks on local files: its own prompts and metrics, with the data set replaced by files
on disk.

tasks.toml lists the places searched for each benchmark, and the fields that lm-eval's task of that
name reads.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sinklab.core.errors import near
from sinklab.lab.data.corpora import json_object, placed_lines, text_lines
from sinklab.lab.files import refused, toml_of
from sinklab.lab.registry import sandboxes
from sinklab.lab.studies import Row
from sinklab.lab.studies.benchmarks.study import TWO_STAGE, EvalSettings

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
    rows = [row for path in paths for row in _read(path)]
    if not rows:
        raise ValueError(
            f"a benchmark has at least one document, but {paths[0]} is empty; get the file again"
        )
    source = SOURCES[benchmark]
    return [
        _formed(source, row, f"{paths[0]}, document {number}") for number, row in enumerate(rows, 1)
    ]


def _read(path: Path) -> list[Row]:
    kind = path.suffix
    if kind in _PACKED:
        kind = path.with_suffix("").suffix
    if kind == ".parquet":
        with refused(f"{path} cannot be read as Parquet; get it again", pa.ArrowException, OSError):
            return list(pq.read_table(path).to_pylist())
    if kind == ".txt":
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


def _six_lines(path: Path) -> list[Row]:
    """Six lines a document: activity and context, number of the right ending, four endings."""
    lines = "".join(text_lines(path)).rstrip("\n").split("\n")
    if len(lines) % 6:
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


def _formed(source: Source, row: Row, where: str) -> Row:
    """A document in the form of lm-eval's task, also if it has that of llm-foundry."""
    if {"query", "choices", "gold"} <= row.keys():
        # the prompt's first word stands in the data, answers have no letters
        letters = list(_LETTERS[: len(row["choices"])])
        row = {
            "question": str(row["query"]).removeprefix("Question: "),
            "choices": {"text": list(row["choices"]), "label": letters},
            "answerKey": letters[int(row["gold"])],
        }
    elif {"context", "continuation"} <= row.keys():
        row = {"text": f"{row['context'].rstrip()} {row['continuation'].strip()}"}
    missing = [name for name in source.fields if row.get(name) is None]
    if missing:
        raise ValueError(
            f"{where} needs the field {missing[0]}, but has {', '.join(row)}; get the file again, "
            "labels in a file NAME-labels.lst beside it"
        )
    found = {name: row[name] for name in source.fields}
    if source.labels:
        known = {str(label): label for label in source.labels}
        if str(found["label"]) not in known:
            raise ValueError(
                f"{where}: label must be {source.labels[0]} to {source.labels[-1]}, but is "
                f"{str(found['label'])!r}"
            )
        found["label"] = known[str(found["label"])]
    return found


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
    runs_code: bool = False
    writes: bool = False
    """Whether it asks for text, and for no likelihoods."""
    fields: Sequence[str] = ()
    """Fields of a document that lm-eval's task reads."""
    labels: Sequence[Any] = ()
    """Values of the field label."""

    @property
    def graded(self) -> str:
        """The split that is scored."""
        return "test" if "test" in self.files else "validation"

    def needed(self, data: Path, split: str, why: str = "") -> list[Path]:
        """The parts of a split in order. Raises ValueError if no file is there, with the places
        searched and how to get it.
        """
        folders = [data / name for name in self.folders]
        patterns = self.files.get(split, ("no file of this split",))
        for folder, pattern, ending in product(folders, patterns, ("", *_PACKED)):
            found = sorted(path for path in folder.glob(pattern + ending) if path.is_file())
            if found:
                return found
        raise ValueError(
            f"{self.task} needs its {split} split{why}, but looked for {', '.join(patterns)} in "
            f"{' or '.join(map(str, folders))}, also as .gz and .bz2, and found none; get the Hub "
            f"data set {self.hub} with {self.command(data)}, or leave out the folder of data to "
            "let lm-eval download it"
        )

    def command(self, data: Path) -> str:
        """Command that gets the data set from the Hub."""
        folder = data / self.folders[0]
        return f"hf download --repo-type dataset {self.hub} --local-dir {folder}"


def _packaged() -> dict[str, Source]:
    """The sources of tasks.toml."""
    found = {}
    for name, own in toml_of(__package__, "tasks.toml").items():
        folders = dict.fromkeys([name, own["hub"].partition("/")[2], *own.get("folders", ())])
        given = {"include": f"{name}/{name}.yaml"} | own | {"folders": [*folders]}
        found[name] = Source(name, **given)
    return found


SOURCES = _packaged()
"""The packaged benchmarks by name."""
OFFLINE = tuple(SOURCES)
"""Benchmarks that can be read from local files."""
LIKELIHOODS = frozenset(name for name, source in SOURCES.items() if not source.writes)
"""Benchmarks that ask for likelihoods, and for no text."""
RUNS_CODE = tuple(name for name, source in SOURCES.items() if source.runs_code)


def task(name: str, settings: EvalSettings) -> Any:
    """A task for ``lm_eval.evaluate``, checked and with its data loaded: with prompts, metrics and
    filters of lm-eval's own. HumanEval's completions run inside bubblewrap; give
    ``confirm_run_unsafe_code=True`` to ``evaluate`` for it.

    Raises:
        ValueError: for an unknown task (with near names), data that are not there or cannot be read
            (how to get it), and code that is not allowed.
    """
    known = (*OFFLINE, TWO_STAGE)
    if name not in OFFLINE:
        raise ValueError(
            f"unknown task {name!r}; {f'{near(name, known)} '.lstrip()}known are "
            f"{', '.join(known)}; lm-eval's others are asked by python -m sinklab.lm_eval"
        )
    if name in RUNS_CODE and not settings.run_code:
        raise ValueError(
            f"{name} runs programs that the model wrote, inside bubblewrap, and keeps them if "
            "that cannot be had; allow it with --run-code (in Python run_code=True)"
        )
    changes = {}
    if settings.num_fewshot is not None:
        changes["num_fewshot"] = settings.num_fewshot
    return packaged(SOURCES[name], settings.data, **changes)


def sandbox() -> Any:
    """Place to run programs that a model wrote. Raises ValueError if its extra is not there."""
    if "humaneval" not in sandboxes:
        raise ValueError(
            f"{' and '.join(RUNS_CODE)} run programs that a model wrote in the extra "
            "sinklab.extras.sandbox, which is not there; put its folder back, or leave these tasks "
            "out"
        )
    return sandboxes["humaneval"]()


def needs_lm_eval() -> None:
    """Raises ValueError, with the remedy, if lm-eval is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError(
            "benchmarks need lm-eval, which is not installed; pip install 'sinklab[eval]'"
        )


def packaged(source: Source, data: str | None, **changes: Any) -> Any:
    """The task of a packaged benchmark: lm-eval's own with these changes of its fields, with local
    files as its data set if `data` is given.

    Raises:
        ValueError: if the installed lm-eval has no such task, and for files that are not there.
    """
    import lm_eval
    from datasets import Dataset
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    if data is not None and not Path(data).is_dir():
        raise ValueError(
            f"benchmark files lie in a folder, but {data} is none; give the folder that holds them"
        )
    own = Path(lm_eval.__file__).parent / "tasks" / source.include
    if not own.is_file():
        raise ValueError(
            f"{source.task} needs lm-eval's own {own.name}, but {own} is not there; install "
            "lm-eval 0.4.13"
        )
    # functions of HumanEval's own file are never imported: it asks the network on import
    config = load_yaml(own, resolve_func=not source.runs_code)
    if source.runs_code:
        config |= load_yaml(sandbox().task_file())
    # lm-eval leaves a task's own 0 as it is, whatever is asked for
    if config.get("num_fewshot") == 0:
        changes.pop("num_fewshot", None)
    config |= {"task": source.task, **changes}
    config.pop("tag", None)
    if config.get("process_docs"):
        # lm-eval processes all documents again each time it looks at them
        config["process_docs"] = cache(config["process_docs"])
    if data is not None:
        graded, shots = source.graded, config.get("num_fewshot")
        paths = {graded: source.needed(Path(data), graded)}
        if shots:
            why = f" for {shots} examples in each prompt"
            paths["train"] = source.needed(Path(data), "train", why)
        splits = {
            split: Dataset.from_list(rows_of(source.task, some)) for split, some in paths.items()
        }
        config |= dict.fromkeys(("training_split", "validation_split", "test_split"))
        config |= {f"{graded}_split": graded, "custom_dataset": lambda **_: splits}
        if shots:
            config["training_split"] = "train"
        else:
            config["fewshot_split"] = None
    try:
        return ConfigurableTask(config=config)
    except Exception as error:
        # data sets, the Hub and their clients fail in dozens of ways
        first = (str(error).splitlines() or ["no message"])[0]
        raise ValueError(
            f"{source.task} needs the Hub data set {source.hub}, but it could not be loaded "
            f"({type(error).__name__}: {first}); on a machine with a network run "
            f"{source.command(Path('DATA'))} and give the folder DATA (--data, in "
            "Python data=)"
        ) from error
