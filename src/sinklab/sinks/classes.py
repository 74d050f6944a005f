"""Classes of tokens, and the age of a position as of a step."""

# T steps, S positions
from __future__ import annotations

import difflib
import unicodedata
from typing import Any

import numpy as np

CLASSES = (
    "mask",
    "newline",
    "whitespace",
    "punctuation",
    "digits",
    "words",
    "bos",
    "eos",
    "template",
    "special",
    "image",
    "sink",
)
"""what a token can be; "eos" holds end of text and end of turn, "template" the words of the chat format too"""

STATES = ("masked", "committed", "prompt")
"""state of a position before a step, by its code 0, 1, 2"""

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
    if special and special not in _ROLES:
        near = difflib.get_close_matches(special, _ROLES, n=1)
        raise ValueError(
            f"The role of a token is empty or one of {', '.join(_ROLES)}: got {special!r} for {text!r}."
            + (f" Did you mean {near[0]!r}?" if near else "")
        )
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
    known: dict[tuple[str, str, bool], str] = {}
    found = np.full(texts.size, None, dtype=object)
    for place, token in enumerate(zip(texts.flat, roles.flat, flags.flat, strict=True)):
        if token[0] is None:
            continue
        if token not in known:
            known[token] = token_class(*token)
        found[place] = known[token]
    return found.reshape(texts.shape)


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
    names = np.array([None, "masked", "committed", "prompt"], dtype=object)
    ages = names[states + 1]
    fresh = (states[..., 1:, :] == 1) & (states[..., :-1, :] <= 0)
    ages[..., 1:, :][fresh] = "just committed"
    return ages
