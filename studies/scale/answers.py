"""What may be said of the finished runs: a seed is a sample, and fewer than six complete seeds are
no verdict.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from sinklab.lab.analysis.estimates import SEEDS, mean_over
from sinklab.lab.reports.tables import markdown

Cells = list[dict[str, Any]]
"""What blocking keys cost a model: a dict a number of keys and control."""
HALF = 0.5
"""Share of heads below which a control of equal mass says nothing."""
Cells = list[dict[str, Any]]
"""What blocking keys cost a model: a dict a number of keys and control."""
WORDS = ("more", "less")
HALF = 0.5
"""Share of heads below which a control of equal mass says nothing."""
PRECONDITION, ABSENT = 0.2, 0.05
"""Share of heads of the causal model whose main sink is the first token, by Gu et al.'s rule: above
the one in every seed its sink is there to be contrasted; below the other it did not emerge."""


def report(book: Any) -> str:
    """The tables and sentences; written to report.md beside the results."""
    results = list(book.results().values())
    stages = {stage["name"]: stage for stage in book.settings["stages"]}
    parts = [
        f"{len(results)} runs are finished; {book.spent():.0f} s of {book.limits['seconds']:.0f} "
        "s are spent."
    ]
    for name, told in (("variants", variants), ("twins", twins), ("size", size)):
        found = pd.DataFrame([line for line in results if line["stage"] == name])
        if name in stages:
            lines = list(told(found, stages[name])) if len(found) else ["nothing is finished"]
            parts.append(f"## {name}\n\n" + "\n".join(lines))
    text = "\n\n".join(parts) + "\n"
    (book.out / "report.md").write_text(text, encoding="utf-8")
    return text


def complete(found: pd.DataFrame, stage: dict[str, Any]) -> list[int]:
    """Seeds of which every kind is finished, after equally many tokens."""
    by_seed = found.groupby("seed")
    return [
        seed
        for seed, some in by_seed
        if {*some["kind"]} == {*stage["kinds"]} and some["tokens"].nunique() == 1
    ]


def paired(
    found: pd.DataFrame, stage: dict[str, Any], column: str, one: str, other: str
) -> np.ndarray:
    """Column of a kind less that of another, a number a complete seed."""
    table = found[found["seed"].isin(complete(found, stage))].pivot(
        index="seed", columns="kind", values=column
    )
    return (table[one] - table[other]).to_numpy(float) if len(table) else np.array([])


def verdict(values_S: np.ndarray, what: str, unit: str, words: tuple[str, str]) -> str:
    """A difference over seeds: its interval and what follows, or points and a range."""
    if np.isnan(values_S).any():
        return (
            f"- {what}: inconclusive, since {np.isnan(values_S).sum()} of {len(values_S)} seeds "
            "have no dose in common"
        )
    if len(values_S) < SEEDS:
        points = ", ".join(f"{value:+.4f}" for value in values_S) or "none"
        return (
            f"- {what}: no verdict, since {len(values_S)} of {SEEDS} seeds are complete "
            f"({points} {unit})"
        )
    found = mean_over(values_S, fewest=SEEDS)
    said = {True: words[0], False: words[1], None: "inconclusive"}[found.above()]
    reach = (found.high - found.low) / 2
    interval = (
        f"{found.value:+.4f} {unit}, 95 % {found.low:+.4f} to {found.high:+.4f}, "
        f"{found.samples} seeds"
    )
    return f"- {what}: {said} ({interval}; a difference of {reach:.4f} or more would have shown)"


def variants(found: pd.DataFrame, stage: dict[str, Any]) -> Iterator[str]:
    """Held-out loss of every variant less that of plain."""
    yield from _losses(found)
    for kind in stage["kinds"][1:]:
        values_S = paired(found, stage, "loss", kind, stage["kinds"][0])
        yield verdict(
            values_S, f"held-out loss, {kind} less {stage['kinds'][0]}", "nats", ("worse", "better")
        )


def size(found: pd.DataFrame, stage: dict[str, Any]) -> Iterator[str]:
    """The same of the larger models."""
    yield from variants(found, stage)


def twins(found: pd.DataFrame, stage: dict[str, Any]) -> Iterator[str]:
    """Whether the causal model has its sink, what the diffusion model has, and what blocking keys
    costs both.
    """
    causal, diffusion = stage["kinds"]
    found = found.assign(rate=[line["main_first"][-1] for line in found["monitor"]])
    yield from _losses(found)
    yield markdown(_over_training(found)) + "\n"
    for kind in stage["kinds"]:
        rates = found.loc[found["kind"] == kind, "rate"]
        if len(rates):
            yield (
                f"- {kind}: Gu's rate {rates.mean():.3f} ({rates.min():.3f} … "
                f"{rates.max():.3f}, {len(rates)} seeds)"
            )
    rates = found.loc[found["kind"] == causal, "rate"]
    if not (rates > PRECONDITION).all():
        how = "did not emerge" if (rates < ABSENT).all() else "is not there in every seed"
        yield (
            "- inconclusive: the precondition is not met, since the causal model's sink on the "
            f"first token {how}"
        )
        return
    rate = paired(found, stage, "rate", diffusion, causal)
    yield verdict(rate, "Gu's rate, diffusion less causal", "of the heads", WORDS)
    if seeds := complete(found, stage):
        by_kind = {
            kind: found[found["kind"] == kind].set_index("seed").loc[seeds, "masking"]
            for kind in stage["kinds"]
        }
        yield from costs([*zip(by_kind[causal], by_kind[diffusion], strict=True)], stage["kinds"])


def costs(pairs: list[tuple[Cells, Cells]], kinds: list[str]) -> Iterator[str]:
    """What blocking keys costs the two models of every seed: at equal count, at equal removed
    attention, and controls.
    """
    between = f"{kinds[0]} less {kinds[1]}"
    for k in sorted({cell["k"] for cell in pairs[0][0] if cell["k"]}):
        values_S = np.array([_cost(one, k) - _cost(other, k) for one, other in pairs])
        yield verdict(
            values_S, f"cost of blocking the {k} most attended keys, {between}", "nats", WORDS
        )
    equal = [at_equal_mass(one, other) for one, other in pairs]
    masses = ", ".join(
        "none in common" if np.isnan(mass) else f"{100 * mass:.0f} %" for mass, _ in equal
    )
    gaps_S = np.array([gap for _, gap in equal])
    yield verdict(
        gaps_S, f"the same at equal removed attention ({masses}), {between}", "nats", WORDS
    )
    for number, kind in enumerate(kinds):
        of_kind = [pair[number] for pair in pairs]
        share = np.nanmean(
            [cell["matched"] for cells in of_kind for cell in cells if _is(cell, 1, "equal_mass")]
        )
        what = f"{kind}: the most attended key less keys that are no sinks and hold as much"
        if share < HALF:
            yield f"- {what}: inconclusive, since {100 * share:.0f} % of the heads have such keys"
            continue
        values_S = np.array(
            [_cost(cells, 1, "matched") - _cost(cells, 1, "equal_mass") for cells in of_kind]
        )
        yield verdict(values_S, what, "nats", WORDS)


def at_equal_mass(one: Cells, other: Cells) -> tuple[float, float]:
    """A share of attention removed from both models, what hiding a key takes from the first or the
    nearest to it, and there the one's cost less the other's; NaN where their doses have nothing in
    common.
    """
    curves = [
        [(cell["removed"], _cost(cells, cell["k"])) for cell in cells if cell["control"] == "sinks"]
        for cells in (one, other)
    ]
    return at_equal_dose(*curves, next(cell["removed"] for cell in one if _is(cell, 1, "sinks")))


def at_equal_dose(
    one: list[tuple[float, float]], other: list[tuple[float, float]], wanted: float
) -> tuple[float, float]:
    """A dose that both have, the wanted one or the nearest to it, and the one's cost less the
    other's there, linear between doses; NaN if the two have none in common.
    """
    curves = [np.array(sorted(pairs)).T for pairs in (one, other)]
    low, high = max(curve[0, 0] for curve in curves), min(curve[0, -1] for curve in curves)
    if low > high:
        return np.nan, np.nan
    dose = float(np.clip(wanted, low, high))
    here, there = (float(np.interp(dose, *curve)) for curve in curves)
    return dose, here - there


def _is(cell: dict[str, Any], k: int, control: str) -> bool:
    return (cell["k"], cell["control"]) == (k, control)


def _cost(cells: Cells, k: int, control: str = "sinks") -> float:
    """Loss with k keys hidden less that with none."""
    asked = ((k, control), (0, "none"))
    hidden, clean = (next(cell["loss"] for cell in cells if _is(cell, *which)) for which in asked)
    return hidden - clean


def _losses(found: pd.DataFrame) -> Iterator[str]:
    """A line a kind."""
    grouped = found.groupby("kind", sort=False)
    table = (
        grouped["loss"]
        .agg(["count", "mean", "min", "max"])
        .join(grouped["bits_per_byte"].mean())
        .reset_index()
    )
    table.columns = ["kind", "seeds", "held-out loss", "least", "greatest", "bits a byte"]
    yield markdown(table.round(4)) + "\n"


def _over_training(found: pd.DataFrame) -> pd.DataFrame:
    """Gu's rate and the share of attention on the first token at steps of training, mean over
    seeds.
    """
    kept = [
        pd.DataFrame(line["monitor"])[["step", "main_first", "first_share"]].assign(
            kind=line["kind"]
        )
        for _, line in found.iterrows()
    ]
    table = pd.concat(kept).groupby(["kind", "step"], sort=False).mean().reset_index()
    steps = sorted(table["step"].unique())
    shown = [steps[round(place * (len(steps) - 1) / 7)] for place in range(8)]
    table.columns = ["kind", "step", "Gu's rate", "attention on the first token"]
    return table[table["step"].isin(shown)].round(4)
