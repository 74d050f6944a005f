"""The numbers of training runs as tables."""

from __future__ import annotations

import math
from collections.abc import Callable

import pandas as pd

from .training import Training


def history_table(run: Training) -> pd.DataFrame:
    """Losses, learning rate, norm of the gradient and speed over steps."""
    return pd.DataFrame() if run.history is None else run.history


def monitor_table(run: Training) -> pd.DataFrame:
    """What the sink monitor saw, by step and layer (-1: the whole model)."""
    return pd.DataFrame() if run.monitor is None else run.monitor


def outcome_table(run: Training) -> pd.DataFrame:
    """One row a run: its variant, the held-out loss with its 95 % interval, when sinks came up, the last look."""
    loss, info = run.loss, run.run.info
    row = {
        "variant": run.variant,
        "seed": info.seed,
        "status": info.status,
        "heldout_loss": math.nan if loss is None else loss.mean,
        "low": math.nan if loss is None else loss.low,
        "high": math.nan if loss is None else loss.high,
        "heldout_rows": 0 if loss is None else loss.rows,
        "takeover_step": run.takeover,
        "emergence_step": run.emergence,
    }
    last = {} if run.looks.empty else run.looks.iloc[-1].drop(["layer", "causal"]).to_dict()
    table = pd.DataFrame([row | last])
    return table.astype({"takeover_step": "Int64", "emergence_step": "Int64"})


TRAINING_TABLES: dict[str, Callable[[Training], pd.DataFrame]] = {
    "outcome": outcome_table,
    "history": history_table,
    "monitor": monitor_table,
}
