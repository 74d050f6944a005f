"""Masking curves, runs of kind "curve": a figure, a table, and what they say in words."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from sinklab.analysis.estimates import FEWEST
from sinklab.errors import one_of
from sinklab.records.reading import Run
from sinklab.records.storage import write_beside
from sinklab.reports.drawing import drawn_as, figure_of, line
from sinklab.reports.printed import save_figure
from sinklab.reports.runs import as_shown
from sinklab.reports.samples import NotRecorded, Reader
from sinklab.reports.style import legend_above, own_axes, theme_named, themed
from sinklab.reports.tables import markdown
from sinklab.reports.words import number, percent

STYLES = {"sinks": "-", "random": ":", "lowest": "--", "recent": "-."}
WORDS = {"sinks": "sinks", "random": "random columns", "lowest": "least attended", "recent": "last columns"}
SCALES = ("log", "linear")
COLUMNS = {"k", "control", "loss", "delta", "delta_low", "delta_high", "excess", "excess_low", "excess_high"}
COLUMNS |= {"relative", "mass", "rows", "tokens"}


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
        return table

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

    def of(self, control: str) -> pd.DataFrame:
        """The rows of one control by rising k, with k = 0 in front."""
        return self.rows[self.rows["control"].isin(["none", control])].sort_values("k", ignore_index=True)


Curves = Iterable[Run | MaskingCurve] | Run | MaskingCurve


def as_curves(sources: Curves) -> list[MaskingCurve]:
    """Several runs with labels that tell them apart. Raises ValueError without a run, or for another kind."""
    shown = as_shown(sources, "curve")
    return [one if isinstance(one, MaskingCurve) else MaskingCurve(one.run, one.label, one.repeats) for one in shown]


def masking_curve_figure(
    runs: Curves,
    axes: Axes | None = None,
    *,
    relative: bool = False,
    scale: str = "log",
    change: str = "linear",
    theme: str = "light",
) -> Axes:
    """Change of the loss over the number of hidden columns, with 95 % bands over rows of text.

    A colour for each model; full lines for sinks, dotted for random columns, dashed for the least attended. A diffusion
    model's loss is its masked-token bound, an autoregressive one's that of the next token. `relative`: in percent of
    the loss with nothing hidden. `scale`: of the horizontal axis, log (linear below 1) or linear; `change`: of the
    vertical one, linear or log (linear below a thousandth of a nat, or of a percent). Raises ValueError for another
    scale or theme, and for runs of another kind.
    """
    for name in (scale, change):
        one_of("the scale of a masking curve", name, SCALES)
    curves, look = as_curves(runs), theme_named(theme)
    with themed(look):
        own, axes = axes is None, own_axes(axes, 4.8, 3.2)
        for one, curve in zip(drawn_as(curves, look), curves, strict=True):
            for nth, control in enumerate(curve.controls):
                rows = curve.of(control)
                factor = 100 / rows["loss"].iloc[0] if relative else 1.0
                middle, low, high = (factor * rows[name] for name in ("delta", "delta_low", "delta_high"))
                axes.fill_between(rows["k"], low, high, color=one.colour, alpha=0.14, linewidth=0)
                line(axes, one, rows["k"], middle, style=STYLES.get(control, "-"), label=None if nth else curve.title)
        ks = sorted({int(k) for curve in curves for k in curve.rows["k"]})
        if scale == "log":
            axes.set_xscale("symlog", linthresh=1)
        if change == "log":
            axes.set_yscale("symlog", linthresh=1e-3)
            axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}".replace("-", "−"))
        axes.set_xticks(ks, [str(k) for k in ks])
        axes.minorticks_off()
        unit = "% of the loss" if relative else "nats per token"
        axes.set(xlabel="columns hidden per layer and head", ylabel=f"change of loss, {unit}")
        axes.grid(axis="y")
        controls = dict.fromkeys(control for curve in curves for control in curve.controls)
        words = [(STYLES.get(control, "-"), WORDS.get(control, control)) for control in controls]
        legend_above(axes, 2, grow=own, extra=words)
    return axes


def masking_curve_table(runs: Curves) -> pd.DataFrame:
    """One row per (model, k): loss, and the change by each control with its 95 % interval, as text for people.

    The numbers themselves are the table ``curve`` of each run.
    """
    rows = []
    for curve in as_curves(runs):
        for k, cells in curve.rows.groupby("k"):
            row: dict[str, object] = {"model": curve.title, "k": k}
            for cell in cells.to_dict("records"):
                if cell["control"] == "none":
                    row["loss"] = cell["loss"]
                    continue
                row[WORDS.get(cell["control"], cell["control"])] = _change(cell)
                if cell["control"] == "sinks":
                    row |= {"sinks held": percent(cell["mass"]), "change": _signed(100 * cell["relative"], 1) + " %"}
            rows.append(row)
    return pd.DataFrame(rows)


def masking_curve_sentences(runs: Curves) -> list[str]:
    """What the curves say: of each model, then of diffusion models against autoregressive ones."""
    curves = as_curves(runs)
    sentences = [sentence for curve in curves for sentence in _of_one(curve)]
    return sentences + _families(curves)


def write_masking_curves(
    runs: Curves, folder: str | Path, formats: Iterable[str] = ("png",), **look: Any
) -> list[Path]:
    """Write the figure, the table (masking_curve.md, .csv with all numbers) and the sentences below the table.

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
    stem = target / "masking_curve"
    return written + save_figure(lambda: figure_of(masking_curve_figure(curves, **look)), stem, formats)


def _of_one(curve: MaskingCurve) -> list[str]:
    if "sinks" not in curve.controls:
        return []
    rows = curve.of("sinks")
    last, loss = rows.iloc[-1], number(rows["loss"][0])
    if last["k"] == 0:
        return []
    kind = "next-token loss" if curve.is_causal else "masked-token bound"
    sure = rows[(rows["k"] > 0) & (rows["delta_low"] > 0)]
    where = "at no k" if sure.empty else f"from k = {int(sure['k'].iloc[0])} on"
    told = f"the interval of the change lies above 0 {where}{_against_random(curve, last)}"
    if math.isnan(last["delta_low"]):
        told = f"{last['rows']:.0f} rows are too few for an interval (at least {FEWEST})"
    return [
        f"{curve.title}: hiding {_sinks(last['k'])} per layer and head changes the {kind} of {loss} by "
        f"{_change(last)} nats per token ({_signed(100 * last['relative'], 1)} %).",
        f"{curve.label}: {told}.",
    ]


def _against_random(curve: MaskingCurve, last: pd.Series) -> str:
    if "random" not in curve.controls or math.isnan(last["excess_low"]):
        return ""
    random = curve.of("random").iloc[-1]["delta"]
    if last["excess_low"] <= 0 <= last["excess_high"]:
        return f"; {_sinks(last['k'])} and as many random columns ({_signed(random)}) cannot be distinguished"
    verdict = "more than" if last["excess_low"] > 0 else "less than"
    times = f", {number(last['delta'] / random, 2)} times" if random > 0 and last["delta"] > 0 else ""
    return f"; {_sinks(last['k'])} cost {verdict} as many random columns ({_signed(random)}{times})"


def _families(curves: list[MaskingCurve]) -> list[str]:
    """At one hidden sink: what the analysis paper's Table 1 contrasts."""
    found: dict[bool, list[str]] = {}
    for curve in curves:
        row = curve.rows[(curve.rows["k"] == 1) & (curve.rows["control"] == "sinks")]
        if len(row):
            share = f"{curve.label} {_signed(100 * row['relative'].iloc[0], 2)} %"
            found.setdefault(curve.is_causal, []).append(share)
    if len(found) < 2:
        return []
    return [
        f"One hidden sink: {', '.join(found[False])} (diffusion) against {', '.join(found[True])} (autoregressive) of "
        "the loss. In the analysis paper's Table 1 one hidden sink costs diffusion models at most 3 points of GSM8K, "
        "and Llama-3.1-8B 83."
    ]


def _sinks(k: float) -> str:
    return "1 sink" if k == 1 else f"{int(k)} sinks"


def _change(cell: Any) -> str:
    if math.isnan(cell["delta_low"]):
        return _signed(cell["delta"])
    return f"{_signed(cell['delta'])} ({_signed(cell['delta_low'])} … {_signed(cell['delta_high'])})"


def _signed(value: float, digits: int = 3) -> str:
    return "–" if np.isnan(value) else f"{value:+.{digits}f}".replace("-", "−")
