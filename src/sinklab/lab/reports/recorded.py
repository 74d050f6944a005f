"""Statistics that a run recorded and no figure of their own shows: their descriptions, and their
means by layer and step.
"""

# T recorded steps, L recorded layers
import inspect
import math

import numpy as np
import pandas as pd

from sinklab.core.registry import statistics
from sinklab.lab.analysis.counts import spans
from sinklab.lab.reports.samples import Sample
from sinklab.lab.reports.study import Study

DRAWN = frozenset(
    (
        *(
            "received",
            "received_by_state",
            "main_by_state",
            "share_by_state",
            "value_norm",
            "output_norm",
            "noop_bound",
        ),
        *("visible", "positions", "step_number"),
    )
)
"""Arrays of a trace that figures of their own show, or that give the steps and numbers of queries
of the others.
"""
COLUMNS = ("statistic", "layer", "step", "mean", "samples")


def recorded_statistics(study: Study) -> dict[str, tuple[str, ...]]:
    """Name -> axes of every recorded statistic that no figure of its own shows; empty without
    attention.

    Those of a plug-in are among them, whether or not the plug-in is loaded now.
    """
    if not study.recorded:
        return {}
    sample = study.sample(study.recorded[0])
    dims = study.run.dims("attention", part=sample.index)
    return {
        name: axes
        for name, axes in dims.items()
        if name not in DRAWN and {"step", "layer"} <= {*axes}
    }


def statistics_table(study: Study) -> pd.DataFrame:
    """The mean of each of them by layer and step, over samples and all its other axes (heads, keys,
    states).

    A row per statistic, layer and step; ``samples`` says how many had a number there. NaN is left
    out of the mean.
    """
    parts = [by_layer_and_step(study, name) for name in recorded_statistics(study)]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=[*COLUMNS])


def by_layer_and_step(study: Study, name: str) -> pd.DataFrame:
    """The rows of `statistics_table` of one statistic."""
    each = []
    for place in study.recorded:
        sample = study.sample(place)
        means_TL = _means(sample, name)
        step, layer = np.indices(means_TL.shape).reshape(2, -1)
        rows = {
            "layer": np.array(study.layers)[layer],
            "step": sample.step_numbers_T[step],
            "mean": means_TL.ravel(),
        }
        each.append(pd.DataFrame(rows))
    groups = pd.concat(each).groupby(["layer", "step"])["mean"]
    found = groups.agg(["mean", "count"]).reset_index().rename(columns={"count": "samples"})
    return found.assign(statistic=name)[[*COLUMNS]]


def _means(sample: Sample, name: str) -> np.ndarray:
    """(step, layer) means of one sample, read some steps at a time."""
    shape, axes = (
        sample.run.shape("attention", name, sample.index),
        sample.run.dims("attention", sample.index)[name],
    )
    layer = axes.index("layer")
    means = []
    parts = spans(shape[0], math.prod(shape[1:]))
    for rows in sample.run.rows("attention", name, sample.index, parts):
        values_TLX = (
            np.moveaxis(rows, layer, 1).astype(np.float64).reshape(len(rows), shape[layer], -1)
        )
        known_TLX = ~np.isnan(values_TLX)
        count_TL = known_TLX.sum(2)
        total_TL = np.where(known_TLX, values_TLX, 0).sum(2)
        means.append(total_TL / np.where(count_TL > 0, count_TL, np.nan))
    return np.concatenate(means)


def words_of_statistic(name: str) -> str:
    """Description of the statistic of this name: the first line of its docstring; empty if none
    such is registered now.
    """
    try:
        kind = type(statistics.parse(name))
    except ValueError:
        return ""
    return (inspect.getdoc(kind) or "").partition("\n")[0]
