"""The two sides of a question, each a process of its own, started as a script by `boundary` and
never imported.

    python -ISB code_driver.py program|judge SOCKET OPTIONS

``program`` runs the model's program and answers calls of its function. ``judge`` runs the
question's tests, in which that function is a stub which asks over the socket, and prints the
verdict. A call and its answer are a line of JSON each, with literals in them and nothing else; an
answer must bear the tag of its call. So nothing that the program patches, overloads, walks through
or prints is seen by the tests: it can only be right.

Around both stands a boundary of the system. The audit hook in here is a second one, which keeps
honest and clumsy programs out of trouble; it is no wall against an attacker.
"""

import contextlib
import json
import os
import site
import sys
import types
from collections.abc import Callable
from typing import Any

MOST = 1 << 20
"""Bytes of an answer."""
KINDS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "bytes": bytes,
    "complex": lambda parts: complex(*parts),
}
HARMLESS: tuple[str, ...] = (
    "array.",
    "builtins.",
    "code.",
    "compile",
    "cpython.",
    "exec",
    "function.",
    "glob.",
    "import",
    "marshal.",
    "mmap.",
    "object.",
    "os.fwalk",
    "os.putenv",
    "os.unsetenv",
    "os.walk",
    "pathlib.",
    "pickle.",
    "sys._current",
    "sys._getframe",
    "sys.excepthook",
    "sys.monitoring",
    "sys.set",
    "sys.unraisable",
    "tempfile.",
    "time.",
)
UNSEEN = (
    "mkfifo",
    "mknod",
    "pidfd_open",
    "pidfd_send_signal",
    "setsid",
    "setpriority",
    "sched_setaffinity",
    "unshare",
)
"""Functions that no hook hears of."""
DEAF = ("_gdbm", "_dbm", "_multiprocessing", "_posixshmem", "_ssl", "_tkinter", "readline", "spwd")
"""Modules that open files, or ask the system, unheard."""
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


class VerdictError(Exception):
    """Ends the tests before their last line, with a status and a reason."""


def packed(value: Any) -> Any:
    """A literal as JSON has it, tagged if JSON lacks its type. Raises TypeError for any other
    value.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, list):
        return [packed(one) for one in value]
    if isinstance(value, dict):
        return {"dict": [[packed(key), packed(one)] for key, one in value.items()]}
    for name in ("tuple", "set", "frozenset", "bytes"):
        if isinstance(value, KINDS[name]):  # type: ignore[arg-type]
            return {name: [packed(one) for one in value]}
    raise TypeError(f"a {type(value).__name__} is no literal")


def unpacked(value: Any) -> Any:
    """Inverse of `packed`, with Python's own types alone."""
    if isinstance(value, list):
        return [unpacked(one) for one in value]
    if not isinstance(value, dict):
        return value
    ((name, parts),) = value.items()
    return KINDS[name](unpacked([*parts]))


def limit(seconds: int, memory: int) -> None:
    """Lower the limits of this process, for good; no file can grow."""
    import resource

    limits = {"CPU": seconds, "AS": memory, "FSIZE": 0, "NOFILE": 32, "CORE": 0, "NPROC": 0}
    for name, most in limits.items():
        # not every system knows every limit; the clock of the parent holds everywhere
        with contextlib.suppress(AttributeError, ValueError, OSError):
            kind = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(kind)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (most, most))


def step_down() -> None:
    """Give up every right: the superuser's on this machine, by being nobody, and those over a
    namespace of our own.
    """
    with contextlib.suppress(OSError):
        # in a namespace with one user there is no other to become
        os.setgroups([])
        os.setgid(65534)
        os.setuid(65534)
    if sys.platform == "linux":
        import ctypes

        libc = ctypes.CDLL(None)
        # PR_SET_NO_NEW_PRIVS; then no capability in either half of version 3's masks
        libc.prctl(38, 1, 0, 0, 0)
        libc.capset((0x20080522).to_bytes(4, sys.byteorder) + bytes(4), bytes(24))


def guard(readable: tuple[str, ...]) -> None:
    """Refuse everything that an answer to a programming question does not need: it computes, and
    reads its libraries.
    """
    for module in (os, sys.modules["posix"], __import__("signal"), sys.modules["_signal"]):
        for name in UNSEEN:
            vars(module).pop(name, None)

    # the program cannot reach the hook's names: none is of this module or of the builtins
    harmless, deaf, writing, of, number, text = HARMLESS, DEAF, WRITES, type, int, str

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir"):
            path = args[0]
            # by its whole path alone: a relative one may begin at any open folder
            known = of(path) is text and (
                path == "/dev/null" or (path.startswith(readable) and "/.." not in path)
            )
            reads = (
                event != "open"
                or path == "/dev/null"
                or (args[1] in (None, "r", "rb") and not args[2] & writing)
            )
            if of(path) is not number and not (known and reads):
                raise PermissionError(f"not allowed: {event} {path!r}")
        elif event == "import" and args[0] in deaf:
            raise ImportError(f"not allowed: {args[0]}")
        elif not event.startswith(harmless) and (event != "ctypes.dlopen" or args[0]):
            # numpy opens the interpreter itself, without a name
            raise PermissionError(f"not allowed: {event}")

    sys.addaudithook(hook)


def serve(channel: Any, reply: Any) -> None:
    """The program's side: run it, then answer calls until there are no more."""
    module = types.ModuleType("program")
    sys.modules["program"] = module
    function: Any = None
    for line in channel:
        asked = json.loads(line)
        said: dict[str, Any] = {"tag": asked["tag"], "value": None}
        try:
            if "program" in asked:
                exec(compile(asked["program"], "program.py", "exec"), module.__dict__)
                function = vars(module)[asked["name"]] if asked["name"] else None
            else:
                said["value"] = packed(
                    function(*unpacked(asked["given"]), **unpacked(asked["named"]))
                )
            text = json.dumps(said)
        except BaseException as error:
            # SystemExit too: a program that leaves has not passed
            text = json.dumps({"tag": asked["tag"], "raised": told(error)})
        reply.write(text.encode() + b"\n")
        reply.flush()


def told(error: BaseException) -> str:
    """An exception in words."""
    text = str(error)[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def judge(channel: Any, reply: Any, given: dict[str, Any]) -> tuple[str, str]:
    """The tests' side: the status of the program, and the reason."""

    def ask(**what: Any) -> Any:
        tag = os.urandom(8).hex()
        try:
            reply.write(json.dumps({"tag": tag, **what}).encode() + b"\n")
            reply.flush()
            line = channel.readline(MOST)
        except OSError:
            line = b""
        if not line:
            raise VerdictError("error", "the program's process ended before its last answer")
        try:
            said = json.loads(line)
            if said["tag"] != tag:
                raise ValueError("it bears the tag of another call")
            value = unpacked(said.get("value"))
        except Exception as error:
            raise VerdictError("failed", f"an answer that is none: {told(error)}") from error
        if "raised" in said:
            raise VerdictError("failed", str(said["raised"])[:200])
        return value

    def stub(*args: Any, **named: Any) -> Any:
        try:
            literals = {"given": packed(args), "named": packed(named)}
        except TypeError as error:
            raise VerdictError(
                "unjudged", f"its tests call it with what cannot be sent: {error}"
            ) from error
        return ask(**literals)

    try:
        ask(program=given["program"], name=given["name"])
        exec(
            compile(given["tests"], "tests.py", "exec"), {"__name__": "tests", given["name"]: stub}
        )
    except VerdictError as verdict:
        status, reason = verdict.args
        return status, reason
    except BaseException as error:
        return "failed", told(error)
    return "passed", ""


def main() -> None:
    """Take one side."""
    side, number, options = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
    # before the guard: the tests' side tells its verdict to the parent alone
    given, verdict = (json.loads(sys.stdin.readline()), os.dup(1)) if side == "judge" else ({}, -1)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    os.environ.clear()
    # numpy's libraries begin as many threads as there are processors, and end the process where
    # they may not
    os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    sys.path += [path for path in options["packages"] if path not in sys.path]
    # without site, which takes longer to begin than most programs to end
    site.setquit()
    sys.set_int_max_str_digits(0)
    step_down()
    limit(options["seconds"], options["memory"])
    if options["guarded"]:
        guard(tuple(options["readable"]))
    with open(number, "rb") as channel, open(number, "wb", closefd=False) as reply:
        if side == "program":
            serve(channel, reply)
        else:
            status, reason = judge(channel, reply, given)
            os.write(verdict, json.dumps({"status": status, "reason": reason}).encode())
    # threads and exit handlers that were left behind have no say any more
    os._exit(0)


if __name__ == "__main__":
    main()
