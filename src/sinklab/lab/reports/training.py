"""Training run folders, read for reports: losses, and the measurements of the sink monitor."""

# L layers
from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from sinklab.core.registry import sinks
from sinklab.lab.analysis.estimates import FEWEST, Estimate, mean_over
from sinklab.lab.reports.study import Reader

# Settings that may differ between repeats: the seed, and options of running and reporting.
FREE = frozenset(
    {
        "seed",
        "out",
        "compile",
        "gradient_checkpointing",
        "micro_batch",
        "log_every",
        "save_every",
        "monitor_every",
    }
)


OF_VARIANT = frozenset({"sink_kind", "sink_count", "sink_side", "gate", "init_from"})
"""Settings that make a variant, or follow from it: runs of one experiment may differ in these."""


def variant(model: Mapping[str, Any]) -> str:
    """The variant of a model in words: plain, sink, 2 sinks, zero-value sink, sink at the end,
    gate, sink and gate.
    """
    count = int(model.get("sink_count") or 0)
    words = []
    if count:
        name = str(model.get("sink_kind", "token")).partition(":")[0]
        label = name
        if name in sinks and sinks[name].label is not None:
            label = sinks[name].label
        said = f"{label} sink".lstrip()
        if count > 1:
            said = f"{count} {said}s"
        if model.get("sink_side") == "end":
            said += " at the end"
        words.append(said)
    if model.get("gate", "none") != "none":
        words.append("gate")
    attention = model.get("attention", "full")
    if attention != "full":
        words.append("causal attention" if attention == "causal" else "first token alone")
    return " and ".join(words) or "plain"


FIELDS = {
    "sink_share": "added_share",
    "top_text_share": "text_share",
    "value_added": "added_norm",
    "value_sink": "sink_norm",
    "value_other": "rest_norm",
    "value_masked": "mask_norm",
}
"""columns of the monitor -> the names that the same facts have in a study"""
OVER_EVEN = 2.0
"""multiple of an even share above which added sinks count as having taken over"""


@dataclass(frozen=True, eq=False)
class Training(Reader):
    """One run of kind "training"."""

    @cached_property
    def history(self) -> pd.DataFrame | None:
        """step, tokens, loss, heldout_loss, lr, grad_norm, …; NaN if a row has only the other
        loss.
        """
        return self.table("history")

    @cached_property
    def monitor(self) -> pd.DataFrame | None:
        """Measurements of the sink monitor: a row per measurement and layer, layer -1 for the whole
        model.
        """
        return self.table("monitor")

    @cached_property
    def facts(self) -> pd.DataFrame:
        """The rows of the monitor under the names that the same facts have in a study; empty
        without a monitor.
        """
        if self.monitor is None:
            return pd.DataFrame(columns=["step", "layer"])
        return self.monitor.rename(columns=FIELDS)

    def over(self, axis: str) -> pd.DataFrame:
        """By step: the whole model at every measurement of the monitor; by layer: the layers at the
        last one.
        """
        whole = self.facts["layer"] == -1
        if axis == "step":
            return self.facts[whole].sort_values("step", ignore_index=True)
        if axis == "layer":
            last = self.facts["step"] == self.facts["step"].max()
            return self.facts[last & ~whole].sort_values("layer", ignore_index=True)
        return super().over(axis)

    @cached_property
    def variant(self) -> str:
        """Variant of the model: plain, sink, 2 sinks, gate, …"""
        return variant(self.run.info.model)

    @cached_property
    def design(self) -> str:
        """The seed and all settings that runs of one experiment share, whatever their variant."""
        free = (FREE | OF_VARIANT) - {"seed"}
        settings = self.run.info.settings.items()
        return json.dumps({name: value for name, value in settings if name not in free})

    @property
    def causal_steps(self) -> int:
        """Steps of the causal warm start; 0 without one."""
        settings = self.run.info.settings
        return round(float(settings.get("causal_start") or 0) * int(settings.get("steps") or 0))

    @cached_property
    def loss(self) -> Estimate | None:
        """The held-out loss in nats per token, at the end, or else the last one that was measured.

        Its interval is over rows of text; of 0 samples if these were not kept.
        """
        rows, final = self.table("heldout_rows"), self.table("heldout")
        if rows is not None and len(rows) > 1:
            return _over_rows(rows["loss"], rows["tokens"])
        known: Any = ()
        if final is not None:
            known = final["loss"]
        elif self.history is not None:
            known = self.history["heldout_loss"].dropna()
        for last in known[-1:]:
            return Estimate(float(last), math.nan, math.nan, 0)
        return None

    def against(self, other: Training) -> Estimate | None:
        """Held-out loss less that of another run, whatever their seeds, with an interval over rows.

        None if the rows were not kept, are of other text, or fewer than 8.
        """
        mine, theirs = self.table("heldout_rows"), other.table("heldout_rows")
        data = [run.info.model.get("data_sha256") for run in (self.run, other.run)]
        if mine is None or theirs is None or data[0] != data[1] or len(mine) < FEWEST:
            return None
        both = mine.merge(theirs, on="row", suffixes=("", "_other"))
        if len(both) != len(mine) or len(both) != len(theirs):
            return None
        return _over_rows(both["loss"] - both["loss_other"], both["tokens"])

    @cached_property
    def takeover(self) -> int | None:
        """First measured step from which the added sinks draw more than twice an even share to the
        end, or None.
        """
        table = self.over("step")
        if table.empty or not self.sink_count:
            return None
        return first_for_good(table["step"], table["added_share"] > OVER_EVEN * table["even_share"])

    @cached_property
    def emergence(self) -> int | None:
        """First measured step from which more than half of all heads have a sink to the end, or
        None.
        """
        table = self.over("step")
        return None if table.empty else first_for_good(table["step"], table["main_none"] < 0.5)


def _over_rows(value_R: pd.Series, tokens_R: pd.Series) -> Estimate:
    """The mean over tokens, and its interval over rows, by the first-order terms of a ratio."""
    weight_R = tokens_R / tokens_R.mean()
    mean = (value_R * weight_R).mean()
    return mean_over(mean + (value_R - mean) * weight_R)


def first_for_good(steps: pd.Series, holds: pd.Series) -> int | None:
    """The first of the steps from which it holds at every later one; None when it does not hold at
    the last.
    """
    if not holds.iloc[-1]:
        return None
    broken = np.flatnonzero(~holds.to_numpy(bool))
    return int(steps.iloc[broken[-1] + 1 if len(broken) else 0])
