"""What may be said beyond a table of masked scores: keys against others of equal mass, one model against another."""

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import product

import numpy as np
import pandas as pd

from sinklab.analysis.doses import MATCHED, Doses, at_equal_mass, no_phenomenon
from sinklab.analysis.estimates import Estimate, mean_over
from sinklab.reports.runs import labels
from sinklab.studies.base import hidden_words
from sinklab.studies.benchmarks import tables as paper
from sinklab.studies.benchmarks.tables import Benchmark

POINTS = 0.05
"""What the summary calls a «> 5 % performance drop», as a difference of two accuracies."""
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
    return {name: [one for one in listed if one.alike == alike] for alike, name in zip(order, names, strict=True)}


def tasks_of(listed: Sequence[Benchmark]) -> list[str]:
    """What was scored, the paper's tasks first."""
    tasks = dict.fromkeys(task for one in listed for task in one.tasks)
    return sorted(tasks, key=lambda task: [*paper.TITLES, task].index(task))


def cells_of(task: str, model: str, group: Iterable[Benchmark]) -> Cells:
    """The runs of one model on a task. Raises ValueError where two are the same cell."""
    cells: Cells = {}
    mine = [one for one in group if task in one.tasks]
    for one in sorted(mine, key=lambda one: (*(one.control != name for name in FIRST), one.control, one.k)):
        key = (one.protocol(task), one.control, one.k) if one.k else PLAIN
        if key in cells:
            what = f"{one.k} keys masked ({', '.join(key[:2])})" if one.k else "nothing masked"
            raise ValueError(
                f"{cells[key].run.path} and {one.run.path} both hold {task} of {model} with {what}; read one of them"
            )
        cells[key] = one
    return cells


def floor_of(plain: Benchmark, task: str) -> float:
    """The unmasked score up to which no loss can be told: 5 points, or chance and two standard errors."""
    score, chance = plain.score(task), plain.chance(task)
    stderr = math.nan if score is None else float(score["stderr"])
    return max(POINTS, chance + 2 * stderr) if chance and not math.isnan(stderr) else POINTS


def contrasts(listed: Sequence[Benchmark]) -> list[str]:
    """A sentence for each control of equal mass, and for each diffusion and autoregressive model on the same task.

    Differences are paired by question, with 95 % intervals. Both models are masked by one protocol, which is named. It
    cannot be told which loses more where one of them has no such sinks, or no score to lose.
    """
    said: list[str] = []
    for task in tasks_of(listed):
        models = {name: cells_of(task, name, group) for name, group in by_model(listed).items()}
        masked = [one for cells in models.values() for one in cells.values() if one.k]
        if any(one.is_likelihood(task) for one in masked):
            said.append(f"{titled(task)}: likelihoods have no step before: a clean pass over each text chooses")
        models = {name: cells for name, cells in models.items() if PLAIN in cells}
        for name, cells in models.items():
            said += _against_equal_mass(task, name, cells)
        families = {name: cells[PLAIN].model.get("family") for name, cells in models.items()}
        sides = [[name for name in models if (families[name] == "diffusion") == side] for side in (True, False)]
        for one, other in product(*sides):
            said += _between(task, (one, models[one]), (other, models[other]))
    return said


def _costs(task: str, cells: Cells, key: Cell) -> pd.Series:
    """By question, what was right with nothing masked less what was right in this cell; empty where that is unknown."""
    rights = []
    for run in (cells[PLAIN], cells[key]):
        score = run.score(task)
        rights.append(pd.Series(dtype=float) if score is None else run.right(task, score))
    return (rights[0] - rights[1]).dropna()


def _against_equal_mass(task: str, model: str, cells: Cells) -> Iterator[str]:
    for protocol, control, k in [key for key in cells if key[1] == "matched"]:
        if (protocol, "equal_mass", k) not in cells:
            continue
        dose = cells[protocol, control, k].dose(task)
        share = math.nan if dose is None else dose.matched
        keys = hidden_words("sinks", protocol)
        what = f"{titled(task)}, {model}, protocol {protocol}, {k} {keys} against other keys of equal mass"
        # NaN where nothing was hidden
        if not share >= MATCHED:
            some = "no head had" if math.isnan(share) else f"{100 * share:.0f} % of heads have"
            yield f"{what}: cannot tell, {some} other keys that hold as much"
        elif reason := _too_low(task, model, cells[PLAIN]):
            yield f"{what}: cannot tell, {reason}"
        else:
            both = [_costs(task, cells, (protocol, name, k)) for name in ("matched", "equal_mass")]
            apart = mean_over((both[0] - both[1]).dropna())
            verdict = {True: "they cost more", False: "they cost less", None: "cannot tell"}[apart.above()]
            yield f"{what}, in the {100 * share:.0f} % of heads that have such: {points(apart)} points lost: {verdict}"


def _between(task: str, one: tuple[str, Cells], other: tuple[str, Cells]) -> Iterator[str]:
    (name, cells), (name_of_other, others) = one, other
    shared = [key for key in cells if key in others and key[1] == "sinks" and key[2]]
    for model, plain in ((name, cells[PLAIN]), (name_of_other, others[PLAIN])):
        if shared and (reason := _no_sinks(task, model, plain) or _too_low(task, model, plain)):
            both = f"{titled(task)}, {name} and {name_of_other}"
            yield f"{both}: cannot tell which loses more, by any protocol: {reason}"
            return
    more = {True: f"{name} loses more", False: f"{name_of_other} loses more", None: "cannot tell"}
    for protocol in dict.fromkeys(protocol for protocol, _, _ in shared):
        how, ks = f"{titled(task)}, both by protocol {protocol}", [key[2] for key in shared if key[0] == protocol]
        for k in sorted(ks):
            costs = [_costs(task, part, (protocol, "sinks", k)) for part in (cells, others)]
            apart = mean_over((costs[0] - costs[1]).dropna())
            keys = f"{k} {hidden_words('sinks', protocol)}"
            lost = f"they cost {name} {signed(costs[0].mean())} points, {name_of_other} {signed(costs[1].mean())}"
            yield f"{how}, {keys}: {lost} (difference {points(apart)}): {more[apart.above()]}"
        found = at_equal_mass(*(_doses(task, part, protocol) for part in (cells, others)))
        if math.isnan(found.mass):
            yield f"{how}, at equal removed attention: cannot tell, no share of it was removed from both"
        else:
            lost = f"it costs {name} {signed(found.one.value)} points, {name_of_other} {signed(found.other.value)}"
            verdict = f"{lost} (difference {points(found.difference)}): {more[found.difference.above()]}"
            yield f"{how}, at equal removed attention ({100 * found.mass:.1f} %): {verdict}"


def _doses(task: str, cells: Cells, protocol: str) -> Doses:
    """What each number of keys took and cost by a protocol, where what was removed is known."""
    doses = {key: one.dose(task) for key, one in cells.items() if key[:2] == (protocol, "sinks")}
    found = {key: dose.removed for key, dose in doses.items() if dose is not None}
    known = [key for key, mass in found.items() if not math.isnan(mass)]
    costs = pd.DataFrame({key[2]: _costs(task, cells, key) for key in known}).dropna()
    return Doses(np.array([found[key] for key in known]), costs.to_numpy(float).reshape(len(costs), len(known)))


def _no_sinks(task: str, model: str, plain: Benchmark) -> str:
    """Why there is no phenomenon to take away; empty where there is."""
    why = no_phenomenon(model, plain.sinks(task, "gu_rate"), plain.sinks(task, "share"))
    return f"{why} (record_sinks)" if why.endswith("masked") else why


def _too_low(task: str, model: str, plain: Benchmark) -> str:
    """Why no loss can be told of a score; empty where one can."""
    score, floor = plain.score(task), floor_of(plain, task)
    value = math.nan if score is None else float(score["value"])
    why = "chance and two standard errors" if floor > POINTS else "5 points"
    return "" if value > floor else f"{model} gets {value:.3f} with nothing masked, no more than {why}"


def points(estimate: Estimate) -> str:
    """A difference of shares in percentage points, with its interval where it has one."""
    value, low, high = (signed(number) for number in (estimate.value, estimate.low, estimate.high))
    return f"{value} ({low} … {high})" if estimate.is_interval else f"{value}, too few questions for an interval"


def signed(share: float) -> str:
    """A share in percentage points, with its sign and never −0.0."""
    return f"{round(100 * share, 1) + 0.0:+.1f}".replace("-", "−")


def titled(task: str) -> str:
    """What the paper calls it, where it has it."""
    return paper.TITLES.get(task, task)
