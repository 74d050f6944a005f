"""Statistics that a run recorded and no figure of their own shows: their descriptions, and their
means by layer and step. A study is a `sinklab.lab.reports.study.Study`.
"""

# T recorded steps, L recorded layers
import ast
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sinklab.core.registry import provided, statistics
from sinklab.lab.analysis.counts import ratio, spans
from sinklab.lab.records.info import STUDY_DIMS
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


def means_of(sample: Sample, layers: Sequence[int]) -> pd.DataFrame:
    """Mean of each of them by layer and step over all its other axes, a row each; NaN is left out
    of the mean.
    """
    parts = []
    layer_TL, step_TL = np.meshgrid(layers, sample.step_numbers_T)
    for name, axes in axes_of(sample).items():
        mean_TL = _means(sample, name, axes)
        rows = {"layer": layer_TL.ravel(), "step": step_TL.ravel(), "mean": mean_TL.ravel()}
        parts.append(pd.DataFrame({"statistic": name} | rows))
    return pd.concat(parts) if parts else pd.DataFrame()


def _means(sample: Sample, name: str, axes: tuple[str, ...]) -> np.ndarray:
    """The means of one, read some steps at a time."""
    shape, layer = sample.run.shape(sample.attention, name, sample.index), axes.index("layer")
    means = []
    parts = spans(shape[0], math.prod(shape[1:]))
    for rows in sample.run.rows(sample.attention, name, sample.index, parts):
        values_TLX = (
            np.moveaxis(rows, layer, 1).astype(np.float64).reshape(len(rows), shape[layer], -1)
        )
        means.append(ratio(np.nansum(values_TLX, axis=2), (~np.isnan(values_TLX)).sum(2)))
    return np.concatenate(means)


def statistics_table(study: Any) -> pd.DataFrame:
    """The mean of each of them by layer and step, over samples and all its other axes (heads, keys,
    states).

    A row per statistic, layer and step; ``samples`` says how many had a number there. NaN is left
    out of the mean.
    """
    found = study.measured.statistics
    if found.empty:
        return pd.DataFrame(columns=[*COLUMNS])
    groups = found.groupby(["statistic", "layer", "step"])["mean"]
    return groups.agg(mean="mean", samples="count").reset_index()


def words_of_statistic(name: str) -> str:
    """Description of the statistic of this name: the first line of its docstring; empty if none
    such is registered now.

    One of the package is looked up in its source: its module would load torch.
    """
    for module in provided("statistics"):
        place = find_spec(module)
        source = Path(str(place and place.origin)).read_text("utf-8")
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and any(
                ast.unparse(one) == f"statistics.register({name!r})" for one in node.decorator_list
            ):
                return str(ast.get_docstring(node)).partition("\n")[0]
    if name in STUDY_DIMS or name not in statistics:
        return ""
    return str(statistics[name].__doc__).partition("\n")[0]
