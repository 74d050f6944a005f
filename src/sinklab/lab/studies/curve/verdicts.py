"""Costs of blocked keys as a table of statements: measure, value, interval, controls, verdict."""

# R rows, K doses
import math
from collections.abc import Iterator
from itertools import product
from typing import Any, NamedTuple

import pandas as pd

from sinklab.lab.analysis.differences import effects
from sinklab.lab.analysis.doses import MATCHED, PHENOMENON, Doses, common_mass
from sinklab.lab.analysis.estimates import FEWEST, median_over
from sinklab.lab.analysis.words import CONTROLS, beside
from sinklab.lab.records import Run, of_twin
from sinklab.lab.reports import Reader, as_shown, finished, percent, signed
from sinklab.lab.reports.samples import rule_name
from sinklab.lab.studies import twins_of
from sinklab.lab.studies.curve.arms import WORDS

MAIN = ("top", "sinks")
"""Arms that a curve is about, in contrast to its controls."""
MODEL = ["model", "level", "control"]
"""Columns that tell the arms of several curves apart: the level is k, or beta of a curve by degree.
"""
MORE = {"costs": "costs more", "helps": "costs less"}
"""Word for an arm less no edit -> that for an arm less another."""


def is_map(run: Run) -> bool:
    """Whether keys were blocked in one layer or head at a time."""
    return run.info.settings.get("by", "model") != "model"


def by_degree(run: Run) -> bool:
    """Whether keys kept several parts of their weight."""
    return bool(run.info.settings.get("beta"))


def title_of(one: Reader) -> str:
    """Label of a run, and the kind of its model."""
    family = "DLM" if one.run.info.model.get("family") == "diffusion" else "AR"
    return f"{one.label} ({family})"


def cost_verdicts(runs: Any) -> pd.DataFrame:
    """Statements of curves and maps, a row each: model, measure, value, interval, controls,
    verdict.

    Values of curves are percent of the loss, and their verdicts are corrected for all of them
    together (Holm). A diffusion model is compared with an autoregressive one if both have heavy
    sinks.
    """
    shown: list[Reader] = as_shown(runs, "curve")
    lines = _curve_lines([one for one in shown if not is_map(one.run)])
    for one in shown:
        if is_map(one.run):
            lines += [{"model": one.label} | line for line in _map_lines(one)]
    columns = ["model", "measure", "value", "interval", "controls", "verdict"]
    return pd.DataFrame([dict.fromkeys(columns, "") | line for line in lines], columns=columns)


def cost_sentences(runs: Any) -> list[str]:
    """`cost_verdicts`, a line each; then which models have no controls."""
    shown: list[Reader] = as_shown(runs, "curve")
    lines = []
    for row in cost_verdicts(shown).to_dict("records"):
        line = ": ".join(filter(None, (row["model"], row["measure"], row["value"])))
        if row["interval"]:
            line += f" (95\u00a0% {row['interval']})"
        line += row["controls"] and f" ({row['controls']})"
        lines.append(f"{line}{row['verdict'] and '; '}{row['verdict']}.")
    if lines:
        lines.append("Verdicts are corrected together, intervals are not.")
    alone = [one for one in shown if not twins_of(one.run)]
    if alone:
        whys = [one.run.table("twins")["why"].iloc[0] for one in alone if "twins" in one.run.tables]
        why = f" ({whys[0]})" if whys else ""
        names = " and ".join(one.label for one in alone)
        lines.append(f"No untrained control of {names} was run{why}.")
    return lines


class _Question(NamedTuple):
    """Cost of an arm, or how much more it costs than another; or why there is no answer."""

    model: str
    measure: str
    arm: tuple[Any, ...] = ()
    other: tuple[Any, ...] | None = None
    why: str = ""


class _Curve:
    """A curve, and what is asked of it."""

    def __init__(self, one: Reader) -> None:
        self.label, self.title, self.rows = one.label, title_of(one), _costs(one)
        self.settings = one.run.info.settings
        self.rule = self.settings.get("sink_rule")
        # of a map each layer is named with its cost
        self.layers = [] if is_map(one.run) else self.settings.get("layers") or []
        self.by_degree = by_degree(one.run)
        self.is_diffusion = one.run.info.model.get("family") == "diffusion"
        # None if controls alone were scored
        self.main = next((name for name in MAIN if (self.rows["control"] == name).any()), None)
        self.own = self.rows[self.rows["control"] == self.main]
        self.levels = sorted({*self.own["level"]}, reverse=self.by_degree)

    def keys(self, level: float) -> str:
        """The keys that an arm takes in each head, in words."""
        weight, k = "", level
        if self.by_degree:
            weight, k = f" at {percent(level)} of the weight", self.settings["ks"][-1]
        count, key = ("", "key") if k == 1 else (f"{k:g} ", "keys")
        if self.layers:
            named = {1: "layer"}.get(len(self.layers), "layers")
            weight += f" in {named} {', '.join(map(str, self.layers))} alone"
        if self.rule is None:
            return f"the {count}most attended {key}{weight}"
        return f"at most {k:g} {key} that {rule_name(self.rule)} calls sinks{weight}"

    def questions(self) -> Iterator[_Question]:
        """Whether blocking keys costs anything, at every level; more than as many random ones, at
        the greatest dose; and more than others that hold as much, at the greatest at which half of
        the heads have such.
        """
        if self.main is None:
            return
        for level in self.levels:
            arm = self.label, level, self.main
            yield _Question(self.title, f"cost of {self.keys(level)}", arm)
        if (self.rows["control"] == "random").any():
            than = f"cost of {self.keys(level)} against as many random ones"
            yield _Question(self.title, than, arm, (self.label, level, "random"))
        matched = self.rows[self.rows["control"] == "matched"].groupby("level")["matched"].mean()
        fit = [level for level in self.levels if matched.get(level, 0) >= MATCHED]
        if fit:
            arms: Any = [(self.label, fit[-1], name) for name in ("matched", "equal_mass")]
            than = f"cost of {self.keys(fit[-1])} against others of equal mass"
            yield _Question(self.title, than, *arms)
        elif matched.notna().any():
            why = f"inconclusive, at most {percent(matched.max())} of heads have such others"
            than = "cost of these keys against others of equal mass"
            yield _Question(self.title, than, why=f"{why} (half needed)")

    def lacks(self) -> str | None:
        """Reason why the model has no such sinks as comparisons are about; None if it has them."""
        clean = self.rows[self.rows["control"] == "none"]
        rate = median_over(clean["strong"])
        if rate.above(PHENOMENON):
            return None
        sure = ""
        if rate.above(PHENOMENON) is None:
            sure = ", and whether that is enough is inconclusive"
        return (
            f"in {percent(rate.value)} of the heads of {self.label} a key gets more than 30 % of "
            f"the attention (we require {100 * PHENOMENON:.0f} %{sure}; the most attended key gets "
            f"{percent(clean['strongest'].mean())} on average)"
        )

    def doses(self) -> Doses:
        """Removed mass of each level, and the cost of every row."""
        costs_RK = self.own.pivot(index="row", columns="level", values="cost")
        removed_K = self.own.groupby("level")["removed"].mean()[costs_RK.columns]
        return Doses(removed_K.to_numpy(), costs_RK.to_numpy())


def _costs(curve: Reader, twin: str = "") -> pd.DataFrame:
    """Rows of a curve, or of its control, with their cost in percent of the mean loss."""
    rows = finished(curve.run, of_twin("curve_rows", twin))
    clean = rows[rows["control"] == "none"].set_index("row")["loss"]
    cost = rows["loss"] - rows["row"].map(clean)
    level = rows["beta" if by_degree(curve.run) else "k"]
    return rows.assign(model=curve.label, level=level, cost=100 * cost / clean.mean())


def _curve_lines(shown: list[Reader]) -> list[dict[str, str]]:
    curves = [_Curve(one) for one in shown]
    rows = [one.rows for one in curves]
    own = [question for one in curves for question in one.questions()]
    between: list[_Question] = []
    for one, other in product(curves, curves):
        if one.is_diffusion and not other.is_diffusion:
            between += _between(one, other, rows)
    asked, apart = ([one for one in some if not one.why] for some in (own, between))
    lines = []
    if asked:
        how: dict[str, Any] = {"arm": MODEL, "unit": "row", "words": WORDS}
        how["pairs"] = [(one.arm, one.other) for one in asked]
        how["apart"] = [(one.arm, one.other) for one in apart]
        table = effects(pd.concat(rows), "cost", **how)
        controls = _of_controls(shown)
        for question, found in zip([*asked, *apart], table.to_dict("records"), strict=True):
            lines.append(_line(question, found, controls))
    notes = [one for one in (*own, *between) if one.why]
    return lines + [
        {"model": one.model, "measure": one.measure, "verdict": one.why} for one in notes
    ]


def _of_controls(shown: list[Reader]) -> dict[str, Any]:
    """Mean cost of each arm in each untrained control."""
    found = {}
    for kind in CONTROLS:
        some = [_costs(one, kind) for one in shown if kind in twins_of(one.run)]
        if some:
            found[kind] = pd.concat(some).groupby(MODEL)["cost"].mean()
    return found


def _line(one: _Question, found: dict[str, Any], controls: dict[str, Any]) -> dict[str, str]:
    """The answer to a question."""
    values = {}
    for kind, means in controls.items():
        other = means.get(one.other, math.nan) if one.other else 0.0
        values[kind] = _percent(means.get(one.arm, math.nan) - other)
    verdict, interval = found["verdict"], f"{_percent(found['low'])} … {_percent(found['high'])}"
    if one.other:
        verdict = MORE.get(verdict, verdict)
    if math.isnan(found["low"]):
        interval, verdict = "", f"inconclusive, {FEWEST} rows needed"
    line = {"model": one.model, "measure": one.measure, "value": _percent(found["mean"])}
    return line | {"interval": interval, "controls": beside(values), "verdict": verdict}


def _between(one: _Curve, other: _Curve, rows: list[pd.DataFrame]) -> Iterator[_Question]:
    """A diffusion model with an autoregressive one: at equal count of keys, the least that was
    scored of both, and at equal removed mass, whose costs become rows of their own.
    """
    less = f"less that of {other.title}"
    why = one.lacks() or other.lacks()
    blocked = [
        (each.main, each.rule, each.layers, each.by_degree and each.settings["ks"])
        for each in (one, other)
    ]
    if one.main is None or blocked[0] != blocked[1]:
        why = "not the same keys were blocked in both"
    if why:
        yield _Question(one.title, f"cost {less}", why=f"no comparison: {why}")
        return
    shared = {*one.levels} & {*other.levels}
    labels = (one.label, other.label)
    if shared:
        arms: Any = [(label, min(shared), one.main) for label in labels]
        yield _Question(one.title, f"cost of {one.keys(min(shared))} {less}", *arms)
    doses = [one.doses(), other.doses()]
    mass = common_mass(*doses)
    if math.isnan(mass):
        why = "no comparison: no share of it was removed from both"
        yield _Question(one.title, f"cost at equal removed attention {less}", why=why)
        return
    arms = [(label, mass, ", ".join(labels)) for label in labels]
    for arm, dose in zip(arms, doses, strict=True):
        cost_R = dose.at(mass)
        named = dict(zip(MODEL, arm, strict=True))
        rows.append(pd.DataFrame({"row": range(len(cost_R)), "cost": cost_R} | named))
    yield _Question(one.title, f"cost of {percent(mass)} of the attention {less}", *arms)


def _map_lines(one: Reader) -> list[dict[str, str]]:
    """The greatest cost, the attention that the keys held, and how many cells cost and help, for
    each number of keys.
    """
    curve = _Curve(one)
    lines = list[dict[str, str]]()
    for k in curve.levels:
        if k > 0:
            lines += _of_cells(one, curve, k)
    return lines


def _of_cells(one: Reader, curve: _Curve, k: float) -> list[dict[str, str]]:
    run = one.run
    unit = run.info.settings["by"]

    def of_keys(table: pd.DataFrame) -> pd.DataFrame:
        wanted = (table["layer"] >= 0) & (table["control"] == curve.main) & (table["k"] == k)
        return table[wanted]

    cells = of_keys(finished(run, "curve"))
    most = cells.loc[cells["mean"].idxmax()]
    where = f"layer {most['layer']:.0f}"
    if most["head"] >= 0:
        where += f", head {most['head']:.0f}"
    keys = curve.keys(k)
    greatest = {"measure": f"greatest cost of {keys}, nats per token: {where}"}
    greatest |= {"value": signed(most["mean"], 4), "verdict": most["verdict"]}
    if math.isnan(most["low"]):
        greatest["verdict"] = f"inconclusive in {most['n']} rows, {FEWEST} needed"
    else:
        greatest["interval"] = " … ".join(signed(most[end], 4) for end in ("low", "high"))
    shown = {}
    for kind in twins_of(run):
        means = of_keys(run.table(of_twin("curve", kind)))["mean"]
        shown[kind] = signed(means[means.abs().idxmax()], 4)
    lines = [greatest | {"controls": beside(shown)}]
    if "screen" in run.tables:
        measure = "heads blocked, the first of a screen, which can miss the costliest"
        lines.append({"measure": measure, "value": f"{len(cells)} of {len(run.table('screen'))}"})
    held = f"{percent(cells['held'].mean())}, {percent(cells['held'].max())}"
    lines.append({"measure": "attention that they held, mean and most", "value": held})
    for word in WORDS:
        measure = f"{unit}s in which blocking them {word}, of {len(cells)}"
        lines.append({"measure": measure, "value": str((cells["verdict"] == word).sum())})
    return lines


def _percent(value: float) -> str:
    """A change in percent; empty if there is none."""
    if math.isnan(value):
        return ""
    return f"{signed(value, 1)}\u00a0%"
