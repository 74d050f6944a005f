"""Semantic or positional: how much of where attention lands is explained by what a token is, and how much by where."""

# T steps, S positions; C classes, P positions
from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import pandas as pd

from sinklab.errors import one_of
from sinklab.sinks.states import COMMITTED, MASKED, STATES

TEXT_CLASSES = ("newline", "whitespace", "punctuation", "digits", "words")
"""what a token of the language can be"""

CLASSES = ("mask", *TEXT_CLASSES, "bos", "eos", "template", "special", "image", "sink")
"""what a token can be; "eos" holds end of text and end of turn, "template" the words of the chat format too"""

AGES = ("masked", "just committed", "committed", "prompt")
"""age of a position as of a step: "just committed" was masked at the step before"""

# Role of a token id, as the tokens table has it, to its class.
_ROLES = {"mask": "mask", "bos": "bos", "eos": "eos", "eot": "eos", "template": "template", "image": "image"}
_ROLES |= {"pad": "special", "other": "special", "sink": "sink"}

# How byte-level BPE and SentencePiece spell white space.
_SPELLINGS = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n", "ĉ": "\t"})


def token_class(text: str, special: str = "", template: bool = False) -> str:
    """Class of a token, one of ``CLASSES``.

    text: decoded text or byte-level spelling ("Ġthe"); a part of a character ("\\ufffd") counts as words.
    special: role of the token id: "" for language, or mask, bos, eos, eot, pad, template, image, other, sink.
    template: the position belongs to the chat format. Its words, line ends and lesser specials are then "template";
        mask, bos, eos, image and sink stay what they are.
    Raises ValueError for an unknown role.
    """
    if special:
        one_of(f"the role of the token {text!r}, unless it is empty,", special, _ROLES)
    name = _ROLES[special] if special else text_class(text)
    return "template" if template and name not in ("mask", "bos", "eos", "image", "sink") else name


def text_class(text: str) -> str:
    """newline, whitespace, punctuation, digits or words; "special" for a token of no text."""
    plain = text.translate(_SPELLINGS)
    core = plain.strip()
    if not plain:
        return "special"
    if not core:
        return "newline" if "\n" in plain or "\r" in plain else "whitespace"
    categories = {unicodedata.category(letter)[0] for letter in core}
    if categories <= {"P", "S"}:
        return "words" if "\ufffd" in core else "punctuation"
    return "digits" if "N" in categories and not categories & {"L", "M"} else "words"


def token_classes(texts: Any, specials: Any = "", templates: Any = False) -> np.ndarray:
    """``token_class`` of whole arrays: object array of the shape of ``texts``; None where the text is None.

    specials and templates broadcast to texts. Every distinct token is classed once.
    """
    texts = np.asarray(texts, dtype=object)
    roles = np.broadcast_to(np.asarray(specials, dtype=object), texts.shape)
    flags = np.broadcast_to(np.asarray(templates, dtype=bool), texts.shape)
    classed = cache(token_class)
    tokens = zip(texts.flat, roles.flat, flags.flat, strict=True)
    found = [None if token[0] is None else classed(*token) for token in tokens]
    return np.array(found, dtype=object).reshape(texts.shape)


def token_ages(states_TS: Any) -> np.ndarray:
    """Age of every position at every step, object array of ``AGES``; None where there is no position.

    states_TS: (..., step, position) codes 0 masked, 1 committed, 2 prompt (``STATES``), or -1 for no position.
    A position is just committed when it is committed and was masked, or not there yet (a decoder that appends), at the
    step before. At the first step nothing is known to be just committed. Where steps were recorded at intervals, "just"
    means since the step recorded before. Raises ValueError for other codes.
    """
    states = np.asarray(states_TS)
    if states.ndim < 2 or not np.isin(states, (-1, 0, 1, 2)).all():
        raise ValueError(
            "states_TS needs axes (..., step, position) and codes 0 masked, 1 committed, 2 prompt or -1: got shape "
            f"{states.shape} and codes {np.unique(states).tolist()[:8]}."
        )
    names = np.array([None, *STATES], dtype=object)
    ages = names[states + 1]
    fresh = (states[..., 1:, :] == COMMITTED) & (states[..., :-1, :] <= MASKED)
    ages[..., 1:, :][fresh] = "just committed"
    return ages


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
    here = names != None  # noqa: E711 - elementwise
    if not here.any():
        raise ValueError("enrichment needs at least one position that holds a token: every label is None.")
    table = pd.DataFrame({"label": names[here].astype(str).astype(object), "events": counts[here]})
    found = table.groupby("label")["events"].agg(["sum", "size"]).sort_values("sum", ascending=False, kind="stable")
    events, places = found["sum"].to_numpy(), found["size"].to_numpy()
    frequency, occupancy = events / (events.sum() or 1), places / places.sum()
    enriched = frequency / occupancy if events.any() else np.full(len(found), np.nan)
    return Enrichment([*found.index], events, places, frequency, occupancy, enriched)


@dataclass(frozen=True)
class Explained:
    """Shares of the variance of received attention over places (sample, step, position). Samples add up.

    The shares are adjusted R^2: of pure noise none is explained, however many positions there are; they can fall a
    little below 0 then. NaN where attention does not vary or there are too few places.
    """

    labels: tuple[str, ...]
    """classes, in the order of the rows"""
    count_CP: np.ndarray
    """(class, position) number of places"""
    total_CP: np.ndarray
    """(class, position) sum of what they receive"""
    squares: float
    """sum of the squares"""

    @property
    def places(self) -> int:
        """Number of places."""
        return int(self.count_CP.sum())

    @property
    def by_class(self) -> float:
        """Share explained by the class of the token alone: the semantic score."""
        return self._adjusted(_between(self.count_CP.sum(1), self.total_CP.sum(1)), (self.count_CP.sum(1) > 0).sum())

    @property
    def by_position(self) -> float:
        """Share explained by the position alone: the positional score."""
        return self._adjusted(_between(self.count_CP.sum(0), self.total_CP.sum(0)), (self.count_CP.sum(0) > 0).sum())

    @property
    def by_both(self) -> float:
        """Share explained by an effect of the class plus an effect of the position."""
        return self._adjusted(*self._additive)

    @property
    def unique_class(self) -> float:
        """What the class explains beyond the position."""
        return self.by_both - self.by_position

    @property
    def unique_position(self) -> float:
        """What the position explains beyond the class."""
        return self.by_both - self.by_class

    @property
    def shared(self) -> float:
        """What either explains, because certain tokens stand at certain positions."""
        return self.by_class + self.by_position - self.by_both

    @cached_property
    def _additive(self) -> tuple[float, int]:
        """Sum of squares and number of parameters of the least-squares fit class + position."""
        here_P = self.count_CP.sum(0) > 0
        count_CP, total_CP = self.count_CP[:, here_P].astype(float), self.total_CP[:, here_P]
        count_P, total_P = count_CP.sum(0), total_CP.sum(0)
        # Normal equations with the positions eliminated: as small as the number of classes.
        left_CC = np.diag(count_CP.sum(1)) - (count_CP / count_P) @ count_CP.T
        right_C = total_CP.sum(1) - (count_CP / count_P) @ total_P
        rank = int(np.linalg.matrix_rank(left_CC, hermitian=True))
        beyond = float(right_C @ (np.linalg.pinv(left_CC, rcond=1e-9, hermitian=True) @ right_C))
        return _between(count_P, total_P) + beyond, int(here_P.sum()) + rank

    def _adjusted(self, between: float, parameters: int) -> float:
        places = self.places
        spread = self.squares - self.total_CP.sum() ** 2 / places if places else 0.0
        if spread <= 1e-12 * self.squares or places <= parameters:
            return float("nan")
        return float(1 - (1 - between / spread) * (places - 1) / (places - parameters))

    def __add__(self, other: Explained) -> Explained:
        def added(name: str) -> pd.DataFrame:
            one, two = (pd.DataFrame(getattr(each, name), each.labels) for each in (self, other))
            return one.add(two, fill_value=0).fillna(0)

        count_CP, total_CP = added("count_CP"), added("total_CP")
        labels, squares = tuple(count_CP.index), self.squares + other.squares
        return Explained(labels, count_CP.to_numpy(np.int64), total_CP.to_numpy(float), squares)


def _between(count: np.ndarray, total: np.ndarray) -> float:
    """Sum of squares between groups of these sizes and sums."""
    here = count > 0
    return float((total[here] ** 2 / count[here]).sum() - total.sum() ** 2 / max(count.sum(), 1))


def explained_mass(received: Any, classes: Any, positions: Any = None) -> Explained:
    """How much of the variance of received attention the classes and the positions of tokens explain.

    Every place (sample, step, position) is one observation. With y what it receives, the share explained by a grouping
    is the sum of squares between the groups over the whole one (R^2), adjusted for the number of groups; "both" is the
    fit of an effect per class plus one per position, so that what is unique to each can be separated.

    Args:
        received: (..., position) what each place receives: share or score, mean over heads (and layers), or numbers of
            sink events. Added sink columns left out. NaN where there is no place.
        classes: labels of the same shape (``token_classes``), None where there is no place.
        positions: whole numbers of at least 0, broadcastable to received; None: the place on the last axis. Any other
            notion of position will do, such as the distance to the rightmost masked position.

    Time O(places + classes^2 positions). Raises ValueError when shapes differ or no place is left.
    """
    y, names = np.asarray(received, dtype=float), np.asarray(classes, dtype=object)
    if y.ndim < 1 or y.shape != names.shape:
        raise ValueError(f"One class per position: received has shape {y.shape}, classes {names.shape}.")
    where = np.arange(y.shape[-1]) if positions is None else np.asarray(positions)
    if not np.issubdtype(where.dtype, np.integer) or where.min(initial=0) < 0:
        raise ValueError(f"positions are whole numbers of at least 0: got {where.dtype} from {where.min(initial=0)}.")
    where = np.broadcast_to(where, y.shape)
    here = np.isfinite(y) & (names != None)  # noqa: E711 - elementwise
    if not here.any():
        raise ValueError("explained_mass needs at least one position that holds a token and a finite number: got none.")
    y, where = y[here], where[here]
    row, labels = pd.factorize(names[here].astype(str).astype(object), sort=True)
    width = int(where.max()) + 1
    cell = row * width + where
    shape = (len(labels), width)
    count_CP = np.bincount(cell, minlength=len(labels) * width).reshape(shape)
    total_CP = np.bincount(cell, weights=y, minlength=len(labels) * width).reshape(shape)
    return Explained(tuple(labels), count_CP, total_CP, float((y**2).sum()))
