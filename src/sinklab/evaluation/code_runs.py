"""Running programs that a model wrote: each in a fresh process with limits, its fate in one word and a reason."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

DRIVER = Path(__file__).with_name("code_driver.py")


@dataclass(frozen=True)
class CodeLimits:
    """What one program may use. Raises ValueError for limits that let nothing run."""

    seconds: float = 10.0
    """Time by the clock; processor time is limited to as much, rounded up."""
    memory: int = 1 << 30
    """Bytes of address space; Python itself needs some 200 MB of it."""
    file_size: int = 1 << 20
    """Bytes in any file it writes."""

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"a program needs time to run, but seconds is {self.seconds}; give some, such as 10")
        if self.memory < 256 << 20:
            raise ValueError(
                f"Python starts in no less than {256 << 20} bytes of address space, but memory is {self.memory}; "
                "give 1 GiB"
            )
        if self.file_size < 1 << 12:
            raise ValueError(f"the report of a run takes up to 4096 bytes, but file_size is {self.file_size}")


@dataclass(frozen=True)
class CodeResult:
    """How a program ended."""

    status: str
    """``passed``; ``failed``: it raised; ``timeout``: stopped by the clock; ``error``: it ended its process, or was
    ended, before its last line."""
    reason: str = ""
    """The exception, the limit or the way the process ended."""

    @property
    def passed(self) -> bool:
        """Whether it ran to its last line."""
        return self.status == "passed"

    def __str__(self) -> str:
        return f"{self.status}: {self.reason}" if self.reason else self.status


def run_program(program: str, limits: CodeLimits | None = None) -> CodeResult:
    """Run a program in a fresh ``python -I`` and wait for it.

    It has an empty environment, an empty working folder of its own, limits on time, memory, file size, open files and
    processes, no input and no output; writing elsewhere, other processes and the network are refused. When its time is
    over it is killed with its process group. It passes only by running to its last line: leaving early is an error.
    Run as the superuser it steps down to nobody first. All of that contains mistakes; against malice use a container.

    Raises:
        ValueError: where the system has no such limits (Windows).
    """
    if importlib.util.find_spec("resource") is None:
        raise ValueError("programs are run under limits that this system does not have; use Linux or macOS")
    limits = limits or CodeLimits()
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="sinklab-run-", ignore_cleanup_errors=True) as folder:
        home, report = Path(folder) / "home", Path(folder) / "report"
        home.mkdir()
        report.touch()
        given = {
            "program": program,
            "token": token,
            "report": str(report),
            "seconds": max(1, int(-(-limits.seconds // 1))),
            "memory": limits.memory,
            "size": limits.file_size,
        }
        ended = _waited(json.dumps(given).encode() + b"\n", home, limits.seconds)
        return _result(ended, report.read_bytes(), token, limits)


def _waited(given: bytes, home: Path, seconds: float) -> int | None:
    """The exit status of the driver; None when its time was over."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-B", str(DRIVER)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=home,
        env={},
        start_new_session=True,
    )
    try:
        process.communicate(given, timeout=seconds)
        return process.returncode
    except subprocess.TimeoutExpired:
        return None
    finally:
        # also when it ended by itself: what it may have started goes with it
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _result(ended: int | None, report: bytes, token: str, limits: CodeLimits) -> CodeResult:
    if ended is None:
        return CodeResult("timeout", f"{limits.seconds:g} s by the clock")
    try:
        told = json.loads(report or b"{}")
    except ValueError:
        told = {}
    if not isinstance(told, dict) or told.get("token") != token:
        if ended == -getattr(signal, "SIGXCPU", 0):
            return CodeResult("timeout", f"{limits.seconds:g} s of processor time")
        how = f"was ended by {signal.Signals(-ended).name}" if ended < 0 else f"left with status {ended}"
        return CodeResult("error", f"the process {how} before its last line")
    raised = str(told["raised"])
    return CodeResult("failed", raised) if raised else CodeResult("passed")


def run_programs(
    programs: Sequence[str], limits: CodeLimits | None = None, *, workers: int | None = None
) -> list[CodeResult]:
    """Run programs side by side; results in their order.

    Args:
        programs: each as for :func:`run_program`.
        limits: of each.
        workers: programs at a time; half of the processors, at most 8, when left out.
    """
    most = workers or max(1, min(8, (os.cpu_count() or 2) // 2))
    with ThreadPoolExecutor(most) as pool:
        return list(pool.map(lambda program: run_program(program, limits), programs))
