"""What `sink_variants.py tables` makes of the run folders: results.json and three figures."""

# R held-out rows, L layers
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib import pyplot as plt

from sinklab.lab.records import open_run
from sinklab.lab.reports import as_studies
from sinklab.lab.reports.tables import measures

# two-sided 95 % quantiles of Student's t for 1, 2, 3, … degrees of freedom
T95 = (12.706, 4.303, 3.182, 2.776, 2.571)
KEPT = (
    "mobility of the main sink",
    "mobility of the greatest text sink",
    "attention on the added sink, %",
)


def tables(runs: Path, results: Path, trained: list[str]) -> None:
    """Collect every scored run under ``runs`` and write ``results``."""
    found = {path.parent.name: path.parent for path in sorted(runs.glob("*/losses.npy"))}
    seeds = sorted({int(name.rpartition("-")[2]) for name in found})
    names = [*trained, "retrofit-token", "retrofit-kv"]
    names = [name for name in names if any(f"{name}-{seed}" in found for seed in seeds)]
    variants = {name: _variant(name, seeds, found, runs) for name in names}
    result = {
        "seeds": seeds,
        "heldout_rows": len(np.load(found[f"plain-{seeds[0]}"] / "losses.npy")),
    }
    (results / "results.json").write_text(
        json.dumps(result | {"variants": variants}, indent=2) + "\n"
    )
    _losses(variants, results / "losses.png")
    _emergence(variants, found, results / "emergence.png")
    _by_layer(variants, found, results / "by_layer.png")
    print(_markdown(variants))


def _variant(name: str, seeds: list[int], found: dict[str, Path], runs: Path) -> dict[str, Any]:
    per_seed = {
        seed: _one(f"{name}-{seed}", f"plain-{seed}", found, runs)
        for seed in seeds
        if f"{name}-{seed}" in found
    }
    deltas = np.array([one["minus_plain"] for one in per_seed.values()])
    reach = (
        T95[len(deltas) - 2] * deltas.std(ddof=1) / np.sqrt(len(deltas))
        if 1 < len(deltas) < 7
        else float("nan")
    )
    return {
        "loss": float(np.mean([one["loss"] for one in per_seed.values()])),
        "minus_plain": float(deltas.mean()),
        "minus_plain_reach_over_seeds": float(reach),
        "per_seed": {str(seed): one for seed, one in per_seed.items()},
    }


def _one(name: str, plain: str, found: dict[str, Path], runs: Path) -> dict[str, Any]:
    losses_R, plain_R = (np.load(found[one] / "losses.npy").astype(float) for one in (name, plain))
    delta_R = losses_R - plain_R
    run = open_run(found[name])
    monitor = run.table("monitor")
    overall = monitor[monitor["layer"] == -1].sort_values("step")
    last = overall.iloc[-1]
    seen = measures(as_studies([open_run(runs / "traced" / name)])[0])
    return {
        "loss": float(losses_R.mean()),
        "stderr": float(losses_R.std(ddof=1) / np.sqrt(len(losses_R))),
        "minus_plain": float(delta_R.mean()),
        "minus_plain_stderr": float(delta_R.std(ddof=1) / np.sqrt(len(delta_R))),
        "parameters": int(run.table("heldout")["parameters"].iloc[0]),
        "steps": int(last["step"]),
        "share_emerges_at": _from(overall, overall["sink_share"] > 2 * overall["even_share"]),
        "holds_most_main_sinks_from": _from(overall, overall["main_added"] > 0.5),
        "monitor": {
            key: _number(last[key])
            for key in monitor.columns
            if key not in ("step", "layer", "causal")
        },
        "traced": {key: value for key, value in seen.items() if key.startswith(KEPT)},
    }


def _number(value: Any) -> float | None:
    return None if pd.isna(value) else float(value)


def _from(overall: pd.DataFrame, holds: pd.Series) -> int | None:
    """The first measured step from which on it holds; None if it does not at the end."""
    kept = holds[::-1].cummin()[::-1]
    return int(overall.loc[kept, "step"].iloc[0]) if kept.any() else None


def _colour(place: int) -> Any:
    return plt.get_cmap("tab10")(place)


def _losses(variants: dict[str, Any], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    names = [name for name in variants if name != "plain"]
    for place, name in enumerate(names):
        for shift, one in enumerate(variants[name]["per_seed"].values()):
            y = place + 0.16 * (shift - 0.5 * (len(variants[name]["per_seed"]) - 1))
            axes.errorbar(
                one["minus_plain"],
                y,
                xerr=1.96 * one["minus_plain_stderr"],
                fmt="o",
                ms=4,
                color=_colour(place + 1),
            )
    axes.axvline(0, color="grey", lw=1)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(
        "held-out loss less that of plain, same seed (nats per token); below 0 is better"
    )
    figure.savefig(path, dpi=150)


def _emergence(variants: dict[str, Any], found: dict[str, Path], path: Path) -> None:
    figure, (share, holder, moves) = plt.subplots(1, 3, figsize=(11, 3.8), layout="constrained")
    for place, name in enumerate(variants):
        tables = [
            open_run(found[f"{name}-{seed}"]).table("monitor")
            for seed in variants[name]["per_seed"]
        ]
        if name.startswith("retrofit"):
            continue
        joined = pd.concat(table[table["layer"] == -1] for table in tables)
        for axes, column, scale in (
            (share, "sink_share", 100),
            (holder, "main_added", 100),
            (moves, "text_mobility", 1),
        ):
            if column != "text_mobility" and joined["added"].max() == 0:
                continue
            by_step = joined.groupby("step")[column]
            axes.plot(by_step.mean() * scale, color=_colour(place), label=name, lw=1.6)
            steps = by_step.mean().index
            axes.fill_between(
                steps,
                by_step.min() * scale,
                by_step.max() * scale,
                color=_colour(place),
                alpha=0.15,
                lw=0,
            )
    share.set_ylabel("attention on the added sinks, %")
    holder.set_ylabel("heads whose main sink is added, %")
    moves.set_ylabel("mobility of sinks in the text")
    for axes in (share, holder, moves):
        axes.set_xlabel("step")
    figure.legend(
        *moves.get_legend_handles_labels(), loc="outside upper center", ncols=7, frameon=False
    )
    figure.savefig(path, dpi=150)


def _by_layer(variants: dict[str, Any], found: dict[str, Path], path: Path) -> None:
    figure, (share, norm) = plt.subplots(1, 2, figsize=(9, 3.8), layout="constrained")
    for place, name in enumerate(variants):
        tables = [
            open_run(found[f"{name}-{seed}"]).table("monitor")
            for seed in variants[name]["per_seed"]
        ]
        last = pd.concat(table[table["step"] == table["step"].max()] for table in tables)
        by_layer = last[last["layer"] >= 0].groupby("layer").mean(numeric_only=True)
        if by_layer["added"].max() == 0:
            continue
        style = "--" if name.startswith("retrofit") else "-"
        share.plot(100 * by_layer["sink_share"], color=_colour(place), label=name, ls=style)
        norm.plot(by_layer["value_added"] / by_layer["value_other"], color=_colour(place), ls=style)
    share.set_ylabel("attention on the added sinks, %")
    norm.set_ylabel("value norm, added sink over other text")
    norm.axhline(1, color="grey", lw=1)
    for axes in (share, norm):
        axes.set_xlabel("layer")
    figure.legend(loc="outside upper center", ncols=7, frameon=False)
    figure.savefig(path, dpi=150)


def _markdown(variants: dict[str, Any]) -> str:
    lines = [
        "| variant | loss | less plain, per seed | 95 % over seeds | attention on the added | "
        "value norm, added / other | mobility, text sinks |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, one in variants.items():
        seeds = list(one["per_seed"].values())
        deltas = ", ".join(
            f"{s['minus_plain']:+.4f} ± {s['minus_plain_stderr']:.4f}" for s in seeds
        )
        seen = [s["monitor"] for s in seeds]
        added = bool(seen[0]["added"])
        share = f"{100 * np.mean([s['sink_share'] for s in seen]):.1f} %" if added else "–"
        norm = (
            f"{np.mean([s['value_added'] / s['value_other'] for s in seen]):.2f}" if added else "–"
        )
        reach = one["minus_plain_reach_over_seeds"]
        interval = "–" if name == "plain" else f"{one['minus_plain']:+.4f} ± {reach:.4f}"
        mobility = np.mean([s["text_mobility"] for s in seen])
        lines.append(
            f"| {name} | {one['loss']:.4f} | {deltas if name != 'plain' else '–'} | {interval} | "
            f"{share} | {norm} | {mobility:.2f} |"
        )
    return "\n".join(lines)
