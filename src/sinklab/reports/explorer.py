"""The explorer of the page: its markup, its one script, and the data block the script reads."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from sinklab.analysis.thresholds import ScoreHistogram
from sinklab.reports.payload import BUDGET, arrays_of
from sinklab.reports.study import Study
from sinklab.reports.style import THEMES, asset

LAYER_FIELDS = ("added_share", "text_share", "added_norm", "sink_norm", "rest_norm", "sinks", "mobility")


def facts_of(study: Study) -> dict[str, Any]:
    """Everything of one run that is not an array of a sample."""
    if not study.layers:
        return {"layers": [], "heads": [], "facts": {}, "head_maps": [], "first_layer": 0, "heldout": _heldout(study)}
    curve, histogram = study.curve, study.histogram
    weight_LH = study.measured.main_share_LH
    return {
        "layers": study.layers,
        "heads": study.heads,
        # The page opens on the layer whose heads attend most to one key.
        "first_layer": int(np.nan_to_num(weight_LH).mean(1).argmax()),
        "facts": {name: listed(study.over("layer")[name]) for name in LAYER_FIELDS},
        "head_maps": _head_maps(study, weight_LH),
        "curve": curve and {"epsilon": listed(curve.epsilon), "filtered": listed(curve.filtered)},
        "histogram": histogram and _histogram(histogram),
        # null where the rule is no bound on received attention
        "threshold": listed([study.measured.threshold])[0],
        "heldout": _heldout(study),
    }


def listed(values: Any) -> list[float | None]:
    """Numbers as JSON has them: a few digits, null in place of NaN."""
    return [None if not math.isfinite(value) else float(f"{value:.5g}") for value in np.asarray(values, float).ravel()]


def _head_maps(study: Study, weight_LH: np.ndarray) -> list[dict[str, Any]]:
    """Numbers per layer and head, as the analysis paper's Fig. 5."""
    about = "Mean weight on the main sink of the head"
    maps = [_head_map("weight", about, 100 * weight_LH, unit=" %", log=True)]
    # A head without sinks has no motion; its mean over samples is that of the samples where it has some.
    means = study.measured.motions.groupby(["layer", "head"])["mobility"].mean()
    index = [(layer, head) for layer in study.layers for head in study.heads]
    mobility_LH = means.reindex(index).to_numpy().reshape(weight_LH.shape)
    if np.isfinite(mobility_LH).any():
        about = "Chance that two steps have their main sink at different places: 0 static, 1 moving"
        maps.append(_head_map("motion", about, mobility_LH, low=0, high=1))
    return maps


def _head_map(
    name: str, about: str, values_LH: np.ndarray, *, unit: str = "", log: bool = False,
    low: float | None = None, high: float | None = None,
) -> dict[str, Any]:  # fmt: skip
    known = values_LH[np.isfinite(values_LH) & ((values_LH > 0) | (not log))]
    low = float(known.min(initial=math.inf)) if low is None else low
    high = float(known.max(initial=-math.inf)) if high is None else high
    if not low < high:
        low, high = (low / 2, low * 2) if math.isfinite(low) and low > 0 else (0.5, 1.0)
    shown = {"name": name, "about": about, "unit": unit, "log": log, "low": low, "high": high}
    return shown | {"values": listed(values_LH)}


def _histogram(histogram: ScoreHistogram) -> dict[str, Any]:
    counts = histogram.counts.astype(float)
    counts[0] += histogram.below
    counts[-1] += histogram.above
    full = np.flatnonzero(counts)
    first, last = (full[0], full[-1] + 1) if full.size else (0, len(counts))
    return {
        "edges": listed(histogram.edges[first : last + 1]),
        "parts": listed(counts[first:last] / max(counts.sum(), 1)),
    }


def _heldout(study: Study) -> list[dict[str, Any]]:
    rows = [] if study.heldout is None else study.heldout.to_dict("records")
    numbers = [listed([row["delta"], row["delta_stderr"]]) for row in rows]
    return [
        {"k": int(row["k"]), "control": str(row["control"]), "delta": delta, "error": error or 0}
        for row, (delta, error) in zip(rows, numbers, strict=True)
    ]


# In the order they are put together: a later file may use an earlier one.
SCRIPTS = (
    "data", "colours", "text", "drawing", "app", "player", "readout", "heatmap", "heads", "paths", "scatter", "pane",
    "charts", "findings", "controls", "main",
)  # fmt: skip


@lru_cache(maxsize=1)
def script() -> str:
    """All scripts as one, in a scope of its own."""
    parts = (asset(f"assets/{name}.js").strip() for name in SCRIPTS)
    return '(() => {\n"use strict";\n' + "\n\n".join(parts) + "\n})();\n"


def script_hash() -> str:
    """What the page's Content-Security-Policy allows to run: this script and no other."""
    return base64.b64encode(hashlib.sha256(script().encode("utf-8")).digest()).decode("ascii")


def payload(studies: Sequence[Study], budget: int = BUDGET) -> dict[str, Any]:
    """Everything the script draws, as JSON values. ``budget``: characters for the arrays of each run."""
    palette = {name: {"scale": theme.scale, "runs": theme.runs} for name, theme in THEMES.items()}
    runs = [
        {
            "label": study.label,
            "family": study.family,
            "added": study.sink_count,
            **facts_of(study),
            **arrays_of(study, budget),
        }
        for study in studies
    ]
    return {"palette": palette, "runs": runs}


def data_block(content: dict[str, Any]) -> str:
    """A block that no browser runs or reads as markup: "<" is written as an escape."""
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="payload">{text}</script>'
