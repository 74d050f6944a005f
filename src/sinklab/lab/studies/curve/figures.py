"""Masking curves and maps of heads, runs of kind "curve" and "ablate": figures, tables, and their
results in words.
"""

# R rows
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pandas as pd

from sinklab.core.errors import one_of
from sinklab.core.sinks import DEFAULT
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
from sinklab.lab.reports import (
    Axis,
    Chart,
    Map,
    Reader,
    as_shown,
    drawn_as,
    figure,
    finished,
    number,
    percent,
    ranged,
    save_figure,
    signed,
    statements,
    write_csv,
    write_page,
)
from sinklab.lab.reports.samples import rule_name
from sinklab.lab.studies import labels_of, no_twins, of_each, shown_by, twins_of, wide

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
    return {
        key: Judged(verdict.holds, words)
        for (key, (_, words)), verdict in zip(found.items(), corrected, strict=True)
    }


def _verdict(found: Estimate, p: float, controls: str) -> tuple[Verdict, str]:
    return Verdict("", found.above(), found.value, 0.0, "", p=p), controls


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


STYLES: dict[str, Any] = {"top": "-", "sinks": "-", "random": ":"}
STYLES |= {"equal_mass": (0, (4, 1, 1, 1, 1, 1)), "matched": (0, (6, 1))}
WORDS: dict[str, str] = labels_of("curve")["blocked"]
SCALES = {"linear": "linear", "log": "symlog"}
AXES = ("count", "mass")


@figure("masking_curve", kind="curve", prepared=True, size=(4.8, 3.2))
def masking_curve_figure(
    runs: list[Reader], *, over: str = "count", change: str = "linear"
) -> Chart:
    """Change of the loss over the number of blocked keys, or the attention removed, with 95 % bands
    over rows of text.

    A colour for each model; a style for each control. A diffusion model's loss is its masked-token
    bound, an autoregressive one's that of the next token. `over`: count (keys per layer and head)
    or mass (percent of the attention really removed). `change`: scale of the vertical axis, linear
    or log (linear below a thousandth of a nat). Raises ValueError for another axis, scale or theme,
    and for runs of another kind.
    """
    one_of("the scale of a masking curve", change, SCALES)
    one_of("the axis of a masking curve", over, AXES)
    curves = as_curves([run if isinstance(run, MaskingCurve) else run.run for run in runs])
    column, to_axis = {"count": ("k", 1), "mass": ("removed", 100)}[over]
    lines = []
    for one, curve in zip(drawn_as(curves), curves, strict=True):
        for control in curve.controls:
            rows = curve.of(control).sort_values(column, kind="stable")
            how = {
                "run": curve.title,
                "name": curve.title,
                "style": STYLES.get(control, "-"),
                "words": WORDS.get(control, control),
                "low": rows["delta_low"],
                "high": rows["delta_high"],
            }
            lines.append(one.line(to_axis * rows[column], rows["delta"], **how))
    x = Axis("attention removed, %")
    if over == "count":
        x = Axis(
            "keys blocked per layer and head",
            scale="symlog",
            ticks=sorted({int(k) for one in curves for k in one.rows["k"]}),
        )
    y = Axis("change of loss, nats per token", scale=SCALES[change], linear=1e-3)
    return Chart(x, y, lines)


def masking_curve_table(runs: Curves) -> pd.DataFrame:
    """One row per (model, k, control): loss, its change with the 95 % interval, and the dose, for
    people.

    The dose: keys per head, the share of them that are sinks by the rule, the attention they held
    when chosen, the share really removed, and the share of heads that have a control of equal mass.
    Numbers are the table ``curve`` of a run.
    """
    rows = []
    for curve in as_curves(runs):
        for cell in curve.rows.sort_values("k", kind="stable").to_dict("records"):
            row = {
                "model": curve.title,
                "k": cell["k"],
                "blocked": WORDS.get(cell["control"], cell["control"]),
                "loss": number(cell["loss"], 4),
                "change": change(cell),
                "relative": in_percent(cell["relative"]),
                "keys": number(cell["keys"]),
            }
            rows.append(row | {name: percent(cell[name]) for name in DOSE[1:]})
    return pd.DataFrame(rows)


@cache
def curve_statements() -> Callable[..., list[str]]:
    """Function that fills the statements of sentences.jinja."""
    filters = (
        signed,
        two_digits,
        change,
        in_percent,
        rule_name,
        unlike,
        contrasts,
    )
    known: dict[str, Any] = {
        "matched": MATCHED,
        "fewest": FEWEST,
        "fewest_cells": FEWEST_CELLS,
        "default_rule": rule_name(DEFAULT),
    }
    return statements("sinklab.lab.studies.curve", filters, **known)


def masking_curve_sentences(runs: Curves) -> list[str]:
    """Sentences on the curves: on each model, then on diffusion models against autoregressive ones.

    Verdicts are corrected for the number of all of them together; results of the controls stand
    beside them.
    """
    curves = as_curves(runs)
    told = curve_statements()
    watched = {curve.label: curve.run for curve in curves if curve.main is not None}
    return told("page", curves, judged(curves)) + no_twins(watched)


def draw_masking_curves(runs: list[Run], out: Path, options: Any) -> list[Path]:
    """masking_curve.md, .csv and the pictures, with the look of the options."""
    return write_masking_curves(runs, out, options.figures, change=options.change)


def write_masking_curves(
    runs: Curves,
    folder: str | Path,
    formats: Iterable[str] = ("png",),
    *,
    change: str = "linear",
) -> list[Path]:
    """Write the pictures over count and over mass, the table (masking_curve.md, .csv with all
    numbers) and sentences.

    `change`: see `masking_curve_figure`.

    Raises ValueError for an unknown format or scale, and for runs of another kind.
    """
    curves, target = as_curves(runs), Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    parts = {curve.title: curve.rows for curve in curves}
    numbers = pd.concat(parts, names=["model"]).reset_index("model")
    said = masking_curve_sentences(curves)
    written = [
        write_page(target / "masking_curve.md", masking_curve_table(curves), said),
        write_csv(target / "masking_curve.csv", numbers),
    ]
    for over, stem in (("count", "masking_curve"), ("mass", "masking_curve_mass")):
        draw = partial(masking_curve_figure, curves, over=over, change=change)
        written += save_figure(draw, target / stem, formats)
    return written


def two_digits(cell: Any, name: str) -> str:
    """A number of a row, with its interval."""
    return ranged(cell, name, partial(number, significant=2))


def change(cell: Any, name: str = "delta", digits: int = 3) -> str:
    """A change in a row, in nats per token, with its interval."""
    return ranged(cell, name, partial(signed, digits=digits))


def in_percent(share: float, digits: int = 1) -> str:
    """A change as a share, in percent."""
    return f"{signed(100 * share, digits)} %"


CELL = ["layer", "head"]
SHOWN = 20
"""Cells in the Markdown table; the CSV has all."""
TOLD = {1: "costs", -1: "helps", 0: "inconclusive"}


@of_each
def ablation_sentences(run: Run) -> list[str]:
    """Sentences on each run: how many cells cost something and which most, and whether weight and
    cost go together.
    """
    told = curve_statements()
    cells = finished(run, "map")
    kinds = twins_of(run)
    settings = run.info.settings
    name = run.info.model["name"]
    most = {}
    for kind in kinds:
        delta = run.table(of_twin("map", kind))["delta"]
        most[kind] = signed(delta[delta.abs().idxmax()], 4)
    clean = float(cells["loss"].mean() - cells["delta"].mean())
    said = told("ablation", name, settings, cells, clean, shown_by(most))
    if cells["rows"].iloc[0] < FEWEST:
        return said
    found = _correlation(run)
    others = {kind: _correlation(run, kind).value for kind in kinds}
    texts = {kind: number(value, 2).strip("–") for kind, value in others.items()}
    return [
        *said,
        *told("together", settings["by"], found, shown_by(texts)),
        *no_twins({name: run}),
    ]


def _correlation(run: Run, twin: str = "") -> Estimate:
    rows = run.table(of_twin("ablation", twin))
    rows = rows.assign(delta=rows["loss"] - rows["clean"])
    held_RC, delta_RC = (wide(rows, CELL, name).to_numpy() for name in ("held", "delta"))
    return rank_correlation(held_RC, delta_RC)


def ablation_table(run: Run) -> pd.DataFrame:
    """The cells by falling size of the change, as text for people; the numbers are the table
    ``map``.
    """
    cells = finished(run, "map")
    cells = cells.reindex(cells["delta"].abs().sort_values(ascending=False, kind="stable").index)
    text = {"layer": cells["layer"].map("{:.0f}".format)}
    text["head"] = cells["head"].map("{:.0f}".format).replace("-1", "all")
    text["keys"] = cells["keys"].map(partial(number, significant=2))
    text |= {name: cells[name].map(percent) for name in ("sinks", "held", "removed")}
    text["change of loss"] = cells.apply(change, axis=1, digits=4)
    text["verdict"] = cells["told"].map(TOLD).where(cells["keys"] != 0, "nothing to block")
    return pd.DataFrame(text).reset_index(drop=True)


@figure("ablation", kind="ablate", alone=True, prepared=True, columns=2, share="y", size=(3.6, 2.6))
def ablation_figure(one: Reader) -> list[Map]:
    """Layer × head: the share of attention on the blocked keys, and the cost of blocking them.

    A dot marks a cell with an inconclusive change.
    """
    cells = finished(one.run, "map")
    share_LH, delta_LH, told_LH = (
        cells.pivot(index="layer", columns="head", values=name).to_numpy()
        for name in ("held", "delta", "told")
    )
    layers, heads = (
        Axis(name, names=[*map(str, dict.fromkeys(cells[name]))]) for name in ("layer", "head")
    )
    heads = replace(heads, names=[{"-1": "all"}.get(name, name) for name in heads.names])
    dotted = replace(heads, label="head (a dot: cannot be told from no change)")
    costs = Map(
        delta_LH,
        "change of loss, nats per token",
        layers,
        dotted,
        both=True,
        unsure_RC=told_LH == 0,
    )
    return [Map(100 * share_LH, "attention on the blocked keys, %", layers, heads), costs]


@of_each
def draw_ablation(run: Run, out: Path, options: Any) -> list[Path]:
    """ablation.md, ablation.csv (all cells with all numbers) and the maps, in each run folder."""
    table = ablation_table(run)
    more = ""
    if len(table) > SHOWN:
        more = f"\n{len(table) - SHOWN} more in ablation.csv.\n"
    stem = run.path / "ablation"
    return [
        write_page(stem.with_suffix(".md"), table.head(SHOWN), ablation_sentences([run]), more),
        write_csv(stem.with_suffix(".csv"), finished(run, "map")),
        *save_figure(partial(ablation_figure, run), stem, options.figures),
    ]
