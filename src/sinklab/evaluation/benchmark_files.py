"""Where the files of a packaged benchmark lie below a folder of data, and one form for all of them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sinklab.evaluation.benchmark_rows import json_lines, rows_of

_ENDINGS = ("", ".gz", ".bz2")
# raised when rows of the same file come out otherwise: what an older version converted is then left alone
_FORM = 1


@dataclass(frozen=True)
class Source:
    """Where a benchmark's files may lie, and where to get them."""

    task: str
    hub: str
    config: str | None
    folders: tuple[str, ...]
    files: Mapping[str, tuple[str, ...]]
    """Split -> patterns, relative to one of the folders; the first one that is there is taken."""

    def find(self, data: Path, split: str) -> list[Path]:
        """The parts of a split in order; none where no file is there."""
        # the folder may be that of the benchmark itself
        own = [data] if data.name in self.folders else []
        for folder in [*(data / name for name in self.folders), *own]:
            for pattern in self.files.get(split, ()):
                for ending in _ENDINGS:
                    if found := sorted(path for path in folder.glob(pattern + ending) if path.is_file()):
                        return found
        return []

    def needed(self, data: Path, split: str, why: str = "") -> list[Path]:
        """As `find`. Raises ValueError where no file is there: what was looked for, and how to get it."""
        if found := self.find(data, split):
            return found
        patterns = self.files.get(split, ())
        looked = f"{data}/{self.folders[0]}/{{{', '.join(patterns)}}}" if patterns else "no file of this split"
        others = f" (or in {', '.join(self.folders[1:])})" if self.folders[1:] else ""
        raise ValueError(
            f"{self.task} needs its {split} split{why}, but looked for {looked}{others}, also as .gz and .bz2, and "
            f"found none; get the Hub data set {self.hub} with {self.command(data, split)}, or leave out the folder "
            "of data to let lm-eval download it"
        )

    def command(self, data: Path, split: str) -> str:
        """What writes the file of a split from the Hub."""
        named = f", {self.config!r}" if self.config else ""
        plain = next((name for name in self.files.get(split, ()) if name.endswith(".jsonl")), f"{split}.jsonl")
        goal = data / self.folders[0] / plain
        return (
            f'python -c "from datasets import load_dataset as get; get({self.hub!r}{named}, split={split!r})'
            f".to_json('{goal}')\""
        )


def converted(source: Source, split: str, paths: list[Path], cache: Path) -> Path:
    """The split as JSON lines with the Hub's fields, written once into the cache.

    Raises:
        ValueError: for files that cannot be read, and a cache that cannot be written.
    """
    stats = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    digest = hashlib.sha256(repr((_FORM, source.task, split, stats)).encode()).hexdigest()[:12]
    target = cache / f"{source.task}-{split}-{digest}.jsonl"
    if not target.is_file():
        write_beside(target, "".join(json_lines(rows_of(source.task, paths))))
    return target


def write_beside(target: Path, text: str) -> None:
    """Write a file under another name, then rename it: nothing half-written is ever read.

    Raises:
        ValueError: if the folder cannot be written.
    """
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(text, "utf-8")
        part.replace(target)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        fact = error.strerror or error
        raise ValueError(f"{target} cannot be written: {fact}; choose another cache folder") from error
