"""Base of all studies: a run folder, a seed, resuming, shards, progress, one command.

A study is one kind of run. Registered, it has a command, ``sinklab NAME``, made of its settings and
its docstring; examples/add_a_study.py is one in thirty lines.

One that outgrows a file is a folder: study.py with settings and class, run.py, figures.py. A
study's module is imported for ``--help``: torch, and all that imports it, is imported in functions.

A long study is written in parts: `samples` says how many samples there are, `part_size` how many
make a part, and `make` gives the tables and arrays of some of them instead of `run`. A part that is
there is not made again: the same call goes on with a run, which is all of resuming. If it `shards`,
process i of n writes the parts p with p mod n = i of ``shard="i/n"``; whoever finds that all are
there does `finish`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from sinklab.lab.records import Contents, RunWriter
from sinklab.lab.registry import engines, studies
from sinklab.lab.studies.about import describe
from sinklab.lab.studies.progress import Audience, Progress, as_progress
from sinklab.lab.studies.settings import kept_record, shard_of

if TYPE_CHECKING:
    from sinklab.lab.checkpoints import Loaded
    from sinklab.lab.records import Run


Row = dict[str, Any]
"""A line of a table: values by the names of its columns."""


@dataclass(frozen=True)
class Work:
    """Arguments of `Study.run`."""

    loaded: Loaded
    settings: Any
    run: RunWriter
    """The run folder, open."""
    progress: Progress
    plan: Any
    """Result of `Study.prepare`."""
    spread: Any = None
    """Function of portions that gives each with what workers made of it, in any order; None: this
    process makes them.
    """


def begin_worker(
    study: Study, load: Callable[[], Loaded], settings: Any
) -> tuple[dict[str, str], Callable[[Sequence[int]], dict[int, Contents]]]:
    """Load the model of a worker; what must be the same on all, and the function that makes
    samples.
    """
    loaded = load()
    plan = study.prepare(loaded, settings)
    # the one writer is the process that started the workers
    nowhere: Any = None
    work = Work(loaded, settings, nowhere, Progress(), plan)
    return same_for_all(study.about(loaded, plan)), partial(study.make, work)


def same_for_all(about: Mapping[str, Any]) -> dict[str, str]:
    """Facts of a model that are the same on all workers."""
    return {"weights": about["weights_sha256"], "kind of device": about["device"]}


class Study:
    """One kind of run: a subclass defines the choices (Settings), the refusals (prepare) and the
    work (run).

    Called with a model and a folder it writes a run folder; its docstring and settings make its
    command. Registered by ``@studies.register(name)``.
    """

    Settings: ClassVar[type]
    """A frozen dataclass; every field has a default and a docstring. A field with ``limited(…,
    free=True)`` changes the speed, not the result: it is not kept, and may differ when a run goes
    on.
    """
    group: ClassVar[str] = "more"
    """Group of its command in ``sinklab --help``."""
    kind: ClassVar[str] = ""
    """Kind of its run folders; its own name when left empty."""
    model: ClassVar[str | tuple[str, ...]] = "tiny"
    """Default model; a tuple if the command takes several; empty if the study makes its own
    (``loaded`` is None).
    """
    shards: ClassVar[bool] = False
    """Whether several processes may share its samples: then `run` writes nothing but parts."""
    together: ClassVar[int] = 1
    """Samples of a part that are given to `make` at once."""

    def prepare(self, loaded: Loaded, settings: Any) -> Any:
        """Refuse bad input, with ValueError, before a folder is taken; returns ``work.plan``."""

    def samples(self, plan: Any) -> int:
        """Number of samples to write; 0 for a study that is written at once."""
        return 0

    def part_size(self, plan: Any) -> int:
        """Number of samples of a part."""
        return 1

    def make(self, work: Work, samples: Sequence[int]) -> dict[int, Contents]:
        """Tables and arrays of each of these samples, at most `together` in a row. They depend on
        nothing but the plan; the run folder is not touched. ``work.progress`` is that of these
        samples.
        """
        raise NotImplementedError

    def about(self, loaded: Loaded, plan: Any) -> dict[str, Any]:
        """The model as the run folder describes it."""
        return describe(loaded)

    def run(self, work: Work) -> None:
        """Do it, and write tables and arrays into ``work.run``: by default the missing parts."""
        info = work.run.info
        parts = {part: info.part(part) for part in work.run.missing}
        portions = [
            tuple(samples[first : first + self.together])
            for samples in parts.values()
            for first in range(0, len(samples), self.together)
        ]
        results = self._made(work, portions)
        if work.spread is not None:
            results = work.spread(portions)
        made: dict[int, dict[int, Contents]] = {part: {} for part in parts}
        for portion, contents in results:
            part = portion[0] // info.part_size
            made[part] |= contents
            if len(made[part]) == len(parts[part]):
                work.run.write(part, made.pop(part))

    def _made(self, work: Work, portions: list[tuple[int, ...]]) -> Iterator[Any]:
        """Each portion with its samples, made here one after the other."""
        done, total = 0, sum(map(len, portions))
        for portion in portions:
            progress = work.progress.within(done, len(portion), total)
            yield portion, self.make(dataclasses.replace(work, progress=progress), portion)
            done += len(portion)
            work.progress.count(done, total)

    def finish(self, work: Work) -> None:
        """Write the results that need all samples, if they are not there; one process does."""

    def results(self, runs: list[Run], out: Path, settings: Any) -> list[str]:
        """Results of the runs in words, once figures are drawn beside or below them."""
        return []

    def __call__(
        self,
        loaded: Any,
        out: str | Path,
        settings: Any = None,
        *,
        progress: Audience = None,
        shard: str | None = None,
        workers: int = 0,
        gpus_per_worker: int = 0,
    ) -> Path:
        """Write a run folder, or go on with it; returns its path.

        Args:
            loaded: the model, or a function that loads it once nothing else can be wrong.
            out: folder to write: empty, absent, or with this very run, whole or interrupted. What
                is there is not made again; what is missing or damaged is.
            settings: of the study; the defaults when left out.
            progress: a function is called with a short text at each stage.
            shard: "i/n", to write part p if p mod n is i, in a folder that n processes share.
            workers: processes that load the model too and make the samples, by Ray; this one alone
                writes. How many changes nothing.
            gpus_per_worker: GPUs that each of them has.

        Raises:
            ValueError: for settings that the model or the study refuses, a folder that is taken, or
                in use by another process, and at the end for samples that failed.
        """
        settings = settings or self.Settings()
        path = Path(out)
        say = as_progress(progress)
        if (shard is not None or workers) and not self.shards:
            raise ValueError(
                f"a {self.name} is written by one process; leave out shard and workers"
            )
        how: dict[str, Any] = {"shard": shard_of(shard)}
        load = getattr(loaded, "again", loaded)
        with ExitStack() as last:
            if workers:
                if not callable(load):
                    raise ValueError(
                        f"workers load the model by themselves, but {loaded.name} was not loaded "
                        "by sinklab.load; leave out workers"
                    )
                pool = last.enter_context(engines["ray"].started(workers, gpus_per_worker))
            if callable(loaded):
                loaded = loaded()
            # errors of the input show here, before a folder is taken
            plan = self.prepare(loaded, settings)
            model = self.about(loaded, plan)
            last.enter_context(getattr(loaded, "few_threads", nullcontext)())
            how |= {"samples": self.samples(plan), "part_size": self.part_size(plan)}
            how |= {"kind": self.kind or self.name, "model": model}
            how |= {"settings": kept_record(settings), "seed": getattr(settings, "seed", None)}
            with RunWriter(path, **how) as run:
                if run.info.status == "complete":
                    say.note(f"{path} is there; nothing that it has is made again")
                work = Work(loaded, settings, run, say, plan)
                if workers:
                    begin = partial(begin_worker, self, load, settings)
                    spread = partial(pool.results, begin, same_for_all(model), say)
                    work = dataclasses.replace(work, spread=spread)
                if run.info.status != "complete":
                    self.run(work)
                # the last to come finishes; the others wait until run.json says so
                last.enter_context(run.lock)
                if not run.refresh().missing:
                    self.finish(work)
        return path

    @property
    def name(self) -> str:
        """The registered name; the name of the class if it is not registered."""
        if type(self) in studies.values():
            return studies.name_of(self)
        return type(self).__name__.lower()
