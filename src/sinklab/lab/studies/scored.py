"""Scored studies: samples measured under arms, and what the arms cost.

An arm is whatever is compared: edits of attention, ways to write, models. A subclass of
`ScoredStudy` says which arms there are (`arms`), how samples are divided (`blocks`), what is
measured (`measure`), and which tables follow from all rows (`contrasts`). The runner writes the
rows of every block, resumes block by block, shares blocks among workers, and measures controls
that learned nothing in the same way. The tables of rows are tidy: a line per arm and sample.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import TYPE_CHECKING, Any, ClassVar

from sinklab.lab.records import Contents, of_twin, open_run
from sinklab.lab.studies.base import Study, Work
from sinklab.lab.studies.progress import Meter, Progress, Tick, nothing

if TYPE_CHECKING:
    import pandas as pd

    from sinklab.lab.checkpoints import Loaded
    from sinklab.lab.records import Run

Arm = tuple[Any, ...]
"""Name of an arm: its values in the columns that tell arms apart."""
Rows = dict[str, Any]
"""Tables by their names: data frames, or lists of rows."""


@dataclass(frozen=True)
class Block:
    """Samples that are measured together under some arms: the unit that is resumed and shared."""

    arms: tuple[Arm, ...]
    rows: range
    """Numbers of the samples."""
    words: str
    """Line of progress."""

    @property
    def size(self) -> int:
        """Number of rows to measure."""
        return len(self.arms) * len(self.rows)


@dataclass(frozen=True)
class Design:
    """Plan of a scored study: what is measured, of what, and in which blocks."""

    samples: Any
    """Result of `ScoredStudy.read_samples`."""
    arms: dict[Arm, Any]
    blocks: list[Block]


@dataclass(frozen=True)
class Trial:
    """Arguments of `ScoredStudy.measure`."""

    loaded: Loaded
    settings: Any
    samples: Any
    """Result of `ScoredStudy.read_samples`."""
    arms: dict[Arm, Any]
    """Arms to measure, by their names."""
    rows: range
    """Numbers of the samples to measure."""
    step: Tick
    """Called after each evaluation."""


class ScoredStudy(Study):
    """A study of arms × samples.

    ``settings.twin`` asks for controls.
    """

    shards = True
    row_tables: ClassVar[tuple[str, ...]] = ()
    """Tables of rows that `contrasts` reads."""

    def read_samples(self, loaded: Loaded, settings: Any, progress: Progress) -> Any:
        """The samples, in any form. Raises ValueError for input that is refused."""
        raise NotImplementedError

    def arms(self, loaded: Loaded, settings: Any, samples: Any) -> dict[Arm, Any]:
        """Arms by their names, the one that others are compared with first."""
        raise NotImplementedError

    def blocks(self, settings: Any, samples: Any, arms: Sequence[Arm]) -> list[Block]:
        """Blocks to measure: batches of ``settings.batch`` samples, each under all arms."""
        found = []
        for first in range(0, len(samples), settings.batch):
            rows = range(first, min(first + settings.batch, len(samples)))
            words = f"rows {first + 1} to {rows.stop}, {len(arms)} ways"
            found.append(Block(tuple(arms), rows, words))
        return found

    def measure(self, trial: Trial) -> Rows:
        """Rows of some samples under some arms, by table.

        Rows of one arm and sample must not depend on which others are measured with them.
        """
        raise NotImplementedError

    def contrasts(self, trial: Trial, rows: Rows) -> Rows:
        """Tables that follow from all rows, by name; the trial is that of all arms."""
        raise NotImplementedError

    def steps(self, settings: Any, block: Block) -> int:
        """Number of calls of `Trial.step` for a block, at most."""
        return len(block.arms)

    def prepare(self, loaded: Loaded, settings: Any, progress: Progress) -> Design:
        """The design of the study. Raises ValueError for input that is refused."""
        samples = self.read_samples(loaded, settings, progress)
        arms = self.arms(loaded, settings, samples)
        return Design(samples, arms, self.blocks(settings, samples, [*arms]))

    def samples(self, plan: Design) -> int:
        """Number of blocks."""
        return len(plan.blocks)

    def meter(self, plan: Design, settings: Any, progress: Progress, samples: int) -> Meter:
        """Counts the steps of so many blocks."""
        most = max((self.steps(settings, block) for block in plan.blocks), default=0)
        return Meter(progress, samples, most)

    def make(self, work: Work, samples: Sequence[int]) -> dict[int, Contents]:
        """Rows of blocks."""
        blocks = {number: work.plan.blocks[number] for number in samples}
        return {
            number: Contents(self._measured(work, work.loaded, block, work.meter))
            for number, block in blocks.items()
        }

    def finish(self, work: Work) -> None:
        """Write the tables that follow from all rows, and those of controls."""
        import pandas as pd

        done = open_run(work.run.path)
        names = [name for name in self.row_tables if name in done.tables]
        self._conclude(work, work.loaded, {name: done.table(name) for name in names}, "")
        blocks = work.plan.blocks

        def seconds() -> float:
            if not work.paces:
                # all blocks were there
                first = blocks[0]
                some = replace(first, arms=first.arms[:2], rows=first.rows[: work.settings.batch])
                meter = self.meter(work.plan, work.settings, Progress(), 1)
                self._measured(work, work.loaded, some, meter)
            return mean(work.paces) * sum(block.size for block in blocks)

        def write(control: Loaded, kind: str) -> None:
            meter = self.meter(work.plan, work.settings, work.progress, len(blocks))
            parts = [
                self._measured(work, control, replace(block, words=""), meter) for block in blocks
            ]
            rows = {}
            for name in dict.fromkeys(name for part in parts for name in part):
                some = [part[name] for part in parts if name in part]
                rows[name] = pd.concat(some, ignore_index=True)
                work.run.table(of_twin(name, kind), rows[name])
            self._conclude(work, control, rows, kind)

        write_twins(work, seconds, write)

    def _measured(self, work: Work, loaded: Loaded, block: Block, meter: Meter) -> Rows:
        design = work.plan
        arms = {name: design.arms[name] for name in block.arms}
        meter.stage(block.words)
        trial = Trial(loaded, work.settings, design.samples, arms, block.rows, meter.step)
        started = time.perf_counter()
        rows = self.measure(trial)
        work.paces.append((time.perf_counter() - started) / block.size)
        meter.end()
        return rows

    def _conclude(self, work: Work, loaded: Loaded, rows: Rows, kind: str) -> None:
        design = work.plan
        everything = range(max((block.rows.stop for block in design.blocks), default=0))
        trial = Trial(loaded, work.settings, design.samples, design.arms, everything, nothing)
        for name, table in self.contrasts(trial, rows).items():
            work.run.table(of_twin(name, kind), table)


def less_other(
    rows: pd.DataFrame, arm: Sequence[str], value: str, others: Mapping[Arm, Arm]
) -> pd.Series:
    """A column of every row, less that of the same sample under another arm; NaN where there is
    none.

    Args:
        rows: a line per arm and sample; the column ``row`` is the sample.
        arm: columns that tell arms apart.
        value: column to subtract.
        others: arm -> the arm that it is compared with.
    """
    import numpy as np
    import pandas as pd

    by_sample = rows.pivot(index="row", columns=[*arm], values=value)
    found = pd.Series(np.nan, rows.index)
    for name, some in rows.groupby([*arm], sort=False):
        other = others.get(name)
        if other in by_sample:
            found[some.index] = some[value] - by_sample[other].loc[some["row"]].to_numpy()
    return found


def wide(rows: pd.DataFrame, arm: Sequence[str], value: str) -> pd.DataFrame:
    """A column as a table of samples × arms, arms in the order of their names."""
    return rows.pivot(index="row", columns=[*arm], values=value).sort_index(axis=1)


def mean_table(
    rows: pd.DataFrame, arm: Sequence[str], names: Sequence[str], means: Sequence[str] = ()
) -> pd.DataFrame:
    """A line per arm, in their order: means over samples of some columns, with the ends of their
    95 % intervals (`mean_over`); means alone of others; ``rows``, the number of samples.
    """
    import pandas as pd

    from sinklab.lab.analysis import mean_over

    lines = []
    for values, some in rows.groupby([*arm], sort=False):
        line = dict(zip(arm, values, strict=True))
        for name in names:
            over = mean_over(some[name])
            low, high = over.interval
            line |= {name: over.value, f"{name}_low": low, f"{name}_high": high}
        line |= some[[*means]].astype(float).mean().to_dict()
        lines.append(line | {"rows": len(some)})
    return pd.DataFrame(lines)


LITTLE = 60.0
"""Seconds: twins that take less are made without being asked for."""
MAKING = 1e-7
"""Seconds that it takes to initialise or permute a parameter."""


def write_twins(
    work: Work, seconds: Callable[[], float], write: Callable[[Loaded, str], None]
) -> None:
    """Make both twins of the model, one after the other, and write their results; then the table
    ``twins``: which there are, or why not. Does nothing if none is wanted, or those that can be
    made are there.

    Args:
        work: of the run, open. settings.twin is the choice; None runs both if they take little.
        seconds: measures the time of one twin, without making it; called only if it matters.
        write: takes a twin and its name, of which `of_twin` makes the names of its tables.
    """
    from sinklab.lab.analysis.words import CONTROLS
    from sinklab.lab.checkpoints.controls import UNTRAINED
    from sinklab.lab.records import weights_hash

    run = work.run
    wanted = work.settings.twin
    if wanted is False:
        return
    if run.has("twins") and (not wanted or open_run(run.path).table("twins")["made"].all()):
        return
    hindrance = ""
    if not wanted:
        both = 2 * (seconds() + MAKING * work.loaded.model.num_parameters())
        if both >= LITTLE:
            hindrance = f"both would take about {both / 60:.0f} min; the setting `twin` runs them"
    seed = work.settings.seed or 0
    rows = []
    for kind, make in UNTRAINED.items():
        row = {"twin": kind, "made": False, "seed": seed, "weights_sha256": None, "why": hindrance}
        if not hindrance:
            work.progress.stage(f"a control ({CONTROLS[kind]}) reads the same canvases")
            try:
                twin = make(work.loaded, seed)
            except ValueError as error:
                row["why"] = str(error)
            else:
                row |= {"made": True, "weights_sha256": weights_hash(twin.model.state_dict())}
                write(twin, kind)
        if row["why"]:
            work.progress.note(f"no control ({CONTROLS[kind]}): {row['why']}")
        rows.append(row)
    run.table("twins", rows)


def twins_of(run: Run) -> list[str]:
    """Names of the twins that a run has."""
    if "twins" not in run.tables:
        return []
    return run.table("twins").query("made")["twin"].tolist()


def no_twins(runs: Mapping[str, Run]) -> list[str]:
    """Sentence on those of these models that have no controls; nothing if all have."""
    alone = {label: run for label, run in runs.items() if not twins_of(run)}
    tables = [run.table("twins") for run in alone.values() if "twins" in run.tables]
    if not alone:
        return []
    why = ""
    if tables:
        why = f" ({tables[0]['why'].iloc[0]})"
    return [f"No untrained control of {' and '.join(alone)} was run{why}."]


def shown_by(
    texts: Mapping[str, str], own: Any = (), theirs: Mapping[str, Any] | None = None
) -> str:
    """Results of controls, in brackets behind a number; empty without any. See
    `sinklab.lab.analysis.words.beside`.
    """
    from sinklab.lab.analysis.words import beside

    words = beside(texts, own, theirs)
    if not words:
        return ""
    return f" ({words})"


VERDICT_COLUMNS = ("model", "measure", "value", "interval", "controls", "verdict")


def verdict_table(lines: Iterable[dict[str, str]]) -> pd.DataFrame:
    """Statements of a study, a row for each statement; "" where a line has no such cell."""
    import pandas as pd

    rows = [dict.fromkeys(VERDICT_COLUMNS, "") | line for line in lines]
    return pd.DataFrame(rows, columns=[*VERDICT_COLUMNS])


def verdict_lines(table: pd.DataFrame) -> list[str]:
    """A `verdict_table` as people read it, a line for each row."""
    lines = []
    for row in table.to_dict("records"):
        line = ": ".join(filter(None, (row["model"], row["measure"], row["value"])))
        if row["interval"]:
            line += f" (95\u00a0% {row['interval']})"
        lines.append(f"{line}{row['verdict'] and '; '}{row['verdict']}{row['controls']}.")
    return lines
