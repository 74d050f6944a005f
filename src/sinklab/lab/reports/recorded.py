"""Statistics that a run recorded and no figure of their own shows: their descriptions, and their
means by layer and step. A study is a `sinklab.lab.reports.study.Study`.
"""

# T recorded steps, L recorded layers
import inspect
import math
from typing import Any

import numpy as np
import pandas as pd

from sinklab.core.registry import statistics
from sinklab.lab.analysis.counts import spans
from sinklab.lab.reports.samples import Sample

DRAWN = (
    "received",
    "received_by_state",
    "main_by_state",
    "share_by_state",
    "value_norm",
    "output_norm",
    "noop_bound",
    "visible",
    "positions",
    "step_number",
)
"""Arrays of a trace that figures of their own show, or that give the steps and numbers of queries
of the others.
"""
COLUMNS = ("statistic", "layer", "step", "mean", "samples")


def recorded_statistics(study: Any) -> dict[str, tuple[str, ...]]:
    """Name -> axes of every recorded statistic that no figure of its own shows; empty without
    attention.

    Those of a plug-in are among them, whether or not the plug-in is loaded now.
    """
    return axes_of(study.sample(study.recorded[0])) if study.recorded else {}


def axes_of(sample: Sample) -> dict[str, tuple[str, ...]]:
    """The same of one sample that recorded attention."""
    dims = sample.run.dims(sample.attention, part=sample.index)
    return {
        name: axes
        for name, axes in dims.items()
        if name not in DRAWN and {"step", "layer"} <= {*axes}
    }


def means_of(sample: Sample) -> dict[str, np.ndarray]:
    """Name -> (step, layer) means of each of them over all its other axes; NaN is left out."""
    return {name: _means(sample, name, axes) for name, axes in axes_of(sample).items()}


def _means(sample: Sample, name: str, axes: tuple[str, ...]) -> np.ndarray:
    """The means of one, read some steps at a time."""
    shape, layer = sample.run.shape(sample.attention, name, sample.index), axes.index("layer")
    means = []
    parts = spans(shape[0], math.prod(shape[1:]))
    for rows in sample.run.rows(sample.attention, name, sample.index, parts):
        values_TLX = (
            np.moveaxis(rows, layer, 1).astype(np.float64).reshape(len(rows), shape[layer], -1)
        )
        known_TLX = ~np.isnan(values_TLX)
        count_TL = known_TLX.sum(2)
        total_TL = np.where(known_TLX, values_TLX, 0).sum(2)
        means.append(total_TL / np.where(count_TL > 0, count_TL, np.nan))
    return np.concatenate(means)


def statistics_table(study: Any) -> pd.DataFrame:
    """The mean of each of them by layer and step, over samples and all its other axes (heads, keys,
    states).

    A row per statistic, layer and step; ``samples`` says how many had a number there. NaN is left
    out of the mean.
    """
    parts = [by_layer_and_step(study, name) for name in recorded_statistics(study)]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=[*COLUMNS])


def by_layer_and_step(study: Any, name: str) -> pd.DataFrame:
    """The rows of `statistics_table` of one statistic."""
    each = []
    for steps_T, means in study.measured.statistics:
        step, layer = np.indices(means[name].shape).reshape(2, -1)
        rows = {
            "layer": np.array(study.layers)[layer],
            "step": steps_T[step],
            "mean": means[name].ravel(),
        }
        each.append(pd.DataFrame(rows))
    groups = pd.concat(each).groupby(["layer", "step"])["mean"]
    found = groups.agg(["mean", "count"]).reset_index().rename(columns={"count": "samples"})
    return found.assign(statistic=name)[[*COLUMNS]]


def words_of_statistic(name: str) -> str:
    """Description of the statistic of this name: the first line of its docstring; empty if none
    such is registered now.
    """
    try:
        kind = type(statistics.parse(name))
    except ValueError:
        return ""
    return (inspect.getdoc(kind) or "").partition("\n")[0]
