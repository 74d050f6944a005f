"""Processes as forks of one that has imported the package: each costs its work, not seconds of
imports.

A fork has arguments, folder, environment, streams, signals and exit status of its own.
"""

import contextlib
import gc
import importlib
import json
import logging
import os
import pkgutil
import random
import runpy
import selectors
import signal
import socket
import sys
import traceback
from pathlib import Path
from types import ModuleType

COMMAND = """#!{python} -IS
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as asked:
    asked.connect({address!r})
    socket.send_fds(asked, [b" "], [0, 1, 2])
    asked.sendall(json.dumps([sys.argv, os.getcwd(), dict(os.environ)]).encode() + b"\\n")
    told = asked.makefile()
    fork, signals = int(told.readline()), (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        signal.signal(number, lambda number, frame: os.killpg(fork, number))
    status = int(told.readline() or 1)
for number in signals:
    signal.signal(number, signal.SIG_DFL)
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""
"""A process that hands its signals to its fork and what that starts, and ends as the fork does; if
it is killed, so are they, but a moment later.
"""


@contextlib.contextmanager
def forks(folder):
    """Commands `sinklab` and `python` in `folder` (a short path), whose processes are forks of this
    one as it is now.
    """
    address = str(folder / "socket")
    for name in ("sinklab", "python"):
        (folder / name).write_text(COMMAND.format(python=sys.executable, address=address), "utf-8")
        (folder / name).chmod(0o755)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        parent, process = os.getpid(), os.fork()
        if not process:
            try:
                import_all()
                listen(server, parent)
            finally:
                os._exit(0)
    try:
        yield
    finally:
        os.kill(process, signal.SIGTERM)
        os.waitpid(process, 0)


def run(command, *arguments):
    """The exit status of a command `sinklab`, or of a Python that is given a file, -m or -c."""
    try:
        if command == "sinklab":
            arguments = ("-m", command, *arguments)
        # all lines are written as they come
        kind, *sys.argv = arguments[1:] if arguments[0] == "-u" else arguments
        sys.path.insert(0, str(Path(kind).parent))
        if kind == "-m":
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            sys.modules["__main__"] = script = ModuleType("__main__")
            exec(sys.argv[0], vars(script))
        else:
            sys.argv.insert(0, kind)
            runpy.run_path(kind, run_name="__main__")
        return 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    return 1


def begin(command, streams, folder, environment):
    """Make of this process, a fork, one of its own: what a new interpreter finds."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout, sys.stderr = (os.fdopen(place, "w", 1, closefd=False) for place in (1, 2))
    for name in logging.root.manager.loggerDict:
        for handler in logging.getLogger(name).handlers:
            if type(handler) is logging.StreamHandler:
                handler.setStream(sys.stderr)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    sys.executable = str(command.with_name("python"))
    random.seed()


def fork(streams, given):
    """The number of a fork that does what is asked for, in a process group of its own."""
    child = os.fork()
    if child:
        os.setpgid(child, child)
        return child
    status = 1
    try:
        os.setpgid(0, 0)
        (command, *arguments), folder, environment = json.loads(given)
        begin(Path(command), streams, folder, environment)
        status = run(Path(command).name, *arguments)
        sys.stdout.flush()
    finally:
        os._exit(status)


def tell(asked, number):
    """Tell a process that may have ended."""
    with contextlib.suppress(OSError):
        asked.sendall(f"{number}\n".encode())


def listen(server, parent):
    """Fork for each that asks, and tell it how the fork ended, until the parent is gone."""
    events = selectors.DefaultSelector()
    events.register(server, selectors.EVENT_READ)
    while os.getppid() == parent:
        for event, _ in events.select(timeout=5)[:1]:
            if event.fileobj is server:
                asked, _ = server.accept()
                _, streams, *_ = socket.recv_fds(asked, 1, 3)
                # empty if it was killed at once
                given = asked.makefile().readline()
                child = fork(streams, given)
                for stream in streams:
                    os.close(stream)
                tell(asked, child)
                about = child, asked, os.pidfd_open(child)
                for each in about[1:]:
                    events.register(each, selectors.EVENT_READ, about)
                continue
            child, asked, end = event.data
            if event.fileobj is asked:
                # it says nothing more, so it was killed
                os.killpg(child, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            tell(asked, status)
            for each in (asked, end):
                events.unregister(each)
            asked.close()
            os.close(end)


def import_all():
    """Import what commands import."""
    import datasets  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    from transformers import LlamaForCausalLM, Trainer  # noqa: F401

    import sinklab

    for module in pkgutil.walk_packages(sinklab.__path__, "sinklab."):
        # what stands behind an extra is imported where it is there
        with contextlib.suppress(ImportError):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    # pages of forks are without pictures, which tests/reports draws
    with contextlib.suppress(ImportError):
        from pictures import undrawn
        from sinklab.lab.reports import build

        build.svg_of = undrawn
    # collections of garbage in forks need not look at it, nor copy it
    gc.freeze()
