"""Escapes that a boundary must stop, tried from within: a program like those that models write, run
by `boundary`.

No hook is set while it runs, so that every refusal is the system's.
"""

import os
import socket


def make(folder: str) -> None:
    """Make a folder in another, and remove it."""
    os.mkdir(os.path.join(folder, "made"))
    os.rmdir(os.path.join(folder, "made"))


def escapes(secret: str, port: int, parent: int) -> list[str]:
    """Names of the escapes that succeeded.

    Args:
        secret: a file outside that this user alone may read.
        port: of 127.0.0.1, with a listener.
        parent: id of the process outside.
    """
    tried: list = [
        ("reads a file of the user", os.open, secret, 0),
        ("reads /etc/passwd", os.open, "/etc/passwd", 0),
        ("reads the environment of a process", os.open, f"/proc/{parent}/environ", 0),
        ("signals a process", os.kill, parent, 0),
        ("starts a process", lambda: os.fork() or os._exit(0)),
        ("reaches the network", socket.create_connection, ("127.0.0.1", port), 1),
        ("changes its root", os.chroot, "/"),
        ("becomes another user", os.setuid, 0 if os.getuid() else 1),
    ]
    folders = {
        "/",
        "/tmp",
        "/dev",
        "/dev/shm",
        os.getcwd(),
        os.path.dirname(secret),
        os.path.dirname(os.__file__),
    }
    tried += [(f"writes in {folder}", make, folder) for folder in sorted(folders)]
    found = []
    for name, attempt, *given in tried:
        try:
            attempt(*given)
            found.append(name)
        except OSError:
            pass
    return found
