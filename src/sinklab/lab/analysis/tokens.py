"""Tokens of sinks: classes, ages and how much more frequent they are than by chance."""

# T steps, S positions
import re
import unicodedata
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import pandas as pd

from sinklab.core.errors import one_of
from sinklab.core.sinks import COMMITTED, MASKED, STATES

TEXT_CLASSES = ("newline", "whitespace", "punctuation", "digits", "words")
"""classes of a token of the language"""

CLASSES = ("mask", *TEXT_CLASSES, "bos", "eos", "template", "special", "image", "sink")
"""all classes of tokens; "eos" holds end of text and end of turn, "template" the words of the chat
format too
"""

AGES = ("masked", "just committed", "committed", "prompt")
"""age of a position as of a step: "just committed" was masked at the step before"""

MASK = "[MASK]"
ADDED = "added sink"
"""labels of a masked position, and of the columns of added sinks"""

# Role of a token id, as the tokens table has it, to its class.
_ROLES = {name: name for name in ("mask", "bos", "eos", "template", "image", "sink")}
_ROLES |= {"eot": "eos", "pad": "special", "other": "special"}

# A byte that is a part of a character, as a tokens table names it; others are text.
_BYTE = re.compile("<0x([89A-F][0-9A-F])>")
_PARTS = 4
"""bytes of a character in UTF-8, and so the most tokens that one is spread over"""
CONTINUED = "◌"
"""marks a token that goes on with the character of the one before it"""

# How byte-level BPE and SentencePiece spell white space.
_SPELLINGS = str.maketrans({"Ġ": " ", "▁": " ", "Ċ": "\n", "ĉ": "\t"})


def token_class(text: str, special: str = "", template: bool = False) -> str:
    """Class of a token, one of ``CLASSES``.

    text: decoded text or byte-level spelling ("Ġthe"); a part of a character ("<0xE2>", "\\ufffd")
        counts as words. special: role of the token id: "" for language, or mask, bos, eos, eot,
        pad, template, image, other, sink. template: the position belongs to the chat format. Its
        words, line ends and lesser specials are then "template"; mask, bos, eos, image and sink
        stay unchanged.
    Raises ValueError for an unknown role.
    """
    if special:
        one_of(f"the role of the token {text!r}, unless it is empty,", special, _ROLES)
        name = _ROLES[special]
    else:
        name = text_class(text)
    if template and name not in ("mask", "bos", "eos", "image", "sink"):
        return "template"
    return name


def text_class(text: str) -> str:
    """newline, whitespace, punctuation, digits or words; "special" for a token of no text."""
    plain = _BYTE.sub("\ufffd", text).translate(_SPELLINGS)
    core = plain.strip()
    if not plain:
        return "special"
    if not core:
        return "newline" if "\n" in plain or "\r" in plain else "whitespace"
    categories = {unicodedata.category(letter)[0] for letter in core}
    if categories <= {"P", "S"}:
        return "words" if "\ufffd" in core else "punctuation"
    return "digits" if "N" in categories and not categories & {"L", "M"} else "words"


def characters(texts: Sequence[str]) -> list[str]:
    """Texts of neighbouring tokens as they are read: of those that make a character together
    ("<0xC3>", "<0xA9>") the first has it, the others are "◌". Bytes without the rest of their
    character stay.
    """
    read = list(texts)
    for place, text in enumerate(read):
        for end in range(place + 2, place + 1 + _PARTS) if _BYTE.search(text) else ():
            parts = read[place:end]
            spelt = _BYTE.sub(lambda byte: chr(0xDC00 + int(byte[1], 16)), "".join(parts))
            with suppress(UnicodeError):
                whole = spelt.encode("utf-8", "surrogateescape").decode()
                read[place:end] = [whole, *[CONTINUED] * (len(parts) - 1)]
                break
    return read


def token_classes(texts: Any, specials: Any = "", templates: Any = False) -> np.ndarray:
    """``token_class`` of whole arrays: object array of the shape of ``texts``; None if the text is
    None.

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
    """Age of every position at every step, object array of ``AGES``; None if there is no position.

    states_TS: (..., step, position) codes 0 masked, 1 committed, 2 prompt (``STATES``), or -1 for
    no position. A position is just committed when it is committed and was masked, or not there yet
    (a decoder that appends), at the step before. At the first step nothing is known to be just
    committed. If steps were recorded at intervals, "just" means since the step recorded before.
    Raises ValueError for other codes.
    """
    states = np.asarray(states_TS)
    if states.ndim < 2 or not np.isin(states, (-1, 0, 1, 2)).all():
        raise ValueError(
            "states_TS needs axes (..., step, position) and codes 0 masked, 1 committed, 2 prompt "
            f"or -1: got shape {states.shape} and codes {np.unique(states).tolist()[:8]}."
        )
    ages = np.array([None, *STATES], dtype=object)[states + 1]
    fresh = (states[..., 1:, :] == COMMITTED) & (states[..., :-1, :] <= MASKED)
    ages[..., 1:, :][fresh] = "just committed"
    return ages


def enrichment(labels: Any, events: Any) -> pd.DataFrame:
    """Count sink events per label against how often the label is there at all.

    labels: strings, one per place (sample, step, position), any shape; None if the place does not
    exist. events: numbers of the same shape, how many (layer, head) pairs have a sink there. Raises
    ValueError when the shapes differ or no place exists.

    Returns a row per label, most frequent sink first:
        label: the label counted
        events: number of sink events
        occurrences: number of places (sample, step, position) that held the label
        frequency: share of all sink events: the raw frequency of the published table
        occupancy: share of all places: the frequency that chance would give
        enrichment: frequency over occupancy: 1 is chance; NaN when there is no event at all
    """
    return enriched([tallied(labels, events)])


def tallied(labels: Any, events: Any) -> pd.DataFrame:
    """Counts of ``enrichment`` for each label, which is the index: events, occurrences. Samples are
    counted one by one.
    """
    names, counts = np.asarray(labels, dtype=object), np.asarray(events, dtype=float)
    if names.shape != counts.shape:
        raise ValueError(
            f"One number of events per label: labels have shape {names.shape}, events "
            f"{counts.shape}."
        )
    # None has the code -1
    code, found = pd.factorize(names.ravel())
    number = len(found) + 1
    columns = {
        "events": np.bincount(code + 1, counts.ravel(), number)[1:],
        "occurrences": np.bincount(code + 1, minlength=number)[1:],
    }
    return pd.DataFrame(columns, index=found.astype(str).astype(object))


def enriched(tables: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """The enrichment of the counts of several samples, each as ``tallied`` counts it."""
    counts = pd.concat(tables).groupby(level=0).sum()
    if counts.empty:
        raise ValueError(
            "enrichment needs at least one position that holds a token: every label is None."
        )
    found = counts.sort_values("events", ascending=False, kind="stable")
    found = found.rename_axis("label").reset_index()
    found["frequency"] = found["events"] / (found["events"].sum() or 1)
    found["occupancy"] = found["occurrences"] / found["occurrences"].sum()
    found["enrichment"] = np.nan
    if found["events"].any():
        found["enrichment"] = found["frequency"] / found["occupancy"]
    return found
