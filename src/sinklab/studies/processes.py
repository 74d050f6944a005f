"""The progress of a run, and runs over several processes: each writes a shard of the samples, rank 0 merges them."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from sinklab.records.info import read_info
from sinklab.records.storage import RUN_FILE
from sinklab.records.writing import names_in


class Progress:
    """The progress of a long run in words; the command line draws a bar with the time left."""

    def __init__(self, say: Callable[[str], object] = lambda text: None) -> None:
        self._say = say

    def stage(self, text: str) -> None:
        """A new stage begins."""
        self._say(text)

    def count(self, done: int, total: int) -> None:
        """`done` of `total` model evaluations are done; the total may shrink where a text ends early."""

    def counter(self, total: int) -> Callable[[], None]:
        """A function to call after each of `total` evaluations."""
        numbers = iter(range(1, total + 1))
        self.count(0, total)
        return lambda: self.count(next(numbers, total), total)


def as_progress(given: Progress | Callable[[str], object] | None) -> Progress:
    """`given` as a Progress: a function is called with the text of each stage; None says nothing."""
    if isinstance(given, Progress):
        return given
    return Progress() if given is None else Progress(given)


class Meter:
    """Counts the evaluations of a study that writes several texts of at most `steps` steps."""

    def __init__(self, progress: Progress, texts: int, steps: int) -> None:
        self.progress, self.done, self.total, self.steps = progress, 0, texts * steps, steps
        self._started = 0

    def stage(self, text: str) -> None:
        """A text begins."""
        self._started = self.done
        self.progress.stage(text)
        self.progress.count(self.done, self.total)

    def step(self) -> None:
        """One more evaluation."""
        self.done += 1
        self.total = max(self.total, self.done)
        self.progress.count(self.done, self.total)

    def end(self) -> None:
        """The text is over; steps that it did not need are no longer to come."""
        self.total -= max(self.steps - (self.done - self._started), 0)
        self.progress.count(self.done, max(self.total, self.done))


# The first process waits for the slowest one's last sample: hours on large models.
PATIENCE = timedelta(days=7)


@dataclass(frozen=True)
class Processes:
    """This process among those that `accelerate launch` or `torchrun` started; one alone without them."""

    rank: int
    world: int

    @classmethod
    def here(cls) -> Processes:
        """As the environment says. Raises ValueError for one that makes no sense."""
        rank, world = (os.environ.get(name, default) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
        if not (rank.isdigit() and world.isdigit() and int(rank) < int(world)):
            raise ValueError(
                f"RANK must be a number below WORLD_SIZE, but they are {rank!r} and {world!r}; start with accelerate "
                "launch"
            )
        return cls(int(rank), int(world))

    @property
    def is_first(self) -> bool:
        """Whether this process prints, and merges the shards."""
        return self.rank == 0

    def folder(self, out: Path) -> Path:
        """Where this process writes."""
        return out if self.world == 1 else out.with_name(f"{out.name}.rank{self.rank}")

    def share(self, samples: Iterable[int]) -> list[int]:
        """The samples of this process's shard: by their numbers, so that a resumed process gets its own again."""
        return [sample for sample in samples if sample % self.world == self.rank]

    def agreed(self, value: Any) -> Any:
        """The first process's value, in every process."""
        return self.gathered(value)[0]

    def gathered(self, value: Any) -> list[Any]:
        """Of every process its value, in every process."""
        if self.world == 1:
            return [value]
        import torch.distributed as dist

        self._connect()
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def wait(self) -> None:
        """Until every process is here."""
        self.gathered(None)

    def _connect(self) -> None:
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", timeout=PATIENCE)
            # its threads must end before the interpreter does: a process that aborts takes the others with it
            atexit.register(lambda: dist.is_initialized() and dist.destroy_process_group())

    def missing(self, out: Path, samples: int, *, resume: bool, parts: str = "generations") -> list[int]:
        """The samples that are still to be written, by whichever process; the same in all of them.

        Args:
            out: the run folder.
            samples: in all.
            resume: leave out those that are there.
            parts: table whose parts mark samples as written.

        Raises:
            ValueError: for a folder that holds files when nothing is resumed, and when an interrupted run was started
                by another number of processes.
        """
        return self.agreed(self._missing(out, samples, resume, parts) if self.is_first else None)

    def _missing(self, out: Path, samples: int, resume: bool, parts: str = "generations") -> list[int]:
        if not resume:
            refuse_taken(out)
            return list(range(samples))
        ranks = rank_folders(out)
        done: set[int] = set()
        for folder in [out, *ranks.values()]:
            if (folder / RUN_FILE).is_file():
                done.update(read_info(folder / RUN_FILE).parts.get(f"{parts}.parquet", ()))
        todo = [sample for sample in range(samples) if sample not in done]
        # a folder of the first process alone: the others were stopped before they had theirs
        started = 1 if (out / RUN_FILE).is_file() else max(1, *ranks) + 1 if ranks else self.world
        alone_now, more_then = self.world == 1 and started > 1, started > self.world
        # fewer folders than processes may be those that an early stop left
        if alone_now or (todo and started != self.world and (started == 1 or more_then)):
            raise ValueError(
                f"{out} was started by {started} processes and is resumed by {self.world}: use the same number "
                "(accelerate launch --num_processes), or write into another folder"
            )
        return todo


def refuse_taken(out: Path) -> None:
    """Refuse a folder that holds files, or a run of several processes whose shards are not merged.

    Raises:
        ValueError: naming what is there.
    """
    there = [out] if out.is_file() or names_in(out) else [*rank_folders(out).values()]
    if there:
        raise ValueError(
            "A run folder is written once: a run is written into an empty or absent folder, but "
            f"{there[0]} is taken; choose another folder, or continue the run that is there (--resume, in Python "
            "resume=True)"
        )


def rank_folders(out: Path) -> dict[int, Path]:
    """Rank -> folder that a process left beside `out`, in this launch or in an interrupted one before."""
    found = out.parent.glob(f"{out.name}.rank*") if out.parent.is_dir() else ()
    ranks = {path.name.rpartition(".rank")[2]: path for path in found if (path / RUN_FILE).is_file()}
    return {int(rank): path for rank, path in sorted(ranks.items()) if rank.isdigit()}
