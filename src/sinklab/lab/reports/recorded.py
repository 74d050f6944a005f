"""Statistics that a run recorded and no figure of their own shows: their descriptions, and their
means by layer and step. A study is a `sinklab.lab.reports.study.Study`.
"""

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pandas as pd

from sinklab.core.registry import provided, statistics
from sinklab.lab.analysis.facts import others
from sinklab.lab.records.info import STUDY_DIMS

COLUMNS = ("statistic", "layer", "step", "mean", "samples")


def recorded_statistics(study: Any) -> list[str]:
    """Every recorded statistic that no figure of its own shows; none without attention.

    Those of a plug-in are among them, whether or not the plug-in is loaded now.
    """
    if not study.recorded:
        return []
    return others(study.sample(study.recorded[0]).dims)


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
