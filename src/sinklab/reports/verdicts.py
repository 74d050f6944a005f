"""The statements of the analysis paper, held against one run."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from sinklab.sinks import EpsilonCurve, Verdict, masking_cost, ninety_six, recovery, start_only

WITHIN = 8
"""steps that heads are given to find another sink"""


def judged(
    curve: EpsilonCurve | None,
    events_by_position: np.ndarray,
    heldout: pd.DataFrame | None,
    truncation: pd.DataFrame | None,
) -> list[Verdict]:
    """One verdict per statement; what was not measured says so and holds None.

    The cost of masking is that of the fewest sinks that were masked (one, in a study with the usual settings); its
    error is that of the paired differences.
    """
    found = [start_only(events_by_position if len(events_by_position) else np.zeros(1))]
    plain, masked, error = (math.nan, math.nan), (math.nan, math.nan), None
    if heldout is not None:
        base, hidden = heldout[heldout["k"] == 0], heldout[heldout["control"] == "sinks"].sort_values("k")
        if len(base) and len(hidden):
            one, other = base.iloc[0], hidden.iloc[0]
            plain, masked = ((float(row["loss"]), float(row["stderr"])) for row in (one, other))
            error = float(other["delta_stderr"])
    found.append(masking_cost(plain, masked, paired_error=error))
    found.append(_recovered(truncation))
    if curve is not None:
        found.append(ninety_six(curve))
    return found


def _recovered(truncation: pd.DataFrame | None) -> Verdict:
    if truncation is None:
        unknown = "No part of the context was hidden, so recovery was not measured."
        return Verdict("no recovery", None, math.nan, 0.5, unknown)
    first = truncation.groupby("sample")["step"].transform("min")
    soon = truncation[truncation["step"] < first + WITHIN]
    heads = soon.groupby(["sample", "layer", "head"])[["lost", "recovered"]].any()
    return recovery(heads["lost"].to_numpy(), heads["recovered"].to_numpy(), within=WITHIN)
