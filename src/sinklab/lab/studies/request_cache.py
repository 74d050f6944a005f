"""Answers of a benchmark run, one JSON line each: a request that is answered there is not run
again.
"""

import hashlib
import itertools
import json
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from sinklab.lab.files import from_json
from sinklab.lab.records.leases import Claims, Lease


def request_key(*parts: Any) -> str:
    """A name for a request: equal for equal parts, in every process and on every machine."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def request_number(seed: int, key: str) -> int:
    """The seed of one request: it depends on the run's seed and on the request, not on its
    neighbours.
    """
    return int(hashlib.sha256(f"{seed}:{key}".encode()).hexdigest()[:15], 16)


class RequestCache:
    """Answers by request key, in memory and, if a folder is given, in its files
    requests-<number>.jsonl.

    Every worker writes a file of its own, the first that nobody holds, and reads all of them, so
    that a run can be resumed with any number of workers. A line that was cut short by a kill is
    left out; so is one of another fingerprint. The end of its with block lets go of the file.
    """

    def __init__(self, folder: Path | None, claims: Claims | None, fingerprint: str) -> None:
        self._folder = folder
        self._fingerprint = fingerprint
        self._answers: dict[str, dict[str, Any]] = {}
        self._read: dict[Path, int] = {}
        self._path: Path | None = None
        self._lease: Lease | None = None
        if folder is not None and claims is not None:
            for number in itertools.count():
                self._lease = claims.seek(f"requests-{number}")
                if self._lease is not None:
                    self._path = folder / f"requests-{number}.jsonl"
                    break
        self.refresh()

    def refresh(self) -> None:
        """Read the answers that all workers have added since."""
        if self._folder is None:
            return
        for path in sorted(self._folder.glob("requests-*.jsonl")):
            read = self._read.get(path, 0)
            with open(path, "rb") as file:
                file.seek(read)
                # another worker may be writing the last line
                whole, end, _ = file.read().rpartition(b"\n")
            self._read[path] = read + len(whole + end)
            for line in whole.split(b"\n"):
                # the last line of a worker that was killed is none
                with suppress(ValueError):
                    entry = from_json(line, dict)
                    if entry.get("run") == self._fingerprint and "key" in entry:
                        self._answers.setdefault(entry["key"], entry.get("answer", {}))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._lease is not None:
            self._lease.release()

    def get(self, key: str) -> dict[str, Any] | None:
        """The answer to a request, None if there is none."""
        return self._answers.get(key)

    def has(self, keys: Iterable[str]) -> bool:
        """Whether all of these requests are answered."""
        return all(key in self._answers for key in keys)

    def add(
        self, answers: Mapping[str, dict[str, Any]] | Iterable[tuple[str, dict[str, Any]]]
    ) -> None:
        """Keep answers to requests without one; they are on the disk when this returns."""
        new = {key: answer for key, answer in dict(answers).items() if key not in self._answers}
        self._answers.update(new)
        if self._path is None or not new:
            return
        with open(self._path, "ab+") as handle:
            if handle.tell():
                handle.seek(-1, os.SEEK_END)
                if handle.read(1) != b"\n":
                    # behind a line that was cut short
                    handle.write(b"\n")
            for key, answer in new.items():
                entry = {"run": self._fingerprint, "key": key, "answer": answer}
                handle.write(json.dumps(entry).encode() + b"\n")
            handle.flush()
            os.fsync(handle.fileno())
