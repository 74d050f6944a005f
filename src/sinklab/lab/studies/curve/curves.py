"""Masking curves as they are read, and verdicts on them, corrected for the number of all that stand
on a page.
"""

# R rows
import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pandas as pd

from sinklab.lab.analysis.doses import MATCHED, PHENOMENON, Contrast, Doses, at_equal_mass, contrast
from sinklab.lab.analysis.estimates import Estimate, mean_over, mean_p, median_over
from sinklab.lab.analysis.verdicts import Verdict, holm
from sinklab.lab.records.info import of_twin
from sinklab.lab.records.reading import Run
from sinklab.lab.reports.runs import as_shown
from sinklab.lab.reports.samples import Reader, finished
from sinklab.lab.reports.words import percent, signed
from sinklab.lab.studies.scored import shown_by, twins_of

MAIN = ("top", "sinks")
"""Arms that a curve is about, in contrast to its controls."""
DOSE = ("keys", "sinks", "held", "removed", "matched")
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
            texts = {kind: _points(float(other_R.mean())) for kind, other_R in others.items()}
            words = shown_by(texts, answer_R, others)
            found[curve.label, asked] = _verdict(mean_over(answer_R), mean_p(answer_R), words)
    for one, other in pairs(curves):
        kinds = [kind for kind in one.twins if kind in other.twins]
        beside = {kind: contrasts(one.twins[kind], other.twins[kind]) for kind in kinds}
        for name, (_, own) in contrasts(one, other).items():
            texts = {
                kind: _points(twin[name][1].difference.value)
                for kind, twin in beside.items()
                if name in twin
            }
            found[one.label, (other.label, name)] = _verdict(own.difference, own.p, shown_by(texts))
    corrected = holm([verdict for verdict, _ in found.values()])
    return {
        key: Judged(verdict.holds, words)
        for (key, (_, words)), verdict in zip(found.items(), corrected, strict=True)
    }


def _verdict(found: Estimate, p: float, controls: str) -> tuple[Verdict, str]:
    return Verdict("", found.above(), found.value, 0.0, "", p=p), controls


def _points(share: float) -> str:
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
