"""Commands in forks of one process that has imported the package: each costs its work, not seconds
of imports.

A command has arguments, folder, environment, streams and exit status of its own. `Forks` is what
tests use; run as a script, with the address of a socket, this file is the process that forks.
"""

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import runpy
import socket
import subprocess
import sys
import traceback
from pathlib import Path

COMMAND = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as asked:
    asked.connect({address!r})
    socket.send_fds(asked, [b" "], [0, 1, 2])
    asked.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode())
    asked.shutdown(socket.SHUT_WR)
    sys.exit(int(asked.recv(8) or b"1"))
"""


class Forks:
    """Makes a command `sinklab` in `folder` (a short path); it runs a Python file, too, that is its
    first argument.
    """

    def __init__(self, folder):
        self.folder, address = folder, str(folder / "socket")
        self.command = folder / "sinklab"
        self.command.write_text(COMMAND.format(python=sys.executable, address=address), "utf-8")
        self.command.chmod(0o755)
        self.process = subprocess.Popen([sys.executable, __file__, address], stdout=subprocess.PIPE)

    def __enter__(self):
        assert self.process.stdout.readline() == b"listening\n"
        return self

    def __exit__(self, *error):
        self.process.terminate()
        self.process.wait()
        self.process.stdout.close()


def run(arguments):
    """The exit status of a command or of a Python file, as of a process of its own."""
    from sinklab.lab.cli import main

    try:
        if not arguments or not arguments[0].endswith(".py"):
            sys.argv = ["sinklab", *arguments]
            return main()
        sys.argv, sys.path[0] = arguments, str(Path(arguments[0]).parent)
        runpy.run_path(arguments[0], run_name="__main__")
        return 0
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    return 1


def fork(asked):
    """The exit status of what is asked for, from a fork."""
    _, streams, *_ = socket.recv_fds(asked, 1, 3)
    with asked.makefile("rb") as given:
        arguments, folder, environment = json.load(given)
    if not (child := os.fork()):
        status = 1
        try:
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
            os.chdir(folder)
            os.environ.clear()
            os.environ.update(environment)
            status = run(arguments)
            sys.stdout.flush()
        finally:
            os._exit(status)
    for stream in streams:
        os.close(stream)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def listen(address):
    """Import what commands import, then fork for each that asks, one after the other, until the
    parent is gone.
    """
    import datasets  # noqa: F401
    import matplotlib.pyplot  # noqa: F401
    from transformers import LlamaForCausalLM, Trainer  # noqa: F401

    import sinklab

    for module in pkgutil.walk_packages(sinklab.__path__, "sinklab."):
        # what stands behind an extra is imported where it is there
        with contextlib.suppress(ImportError):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    with contextlib.suppress(ImportError):
        import torch.utils.tensorboard  # noqa: F401
    # collections of garbage in forks need not look at it, nor copy it
    gc.collect()
    gc.freeze()
    parent = os.getppid()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen()
        server.settimeout(5)
        print("listening", flush=True)
        while os.getppid() == parent:
            try:
                asked = server.accept()[0]
            except TimeoutError:
                continue
            with asked:
                asked.settimeout(None)
                asked.sendall(str(fork(asked)).encode())


if __name__ == "__main__":
    listen(sys.argv[1])
