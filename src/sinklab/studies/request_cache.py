"""Answers of a benchmark run, one JSON line each: a request that is answered there is not run again."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from sinklab.errors import from_json


def request_key(*parts: Any) -> str:
    """A name for a request: equal for equal parts, in every process and on every machine."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def request_number(seed: int, key: str) -> int:
    """The seed of one request: it depends on the run's seed and on the request, not on its neighbours."""
    return int(hashlib.sha256(f"{seed}:{key}".encode()).hexdigest()[:15], 16)


class RequestCache:
    """Answers by request key, in memory and, where a folder is given, in its files requests-<rank>.jsonl.

    Every process writes a file of its own and reads all of them, so that a run can be resumed with any number of
    processes. A line that was cut short by a kill is left out; so is one of another fingerprint.
    """

    def __init__(self, folder: Path | None, rank: int, fingerprint: str) -> None:
        self._path = None if folder is None else folder / f"requests-{rank}.jsonl"
        self._fingerprint = fingerprint
        self._answers: dict[str, dict[str, Any]] = {}
        for path in () if folder is None else sorted(folder.glob("requests-*.jsonl")):
            self._read(path)

    def _read(self, path: Path) -> None:
        for line in path.read_bytes().split(b"\n"):
            try:
                entry = from_json(line)
            except ValueError:
                # the last line of a process that was killed
                continue
            if isinstance(entry, dict) and entry.get("run") == self._fingerprint and "key" in entry:
                self._answers[entry["key"]] = entry.get("answer", {})

    def get(self, key: str) -> dict[str, Any] | None:
        """The answer to a request, None where there is none."""
        return self._answers.get(key)

    def add(self, answers: Mapping[str, dict[str, Any]] | Iterable[tuple[str, dict[str, Any]]]) -> None:
        """Keep answers; they are on the disk when this returns."""
        new = dict(answers)
        self._answers.update(new)
        if self._path is None or not new:
            return
        lines = [json.dumps({"run": self._fingerprint, "key": key, "answer": answer}) for key, answer in new.items()]
        with open(self._path, "ab+") as handle:
            begins_anew = ""
            if handle.tell():
                handle.seek(-1, os.SEEK_END)
                begins_anew = "" if handle.read(1) == b"\n" else "\n"
            handle.write((begins_anew + "\n".join(lines) + "\n").encode())
            handle.flush()
            os.fsync(handle.fileno())
