"""Cells of a table of masked scores, and contrasts between them: keys against others of equal mass,
one model against another.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import pandas as pd

from sinklab.core.instrument import Dose
from sinklab.lab.analysis import mean_over
from sinklab.lab.analysis.doses import Doses, at_equal_mass, no_phenomenon
from sinklab.lab.reports import checked
from sinklab.lab.reports.runs import labels
from sinklab.lab.studies.benchmarks import tables as paper
from sinklab.lab.studies.benchmarks.tables import Benchmark, spoken

POINTS = 0.05
"""Least loss that counts as the summary's «> 5 % performance drop», as a difference of two
accuracies.
"""
Key = tuple[str, str, int]
"""(protocol, control, k)"""
PLAIN = ("", "sinks", 0)


@dataclass(eq=False)
class Cell:
    """The score of one run on one task."""

    task: str
    model: str
    """Label of the model under its settings."""
    run: Benchmark
    plain: Cell | None = None
    """The same model on the same task with nothing blocked; None if that was not run."""

    def rows(self, name: str) -> pd.DataFrame:
        """Rows of a table of the run on the task; none if the table was not written."""
        if name not in self.run.run.tables:
            return pd.DataFrame()
        return self.run.run.table(name).query("task == @self.task")

    @cached_property
    def continuations(self) -> pd.Series:
        """Number of continuations scored, by document; 0 if a text was written."""
        samples = self.rows("samples")
        return samples.get("logprobs", pd.Series(dtype=object)).map(len).astype(float)

    @property
    def key(self) -> Key:
        """Masking of the cell; "paper" in older runs. Likelihoods are those of a clean pass, unless
        the protocol is "rule".
        """
        if not self.run.k:
            return PLAIN
        protocol = str(self.run.run.info.settings.get("protocol") or "paper")
        if protocol != "rule" and self.continuations.any():
            protocol = "clean"
        return protocol, self.run.control, self.run.k

    @cached_property
    def score(self) -> pd.Series:
        """Row of the table ``scores``."""
        score = self.run.score(self.task)
        assert score is not None
        return score

    @cached_property
    def rights(self) -> pd.Series:
        """Value of the metric, 1 for a right answer and 0 for a wrong one, by number of the
        question; empty without the table ``samples``.
        """
        if "samples" not in self.run.run.tables:
            return pd.Series(dtype=float)
        columns = {"task", "filter", "doc_id", "right", "metrics"}
        rows = checked(self.run.run, "samples", columns, what="a benchmark")
        rows = rows[(rows["task"] == self.task) & (rows["filter"] == self.score["filter"])]
        values = [
            json.loads(metrics).get(self.score["metric"], first)
            for metrics, first in zip(rows["metrics"], rows["right"], strict=True)
        ]
        return pd.Series(values, rows["doc_id"].to_numpy(), float)

    @cached_property
    def dose(self) -> Dose:
        """Dose of masking while the task was scored; unknown if it was not recorded, as in earlier
        runs.
        """
        return Dose.pooled(map(Dose.from_row, self.rows("doses").to_dict("records")))

    def sinks(self, name: str) -> float:
        """A fact of the table ``sinks``, mean over watched documents and layers; NaN if it is not
        there.
        """
        return float(self.rows("sinks").get(name, pd.Series()).astype(float).mean())

    @property
    def costs(self) -> pd.Series:
        """Loss by question: right with nothing blocked less right in this cell."""
        if self.plain is None:
            return self.rights[:0]
        return (self.plain.rights - self.rights).dropna()

    @property
    def floor(self) -> float:
        """The unmasked score up to which a loss is inconclusive: 5 points, or chance and two
        standard errors.
        """
        counts = self.continuations
        # guessing gets one in the number of choices right, and no text
        chance = (1 / counts).where(counts > 1, 0.0).sum() / max(len(counts), 1)
        if not chance or math.isnan(self.score["stderr"]):
            return POINTS
        return max(POINTS, chance + 2 * float(self.score["stderr"]))

    @property
    def too_low(self) -> str:
        """Reason why a loss of this unmasked score would be inconclusive; empty if it would not."""
        value = self.score["value"]
        if value > self.floor:
            return ""
        why = "chance and two standard errors" if self.floor > POINTS else "5 points"
        return f"{self.model} gets {value:.3f} with nothing blocked, no more than {why}"

    @property
    def no_sinks(self) -> str:
        """Reason why there is no phenomenon to remove; empty if there is one."""
        rate, share = (self.sinks(name) for name in ("gu_rate", "share"))
        why = no_phenomenon(self.model, rate, share)
        if why.endswith("blocked"):
            why += " (record_sinks)"
        return why


def cells_of(benchmarks: Iterable[Benchmark]) -> list[Cell]:
    """Every scored task of every run, the paper's tasks first, models as they come, sinks before
    their controls. Raises ValueError if two runs are the same cell.
    """
    listed = list(benchmarks)
    firsts = {one.alike: one.run for one in reversed(listed)}
    alike = [*dict.fromkeys(one.alike for one in listed)]
    names = dict(zip(alike, labels([firsts[each] for each in alike]), strict=True))
    first = {"sinks": "", "matched": " "}
    listed.sort(
        key=lambda one: (alike.index(one.alike), first.get(one.control, one.control), one.k)
    )
    tasks = [task for one in listed for task in one.tasks]
    found: dict[tuple[str, str, Key], Cell] = {}
    # those of the paper first
    for task, one in product(dict.fromkeys([*paper.TITLES, *tasks]), listed):
        if task not in one.tasks:
            continue
        cell = Cell(task, names[one.alike], one)
        before = found.setdefault((task, cell.model, cell.key), cell)
        if before is not cell:
            raise ValueError(
                f"{before.run.run.path} and {one.run.path} both hold {task} of {cell.model}, "
                f"(protocol, control, k) {cell.key}; read one of them"
            )
    for cell in found.values():
        cell.plain = found.get((cell.task, cell.model, PLAIN))
    return list(found.values())


def contrasts(benchmarks: Iterable[Benchmark]) -> list[str]:
    """A sentence for each control of equal mass, and for each diffusion and autoregressive model on
    the same task.

    Differences are paired by question, with 95 % intervals. Both models are masked by one protocol,
    which is named. The contrast is inconclusive if one of them has no such sinks, or no score to
    lose.
    """
    cells = cells_of(benchmarks)
    said = []
    for task in dict.fromkeys(cell.task for cell in cells):
        mine = [cell for cell in cells if cell.task == task]
        if any(cell.run.k and cell.continuations.any() for cell in mine):
            said += spoken()("likelihoods", task)
        models: dict[str, dict[Key, Cell]] = {}
        for cell in mine:
            if cell.plain is not None:
                models.setdefault(cell.model, {})[cell.key] = cell
        for of_model in models.values():
            said += _against_equal_mass(of_model)
        for one, other in product(models.values(), repeat=2):
            if one[PLAIN].run.is_diffusion and not other[PLAIN].run.is_diffusion:
                said += _between(one, other)
    return said


def _against_equal_mass(cells: dict[Key, Cell]) -> list[str]:
    said = []
    for (protocol, control, k), cell in cells.items():
        other = cells.get((protocol, "equal_mass", k))
        if control != "matched" or other is None:
            continue
        share = cell.dose.matched
        apart = mean_over(cell.costs - other.costs)
        about = (cell.task, cell.model, protocol, k)
        said += spoken()("equal_mass", *about, share, cells[PLAIN].too_low, apart)
    return said


def _between(one: dict[Key, Cell], other: dict[Key, Cell]) -> list[str]:
    shared = [key for key in one if key in other and key[1] == "sinks" and key[2]]
    if not shared:
        return []
    plain = one[PLAIN], other[PLAIN]
    why = next(filter(None, (cell.no_sinks or cell.too_low for cell in plain)), "")
    apart = {}
    at_equal = {}
    if not why:
        for key in sorted(shared, key=lambda key: key[2]):
            protocol, _, k = key
            mine = one[key].costs
            theirs = other[key].costs
            apart[protocol, k] = mine.mean(), theirs.mean(), mean_over(mine - theirs)
            at_equal[protocol] = at_equal_mass(_doses(one, protocol), _doses(other, protocol))
    names = [cell.model for cell in plain]
    return spoken()("between", plain[0].task, *names, why, apart, at_equal)


def _doses(cells: dict[Key, Cell], protocol: str) -> Doses:
    """Attention removed and cost of each number of keys by a protocol; numbers without a known
    share removed are left out.
    """
    mine = {key[2]: cell for key, cell in cells.items() if key[:2] == (protocol, "sinks")}
    doses = {k: cell.dose.removed for k, cell in mine.items()}
    removed = pd.Series(doses, dtype=float).dropna()
    costs = pd.DataFrame({k: mine[k].costs for k in removed.index}).dropna()
    return Doses(removed.to_numpy(), costs.to_numpy(float))
