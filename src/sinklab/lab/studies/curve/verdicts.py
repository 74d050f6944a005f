"""Costs of blocked keys as a table of statements: measure, value, interval, controls, verdict."""

# R rows, K doses
import itertools
import math
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
    """Cost of an arm, or how much more it costs than another."""

    model: str
    measure: str
    arm: tuple[Any, ...]
    other: tuple[Any, ...] | None = None


def _costs(curve: Reader, twin: str = "") -> pd.DataFrame:
    """Rows of a curve, or of its control, with their cost in percent of the mean loss."""
    rows = finished(curve.run, of_twin("curve_rows", twin))
    clean = rows[rows["control"] == "none"].set_index("row")["loss"]
    cost = rows["loss"] - rows["row"].map(clean)
    level = rows["beta" if by_degree(curve.run) else "k"]
    return rows.assign(model=curve.label, level=level, cost=100 * cost / clean.mean())


def _curve_lines(curves: list[Reader]) -> list[dict[str, str]]:
    rows = {one.label: _costs(one) for one in curves}
    found = [_questions(one, rows[one.label]) for one in curves]
    asked = [question for questions, _ in found for question in questions]
    notes = [note for _, notes in found for note in notes]
    between, why, more = _between(curves, rows)
    notes += why
    if not asked:
        return notes
    how: dict[str, Any] = {"arm": MODEL, "unit": "row", "words": WORDS}
    how |= {
        name: [(one.arm, one.other) for one in some]
        for name, some in (("pairs", asked), ("apart", between))
    }
    table = effects(pd.concat([*rows.values(), *more]), "cost", **how)
    controls = {}
    for kind in CONTROLS:
        some = [_costs(one, kind) for one in curves if kind in twins_of(one.run)]
        if some:
            controls[kind] = pd.concat(some).groupby(MODEL)["cost"].mean()
    lines = []
    for one, line in zip([*asked, *between], table.to_dict("records"), strict=True):
        values = {}
        for kind, means in controls.items():
            other = means.get(one.other, math.nan) if one.other else 0.0
            values[kind] = _percent(means.get(one.arm, math.nan) - other)
        verdict = line["verdict"]
        if one.other:
            verdict = MORE.get(verdict, verdict)
        said = {"model": one.model, "measure": one.measure, "value": _percent(line["mean"])}
        said |= {"interval": f"{_percent(line['low'])} … {_percent(line['high'])}"}
        if math.isnan(line["low"]):
            said["interval"], verdict = "", f"inconclusive, {FEWEST} rows needed"
        lines.append(said | {"controls": beside(values), "verdict": verdict})
    return lines + notes


def _main(rows: pd.DataFrame) -> str | None:
    """The arm that a curve is about; None if controls alone were scored."""
    return next((name for name in MAIN if (rows["control"] == name).any()), None)


def _questions(one: Reader, rows: pd.DataFrame) -> tuple[list[_Question], list[dict[str, str]]]:
    """Whether blocking keys costs anything, at every level; more than as many random ones, at the
    greatest dose; and more than others that hold as much, at the greatest at which half of the
    heads have such. And lines without numbers.
    """
    main, title = _main(rows), title_of(one)
    if main is None:
        return [], []
    levels = sorted({*rows.loc[rows["control"] == main, "level"]}, reverse=by_degree(one.run))

    def asked(level: float, than: str = "", arms: tuple[str, ...] = (main,)) -> _Question:
        measure = f"cost of {_keys_of(one, level)}{than}"
        return _Question(title, measure, *((one.label, level, control) for control in arms))

    found = [asked(level) for level in levels]
    if (rows["control"] == "random").any():
        found.append(asked(levels[-1], " against as many random ones", (main, "random")))
    matched = rows[rows["control"] == "matched"].groupby("level")["matched"].mean()
    fit = [level for level in levels if matched.get(level, 0) >= MATCHED]
    if fit:
        found.append(asked(fit[-1], " against others of equal mass", ("matched", "equal_mass")))
    elif matched.notna().any():
        few = f"inconclusive, at most {percent(matched.max())} of heads have such others"
        measure = "cost of these keys against others of equal mass"
        return found, [{"model": title, "measure": measure, "verdict": f"{few} (half needed)"}]
    return found, []


def _between(
    curves: list[Reader], rows: dict[str, pd.DataFrame]
) -> tuple[list[_Question], list[dict[str, str]], list[pd.DataFrame]]:
    """Every diffusion model with every autoregressive one: at equal count of keys, the least that
    was scored of both, and at equal removed mass, whose costs are rows of their own. And lines
    without numbers.
    """
    causal = [one for one in curves if one.run.info.model.get("family") != "diffusion"]
    found, notes, more = [], [], []
    for one, other in itertools.product([one for one in curves if one not in causal], causal):
        mine, theirs, title = rows[one.label], rows[other.label], title_of(one)
        main = _main(mine)
        less = f"less that of {title_of(other)}"
        why = _lacks(one, mine) or _lacks(other, theirs)
        blocked = [
            (_main(some), curve.run.info.settings.get("sink_rule"), by_degree(curve.run))
            for curve, some in ((one, mine), (other, theirs))
        ]
        if main is None or blocked[0] != blocked[1]:
            why = "not the same keys were blocked in both"
        if why:
            verdict = f"no comparison: {why}"
            notes.append({"model": title, "measure": f"cost {less}", "verdict": verdict})
            continue
        of_main = [some[some["control"] == main] for some in (mine, theirs)]
        shared = {*of_main[0]["level"]} & {*of_main[1]["level"]}
        if shared:
            arms = [(label, min(shared), main) for label in (one.label, other.label)]
            measure = f"cost of {_keys_of(one, min(shared))} {less}"
            found.append(_Question(title, measure, *arms))
        doses = [_doses(some) for some in of_main]
        mass = common_mass(*doses)
        if math.isnan(mass):
            measure = f"cost at equal removed attention {less}"
            verdict = "no comparison: no share of it was removed from both"
            notes.append({"model": title, "measure": measure, "verdict": verdict})
            continue
        arms = [(label, mass, f"{one.label}, {other.label}") for label in (one.label, other.label)]
        found.append(_Question(title, f"cost of {percent(mass)} of the attention {less}", *arms))
        for arm, dose in zip(arms, doses, strict=True):
            cost_R = dose.at(mass)
            named = dict(zip(MODEL, arm, strict=True))
            more.append(pd.DataFrame({"row": range(len(cost_R)), "cost": cost_R} | named))
    return found, notes, more


def _doses(rows: pd.DataFrame) -> Doses:
    """Removed mass of each level of an arm, and the cost of every row."""
    costs_RK = rows.pivot(index="row", columns="level", values="cost")
    removed_K = rows.groupby("level")["removed"].mean()[costs_RK.columns]
    return Doses(removed_K.to_numpy(), costs_RK.to_numpy())


def _lacks(curve: Reader, rows: pd.DataFrame) -> str | None:
    """Reason why a model has no such sinks as the comparison is about; None if it has them."""
    clean = rows[rows["control"] == "none"]
    rate = median_over(clean["strong"])
    if rate.above(PHENOMENON):
        return None
    sure = ""
    if rate.above(PHENOMENON) is None:
        sure = ", and whether that is enough is inconclusive"
    return (
        f"in {percent(rate.value)} of the heads of {curve.label} a key gets more than 30 % of the "
        f"attention (we require {100 * PHENOMENON:.0f} %{sure}; the most attended key gets "
        f"{percent(clean['strongest'].mean())} on average)"
    )


def _keys_of(one: Reader, level: float) -> str:
    """The keys that an arm takes in each head, in words."""
    settings = one.run.info.settings
    rule, weight, k = settings.get("sink_rule"), "", level
    if by_degree(one.run):
        weight, k = f" at {percent(level)} of the weight", settings["ks"][-1]
    count, key = ("", "key") if k == 1 else (f"{k:g} ", "keys")
    if rule is None:
        return f"the {count}most attended {key}{weight}"
    return f"at most {k:g} {key} that {rule_name(rule)} calls sinks{weight}"


def _map_lines(one: Reader) -> list[dict[str, str]]:
    """The greatest cost, the attention that the keys held, and how many cells cost and help."""
    run = one.run
    table, unit = finished(run, "curve"), run.info.settings["by"]
    cells = table[table["layer"] >= 0]
    most = cells.loc[cells["mean"].idxmax()]
    where = f"layer {most['layer']:.0f}"
    if most["head"] >= 0:
        where += f", head {most['head']:.0f}"
    keys = _keys_of(one, most["k"])
    greatest = {"measure": f"greatest cost of {keys}, nats per token: {where}"}
    greatest |= {"value": signed(most["mean"], 4), "verdict": most["verdict"]}
    if math.isnan(most["low"]):
        greatest["verdict"] = f"inconclusive in {most['n']} rows, {FEWEST} needed"
    else:
        greatest["interval"] = " … ".join(signed(most[end], 4) for end in ("low", "high"))
    shown = {}
    for kind in twins_of(run):
        means = run.table(of_twin("curve", kind))["mean"]
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
