"""Runs one program under limits and says how it ended. Started by `code` as a script of its own, never imported.

Standard input holds a line of JSON: the program, a token, limits, and where to report. The program is taken as run to
its end only where the report holds the token, so that leaving early is no success. Writing, starting processes and
the network are refused by an audit hook, which keeps honest and clumsy programs out of trouble. It is no wall against
an attacker: that takes a container.
"""

import json
import os
import sys
import threading
import types
from typing import Any

REFUSED = ("ctypes.dlsym", "ctypes.addressof", "socket.", "subprocess.", "shutil.", "pty.", "gc.", "urllib.", "http.")
REFUSED_OS = ("fork", "forkpty", "exec", "posix_spawn", "spawn", "system", "kill", "killpg", "startfile")
CHANGING_OS: tuple[str, ...] = ("remove", "rename", "rmdir", "mkdir", "chmod", "chown", "link", "symlink", "truncate")
CHANGING_OS += ("utime", "chflags")
OTHERS = ("sys._current_frames", "resource.setrlimit", "resource.prlimit", "signal.pthread_kill", "os.chdir")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def limit(seconds: int, memory: int, size: int) -> None:
    """Lower what this process may use, for good."""
    import resource

    limits = {"CPU": seconds, "AS": memory, "FSIZE": size, "NOFILE": 32, "CORE": 0, "NPROC": 0}
    for name, most in limits.items():
        try:
            kind = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(kind)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (most, most))
        except (AttributeError, ValueError, OSError):
            # not every system knows every limit; the parent's clock holds everywhere
            continue


def step_down() -> None:
    """From the superuser, whom permissions do not hold, to nobody; not where nobody may read Python's own files."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return
    nobody = 65534
    try:
        os.chown(".", nobody, nobody)
        os.seteuid(nobody)
        readable = os.access(os.__file__, os.R_OK, effective_ids=True)
        os.seteuid(0)
        if readable:
            os.setgroups([])
            os.setgid(nobody)
            os.setuid(nobody)
    except OSError:
        # a container may have no such user; the audit hook stays
        os.seteuid(0)


def guard(home: str) -> None:
    """Refuse what an answer to a programming question has no business doing."""

    def inside(path: Any) -> bool:
        if isinstance(path, int):
            return path > 2
        full = os.path.realpath(os.fsdecode(path))
        return full == home or full.startswith(home + os.sep)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            path, mode, flags = args
            writes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else (flags or 0) & WRITES
            if writes and path != os.devnull and not inside(path):
                raise PermissionError(f"writing outside the working folder: {path}")
        elif event.startswith("os."):
            name = event[3:]
            if name in REFUSED_OS:
                raise PermissionError(f"not allowed: {event}")
            if name in CHANGING_OS and not all(inside(path) for path in args[:2] if isinstance(path, str | bytes)):
                raise PermissionError(f"changing files outside the working folder: {event} {args[0]}")
        # numpy opens the interpreter itself, without a name
        elif event.startswith(REFUSED) or event in OTHERS or (event == "ctypes.dlopen" and args[0]):
            raise PermissionError(f"not allowed: {event}")

    sys.addaudithook(hook)


def ran(program: str, outcome: list[str]) -> None:
    """The program in a module of its own; how it ended goes into `outcome`."""
    module = types.ModuleType("program")
    sys.modules["program"] = module
    try:
        exec(compile(program, "program.py", "exec"), module.__dict__)
    except BaseException as error:
        # SystemExit too: a program that leaves has not passed
        text = str(error)[:200]
        outcome.append(f"{type(error).__name__}: {text}" if text else type(error).__name__)
    else:
        outcome.append("")


def main() -> None:
    """Read what to run, run it, report."""
    given = json.loads(sys.stdin.readline())
    report = os.open(given["report"], os.O_WRONLY)
    null = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(null, number)
    token, program = given.pop("token"), given.pop("program")
    outcome: list[str] = []
    ready = threading.Event()

    def begin() -> None:
        ready.wait()
        ran(program, outcome)

    # a thread: no frame of the program leads back to the token, and deep recursion has a stack. It must be there
    # before the limit on processes, which counts threads.
    threading.stack_size(64 << 20)
    worker = threading.Thread(target=begin, daemon=True)
    worker.start()
    step_down()
    limit(given["seconds"], given["memory"], given["size"])
    guard(os.path.realpath(os.getcwd()))
    ready.set()
    worker.join()
    # the last word counts: the program could reach the list and write there, but not after its own end
    answer = json.dumps({"token": token, "raised": outcome[-1]})
    os.write(report, answer.encode())
    # what the program left behind, such as threads and exit handlers, has no say any more
    os._exit(0)


if __name__ == "__main__":
    main()
