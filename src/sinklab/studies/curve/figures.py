"""Masking curves, runs of kind "curve": a figure, a table, and what they say in words."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sinklab.analysis.doses import MATCHED, PHENOMENON, Contrast, Doses, at_equal_mass, contrast
from sinklab.analysis.estimates import FEWEST, median_over
from sinklab.errors import one_of
from sinklab.records.reading import Run
from sinklab.records.storage import write_beside
from sinklab.registry import rules
from sinklab.reports.drawing import drawn_as, figure_of, line
from sinklab.reports.printed import save_figure
from sinklab.reports.runs import as_shown
from sinklab.reports.samples import NotRecorded, Reader
from sinklab.reports.style import legend_above, own_axes, theme_named, themed
from sinklab.reports.tables import markdown
from sinklab.reports.words import number, percent

STYLES: dict[str, Any] = {"top": "-", "sinks": "-", "random": ":", "lowest": "--", "recent": "-."}
STYLES |= {"equal_mass": (0, (4, 1, 1, 1, 1, 1)), "matched": (0, (6, 1))}
WORDS = {
    "none": "nothing",
    "top": "most attended keys",
    "sinks": "sinks",
    "random": "random keys",
    "lowest": "least attended keys",
}
WORDS |= {"recent": "last keys", "equal_mass": "no sinks, equal mass", "matched": "chosen keys, matched heads"}
MAIN = ("top", "sinks")
"""What a curve is about, and not a control of it."""
SCALES = ("log", "linear")
AXES = ("count", "mass")
COLUMNS = {"k", "control", "loss", "delta", "delta_low", "delta_high", "excess", "excess_low", "excess_high"}
COLUMNS |= {"relative", "rows", "tokens"}
DOSE = ("columns", "sinks", "held", "removed", "matched")


@dataclass(frozen=True, eq=False)
class MaskingCurve(Reader):
    """One run of kind "curve"."""

    columns: ClassVar = {"curve": COLUMNS}
    origin = "a masking curve"

    @cached_property
    def rows(self) -> pd.DataFrame:
        """The table ``curve``. Raises NotRecorded for a run that did not come to its end."""
        if (table := self.table("curve")) is None:
            raise NotRecorded(
                f"This needs curves that are finished: {self.run.path} is not. Run `sinklab curve` again."
            )
        # before 0.2.0 nothing but the mass was kept, and the most attended keys were called sinks
        table = table.rename(columns={"mass": "held"})
        table = table.assign(**{name: math.nan for name in DOSE if name not in table})
        return table if self.rule else table.replace({"control": {"sinks": "top"}})

    @property
    def rule(self) -> str | None:
        """The rule that says what is a sink, where the curve hides what it calls so."""
        return self.run.info.settings.get("sink_rule")

    @property
    def is_causal(self) -> bool:
        """Whether its loss is that of the next token."""
        return self.run.info.model.get("family") != "diffusion"

    @property
    def title(self) -> str:
        """Its label, and the kind of its model."""
        return f"{self.label} ({'AR' if self.is_causal else 'DLM'})"

    @property
    def controls(self) -> list[str]:
        """What was hidden, in the order of the run."""
        return [name for name in dict.fromkeys(self.rows["control"]) if name != "none"]

    @property
    def main(self) -> str | None:
        """The arm that the curve is about: "top" or "sinks"; None where controls alone were scored."""
        return next((name for name in MAIN if name in self.controls), None)

    def of(self, control: str) -> pd.DataFrame:
        """The rows of one control by rising k, with k = 0 in front."""
        found = self.rows[self.rows["control"].isin(["none", control])]
        return found.sort_values("k", kind="stable", ignore_index=True)

    def doses(self, control: str) -> Doses:
        """Removed mass of each k of an arm, and what every row lost, in shares of the loss with nothing hidden."""
        rows, table = self.run.table("curve_rows"), self.of(control)
        rows = rows if self.rule else rows.replace({"control": {"sinks": "top"}})
        losses = rows.pivot(index="row", columns=["k", "control"], values="loss")
        clean_R, table = losses[0, "none"].to_numpy(), table[table["k"] > 0]
        costs_RK = np.stack([losses[k, control] - clean_R for k in table["k"]], 1) / clean_R.mean()
        return Doses(table["removed"].to_numpy(), costs_RK)


Curves = Iterable[Run | MaskingCurve] | Run | MaskingCurve


def as_curves(sources: Curves) -> list[MaskingCurve]:
    """Several runs with labels that tell them apart. Raises ValueError without a run, or for another kind."""
    shown = as_shown(sources, "curve")
    return [one if isinstance(one, MaskingCurve) else MaskingCurve(one.run, one.label, one.repeats) for one in shown]


def masking_curve_figure(
    runs: Curves,
    axes: Axes | None = None,
    *,
    over: str = "count",
    relative: bool = False,
    scale: str = "log",
    change: str = "linear",
    theme: str = "light",
) -> Axes:
    """Change of the loss over the number of hidden keys, or the attention removed, with 95 % bands over rows of text.

    A colour for each model; a style for each control. A diffusion model's loss is its masked-token bound, an
    autoregressive one's that of the next token. `over`: count (keys per layer and head) or mass (percent of the
    attention that was really taken away). `relative`: in percent of the loss with nothing hidden. `scale`: of the axis
    of counts, log (linear below 1) or linear; `change`: of the vertical one, linear or log (linear below a thousandth
    of a nat, or of a percent). Raises ValueError for another axis, scale or theme, and for runs of another kind.
    """
    for name in (scale, change):
        one_of("the scale of a masking curve", name, SCALES)
    one_of("the axis of a masking curve", over, AXES)
    curves, look = as_curves(runs), theme_named(theme)
    with themed(look):
        own, axes = axes is None, own_axes(axes, 4.8, 3.2)
        for one, curve in zip(drawn_as(curves, look), curves, strict=True):
            for nth, control in enumerate(curve.controls):
                rows = curve.of(control)
                factor = 100 / rows["loss"].iloc[0] if relative else 1.0
                across = rows["k"]
                if over == "mass":
                    rows = rows.sort_values("removed", kind="stable")
                    across = 100 * rows["removed"]
                middle, low, high = (factor * rows[name] for name in ("delta", "delta_low", "delta_high"))
                axes.fill_between(across, low, high, color=one.colour, alpha=0.14, linewidth=0)
                line(axes, one, across, middle, style=STYLES.get(control, "-"), label=None if nth else curve.title)
        if over == "count":
            ks = sorted({int(k) for curve in curves for k in curve.rows["k"]})
            if scale == "log":
                axes.set_xscale("symlog", linthresh=1)
            axes.set_xticks(ks, [str(k) for k in ks])
        if change == "log":
            axes.set_yscale("symlog", linthresh=1e-3)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}".replace("-", "−"))
        axes.minorticks_off()
        unit = "% of the loss" if relative else "nats per token"
        across = "keys hidden per layer and head" if over == "count" else "attention removed, %"
        axes.set(xlabel=across, ylabel=f"change of loss, {unit}")
        axes.grid(axis="y")
        controls = dict.fromkeys(control for curve in curves for control in curve.controls)
        words = [(STYLES.get(control, "-"), WORDS.get(control, control)) for control in controls]
        legend_above(axes, 2, grow=own, extra=words)
    return axes


def masking_curve_table(runs: Curves) -> pd.DataFrame:
    """One row per (model, k, what was hidden): loss, its change with the 95 % interval, and the dose, for people.

    The dose: keys per head, the share of them that are sinks by the rule, the attention they held when chosen, what was
    really removed, and the share of heads that have a control of equal mass. Numbers are the table ``curve`` of a run.
    """
    rows = []
    for curve in as_curves(runs):
        for k, cells in curve.rows.groupby("k"):
            for cell in cells.to_dict("records"):
                row: dict[str, object] = {
                    "model": curve.title,
                    "k": k,
                    "hidden": WORDS.get(cell["control"], cell["control"]),
                }
                dose = {"keys": number(cell["columns"]), **{name: percent(cell[name]) for name in DOSE[1:]}}
                row |= {"loss": number(cell["loss"], 4), "change": _change(cell), "relative": _relative(cell), **dose}
                rows.append(row)
    return pd.DataFrame(rows)


def masking_curve_sentences(runs: Curves) -> list[str]:
    """What the curves say: of each model, then of diffusion models against autoregressive ones."""
    curves = as_curves(runs)
    sentences = [sentence for curve in curves for sentence in _of_one(curve)]
    causal = [curve for curve in curves if curve.is_causal]
    return sentences + [_contrast(one, other) for one in curves if not one.is_causal for other in causal]


def write_masking_curves(
    runs: Curves, folder: str | Path, formats: Iterable[str] = ("png",), **look: Any
) -> list[Path]:
    """Write the pictures over count and over mass, the table (masking_curve.md, .csv with all numbers) and sentences.

    `look`: relative, scale, change and theme of `masking_curve_figure`.

    Raises ValueError for an unknown format or scale, and for runs of another kind.
    """
    curves, target = as_curves(runs), Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    text = markdown(masking_curve_table(curves)) + "\n" + "\n".join(f"- {s}" for s in masking_curve_sentences(curves))
    numbers = pd.concat([curve.rows.assign(model=curve.title) for curve in curves], ignore_index=True)
    numbers = numbers[["model", *(name for name in numbers if name != "model")]]
    written = [target / "masking_curve.md", target / "masking_curve.csv"]
    write_beside(written[0], lambda path: path.write_text(text + "\n", encoding="utf-8"))
    write_beside(written[1], lambda path: numbers.to_csv(path, index=False))
    for over, stem in (("count", "masking_curve"), ("mass", "masking_curve_mass")):
        draw = partial(_drawn, curves, over=over, **look)
        written += save_figure(draw, target / stem, formats)
    return written


def _drawn(curves: list[MaskingCurve], **look: Any) -> Figure:
    return figure_of(masking_curve_figure(curves, **look))


def _of_one(curve: MaskingCurve) -> list[str]:
    if curve.main is None or (last := curve.of(curve.main).iloc[-1])["k"] == 0:
        return []
    rows = curve.of(curve.main)
    kind = "next-token loss" if curve.is_causal else "masked-token bound"
    sure = rows[(rows["k"] > 0) & (rows["delta_low"] > 0)]
    where = "at no k" if sure.empty else f"from k = {int(sure['k'].iloc[0])} on"
    told = f"the interval of the change lies above 0 {where}{_against_random(curve, last)}"
    if math.isnan(last["delta_low"]):
        told = f"{last['rows']:.0f} rows are too few for an interval (at least {FEWEST})"
    said = [
        f"{curve.title}: hiding {_keys(curve, last['k'])} per layer and head ({_dose(last)}) changes the {kind} of "
        f"{number(rows['loss'][0])} by {_change(last)} nats per token ({_relative(last)}).",
        f"{curve.label}: {told}.",
    ]
    return said + _against_equal_mass(curve)


def _dose(cell: pd.Series) -> str:
    """What was taken away, as `Dose` says it."""
    sinks = "" if math.isnan(cell["sinks"]) else f", {percent(cell['sinks'])} of them sinks"
    keys = "" if math.isnan(cell["columns"]) else f"{number(cell['columns'])} keys a head{sinks}, "
    removed = "" if math.isnan(cell["removed"]) else f", {percent(cell['removed'])} removed"
    return f"{keys}held {percent(cell['held'])} of the attention{removed}"


def _against_random(curve: MaskingCurve, last: pd.Series) -> str:
    if "random" not in curve.controls or math.isnan(last["excess_low"]):
        return ""
    random, keys = curve.of("random").iloc[-1]["delta"], _keys(curve, last["k"])
    if last["excess_low"] <= 0 <= last["excess_high"]:
        return f"; {keys} and as many random ones ({_signed(random)}) cannot be distinguished"
    verdict = "more than" if last["excess_low"] > 0 else "less than"
    times = f", {number(last['delta'] / random, 2)} times" if random > 0 and last["delta"] > 0 else ""
    return f"; {keys} cost {verdict} as many random ones ({_signed(random)}{times})"


def _against_equal_mass(curve: MaskingCurve) -> list[str]:
    """At the greatest k at which half of the heads have a control of equal mass."""
    rows = curve.rows[curve.rows["control"] == "matched"].sort_values("k")
    # where nothing is hidden nothing is matched
    if rows["matched"].isna().all():
        return []
    fit = rows[rows["matched"] >= MATCHED]
    if fit.empty:
        most = percent(rows["matched"].max())
        return [
            f"{curve.label}: cannot tell whether these keys cost more than others that hold as much, since at most "
            f"{most} of heads have such others (a verdict takes half)."
        ]
    at, words = fit.iloc[-1], {True: "cost more than", False: "cost less than", None: "cannot be distinguished from"}
    is_told = not math.isnan(at["excess_low"]) and not at["excess_low"] <= 0 <= at["excess_high"]
    told = words[at["excess_low"] > 0 if is_told else None]
    return [
        f"{curve.label}: {_keys(curve, at['k'])} {told} keys that are no sinks and hold as much, in the "
        f"{percent(at['matched'])} of heads that have such keys ({_change(at, 'excess')} nats per token)."
    ]


def _contrast(one: MaskingCurve, other: MaskingCurve) -> str:
    """A diffusion model against an autoregressive one, in shares of the loss: the contrast of the paper's Table 1."""
    pair = f"{one.title} against {other.title}, keys chosen by a clean pass (protocol clean)"
    if (main := one.main) is None or (main, one.rule) != (other.main, other.rule):
        return f"{pair}: cannot tell, since not the same keys were hidden in both."
    for curve in (one, other):
        if (missing := _lacks(curve)) is not None:
            return f"{pair}: cannot tell, since {missing}."
    ks = [[k for k in curve.of(main)["k"] if k] for curve in (one, other)]
    doses = [curve.doses(main) for curve in (one, other)]
    told = []
    if both := {*ks[0]} & {*ks[1]}:
        k = min(both)
        costs = [some.costs_RK[:, places.index(k)] for some, places in zip(doses, ks, strict=True)]
        told.append(f"at equal count, {_keys(one, k)} a head, {_told(contrast(costs[0], costs[1]))}")
    same = at_equal_mass(*doses)
    if math.isnan(same.mass):
        told.append("at equal removed attention cannot tell, since no share of it was removed from both")
    else:
        told.append(f"at equal removed attention, {percent(same.mass)}, {_told(same)}")
    return f"{pair}: {'; '.join(told)}."


def _told(found: Contrast) -> str:
    verdict = {True: "it loses more", False: "it loses less", None: "cannot tell which loses more"}
    low, high = (_points(end) for end in found.difference.interval)
    sizes = f"{_points(found.one.value)} against {_points(found.other.value)} of the loss"
    between = "" if math.isnan(found.difference.interval[0]) else f"; difference 95 % {low} … {high}"
    return f"{verdict[found.difference.above()]} ({sizes}{between})"


def _lacks(curve: MaskingCurve) -> str | None:
    """Why a model has no such sinks as the contrast is about, or it is not known; None where it has them."""
    if "phenomenon" not in curve.run.tables:
        return f"{curve.label} was not asked whether it has heavy sinks (a run of an earlier version)"
    seen = curve.run.table("phenomenon")
    rate, main = median_over(seen["gu"]), percent(seen["main"].mean())
    if rate.above(PHENOMENON):
        return None
    sure = "does not have the phenomenon" if rate.above(PHENOMENON) is False else "may not have the phenomenon"
    return (
        f"{curve.label} {sure}: one key gets more than 30 % in {percent(rate.value)} of its heads (median of rows; "
        f"{percent(PHENOMENON)} are wanted), the most attended one {main} on average"
    )


def _keys(curve: MaskingCurve, k: float) -> str:
    if curve.rule is not None:
        return f"at most {int(k)} {'key' if k == 1 else 'keys'} that {rules.parse(curve.rule)} calls sinks"
    return "the most attended key" if k == 1 else f"the {int(k)} most attended keys"


def _change(cell: Any, name: str = "delta") -> str:
    if math.isnan(cell[f"{name}_low"]):
        return _signed(cell[name])
    return f"{_signed(cell[name])} ({_signed(cell[f'{name}_low'])} … {_signed(cell[f'{name}_high'])})"


def _relative(cell: Any) -> str:
    return f"{_signed(100 * cell['relative'], 1)} %"


def _points(share: float) -> str:
    return f"{_signed(100 * share, 2)} %"


def _signed(value: float, digits: int = 3) -> str:
    return "–" if np.isnan(value) else f"{value:+.{digits}f}".replace("-", "−")
