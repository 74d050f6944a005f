"""Results of a comparison of caches: fidelity over the budget, with and without protected sinks,
and cost.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from sinklab.lab.records import Run
from sinklab.lab.reports import Axis, Chart, Line, Mark, Reader, figure, save_figure, statements
from sinklab.lab.studies import labels_of, of_each

NAMES, WHOLE, WHOSE, COLUMNS = (
    labels_of("caches")[name] for name in ("families", "whole", "whose", "columns")
)
KEYS = ["family", "keep", "sinks", "protect"]
DIVERGENCE = Axis("nats per masked token", scale="log")


@figure("caches", kind="caches", alone=True, prepared=True, columns=2, share="", size=(5.6, 3.5))
def caches_figure(one: Reader) -> list[Chart]:
    """Divergence over the budget, and over time if it was measured."""
    run = one.run
    policies = run.table("policies")
    name = run.info.model.get("name", "")
    # over the share of columns kept; full lines protect sinks of now
    lines = []
    for family in NAMES:
        mine = policies[(policies["family"] == family) & (policies["keep"] < 1)].sort_values("keep")
        for whose, words, style in (("", "", "--"), ("now", " + sinks", "-")):
            part = mine[mine["protect"] == whose]
            if not part.empty:
                ends = {end: part[f"divergence_{end}"] for end in ("low", "high")}
                how = _drawn_as(family) | {"run": NAMES[family] + words, "style": style} | ends
                lines.append(Line(100 * part["keep"], part["divergence"], **how))
    whole = policies[policies["family"].isin(WHOLE) & (policies["divergence"] > 0)].drop_duplicates(
        "family"
    )
    marks = [
        Mark("y", *cell)
        for cell in zip(whole["divergence"], whole["family"].map(WHOLE), strict=True)
    ]
    across = Axis("columns kept outside the block (window: of all)", " %", "log")
    title = f"{name}: distance from uncached decoding"
    charts = [Chart(across, DIVERGENCE, lines, marks, title)]
    if "costs" not in run.tables:
        return charts
    # over processor time, a mark a policy; filled ones protect sinks
    costs = _at_longest(run)
    both = policies.merge(costs, on=KEYS)
    lines = []
    for row in both[both["divergence"] > 0].to_dict("records"):
        how = {"kind": "said", "words": row["label"], "colour": len(NAMES)}
        if row["family"] in NAMES and row["keep"] < 1:
            style = {"now": "-"}.get(row["protect"], "--")
            how = _drawn_as(row["family"]) | {"kind": "dots", "style": style}
        lines.append(Line([row["ratio"]], [row["divergence"]], **how))
    across = Axis(f"processor time, uncached = 1 ({costs['length'].iloc[0]} columns)")
    charts.append(Chart(across, DIVERGENCE, lines, title="distance over time"))
    return charts


@of_each
def draw_caches(run: Run, out: Path, options: object) -> list[Path]:
    """Write `caches_figure` as caches.png into each run. Raises ValueError for a run of another
    kind.
    """
    return save_figure(partial(caches_figure, run), run.path / "caches")


def _at_longest(run: Run) -> pd.DataFrame:
    """The costs at the longest canvas measured."""
    costs = run.table("costs")
    return costs[costs["length"] == costs["length"].max()]


def _drawn_as(family: str) -> dict[str, Any]:
    """Colour and marker, the same in every figure."""
    return dict.fromkeys(("colour", "marker"), [*NAMES].index(family))


@of_each
def caches_sentences(run: Run) -> list[str]:
    """The table of caches of each run, a line each, and the effect of protection on the divergence
    at each budget.
    """
    table = run.table("policies")
    if "costs" in run.tables:
        # sparse attention is not timed, and has its line all the same
        table = table.merge(_at_longest(run), on=KEYS, how="left")
        table["kilobytes"] = table["held_bytes"] / 1e3
    text = {
        head: table[name].map(form.format).where(table[name].notna(), "–")
        for head, (name, form) in COLUMNS.items()
        if name in table
    }
    lines = pd.DataFrame(text).set_axis(table["label"]).rename_axis(None).to_string().splitlines()
    told = statements("sinklab.lab.studies.caches", (), whose=WHOSE)
    found = run.table("protection").query("metric == 'divergence'")
    return lines + told("protection", found.to_dict("records"))
