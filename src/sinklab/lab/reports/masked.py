"""Masking curves beside traces: the curve of a model gives the cost of blocking keys on the page of
its trace.
"""

# R rows of held-out text
from __future__ import annotations

import math
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
    clean_R = losses[0, "none"].to_numpy()
    rows = []
    for cell in table[table["control"].isin(ARMS)].to_dict("records"):
        losses_R = losses[cell["k"], cell["control"]].to_numpy()
        row = {
            "k": int(cell["k"]),
            "control": ARMS[cell["control"]],
            "loss": cell["loss"],
            "stderr": _error(losses_R),
        }
        row |= {
            "delta": cell["delta"],
            "delta_stderr": _error(losses_R - clean_R),
            "tokens": cell["tokens"],
        }
        row |= {
            "losses": losses_R.tolist(),
            "bits_per_byte": cell["bits_per_byte"] if cell["k"] == 0 else math.nan,
        }
        rows.append(row)
    frame = pd.DataFrame(rows)
    name = of_twin("grown", twin)
    if name in curve.tables:
        grown_R, places = grown_of(curve.table(name))
        is_one = (frame["k"] == 1) & (frame["control"] == "sinks")
        frame["grown"] = [grown_R.tolist() if one else [] for one in is_one]
        frame["grown_at"] = [places if one else [] for one in is_one]
    return frame


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


def _error(values_R: np.ndarray) -> float:
    return float(values_R.std(ddof=1)) / math.sqrt(len(values_R)) if len(values_R) > 1 else math.nan


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
