"""Contrasts beyond a table of masked scores: keys against others of equal mass, one model against
another.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import numpy as np
import pandas as pd

from sinklab.lab.analysis.doses import Doses, at_equal_mass, no_phenomenon
from sinklab.lab.analysis.estimates import mean_over
from sinklab.lab.reports.runs import labels
from sinklab.lab.studies.benchmarks import tables as paper
from sinklab.lab.studies.benchmarks.tables import Benchmark, spoken

POINTS = 0.05
"""Least loss that counts as the summary's «> 5 % performance drop», as a difference of two
accuracies.
"""
Cell = tuple[str, str, int]
"""(protocol, control, k)"""
PLAIN: Cell = ("", "sinks", 0)
FIRST = ("sinks", "matched")
Cells = dict[Cell, Benchmark]


def by_model(listed: Sequence[Benchmark]) -> dict[str, list[Benchmark]]:
    """The runs of each model under its settings, by a label."""
    firsts = {one.alike: one.run for one in reversed(listed)}
    order = [*dict.fromkeys(one.alike for one in listed)]
    names = labels([firsts[alike] for alike in order])
    return {
        name: [one for one in listed if one.alike == alike]
        for alike, name in zip(order, names, strict=True)
    }


def tasks_of(listed: Sequence[Benchmark]) -> list[str]:
    """Tasks that were scored, the paper's first."""
    tasks = dict.fromkeys(task for one in listed for task in one.tasks)
    return sorted(tasks, key=lambda task: [*paper.TITLES, task].index(task))


def cells_of(task: str, model: str, group: Iterable[Benchmark]) -> Cells:
    """The runs of one model on a task. Raises ValueError if two are the same cell."""
    cells: Cells = {}
    mine = [one for one in group if task in one.tasks]
    for one in sorted(
        mine, key=lambda one: (*(one.control != name for name in FIRST), one.control, one.k)
    ):
        key = (one.protocol(task), one.control, one.k) if one.k else PLAIN
        if key in cells:
            what = f"{one.k} keys masked ({', '.join(key[:2])})" if one.k else "nothing masked"
            raise ValueError(
                f"{cells[key].run.path} and {one.run.path} both hold {task} of {model} with "
                f"{what}; read one of them"
            )
        cells[key] = one
    return cells


def floor_of(plain: Benchmark, task: str) -> float:
    """The unmasked score up to which a loss is inconclusive: 5 points, or chance and two standard
    errors.
    """
    score, chance = plain.score(task), plain.chance(task)
    stderr = math.nan if score is None else float(score["stderr"])
    return max(POINTS, chance + 2 * stderr) if chance and not math.isnan(stderr) else POINTS


def contrasts(listed: Sequence[Benchmark]) -> list[str]:
    """A sentence for each control of equal mass, and for each diffusion and autoregressive model on
    the same task.

    Differences are paired by question, with 95 % intervals. Both models are masked by one protocol,
    which is named. The contrast is inconclusive if one of them has no such sinks, or no score to
    lose.
    """
    said: list[str] = []
    for task in tasks_of(listed):
        models = {name: cells_of(task, name, group) for name, group in by_model(listed).items()}
        masked = [one for cells in models.values() for one in cells.values() if one.k]
        if any(one.is_likelihood(task) for one in masked):
            said += spoken()("likelihoods", task)
        models = {name: cells for name, cells in models.items() if PLAIN in cells}
        for name, cells in models.items():
            said += _against_equal_mass(task, name, cells)
        families = {name: cells[PLAIN].model.get("family") for name, cells in models.items()}
        sides = [
            [name for name in models if (families[name] == "diffusion") == side]
            for side in (True, False)
        ]
        for one, other in product(*sides):
            said += _between(task, (one, models[one]), (other, models[other]))
    return said


def _costs(task: str, cells: Cells, key: Cell) -> pd.Series:
    """Loss by question: right with nothing masked less right in this cell; empty if either is
    unknown.
    """
    rights = []
    for run in (cells[PLAIN], cells[key]):
        score = run.score(task)
        rights.append(pd.Series(dtype=float) if score is None else run.right(task, score))
    return (rights[0] - rights[1]).dropna()


def _against_equal_mass(task: str, model: str, cells: Cells) -> Iterator[str]:
    for protocol, control, k in cells:
        if control == "matched" and (protocol, "equal_mass", k) in cells:
            dose, reason = (
                cells[protocol, control, k].dose(task),
                _too_low(task, model, cells[PLAIN]),
            )
            costs = [_costs(task, cells, (protocol, name, k)) for name in ("matched", "equal_mass")]
            share, apart = (
                math.nan if dose is None else dose.matched,
                mean_over((costs[0] - costs[1]).dropna()),
            )
            yield from spoken()("equal_mass", task, model, protocol, k, share, reason, apart)


def _between(task: str, one: tuple[str, Cells], other: tuple[str, Cells]) -> list[str]:
    sides = (one, other)
    shared = sorted(
        (key for key in one[1] if key in other[1] and key[1] == "sinks" and key[2]),
        key=lambda key: key[2],
    )
    if not shared:
        return []
    whys = [
        _no_sinks(task, name, cells[PLAIN]) or _too_low(task, name, cells[PLAIN])
        for name, cells in sides
    ]
    apart, at_equal = {}, {}
    for protocol, control, k in shared if not any(whys) else ():
        costs = [_costs(task, cells, (protocol, control, k)) for _, cells in sides]
        apart[protocol, k] = (
            costs[0].mean(),
            costs[1].mean(),
            mean_over((costs[0] - costs[1]).dropna()),
        )
        at_equal[protocol] = at_equal_mass(*(_doses(task, cells, protocol) for _, cells in sides))
    return spoken()("between", task, one[0], other[0], whys[0] or whys[1], apart, at_equal)


def _doses(task: str, cells: Cells, protocol: str) -> Doses:
    """Attention removed and cost of each number of keys by a protocol; numbers without a known
    share removed are left out.
    """
    doses = {key: one.dose(task) for key, one in cells.items() if key[:2] == (protocol, "sinks")}
    found = {key: dose.removed for key, dose in doses.items() if dose is not None}
    known = [key for key, mass in found.items() if not math.isnan(mass)]
    costs = pd.DataFrame({key[2]: _costs(task, cells, key) for key in known}).dropna()
    return Doses(
        np.array([found[key] for key in known]),
        costs.to_numpy(float).reshape(len(costs), len(known)),
    )


def _no_sinks(task: str, model: str, plain: Benchmark) -> str:
    """Reason why there is no phenomenon to remove; empty if there is one."""
    why = no_phenomenon(model, plain.sinks(task, "gu_rate"), plain.sinks(task, "share"))
    return f"{why} (record_sinks)" if why.endswith("masked") else why


def _too_low(task: str, model: str, plain: Benchmark) -> str:
    """Reason why a loss of a score would be inconclusive; empty if it would not."""
    score, floor = plain.score(task), floor_of(plain, task)
    value = math.nan if score is None else float(score["value"])
    why = "chance and two standard errors" if floor > POINTS else "5 points"
    return (
        "" if value > floor else f"{model} gets {value:.3f} with nothing masked, no more than {why}"
    )
