"""Claims on a run or on one of its parts, held by living workers of one machine or of many.

A claim is a file in a folder that all workers share. Its holder writes a random name into it and a
number that grows; one whose file stays the same for `EXPIRY` seconds of the observer's own clock is
gone, regardless of other clocks. On one machine the kernel is asked first: it unlocks a file when
the process that locked it ends, so that a killed worker is followed at once. A process number is
never asked: containers give the same one again.
"""

import contextlib
import os
import secrets
import socket
import threading
import time
from pathlib import Path

CLAIMS = ".claims"
"""Folder of the claims, in the folder of the run; it goes when nobody holds one."""
BEAT, EXPIRY, POLL = 5.0, 60.0, 0.05
"""Seconds between two signs of life; without one until a holder counts as gone; between two looks
at the claims. EXPIRY is longer than network file systems may show an old state of a file.
"""
RUN, FINISH = "run", "finish"
"""Names claimed beside parts: run.json (for a run that has one writer: all of it), and the files
that need all parts.
"""


def _kernel() -> str:
    """A name for the running kernel, of which there is one a machine and start; empty if it has
    none.
    """
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _locks(descriptor: int, *, alone: bool) -> bool:
    """Whether the kernel locks an open file; False if its system or file system cannot."""
    try:
        import fcntl

        how = fcntl.LOCK_SH
        if alone:
            how = fcntl.LOCK_EX
        fcntl.flock(descriptor, how | fcntl.LOCK_NB)
    except (ImportError, OSError):
        return False
    return True


class Lease(contextlib.AbstractContextManager):
    """A claim that is held: it beats until it is released, which the end of a with block does."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path, self._file, self._beats = path, descriptor, 0
        holds = _locks(descriptor, alone=True)
        with open(path, "rb") as other:
            # some file systems say that they lock, and do not
            holds = holds and not _locks(other.fileno(), alone=False)
        kernel = ""
        if holds:
            kernel = _kernel()
        self._holder = f"{kernel} {secrets.token_hex(8)} {socket.gethostname()}"
        self._sign()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._live, daemon=True)
        self._thread.start()

    def _sign(self) -> None:
        self._beats += 1
        os.pwrite(self._file, f"{self._holder} {self._beats:08d}\n".encode(), 0)

    def _live(self) -> None:
        while not self._ends.wait(BEAT):
            with contextlib.suppress(OSError):
                self._sign()
                # a network file system keeps it to itself otherwise
                os.fsync(self._file)

    def is_held(self) -> bool:
        """Whether nobody has taken it over since, as happens to a process that is stopped for
        longer than EXPIRY.
        """
        return self.path.exists()

    def release(self) -> None:
        """Let go of it; again does nothing."""
        if not self._ends.is_set():
            self._ends.set()
            self._thread.join()
            try:
                self.path.unlink(missing_ok=True)
            finally:
                # what could not be removed is seen to be free then
                os.close(self._file)
            with contextlib.suppress(OSError):
                self.path.parent.rmdir()

    def __exit__(self, *error: object) -> None:
        self.release()


class Claims:
    """The claims of a run folder, as one worker sees them.

    A claim on a name is the file ``name.n`` with the next number that is free, which one worker
    alone can make. It counts if nothing moved meanwhile: all earlier claims are unchanged, and
    their holders are gone.
    """

    def __init__(self, run: Path) -> None:
        self.folder = run / CLAIMS
        self._seen: dict[Path, tuple[bytes, float, bool]] = {}

    def take(self, name: str) -> Lease | None:
        """A claim on `name`; None while somebody else holds it, or may."""
        before = self._read(name)
        if any(self._lives(path) is not False for path in before):
            return None
        number = 1 + max((int(path.suffix[1:]) for path in before), default=0)
        path = self.folder / f"{name}.{number}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        except (FileExistsError, FileNotFoundError):
            # another one was faster, or was the last to leave and took the folder away
            return None
        try:
            lease = Lease(path, descriptor)
        except BaseException:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        if {
            other: content for other, content in self._read(name).items() if other != path
        } != before:
            lease.release()
            return None
        for other in before:
            other.unlink(missing_ok=True)
        return lease

    def seek(self, name: str) -> Lease | None:
        """The claim on `name` once it is free; None once its holder shows life."""
        lease = self.take(name)
        while lease is None:
            if self.is_held(name):
                return None
            time.sleep(POLL)
            lease = self.take(name)
        return lease

    def hold(self, name: str, *, wait: bool = True) -> Lease:
        """The claim on `name` once it is free. Raises ValueError, with `wait` off, when its holder
        shows life.
        """
        lease = self.seek(name)
        while lease is None:
            if not wait:
                raise ValueError(
                    f"one process at a time writes a run, but {self.folder.parent} is being "
                    f"written by another one {self._where(name)}; wait until it has ended, and "
                    "continue with --resume if something is missing"
                )
            time.sleep(POLL)
            lease = self.seek(name)
        return lease

    def is_held(self, name: str) -> bool:
        """Whether a worker that shows life holds `name`."""
        return any(self._lives(path) is True for path in self._read(name))

    def are_free(self) -> bool:
        """Whether no worker that lives, or may, works here; the holder of `RUN` may ask, and its
        own claim does not count.

        Claims of workers that are gone are removed.
        """
        others = [path for path in self._read() if path.stem != RUN]
        gone = [path for path in others if self._lives(path) is False]
        for path in gone:
            path.unlink(missing_ok=True)
        return len(gone) == len(others)

    def _read(self, name: str = "*") -> dict[Path, bytes]:
        """Contents of the claims on `name`, or of all claims; one that goes meanwhile is none."""
        found: dict[Path, bytes] = {}
        with contextlib.suppress(FileNotFoundError):
            for path in [*self.folder.iterdir()]:
                if path.suffix[1:].isdigit() and name in ("*", path.stem):
                    with contextlib.suppress(FileNotFoundError):
                        found[path] = path.read_bytes()
        return found

    def _lives(self, path: Path) -> bool | None:
        """Whether the holder of a claim lives; None while that cannot be told."""
        try:
            with open(path, "rb") as file:
                content = file.read()
                kernel = _kernel()
                is_here = bool(kernel) and content.startswith(kernel.encode())
                if is_here and _locks(file.fileno(), alone=False):
                    return False
        except FileNotFoundError:
            return False
        now = time.monotonic()
        before, since, moved = self._seen.get(path, (content, now, False))
        if content != before:
            since, moved = now, True
        self._seen[path] = content, since, moved
        if now - since > EXPIRY:
            return False
        # a lock without signs of life may be that of a child that outlives its parent
        if moved or is_here:
            return True
        return None

    def _where(self, name: str) -> str:
        words = [content.decode().split(" ") for content in self._read(name).values()]
        return next((f"on {holder[2]}" for holder in words if len(holder) > 2), "elsewhere")
