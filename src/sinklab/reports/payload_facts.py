"""What the page's charts draw of whole runs, as JSON: facts per layer, head maps, curves, held-out losses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sinklab.sinks import ScoreHistogram

from .study import Study
from .tables import layers_table

LAYER_FIELDS = ("added_share", "text_share", "added_norm", "sink_norm", "rest_norm", "sinks")


def facts_of(study: Study) -> dict[str, Any]:
    """Everything of one run that is not an array of a sample."""
    if not study.layers:
        return {"layers": [], "heads": [], "facts": {}, "head_maps": [], "first_layer": 0, "heldout": _heldout(study)}
    curve, histogram = study.curve, study.histogram
    weight_LH = np.stack([facts.main_share_H for facts in study.facts])
    return {
        "layers": study.layers,
        "heads": study.heads,
        # The page opens on the layer whose heads attend most to one key.
        "first_layer": int(np.nan_to_num(weight_LH).mean(1).argmax()),
        "facts": {
            **{name: listed([getattr(facts, name) for facts in study.facts]) for name in LAYER_FIELDS},
            "mobility": listed(layers_table(study)["mobility"]),
        },
        "head_maps": _head_maps(study, weight_LH),
        "curve": curve and {"epsilon": listed(curve.epsilon), "filtered": listed(curve.filtered)},
        "histogram": histogram and _histogram(histogram),
        "heldout": _heldout(study),
    }


def listed(values: Any) -> list[float | None]:
    """Numbers as JSON has them: a few digits, null in place of NaN."""
    return [None if not math.isfinite(value) else float(f"{value:.5g}") for value in np.asarray(values, float).ravel()]


def _head_maps(study: Study, weight_LH: np.ndarray) -> list[dict[str, Any]]:
    """Numbers per layer and head, as the analysis paper's Fig. 5."""
    maps = [
        _head_map("weight", "Mean weight on the main sink of the head", 100 * weight_LH, unit=" %", log=True),
    ]
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
    return {
        "name": name,
        "about": about,
        "unit": unit,
        "log": log,
        "low": low,
        "high": high,
        "values": listed(values_LH),
    }


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
    if study.heldout is None:
        return []
    return [
        {
            "k": int(row["k"]),
            "control": str(row["control"]),
            "delta": listed([row["delta"]])[0],
            "error": listed([row["delta_stderr"]])[0] or 0,
        }
        for row in study.heldout.to_dict("records")
    ]
