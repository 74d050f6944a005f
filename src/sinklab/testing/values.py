"""What every registered value keeps: its text and its JSON are read again."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from sinklab.registry import Registry


def check_text_and_json(registry: Registry, value: Any) -> None:
    """Hold a registered value to what run folders and the command line rely on.

    Raises:
        AssertionError: unless its class is a documented frozen dataclass, and its text and its JSON are read as it is.
        ValueError: if its class is not registered.
    """
    kind: Any = type(value)
    text, fields = registry.as_text(value), json.loads(json.dumps(registry.as_dict(value)))
    is_record = dataclasses.is_dataclass(value)
    assert is_record and kind.__doc__, f"{text}: {kind.__name__} is no dataclass with a docstring"
    assert kind.__dataclass_params__.frozen, f"{text}: {kind.__name__} can be changed; write @dataclass(frozen=True)"
    assert registry.parse(text) == value, f"{text!r} is read as {registry.parse(text)!r}"
    assert registry.parse(fields) == value, f"{fields} is read as {registry.parse(fields)!r}"
    assert hash(registry.parse(fields)) == hash(value), f"{text}: equal values have different hashes"
