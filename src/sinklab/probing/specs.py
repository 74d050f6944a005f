"""Edits by the names that the command line and run folders use, and edits as text and JSON."""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Mapping
from typing import Any

from sinklab.probing.intervention import Edit
from sinklab.probing.interventions.mask_sinks import MaskSinks
from sinklab.probing.interventions.positions import MaskPositions, TruncateContext
from sinklab.probing.interventions.window import WindowAttention

EDITS: dict[str, type] = {kind.name: kind for kind in (MaskSinks, MaskPositions, WindowAttention, TruncateContext)}
"""Edits by name."""


def edit_by_name(name: str, **fields: Any) -> Edit:
    """The edit called `name` in `EDITS`, made with these fields; lists stand for tuples, as JSON gives them.

    Raises ValueError that names the near name or field, and for fields the edit refuses or lacks.
    """
    if name not in EDITS:
        raise ValueError(f"unknown edit {name!r}; known are {', '.join(sorted(EDITS))}; {_near(name, EDITS)}")
    kind = EDITS[name]
    known = {item.name: item for item in dataclasses.fields(kind)}
    for given in fields:
        if given not in known:
            raise ValueError(f"{name} has no field {given!r}; its fields are {', '.join(known)}; {_near(given, known)}")
    needed = [key for key, item in known.items() if item.default is dataclasses.MISSING and key not in fields]
    if needed:
        raise ValueError(f"{name} needs {' and '.join(needed)}, got only {sorted(fields)}: write {name}:{needed[0]}=…")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()})


def parse_edit(spec: str | Mapping[str, Any]) -> Edit:
    """An edit from its text "mask_sinks:k=5,removal=zero_value", or from what `as_spec` made of it.

    Several values are joined by "+" (layers=0+2, positions=3+4) or written as a range with the end left out
    (positions=8..16); "none", "true" and "false" are what they say. Raises ValueError as `edit_by_name` does, and for
    text it cannot read.
    """
    if isinstance(spec, Mapping):
        if "name" not in spec:
            raise ValueError(f"an edit has a name, got the fields {sorted(spec)}: add name, one of {sorted(EDITS)}")
        return edit_by_name(**spec)
    name, _, rest = spec.strip().partition(":")
    fields: dict[str, Any] = {}
    for part in rest.split(",") if rest else ():
        key, equals, text = (piece.strip() for piece in part.partition("="))
        if not (key and equals and text) or key in {*fields, "name"}:
            raise ValueError(
                f"an edit is written name:field=value,field=value, got {spec!r}: {part.strip()!r} is no single "
                "field=value"
            )
        fields[key] = text
    if name in EDITS:
        kinds = typing.get_type_hints(EDITS[name])
        fields = {key: _value(key, text, kinds[key]) if key in kinds else text for key, text in fields.items()}
    return edit_by_name(name, **fields)


def as_spec(edit: Edit) -> dict[str, Any]:
    """The edit as a JSON object, its name and every field; `parse_edit` makes the edit of it again.

    Raises ValueError for what is not one of `EDITS`.
    """
    name = getattr(edit, "name", None)
    if name not in EDITS or type(edit) is not EDITS[name]:
        raise ValueError(f"only edits of {sorted(EDITS)} have a spec, got {edit!r}: pass an instance of one of them")
    fields = {item.name: getattr(edit, item.name) for item in dataclasses.fields(EDITS[name])}
    return {"name": name} | {key: list(value) if isinstance(value, tuple) else value for key, value in fields.items()}


def as_text(edit: Edit) -> str:
    """The edit as `parse_edit` reads it, with the fields that differ from their defaults: a short label.

    Raises ValueError for what is not one of `EDITS`.
    """
    spec, kind = as_spec(edit), type(edit)
    defaults = {item.name: item.default for item in dataclasses.fields(kind)}  # type: ignore[arg-type]
    fields = [
        f"{key}={_text(value)}"
        for key, value in spec.items()
        if key in defaults and getattr(edit, key) != defaults[key]
    ]
    return ":".join([spec["name"], ",".join(fields)]) if fields else spec["name"]


def _text(value: Any) -> str:
    if isinstance(value, list):
        return "+".join(_text(item) for item in value)
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _value(key: str, text: str, kind: Any) -> Any:
    kinds = set(typing.get_args(kind)) if isinstance(kind, types.UnionType) else {kind}
    origins = {typing.get_origin(one) or one for one in kinds}
    if text.lower() == "none" and types.NoneType in origins:
        return None
    if tuple in origins:
        return tuple(item for piece in text.split("+") for item in _items(piece))
    if bool in origins and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for number in (int, float):
        if number in origins and (value := _number(text, number)) is not None:
            return value
    if str in origins:
        return text
    names = " or ".join(sorted(origin.__name__ for origin in origins if origin is not types.NoneType))
    raise ValueError(f"{key} takes {names}, got {text!r}: write {key}=…")


def _items(piece: str) -> list[Any]:
    if span := re.fullmatch(r"(\d+)\.\.(\d+)", piece):
        return list(range(int(span[1]), int(span[2])))
    number = _number(piece, int)
    if piece.lower() == "none":
        return [None]
    return [piece if number is None else number]


def _number(text: str, kind: type) -> Any:
    try:
        return kind(text)
    except ValueError:
        return None


def _near(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {near[0]!r}?" if near else "choose one of them"
