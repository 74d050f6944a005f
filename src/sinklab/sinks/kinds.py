"""Which tokens are sinks: kinds of tokens, and frequency against occupancy."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

KINDS = ("mask", "newline", "punctuation", "space", "word", "digit", "special", "sink")

# How byte-level BPE and SentencePiece spell white space.
_SPELLINGS = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n", "ĉ": "\t"})


def token_kind(text: str, special: Mapping[str, str] | Iterable[str] = ()) -> str:
    """Kind of a token by its text, one of ``KINDS``; decoded text and byte-level spellings ("Ġthe") both work.

    special: texts that are not language, either a mapping to their kind ({"[MASK]": "mask", "<sink>": "sink"}) or a
    collection, whose members are "special". A token of no text (part of a character) is "special" too.
    Raises ValueError when the mapping names an unknown kind.
    """
    if text in special:
        kind = special[text] if isinstance(special, Mapping) else "special"
        if kind not in KINDS:
            raise ValueError(f"The kinds of tokens are {', '.join(KINDS)}: got {kind!r} for {text!r}.")
        return kind
    plain = text.translate(_SPELLINGS)
    core = plain.strip()
    if not plain:
        return "special"
    if not core:
        return "newline" if "\n" in plain or "\r" in plain else "space"
    classes = {unicodedata.category(letter)[0] for letter in core}
    if classes <= {"P", "S"}:
        return "word" if "\ufffd" in core else "punctuation"
    return "digit" if "N" in classes and not classes & {"L", "M"} else "word"


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
    unique, inverse = np.unique(names.astype(str), return_inverse=True)
    per_label = np.bincount(inverse, weights=counts, minlength=len(unique))
    places = np.bincount(inverse, minlength=len(unique))
    # Falling events, then the alphabet, so that ties print in one order everywhere.
    order = np.lexsort((unique, -per_label))
    total = per_label.sum()
    frequency = per_label[order] / (total or 1)
    occupancy = places[order] / places.sum()
    return Enrichment(
        label=[str(name) for name in unique[order]],
        events=per_label[order],
        occurrences=places[order],
        frequency=frequency,
        occupancy=occupancy,
        enrichment=frequency / occupancy if total else np.full(len(unique), np.nan),
    )
