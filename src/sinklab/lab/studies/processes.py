"""The progress of work, and runs over several workers, each of which claims its next
unit.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

from sinklab.lab.files import launched
from sinklab.lab.records.leases import POLL, Claims, Lease

Tick = Callable[[], object]
"""Called after each of some evaluations."""


def nothing(*said: object) -> None:
    """Tell nobody, where progress would be told."""


class Progress:
    """The progress of a long run in words; the command line draws a bar with the time left."""

    whole = 0.0
    """Seconds that runs with a limit take as a whole, at the rate that was measured."""

    def __init__(self, say: Callable[[str], object] = nothing) -> None:
        self._say = say

    def stage(self, text: str) -> None:
        """A new stage begins."""
        self._say(text)

    def note(self, text: str) -> None:
        """What is not to be missed, however long it takes."""
        self._say(text)

    def count(self, done: float, total: float) -> None:
        """`done` of `total` parts of the pass in work are done; the total may shrink if a text ends
        early.

        Less than before begins another pass. A part that takes long may be counted while it is
        done, as a fraction.
        """

    def counter(self, total: int) -> Callable[[], None]:
        """A function to call after each of `total` evaluations."""
        numbers = iter(range(1, total + 1))
        self.count(0, total)
        return lambda: self.count(next(numbers, total), total)


def duration(seconds: float) -> str:
    """Seconds in the unit that suits them, with two digits."""
    unit, size = next(
        (one for one in (("h", 3600), ("min", 60)) if seconds >= 2 * one[1]), ("s", 1)
    )
    number = max(seconds / size, 0.1)
    # two digits of 100 and more would be written with an exponent
    if number < 99.5:
        return f"{number:.2g} {unit}"
    return f"{number:,.0f} {unit}"


Audience = Progress | Callable[[str], object] | None
"""Progress to show, or a function that is called with the text of each stage."""


def as_progress(given: Audience) -> Progress:
    """`given` as a Progress: a function is called with the text of each stage; None says
    nothing.
    """
    if isinstance(given, Progress):
        return given
    if given is None:
        return Progress()
    return Progress(given)


class Meter:
    """Counts the evaluations of a study of several parts (texts, blocks), each of at most `steps`
    steps.
    """

    def __init__(self, progress: Progress, parts: int, steps: int) -> None:
        self.progress = progress
        self.done = 0
        self.total = parts * steps
        self.steps = steps
        self._started = 0
        self._said = ""

    def stage(self, text: str) -> None:
        """A part begins; the text is told if it is another one than before."""
        self._started = self.done
        if text != self._said:
            self._said = text
            self.progress.stage(text)
        self.progress.count(self.done, self.total)

    def step(self) -> None:
        """Count one more evaluation."""
        self.done += 1
        self.total = max(self.total, self.done)
        self.progress.count(self.done, self.total)

    def end(self) -> None:
        """The part is over; steps that it did not need are no longer to come."""
        self.total -= max(self.steps - (self.done - self._started), 0)
        self.progress.count(self.done, max(self.total, self.done))


PORTION = 4
"""Samples in a row that one worker tries: a study may compute them together."""
# lm-eval's own command has processes wait for each other: hours on large models
PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class Processes:
    """This worker among those that share a run: of ``--shard i/n``, of `accelerate launch` or
    `torchrun`, or alone.

    Workers share a folder and nothing else: any number of them may come, end and come back.
    """

    rank: int = 0
    world: int = 1
    joins: bool = False
    """Whether it joins a run that others may have begun."""
    finished: list[Path] = field(default_factory=list, compare=False)
    """Run folders to which this worker wrote the last."""

    @classmethod
    def here(cls, shard: str | None = None) -> Processes:
        """This worker by ``--shard`` or the environment. Raises ValueError for ranks and shards
        that make no sense.
        """
        if shard is None:
            rank, world = launched()
            return cls(rank, world, joins=world > 1)
        given, _, shards = shard.partition("/")
        if not (given.isdigit() and shards.isdigit() and int(given) < int(shards)):
            raise ValueError(
                f"--shard is i/n with i from 0 to n - 1, such as 0/4, but got {given!r} and "
                f"{shards!r}"
            )
        return cls(int(given), int(shards), joins=True)

    @property
    def is_first(self) -> bool:
        """Whether this process shows the progress: the others would say the same."""
        return int(os.environ.get("RANK", "0")) == 0

    def ordered(self, samples: Iterable[int]) -> list[int]:
        """Samples in the order in which this worker tries them: its own portions first, by their
        numbers, then the others'.
        """
        return sorted(
            samples,
            key=lambda sample: ((sample // PORTION - self.rank) % self.world != 0, sample),
        )

    def gathered(self, value: Any) -> list[Any]:
        """The values of all processes, in every process."""
        if self.world == 1:
            return [value]
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=PATIENCE)
            # its threads must end before the interpreter does: a process that aborts takes the
            # others with it
            atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())
        found = [None] * self.world
        dist.all_gather_object(found, value)
        return found


class Units(AbstractContextManager):
    """Units still to be done, claimed one by one; a unit that another worker has is awaited, and
    done if it dies.

    Iterated, it gives the units that this worker has to do; its end says that all are done, by
    whomever. The end of its with block lets go of the unit in work.
    """

    def __init__(
        self,
        claims: Claims | None,
        units: Sequence[Any],
        is_done: Callable[[Any], bool],
        refresh: Tick = nothing,
    ) -> None:
        """
        Args:
            claims: of the run folder; None if there is one worker.
            units: in the order in which they are tried; their texts name the claims.
            is_done: whether a unit was done by any worker when `refresh` looked.
            refresh: looks.
        """
        self._claims = claims
        self._units = units
        self._is_done = is_done
        self._refresh = refresh
        self._lease: Lease | None = None

    def __len__(self) -> int:
        return len(self._units)

    def __iter__(self) -> Iterator[Any]:
        if self._claims is None:
            yield from self._units
            return
        todo = [*self._units]
        while todo:
            elsewhere = []
            for unit in itertools.filterfalse(self._is_done, todo):
                self._lease = self._claims.take(f"unit-{unit}")
                if self._lease is None:
                    elsewhere.append(unit)
                    continue
                # another worker may have done it just before
                self._refresh()
                if not self._is_done(unit):
                    yield unit
                self._lease.release()
            self._refresh()
            todo = [unit for unit in elsewhere if not self._is_done(unit)]
            if todo:
                time.sleep(POLL)

    def __exit__(self, *error: object) -> None:
        if self._lease is not None:
            self._lease.release()


def request_key(*parts: Any) -> str:
    """A name for a request: equal for equal parts, in every process and on every machine."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def request_number(seed: int, key: str) -> int:
    """The seed of one request: it depends on the run's seed and on the request, not on its
    neighbours.
    """
    return int(hashlib.sha256(f"{seed}:{key}".encode()).hexdigest()[:15], 16)
