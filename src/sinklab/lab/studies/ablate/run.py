"""The ablation map: held-out loss with keys blocked in one head, or layer, at a time."""

# R rows of text, B batch, C cells of the map
from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from sinklab.core.probing.interventions.block_keys import BlockKeys
from sinklab.core.probing.interventions.mask_sinks import MaskSinks
from sinklab.lab.analysis.doses import told_apart
from sinklab.lab.analysis.estimates import mean_over
from sinklab.lab.checkpoints.loading import Loaded
from sinklab.lab.records.info import of_twin
from sinklab.lab.records.reading import open_run
from sinklab.lab.scoring.heldout import edited_losses, heldout_rows
from sinklab.lab.studies import twins
from sinklab.lab.studies.ablate.study import AblateSettings
from sinklab.lab.studies.base import Work, check_fits, describe, heldout_text
from sinklab.lab.studies.processes import Progress

CELL = ["layer", "head"]
DOSE = ("columns", "sinks", "held", "removed")


@dataclass(frozen=True)
class Plan:
    """The text and cells to score."""

    batches: tuple[Tensor, ...]
    cells: tuple[tuple[int, int], ...]
    """Layer and head of each cell of the map; head −1 for all heads of the layer."""


def prepare(loaded: Loaded, settings: AblateSettings, progress: Progress) -> Plan:
    """The text and the cells, once the model is known to have them.

    Raises:
        ValueError: for a model without a mask token or a tokenizer, rows that do not fit its
            context, more keys than a row has, and layers that are not there.
    """
    loaded.needed_tokenizer()
    check_fits(loaded, "ablate", settings.length, "choose a smaller length")
    if settings.k >= settings.length:
        raise ValueError(
            f"k keys must leave something of a row, but k is {settings.k} and a row has "
            f"{settings.length} tokens; choose a smaller k"
        )
    of_model = describe(loaded)
    layers = settings.layers or of_model["recorded_layers"]
    if absent := [layer for layer in layers if layer not in of_model["recorded_layers"]]:
        raise ValueError(
            f"{loaded.name} has layers 0 to {of_model['layers'] - 1}, but no {absent[0]}; leave "
            "it out"
        )
    heads = of_model["recorded_heads"] if settings.by == "head" else [-1]
    text = heldout_rows(
        loaded, heldout_text(settings.heldout), rows=settings.rows, length=settings.length
    )
    cells = tuple((layer, head) for layer in layers for head in heads)
    return Plan(text.ids_RS.split(settings.batch), cells)


def score(work: Work) -> None:
    """Write a part of the table ``ablation`` for every batch of rows that is missing.

    Columns: row; layer; head (−1 for all of the layer); loss and clean, nats per token with the
    keys blocked and without; columns, how many were blocked; sinks, the share of these that are
    sinks by the rule; held, the share of attention that they held in the clean pass; removed, the
    share really taken away (as in `Dose`; over all heads if a layer is blocked).
    """
    count = work.progress.counter(len(work.samples) * (1 + len(work.plan.cells)))
    for part in work.samples:
        first, size = part * work.settings.batch, len(work.plan.batches[part])
        work.progress.stage(f"rows {first + 1} to {first + size}")
        work.run.table(
            "ablation", scored(work, work.loaded, part, work.plan.cells, count), part=part
        )


def scored(
    work: Work,
    loaded: Loaded,
    part: int,
    cells: Sequence[tuple[int, int]],
    count: Callable[[], object] | None = None,
) -> pd.DataFrame:
    """Lines of the table ``ablation`` for a batch of rows and some cells, of a model or its
    twin.
    """
    settings, ids_BS = work.settings, work.plan.batches[part]
    how: dict[str, Any] = {"k": settings.k, "rule": settings.sink_rule, "removal": settings.removal}
    arms: list[list[BlockKeys]] = [[]]
    for layer, head in cells:
        arms.append([MaskSinks(**how, layers=(layer,), heads=None if head < 0 else (head,))])
    found = edited_losses(
        loaded, ids_BS, arms, seed=settings.seed + part, batch=len(ids_BS), progress=count
    )
    rows, clean_B = part * settings.batch + np.arange(len(ids_BS)), found[0].losses_R.numpy()
    frames = [
        pd.DataFrame(
            {
                "row": rows,
                "layer": layer,
                "head": head,
                "loss": one.losses_R.numpy(),
                "clean": clean_B,
            }
        ).assign(**{name: values_R.numpy() for name, values_R in one.doses_by_row().items()})
        for (layer, head), one in zip(cells, found[1:], strict=True)
    ]
    return pd.concat(frames, ignore_index=True)


def summarize(work: Work) -> None:
    """Write the table ``map`` of all rows, and both tables of untrained twins."""
    done, plan = open_run(work.run.path), work.plan
    work.run.table("map", ablation_map(done.table("ablation")))

    def write(twin: Loaded, kind: str) -> None:
        rows = pd.concat(
            [scored(work, twin, part, plan.cells) for part in range(len(plan.batches))]
        )
        work.run.table(of_twin("ablation", kind), rows.reset_index(drop=True))
        work.run.table(of_twin("map", kind), ablation_map(rows))

    def seconds() -> float:
        started = time.perf_counter()
        scored(work, work.loaded, 0, plan.cells[:1])
        # the clean pass and one cell
        return (time.perf_counter() - started) / 2 * (1 + len(plan.cells)) * len(plan.batches)

    twins.write_twins(work, seconds, write)


def ablation_map(rows: pd.DataFrame) -> pd.DataFrame:
    """A line per cell: means over rows of loss, delta (loss less clean) with its 95 % interval, and
    the dose.

    told: 1 if the delta is above zero, −1 if it is below, 0 if inconclusive (`told_apart`).
    """
    rows = rows.assign(delta=rows["loss"] - rows["clean"])
    means = rows.groupby(CELL)[["loss", "delta", *DOSE]].mean()
    found = [mean_over(rows_of) for _, rows_of in rows.groupby(CELL)["delta"]]
    means["delta_low"], means["delta_high"] = np.transpose([one.interval for one in found])
    means["told"] = told_apart(by_row(rows, "delta"))
    return means.assign(rows=rows["row"].nunique()).reset_index()


def by_row(rows: pd.DataFrame, name: str) -> np.ndarray:
    """A column of the table ``ablation`` as an array (R, C), cells by rising layer and head."""
    return rows.pivot(index="row", columns=CELL, values=name).sort_index(axis=1).to_numpy()
