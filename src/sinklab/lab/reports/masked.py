"""Masking curves beside traces: the curve of a model gives the cost of blocking keys on the page of
its trace.
"""

# R rows of held-out text, C cells of a curve
from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from sinklab.lab.analysis.strongest import STRONG
from sinklab.lab.records.info import of_twin
from sinklab.lab.records.reading import Run

ARMS = {"none": "none", "top": "sinks", "random": "random", "equal_mass": "equal_mass"}
"""arm of a curve -> its name in the table ``heldout`` of a trace"""


def heldout_of(curve: Run, twin: str = "") -> pd.DataFrame | None:
    """The table ``heldout`` of a trace, made of a run of kind "curve"; None if it, or its control,
    is not finished.

    Columns: k, control, loss, stderr, delta, delta_stderr, tokens, losses (R,), bits_per_byte;
    grown (R,) and grown_at, of one masked key: the share of heads in which a sink grew, by row, and
    the places of these (`grown_of`).
    """
    names = of_twin("curve", twin), of_twin("curve_rows", twin)
    if not {*names} <= {*curve.tables}:
        return None
    table, by_row = (curve.table(name) for name in names)
    losses = by_row.pivot(index="row", columns=["k", "control"], values="loss")
    cells = table[table["control"].isin(ARMS)]
    losses_CR = losses[list(zip(cells["k"], cells["control"], strict=True))].to_numpy().T
    frame = pd.DataFrame(
        {
            "k": cells["k"].astype(int),
            "control": cells["control"].map(ARMS),
            "loss": cells["loss"],
            "stderr": _errors(losses_CR),
            "delta": cells["delta"],
            "delta_stderr": _errors(losses_CR - losses[0, "none"].to_numpy()),
            "tokens": cells["tokens"],
            "losses": losses_CR.tolist(),
            "bits_per_byte": cells["bits_per_byte"].where(cells["k"] == 0),
        }
    )
    name = of_twin("grown", twin)
    if name in curve.tables:
        grown_R, places = grown_of(curve.table(name))
        is_one = (frame["k"] == 1) & (frame["control"] == "sinks")
        frame["grown"] = [grown_R.tolist() if one else [] for one in is_one]
        frame["grown_at"] = [places if one else [] for one in is_one]
    return frame


def blocked_at(table: pd.DataFrame, place: int = 0) -> tuple[pd.Series, pd.DataFrame]:
    """Of a table ``heldout`` the row with nothing blocked, and those with the fewest sinks blocked
    (``place`` -1: with the most) and as many other keys, by control; no rows if there are none.
    """
    by_k = {k: rows.set_index("control") for k, rows in table.groupby("k")}
    clean = by_k.pop(0).iloc[0]
    arms = [rows for rows in by_k.values() if "sinks" in rows.index]
    return clean, arms[place] if arms else table[:0]


def grown_of(table: pd.DataFrame) -> tuple[np.ndarray, list[int]]:
    """Sinks that grew when the strongest key was blocked: the share of heads in each row, (R,), and
    their positions.

    Such a key is not above `STRONG` before, and above it after. Positions are those in the text,
    below 0 for added sinks, one for each head and row in which a sink grew.

    Args:
        table: the table ``grown`` of a curve.
    """
    has_grown = (table["before"] <= STRONG) & (table["after"] > STRONG)
    return has_grown.groupby(table["row"]).mean().to_numpy(), table.loc[has_grown, "at"].tolist()


def _errors(values_CR: np.ndarray) -> np.ndarray:
    """Standard errors (C,) over rows; NaN with one."""
    return pd.DataFrame(values_CR).sem(axis=1).to_numpy()


def curve_of(study: Run, curves: Sequence[Run]) -> Run | None:
    """The first masking curve of the same model: of its name, and of its weights if both runs noted
    them.
    """
    for curve in curves:
        one, other = study.info.model, curve.info.model
        weights = one.get("weights_sha256"), other.get("weights_sha256")
        if one.get("name") == other.get("name") and (None in weights or weights[0] == weights[1]):
            return curve
    return None
