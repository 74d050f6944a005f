"""One side of a pair of `peers.py`, in a process and an environment of its own: no import of
sinklab here.

    python peer_process.py DRIVER.py SETTINGS.json

A driver is a file with `prepare(settings) -> run` and `version(settings) -> text`; `run()` writes
once and returns the ids of the new tokens and the number of denoising evaluations. This process
loads, runs once without a clock, says what it has counted in one line of JSON, and then runs once
for every line that it reads. What a driver prints goes to stderr.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Run = Callable[[], tuple[list[int], int]]


def driver_of(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None, f"{path} is no Python file"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def counted(run: Run) -> dict[str, Any]:
    """One run with the calls of the network counted: every call embeds its ids once, whoever wrote
    the loop.
    """
    from torch.nn import functional as F

    widths: list[int] = []
    embedding = F.embedding

    def counting(ids: Any, *given: Any, **named: Any) -> Any:
        widths.append(ids.shape[-1])
        return embedding(ids, *given, **named)

    F.embedding = counting
    try:
        tokens, evaluations = run()
    finally:
        F.embedding = embedding
    return {
        "tokens": tokens,
        "evaluations": evaluations,
        "network_calls": len(widths),
        "positions_run": sum(widths),
    }


def timed(run: Run) -> dict[str, Any]:
    """Processor and wall seconds of one run, and its tokens."""
    wall, cpu = time.perf_counter(), time.process_time()
    tokens, _ = run()
    return {
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall,
        "tokens": tokens,
    }


def versions(driver: Any, settings: dict[str, Any]) -> dict[str, Any]:
    import torch
    import transformers

    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }
    return {**found, "transformers": transformers.__version__, "code": driver.version(settings)}


def main() -> None:
    import torch

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    settings = json.loads(Path(sys.argv[2]).read_text())
    driver = driver_of(sys.argv[1])
    run = driver.prepare(settings)
    found = {**counted(run), "versions": versions(driver, settings)}
    print(json.dumps(found), file=answers, flush=True)
    for _ in sys.stdin:
        taken = timed(run)
        taken["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(json.dumps(taken), file=answers, flush=True)


if __name__ == "__main__":
    main()
