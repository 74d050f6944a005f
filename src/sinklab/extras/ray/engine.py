"""Ray as the engine of a study: workers that have the model loaded once and are handed a portion of
the samples at a time.

Placing processes on GPUs and machines, and noticing that one of them died, is the daily work of
an engine, so it is not written here. What is: who is given which portion, how often one is tried,
and that a worker computes the same as this process. Portions are fixed by the numbers of samples,
and no result depends on who computed it or when, so that the number of workers changes nothing.
This process alone writes.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import platform
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import sinklab
from sinklab.lab.analysis.sentences import counted
from sinklab.lab.files import load_plugin, plugins
from sinklab.lab.registry import engines
from sinklab.lab.studies.progress import Progress

TRIES = 3
"""Tries of a portion whose worker dies, before it is given up; one that is preempted costs none."""
STARTS = 4
"""Workers that may die while they start."""
PATIENCE = 1800.0
"""Seconds to wait for a worker that is to start while none computes."""
IN_FLIGHT = 2**30
"""Bytes of results that Ray holds on this machine at most: one a worker, and this process takes one
after the other.
"""
PASSED = ("HF_HOME", "HF_TOKEN", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")
"""Variables of the environment that workers are given."""
ALONE = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_worker_niceness": "0",
}
"""Environment of a Ray that joins no cluster."""

Portion = tuple[int, ...]
"""Numbers of samples that are computed together."""
Compute = Callable[[Portion], Any]
Begin = Callable[[], tuple[Mapping[str, str], Compute]]
"""Run once by each worker; returns what must be the same on all workers, and the function that
computes a portion.
"""


def code_facts() -> dict[str, str]:
    """Digest of the code, which must be the same wherever a run is computed."""
    folder = Path(sinklab.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    packages = {name: metadata.version(name) for name in ("torch", "transformers")}
    return {"source of sinklab": digest.hexdigest()[:16]} | packages


def surroundings() -> dict[str, Any]:
    """Environment, threads and plug-ins of this process, for workers."""
    import torch

    return {
        "environment": {name: os.environ[name] for name in PASSED if name in os.environ},
        "folder": os.getcwd(),
        "threads": torch.get_num_threads(),
        "plugins": [(path.name, path.read_bytes()) for path in plugins()],
    }


class Worker:
    """What Ray makes an actor of: the model, and the portion that it computes."""

    def begin(self, about: dict[str, Any], pickled: bytes) -> tuple[dict[str, str] | None, str]:
        """Load the model. Returns the facts of this worker, or else the error."""
        # Ray sets as many as the processors that it counts for a worker
        os.environ.pop("OMP_NUM_THREADS", None)
        os.environ.update(about["environment"])
        try:
            if os.path.isdir(about["folder"]):
                os.chdir(about["folder"])
            import torch

            torch.set_num_threads(about["threads"])
            with tempfile.TemporaryDirectory() as folder:
                for name, text in about["plugins"]:
                    path = Path(folder, name)
                    path.write_bytes(text)
                    load_plugin(path)
            facts, self._compute = pickle.loads(pickled)()
        except Exception as error:  # the driver tells of it
            return None, f"{type(error).__name__}: {error}"
        return code_facts() | dict(facts), ""

    def compute(self, portion: Portion) -> tuple[Any, str]:
        """The result of a portion, or else the error."""
        try:
            return self._compute(portion), ""
        except Exception as error:  # the driver tells of it
            return None, f"{type(error).__name__}: {error}"


@dataclass(frozen=True)
class End:
    """How a call of a worker ended."""

    result: Any
    error: str
    is_dead: bool = False
    charged: int = 1
    """Tries that a death uses up."""


@dataclass(frozen=True)
class Todo:
    """Portions that wait, and those that failed."""

    waiting: deque[Portion]
    tries: Counter[Portion] = field(default_factory=Counter)
    failed: dict[Portion, str] = field(default_factory=dict)

    def is_done(self, portion: Portion, end: End) -> bool:
        """Whether the portion has a result; else it waits again, or failed."""
        if not end.error:
            return True
        self.tries[portion] += end.charged
        if not end.is_dead:
            self.failed[portion] = end.error
        elif self.tries[portion] < TRIES:
            self.waiting.append(portion)
        else:
            self.failed[portion] = f"ended its worker {TRIES} times"
        return False


@engines.register("ray")
class Ray:
    """Workers of Ray; see `started`."""

    @staticmethod
    @contextmanager
    def started(workers: int, gpus: int) -> Iterator[Ray]:
        """Ray, on this machine or, where RAY_ADDRESS says so, a cluster; it ends with the block.

        Args:
            workers: how many.
            gpus: of each worker.

        Raises:
            ValueError: for no workers, without Ray, on another system than Linux, and for more GPUs
                than there are.
        """
        if workers < 1 or gpus < 0:
            raise ValueError(
                f"workers are 1 or more, and have 0 GPUs or more, got {workers} and {gpus}; leave "
                "them out to work in this process"
            )
        if platform.system() != "Linux":
            raise ValueError("workers need Linux; leave --workers out: this process does it all")
        # Ray reads these when it is imported: it sends nothing home and, if it joins no cluster,
        # listens to this machine and this user alone, and its workers are as urgent as this process
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        if "RAY_ADDRESS" not in os.environ and "ray" not in sys.modules:
            for name, value in ALONE.items():
                os.environ.setdefault(name, value)
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        try:
            import ray
        except ImportError:
            raise ValueError(
                'workers are those of Ray, which is not installed: pip install "sinklab[ray]", or '
                "divide the samples by --shard"
            ) from None
        is_ours = not ray.is_initialized()
        if is_ours:
            _start(ray, workers)
        try:
            there = int(ray.cluster_resources().get("GPU", 0))
            if workers * gpus > there:
                raise ValueError(
                    f"{workers} workers with {gpus} GPUs each need {workers * gpus} GPUs, but "
                    f"there are {there}; give fewer --workers, or --gpus-per-worker"
                )
            yield Ray(ray, workers, gpus)
        finally:
            if is_ours:
                ray.shutdown()

    def __init__(self, ray: Any, workers: int, gpus: int) -> None:
        self._ray = ray
        self._workers = workers
        self._actors = ray.remote(Worker).options(num_cpus=1, num_gpus=gpus)
        self._running: dict[Any, tuple[Any, Portion | None]] = {}
        """Result to come -> its worker, and the portion; None for one that starts."""
        self._deaths = 0
        """Workers that died while they started."""

    def results(
        self,
        begin: Begin,
        facts: Mapping[str, str],
        progress: Progress,
        portions: Sequence[Portion],
    ) -> Iterator[tuple[Portion, Any]]:
        """Each portion and its result, in the order in which they are done.

        A portion that raises an error, or whose worker dies `TRIES` times, is left out, and the
        others go on.

        Args:
            begin: run by each worker when it starts.
            facts: what must be the same on all workers, beside the code.
            progress: of all workers, in one line.
            portions: to compute.

        Raises:
            ValueError: at the end, for portions that were left out; for a worker that cannot start
                or has other facts.
        """
        pickled = self._ray.cloudpickle.dumps(begin)
        self._begin = self._ray.put(surroundings()), self._ray.put(pickled)
        expected = code_facts() | dict(facts)
        todo = Todo(deque(portions))
        progress.stage(counted(self._workers, "worker"))
        tick = progress.counter(len(portions))
        try:
            for _ in range(min(self._workers, len(portions))):
                self._start_worker()
            while todo.waiting or self._is_computing:
                actor, portion, end = self._next()
                if portion is None:
                    self._check_start(end, expected)
                elif todo.is_done(portion, end):
                    tick()
                    yield portion, end.result
                self._go_on(actor, end, todo.waiting)
        finally:
            for actor, _ in self._running.values():
                self._ray.kill(actor)
            self._running.clear()
        if todo.failed:
            found = sorted(todo.failed.items())
            raise ValueError(
                f"{len(found)} of {len(portions)} portions failed, and the others are done; the "
                f"same command tries them again. {'; '.join(map(_told, found))}"
            )

    @property
    def _is_computing(self) -> bool:
        return any(portion for _, portion in self._running.values())

    def _start_worker(self) -> None:
        actor = self._actors.remote()
        self._running[actor.begin.remote(*self._begin)] = actor, None

    def _next(self) -> tuple[Any, Portion | None, End]:
        """The worker that is done next, its portion, and how it ended."""
        done: list[Any] = []
        began = time.monotonic()
        while not done:
            done, _ = self._ray.wait([*self._running], timeout=0)
            # a signal that came while Ray waits would end this process in Ray's way
            time.sleep(0.01)
            if not (done or self._is_computing) and time.monotonic() > began + PATIENCE:
                raise ValueError(
                    f"no worker started within {PATIENCE / 60:.0f} min; look at the cluster with "
                    "`ray status`, and give the same command again"
                )
        actor, portion = self._running.pop(done[0])
        try:
            return actor, portion, End(*self._ray.get(done[0]))
        except self._ray.exceptions.RayError as death:
            said = str(death).partition("\n")[0]
            # a machine that is taken away says nothing about the sample
            charged = int(not getattr(death, "preempted", False))
            return actor, portion, End(None, said, is_dead=True, charged=charged)

    def _check_start(self, end: End, expected: Mapping[str, str]) -> None:
        """Raise ValueError for a worker that has other facts than expected or did not start, but
        not for each one that died.
        """
        if end.is_dead:
            self._deaths += end.charged
            if self._deaths >= STARTS:
                raise ValueError(f"workers die while they start: {end.error}")
            return
        if end.error:
            raise ValueError(f"a worker cannot start: {end.error}")
        for name, mine in expected.items():
            if end.result[name] != mine:
                raise ValueError(
                    f"a run is computed by the same {name} everywhere, but a worker has "
                    f"{end.result[name]}, and this process {mine}; install the same on all "
                    "machines, and give all the same model"
                )

    def _go_on(self, actor: Any, end: End, waiting: deque[Portion]) -> None:
        """Give the worker its next portion, or put another one in its place if it can do no more,
        as after an assertion on a GPU.
        """
        if end.is_dead or "device-side assert" in end.error:
            self._ray.kill(actor)
            if waiting:
                self._start_worker()
        elif waiting:
            chosen = waiting.popleft()
            self._running[actor.compute.remote(chosen)] = actor, chosen
        else:
            self._ray.kill(actor)


def _start(ray: Any, workers: int) -> None:
    """Start Ray on this machine, closed to others, or join a cluster."""
    how: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if "RAY_ADDRESS" not in os.environ:
        # not that of somebody else which happens to run here
        how |= {"address": "local", "include_dashboard": False}
        how |= {"num_cpus": workers, "object_store_memory": IN_FLIGHT}
    before = signal.getsignal(signal.SIGTERM)
    ray.init(**how)
    if threading.current_thread() is threading.main_thread():
        # Ray puts a handler of its own, which would end with another status
        signal.signal(signal.SIGTERM, before)
    # of a worker that died this process tells by itself, in its own words
    ray._private.worker._worker_logs_enabled = False


def _told(failed: tuple[Portion, str]) -> str:
    portion, error = failed
    named = f"sample {portion[0]}"
    if len(portion) > 1:
        named = f"samples {portion[0]} to {portion[-1]}"
    return f"{named}: {error}"
