"""Which tokens sinks fall on: frequency among sinks against frequency among tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Enrichment:
    """One row per label, most frequent sink first; equally long columns."""

    label: list[str]
    """what was counted"""
    events: np.ndarray
    """number of sink events"""
    occurrences: np.ndarray
    """number of places (sample, step, position) that held the label"""
    frequency: np.ndarray
    """share of all sink events: the raw frequency of the published table"""
    occupancy: np.ndarray
    """share of all places: the frequency that chance would give"""
    enrichment: np.ndarray
    """frequency over occupancy: 1 is chance; NaN when there is no event at all"""


def enrichment(labels: Any, events: Any) -> Enrichment:
    """Count sink events per label against how often the label is there at all.

    labels: strings, one per place (sample, step, position), any shape; None where the place does not exist.
    events: numbers of the same shape, how many (layer, head) pairs have a sink there.
    Raises ValueError when the shapes differ or no place exists.
    """
    names = np.asarray(labels, dtype=object)
    counts = np.asarray(events, dtype=float)
    if names.shape != counts.shape:
        raise ValueError(f"One number of events per label: labels have shape {names.shape}, events {counts.shape}.")
    here = np.array([name is not None for name in names.flat], dtype=bool)
    if not here.any():
        raise ValueError("enrichment needs at least one place that holds a token: every label is None.")
    names, counts = names.reshape(-1)[here], counts.reshape(-1)[here]
    unique, code = coded(names)
    per_label = np.bincount(code, weights=counts, minlength=len(unique))
    places = np.bincount(code, minlength=len(unique))
    # Falling events, then the alphabet, so that ties print in one order everywhere.
    order = np.lexsort((np.arange(len(unique)), -per_label))
    total = per_label.sum()
    frequency = per_label[order] / (total or 1)
    occupancy = places[order] / places.sum()
    return Enrichment(
        label=[unique[index] for index in order],
        events=per_label[order],
        occurrences=places[order],
        frequency=frequency,
        occupancy=occupancy,
        enrichment=frequency / occupancy if total else np.full(len(unique), np.nan),
    )


def coded(names: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Distinct labels in alphabetical order, and the number of its label for each name; O(names), no sort of them."""
    seen: dict[Any, int] = {}
    code = np.fromiter((seen.setdefault(name, len(seen)) for name in names.flat), dtype=np.int64, count=names.size)
    labels = sorted({str(name) for name in seen})
    place = {label: index for index, label in enumerate(labels)}
    return labels, np.array([place[str(name)] for name in seen], dtype=np.int64)[code]
