"""Programs that a model wrote, run behind a boundary of the system, and judged by a process that
they never enter.
"""

import contextlib
import functools
import importlib.util
import json
import math
import os
import signal
import site
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sinklab.core.errors import Checked, limited

DRIVER = Path(__file__).with_name("code_driver.py")
PYTHON = os.path.realpath(sys.executable)
PACKAGES = site.getsitepackages([sys.prefix, sys.base_prefix])
_LIBRARIES = [
    "/lib",
    "/lib64",
    "/usr/lib",
    "/usr/lib64",
    "/etc/ld.so.cache",
    f"{sys.base_prefix}/lib",
]
_LIBRARIES += [f"{sys.base_prefix}/lib64", *PACKAGES, PYTHON, str(DRIVER)]
_FOUND = {Path(path) for path in _LIBRARIES if os.path.exists(path)}
# an installed driver lies among the packages: nothing can be mounted there any more
READABLE = sorted(str(path) for path in _FOUND if _FOUND.isdisjoint(path.parents))
"""Paths of this machine that a program can read: the interpreter, its libraries, and the driver
that runs the program.
"""

_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class CodeLimits(Checked):
    """Limits of one program. Raises ValueError for limits that let nothing run."""

    seconds: float = limited(10.0, above=0)
    """Time by the clock; processor time is limited to as much, rounded up."""
    memory: int = limited(1 << 30, at_least=256 << 20)
    """Bytes of address space; Python itself needs some 200 MB of it."""


TRIAL = CodeLimits(seconds=300)
"""Limits of the escapes that are tried behind a boundary: a slow machine must not be taken for one
without a boundary that holds.
"""


@dataclass(frozen=True)
class CodeResult:
    """End of a program: a status and a reason."""

    status: str
    """``passed``; ``failed``: it raised, or a test did; ``timeout``: stopped by the clock;
    ``error``: it ended its process, or was ended, before its last answer; ``unjudged``: the tests
    call it with a value that is no literal.
    """
    reason: str = ""
    """The exception, the limit or the way the process ended."""

    @property
    def passed(self) -> bool:
        """Whether it ran, and its answers passed every test."""
        return self.status == "passed"

    def __str__(self) -> str:
        return f"{self.status}: {self.reason}" if self.reason else self.status


def _bubblewrap(folder: str) -> list[str]:
    # folders on the way are made first: bubblewrap would give them the mode that they have outside
    above = sorted(
        {str(parent) for path in READABLE for parent in Path(path).parents if parent.name}
    )
    mounts = [word for path in above for word in ("--dir", path)]
    mounts += [word for path in READABLE for word in ("--ro-bind", path, path)]
    # the superuser needs no namespace of users, in which nobody would still be the superuser to the
    # files outside
    who = "--cap-drop ALL --cap-add CAP_SETUID --cap-add CAP_SETGID"
    who = who if os.geteuid() == 0 else "--unshare-user --uid 65534 --gid 65534"
    apart = (
        "--unshare-pid --unshare-net --unshare-ipc --unshare-uts --die-with-parent --dev-bind "
        "/dev/null /dev/null"
    )
    return ["bwrap", *apart.split(), *who.split(), *mounts, "--remount-ro", "/", "--"]


def _namespaces(folder: str) -> list[str]:
    who = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    apart = "--mount --pid --net --ipc --uts --fork --kill-child"
    script = ["sh", str(DRIVER.with_name("code_mounts.sh")), folder]
    return ["unshare", *who, *apart.split(), *script, "/dev/null", *READABLE, "--"]


HOOK = "audit hook"
BOUNDARIES: dict[str, Callable[[str], list[str]]] = {
    "bubblewrap": _bubblewrap,
    "namespaces": _namespaces,
    HOOK: lambda folder: [],
}
"""Name of a boundary -> the command that another one is run behind, given an empty folder; the
first that holds is taken.
"""


@functools.cache
def leaks(name: str) -> str:
    """Leaks of a boundary when escapes were tried behind it; empty if it held."""
    with (
        tempfile.NamedTemporaryFile() as secret,
        socket.create_server(("127.0.0.1", 0)) as listening,
    ):
        given = (secret.name, listening.getsockname()[1], os.getpid())
        program = Path(__file__).with_name("code_escapes.py").read_text("utf-8")
        tests = f"found = escapes(*{given!r})\nassert not found, ', '.join(found)"
        result = run_program(
            program, TRIAL, tests=tests, name="escapes", within=name, guarded=False
        )
    return "" if result.passed else str(result)


@functools.cache
def boundary() -> str:
    """The boundary that programs run behind here: the first that holds when escapes are tried; they
    are tried once.

    Raises:
        ValueError: if the system has no limits for processes (Windows), and for the superuser
            without a boundary.
    """
    if importlib.util.find_spec("resource") is None:
        raise ValueError(
            "programs are run under limits that this system does not have; use Linux or macOS"
        )
    of_system = [name for name in BOUNDARIES if name != HOOK]
    held = next((name for name in of_system if not leaks(name)), HOOK)
    if held == HOOK and os.geteuid() == 0:
        found = "; ".join(f"{name}: {leaks(name)}" for name in of_system)
        raise ValueError(
            "programs that a model wrote are not run as the superuser without a boundary, and none "
            f"holds ({found}); run as an ordinary user, or install bubblewrap and allow namespaces "
            "(in a container: --privileged)"
        )
    return held


def run_program(
    program: str,
    limits: CodeLimits | None = None,
    *,
    tests: str = "",
    name: str = "",
    within: str | None = None,
    guarded: bool = True,
) -> CodeResult:
    """Run a program behind a boundary, and tests of its function in another process behind another
    one.

    The program sees the interpreter and its libraries, and can write nothing at all; it has no
    environment, no other processes, no network, and limits on time, memory and open files. Its
    function is called over a socket with literals and answers with literals, of which the tests see
    copies. When the time is over both are killed.

    Args:
        program: Python.
        limits: of each of the two processes.
        tests: Python, in which `name` is the program's function.
        name: of the function; empty if the program is only to run to its last line.
        within: one of `BOUNDARIES`; the first that holds when left out.
        guarded: set the audit hook too.

    Raises:
        ValueError: if there is no boundary to run it behind, see :func:`boundary`.
    """
    limits, within = limits or CodeLimits(), within or boundary()
    options = {
        "seconds": max(1, math.ceil(limits.seconds)),
        "memory": limits.memory,
        "packages": PACKAGES,
    }
    options |= {"readable": READABLE, "guarded": guarded}
    asked = json.dumps({"program": program, "tests": tests, "name": name}).encode() + b"\n"
    with (
        tempfile.TemporaryDirectory(prefix="sinklab-run-") as folder,
        contextlib.ExitStack() as running,
    ):
        command = [*BOUNDARIES[within](folder), PYTHON, "-ISB", str(DRIVER)]
        channels = [running.enter_context(channel) for channel in socket.socketpair()]
        try:
            for side, channel in zip(("program", "judge"), channels, strict=True):
                process = _begun(
                    [*command, side, str(channel.fileno()), json.dumps(options)], folder, channel
                )
                running.enter_context(process)
                running.callback(_kill, process)
            told = process.communicate(asked, timeout=limits.seconds)[0]
        except OSError as error:
            return CodeResult("error", f"{command[0]} cannot be started: {error.strerror}")
        except subprocess.TimeoutExpired:
            return CodeResult("timeout", f"{limits.seconds:g} s by the clock")
    return (
        CodeResult(**json.loads(told))
        if told
        else CodeResult("error", "its tests could not be run to their end")
    )


def _begun(command: list[str], folder: str, channel: socket.socket) -> subprocess.Popen[bytes]:
    """A process in a session of its own, which alone holds its end of the channel."""
    how: dict[str, Any] = {"cwd": folder, "env": {"PATH": _PATH}, "start_new_session": True}
    how |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with channel:
        return subprocess.Popen(command, pass_fds=[channel.fileno()], **how)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill the group of a process, also when it ended by itself: its children go with it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def run_programs(
    programs: Sequence[tuple[str, str, str]],
    limits: CodeLimits | None = None,
    *,
    workers: int | None = None,
) -> list[CodeResult]:
    """Run programs side by side; results in their order.

    Args:
        programs: program, tests and name of each, as for :func:`run_program`.
        limits: of each.
        workers: programs at a time; half of the processors, at most 8, when left out.
    """
    most = workers or max(1, min(8, (os.cpu_count() or 2) // 2))
    within = boundary() if programs else ""
    with ThreadPoolExecutor(most) as pool:
        run = functools.partial(run_program, limits=limits, within=within)
        begun = [
            pool.submit(run, program, tests=tests, name=name) for program, tests, name in programs
        ]
        return [each.result() for each in begun]
