"""What a boundary must not let through, tried from within: a program like those that models write, run by `boundary`.

No hook is set while it runs, so that what is refused is refused by the system.
"""

import os
import socket
from collections.abc import Callable
from functools import partial


def make(folder: str) -> None:
    """Make a folder in another, and remove it."""
    os.mkdir(os.path.join(folder, "made"))
    os.rmdir(os.path.join(folder, "made"))


def escapes(secret: str, port: int, parent: int) -> list[str]:
    """What could be done that must not be.

    Args:
        secret: a file outside that this user alone may read.
        port: of 127.0.0.1, where somebody listens.
        parent: id of the process outside.
    """
    tried: dict[str, Callable[[], object]] = {
        "reads a file of the user": lambda: os.open(secret, 0),
        "reads /etc/passwd": lambda: os.open("/etc/passwd", 0),
        "reads the environment of a process": lambda: os.open(f"/proc/{parent}/environ", 0),
        "signals a process": lambda: os.kill(parent, 0),
        "starts a process": lambda: os.fork() or os._exit(0),
        "reaches the network": lambda: socket.create_connection(("127.0.0.1", port), 1),
        "changes its root": lambda: os.chroot("/"),
        "becomes another user": lambda: os.setuid(0 if os.getuid() else 1),
    }
    for folder in {"/", "/tmp", "/dev", "/dev/shm", os.getcwd(), os.path.dirname(secret), os.path.dirname(os.__file__)}:
        tried[f"writes in {folder}"] = partial(make, folder)
    found = []
    for name, attempt in tried.items():
        try:
            attempt()
            found.append(name)
        except OSError:
            pass
    return sorted(found)
