"""Verdicts of masking curves and maps of heads, a row each."""

# R rows
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pandas as pd

from sinklab.lab.analysis import Verdict, holm
from sinklab.lab.analysis.doses import (
    FEWEST_CELLS,
    MATCHED,
    PHENOMENON,
    Contrast,
    Doses,
    at_equal_mass,
    contrast,
    rank_correlation,
)
from sinklab.lab.analysis.estimates import FEWEST, Estimate, mean_over, mean_p, median_over
from sinklab.lab.records import Run, of_twin
from sinklab.lab.reports import Reader, as_shown, finished, number, percent, signed
from sinklab.lab.reports.samples import rule_name
from sinklab.lab.studies import (
    no_twins,
    of_each,
    shown_by,
    twins_of,
    verdict_lines,
    verdict_table,
    wide,
)
from sinklab.lab.studies.curve.study import CELL, DOSE

MAIN = ("top", "sinks")
"""Arms that a curve is about, in contrast to its controls."""
COLUMNS = {"k", "control", "loss", "delta", "delta_low", "delta_high", "relative", "rows", "tokens"}
COLUMNS |= {"excess", "excess_low", "excess_high", *DOSE}


@dataclass(frozen=True, eq=False)
class MaskingCurve(Reader):
    """One run of kind "curve"."""

    twin: str = ""
    """Source of the numbers: the run's own model if empty, or this control on the same rows."""

    columns: ClassVar = {"curve": COLUMNS}
    origin = "a masking curve"

    def table(self, name: str) -> pd.DataFrame | None:
        """A table of the run, or of its twin."""
        return super().table(of_twin(name, self.twin))

    @cached_property
    def twins(self) -> dict[str, "MaskingCurve"]:
        """The controls that the run has, by name."""
        return {kind: replace(self, twin=kind) for kind in twins_of(self.run)}

    def finished(self, name: str) -> pd.DataFrame:
        """A table that every finished curve has. Raises NotRecorded for a run that did not come to
        its end.
        """
        table = self.table(name)
        if table is None:
            return finished(self.run, of_twin(name, self.twin))
        return table

    @cached_property
    def rows(self) -> pd.DataFrame:
        """The table ``curve``."""
        return self.finished("curve")

    @property
    def rule(self) -> str | None:
        """The rule for sinks, if the curve blocks only sinks by that rule."""
        return self.run.info.settings.get("sink_rule")

    @property
    def is_causal(self) -> bool:
        """Whether its loss is that of the next token."""
        return self.run.info.model.get("family") != "diffusion"

    @property
    def title(self) -> str:
        """Label of the curve, and the kind of its model."""
        if self.is_causal:
            return f"{self.label} (AR)"
        return f"{self.label} (DLM)"

    @property
    def controls(self) -> list[str]:
        """Arms that were scored, in the order of the run."""
        return [name for name in dict.fromkeys(self.rows["control"]) if name != "none"]

    @property
    def main(self) -> str | None:
        """The arm that the curve is about: "top" or "sinks"; None if controls alone were scored."""
        return next((name for name in MAIN if name in self.controls), None)

    def of(self, control: str) -> pd.DataFrame:
        """The rows of one control by rising k, with k = 0 in front."""
        found = self.rows[self.rows["control"].isin(["none", control])]
        return found.sort_values("k", kind="stable", ignore_index=True)

    @cached_property
    def losses(self) -> pd.DataFrame:
        """Loss of every row by (k, control)."""
        return self.finished("curve_rows").pivot(
            index="row", columns=["k", "control"], values="loss"
        )

    def costs(self, k: float, control: str) -> np.ndarray:
        """Cost of every row, (R,), in shares of the mean loss with nothing blocked."""
        clean_R = self.losses[0, "none"].to_numpy()
        return (self.losses[k, control].to_numpy() - clean_R) / clean_R.mean()

    def doses(self, control: str) -> Doses:
        """Removed mass of each k of an arm, and the cost of every row (`costs`)."""
        table = self.of(control)
        table = table[table["k"] > 0]
        return Doses(
            table["removed"].to_numpy(), np.stack([self.costs(k, control) for k in table["k"]], 1)
        )

    @property
    def matched(self) -> pd.DataFrame:
        """The rows of the table on the heads that have a control of equal mass, by rising k."""
        rows = self.rows[self.rows["control"] == "matched"].sort_values("k")
        # nothing is matched if nothing is blocked
        return rows.dropna(subset=["matched"])

    def asked(self) -> list[tuple[str, float]]:
        """Questions to the curve, and their k: whether blocking keys costs anything ("rise", at
        every k), and more than blocking as many random ones ("random", at the greatest) or others
        that hold as much ("equal mass", at the greatest at which half of the heads have such).
        """
        if self.main is None:
            return []
        ks = [k for k in self.of(self.main)["k"] if k]
        asked = [("rise", k) for k in ks]
        if ks and "random" in self.controls:
            asked.append(("random", ks[-1]))
        fit = self.matched[self.matched["matched"] >= MATCHED]
        if len(fit):
            asked.append(("equal mass", fit["k"].iloc[-1]))
        return asked

    def answer(self, name: str, k: float) -> np.ndarray:
        """Answer of each row to a question, (R,), in shares of the loss: above zero for yes."""
        assert self.main is not None
        if name == "rise":
            return self.costs(k, self.main)
        if name == "equal mass":
            return self.costs(k, "matched") - self.costs(k, "equal_mass")
        return self.costs(k, self.main) - self.costs(k, name)


Curves = Iterable[Run | MaskingCurve] | Run | MaskingCurve


def as_curves(sources: Curves) -> list[MaskingCurve]:
    """Several runs with labels that tell them apart. Raises ValueError without a run, or for
    another kind.
    """
    shown = as_shown(sources, "curve")
    return [
        one if isinstance(one, MaskingCurve) else MaskingCurve(one.run, one.label, one.repeats)
        for one in shown
    ]


class Judged(NamedTuple):
    """Verdict on one question of a page."""

    holds: bool | None
    """Above zero or below it; None if inconclusive."""
    controls: str
    """Results of the controls, in brackets; empty without any."""
    estimate: Estimate


Key = tuple[str, Any]
"""Label of a curve and a question of `MaskingCurve.asked`; for a pair, both labels and "count" or
"mass".
"""


def judged(curves: list[MaskingCurve]) -> dict[Key, Judged]:
    """Verdicts on some curves, those of a page: by Holm's method a false one is to stand on 5 % of
    pages.
    """
    found: dict[Key, tuple[Verdict, str]] = {}
    for curve in curves:
        for asked in curve.asked():
            answer_R = curve.answer(*asked)
            others = {kind: twin.answer(*asked) for kind, twin in curve.twins.items()}
            texts = {kind: _in_percent(float(other_R.mean())) for kind, other_R in others.items()}
            words = shown_by(texts, answer_R, others)
            found[curve.label, asked] = _verdict(mean_over(answer_R), mean_p(answer_R), words)
    for one, other in pairs(curves):
        kinds = [kind for kind in one.twins if kind in other.twins]
        beside = {kind: contrasts(one.twins[kind], other.twins[kind]) for kind in kinds}
        for name, (_, own) in contrasts(one, other).items():
            texts = {
                kind: _in_percent(twin[name][1].difference.value)
                for kind, twin in beside.items()
                if name in twin
            }
            found[one.label, (other.label, name)] = _verdict(own.difference, own.p, shown_by(texts))
    corrected = holm([verdict for verdict, _ in found.values()])
    judgements = {}
    for (key, (_, words)), verdict in zip(found.items(), corrected, strict=True):
        assert verdict.estimate is not None
        judgements[key] = Judged(verdict.holds, words, verdict.estimate)
    return judgements


def _verdict(found: Estimate, p: float, controls: str) -> tuple[Verdict, str]:
    verdict = Verdict("", found.above(), found.value, 0.0, "", estimate=found, p=p)
    return verdict, controls


def _in_percent(share: float) -> str:
    """A change of the loss in percent of it; empty if there is none."""
    if math.isnan(share):
        return ""
    return f"{signed(100 * share, 1)}\u00a0%"


def pairs(curves: list[MaskingCurve]) -> list[tuple[MaskingCurve, MaskingCurve]]:
    """Every diffusion model with every autoregressive one of which something may be said
    together.
    """
    causal = [curve for curve in curves if curve.is_causal]
    both = [(one, other) for one in curves if not one.is_causal for other in causal]
    return [pair for pair in both if unlike(*pair) is None]


def unlike(one: MaskingCurve, other: MaskingCurve) -> str | None:
    """Reason why two models cannot be contrasted; None if they can."""
    if one.main is None or (one.main, one.rule) != (other.main, other.rule):
        return "not the same keys were blocked in both"
    return lacks(one) or lacks(other)


def contrasts(one: MaskingCurve, other: MaskingCurve) -> dict[str, tuple[float, Contrast]]:
    """Two models at equal "count" of keys, the least that was scored of both, and at equal removed
    "mass", with it.
    """
    assert one.main is not None
    found = {}
    both = {k for k in one.of(one.main)["k"] if k} & {*other.of(one.main)["k"]}
    if both:
        k = min(both)
        found["count"] = (k, contrast(one.costs(k, one.main), other.costs(k, one.main)))
    same = at_equal_mass(one.doses(one.main), other.doses(one.main))
    return found | {"mass": (same.mass, same)}


def lacks(curve: MaskingCurve) -> str | None:
    """Reason why a model has no such sinks as the contrast is about; None if it has them."""
    seen = curve.finished("phenomenon")
    rate = median_over(seen["gu"])
    if rate.above(PHENOMENON):
        return None
    heads = f"no head of {curve.label} gives"
    if rate.value:
        heads = f"{percent(rate.value)} of the heads of {curve.label} give"
    sure = ""
    if rate.above(PHENOMENON) is None:
        sure = ", and whether that is enough is inconclusive"
    return (
        f"{heads} any key more than 30 % of the attention (we require {100 * PHENOMENON:.0f} % of "
        f"the heads{sure}; the most attended key gets {percent(seen['main'].mean())} on average)"
    )


def blocked_keys(rule: str | None, k: float) -> str:
    """The keys that an arm blocks in each head, in words."""
    count, key = ("", "key") if k == 1 else (f"{k:g} ", "keys")
    if rule is None:
        return f"the {count}most attended {key}"
    return f"at most {k:g} {key} that {rule_name(rule)} calls sinks"


OTHERS = {
    "rise": "",
    "random": " against as many random ones",
    "equal mass": " against others of equal mass",
}
"""Question of `MaskingCurve.asked` -> the keys that blocking is compared with."""


def masking_curve_verdicts(runs: Curves) -> pd.DataFrame:
    """Verdicts of curves, a row each: model, measure, value, interval, controls, verdict.

    Values are shares of the loss, in percent. Verdicts are corrected for the number of all of them
    together.
    """
    curves = as_curves(runs)
    verdicts = judged(curves)
    lines = []
    for curve in curves:
        for name, k in curve.asked():
            measure = f"cost of {blocked_keys(curve.rule, k)}{OTHERS[name]}"
            lines.append(_cost(curve.title, measure, verdicts[curve.label, (name, k)]))
        most = curve.matched["matched"].max()
        if curve.main is not None and most < MATCHED:
            few = f"inconclusive, at most {percent(most)} of heads have such others (half needed)"
            measure = f"cost of these keys{OTHERS['equal mass']}"
            lines.append({"model": curve.title, "measure": measure, "verdict": few})
    causal = [curve for curve in curves if curve.is_causal]
    for one, other in itertools.product([one for one in curves if not one.is_causal], causal):
        why = unlike(one, other)
        if why:
            line = {"model": one.title, "measure": f"cost less that of {other.title}"}
            lines.append(line | {"verdict": f"no comparison: {why}"})
            continue
        for name, (at, _) in contrasts(one, other).items():
            keys = f"{percent(at)} of the attention"
            if name == "count":
                keys = blocked_keys(one.rule, at)
            measure = f"cost of {keys} less that of {other.title}"
            lines.append(_cost(one.title, measure, verdicts[one.label, (other.label, name)]))
            if math.isnan(at):
                lines[-1]["measure"] = f"cost at equal removed attention less that of {other.title}"
                lines[-1]["verdict"] = "no comparison: no share of it was removed from both"
    return verdict_table(lines)


def _cost(model: str, measure: str, found: Judged) -> dict[str, str]:
    line = {"model": model, "measure": measure, "value": _in_percent(found.estimate.value)}
    if not found.estimate.is_interval:
        return line | {"verdict": f"inconclusive, {FEWEST} rows needed"}
    low, high = map(_in_percent, found.estimate.interval)
    line["interval"] = f"{low} … {high}"
    words = {True: "more", False: "less", None: "inconclusive"}
    if found.holds is not None:
        line["controls"] = found.controls
    return line | {"verdict": words[found.holds]}


def masking_curve_sentences(runs: Curves) -> list[str]:
    """`masking_curve_verdicts`, a line each; then for how many they are corrected, and which models
    have no controls.
    """
    curves = as_curves(runs)
    lines = verdict_lines(masking_curve_verdicts(curves))
    together = len(judged(curves))
    if together > 1:
        lines.append(f"Verdicts are corrected for {together} (Holm), intervals are not.")
    return lines + no_twins({one.label: one.run for one in curves if one.main is not None})


TOLD = {1: "costs", -1: "helps", 0: "inconclusive"}


def ablation_verdicts(run: Run) -> pd.DataFrame:
    """Verdicts of a map, a row each, as in `masking_curve_verdicts`: the greatest rise, how many
    cells rise and fall, and whether weight and cost go together.
    """
    cells, settings, name = finished(run, "map"), run.info.settings, run.info.model["name"]
    unit, rows = settings["by"], cells["rows"].iloc[0]
    most = cells.loc[cells["delta"].idxmax()]
    where = f"layer {most['layer']:.0f}"
    if most["head"] >= 0:
        where += f", head {most['head']:.0f}"
    keys = blocked_keys(settings["sink_rule"], settings["ks"][0])
    greatest = {"measure": f"greatest cost of {keys}, nats per token: {where}"}
    greatest |= {"value": signed(most["delta"], 4)}
    held = {"measure": "attention that they held, mean and most"}
    held["value"] = f"{percent(cells['held'].mean())}, {percent(cells['held'].max())}"
    if rows < FEWEST:
        greatest["verdict"] = f"inconclusive in {rows} rows, {FEWEST} needed"
        return verdict_table({"model": name} | line for line in (greatest, held))
    low, high = (signed(most[f"delta_{end}"], 4) for end in ("low", "high"))
    kinds = twins_of(run)
    deltas = {kind: run.table(of_twin("map", kind))["delta"] for kind in kinds}
    shown = {kind: signed(delta[delta.abs().idxmax()], 4) for kind, delta in deltas.items()}
    greatest |= {"interval": f"{low} … {high}", "controls": shown_by(shown)}
    greatest["verdict"] = TOLD[most["told"]]
    lines = [greatest, held]
    for sign, word in ((1, "rises"), (-1, "falls")):
        measure = f"{unit}s in which the loss {word}, of {len(cells)}"
        lines.append({"measure": measure, "value": str((cells["told"] == sign).sum())})
    found = _correlation(run)
    together = {"measure": f"rank correlation of weight and cost over {unit}s"}
    if math.isnan(found.value):
        together["verdict"] = f"inconclusive, {FEWEST_CELLS} {unit}s that differ needed"
    else:
        low, high = (number(end, 2) for end in found.interval)
        others = {kind: number(_correlation(run, kind).value, 2).strip("–") for kind in kinds}
        together |= {"value": number(found.value, 2), "interval": f"{low} … {high}"}
        together["controls"] = shown_by(others)
        words = {True: "they go together", False: "they go apart", None: "inconclusive"}
        together["verdict"] = words[found.above()]
    return verdict_table({"model": name} | line for line in [*lines, together])


@of_each
def ablation_sentences(run: Run) -> list[str]:
    """`ablation_verdicts` of each run, a line each."""
    lines = verdict_lines(ablation_verdicts(run))
    if finished(run, "map")["rows"].iloc[0] < FEWEST:
        return lines
    return lines + no_twins({run.info.model["name"]: run})


def _correlation(run: Run, twin: str = "") -> Estimate:
    rows = run.table(of_twin("ablation", twin))
    rows = rows.assign(delta=rows["loss"] - rows["clean"])
    held_RC, delta_RC = (wide(rows, CELL, name).to_numpy() for name in ("held", "delta"))
    return rank_correlation(held_RC, delta_RC)
