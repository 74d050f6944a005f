"""Settings of studies as commands and run folders have them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from importlib import resources
from typing import Any

from sinklab.lab.files import free_fields


def heldout_text(given: str | None) -> str:
    """The corpus of held-out text that was given, or the excerpt inside the package (None, "" or
    "excerpt").
    """
    if given and given != "excerpt":
        return given
    packaged = resources.files("sinklab.lab.checkpoints")
    return str(packaged.joinpath("packaged", "heldout.jsonl"))


def ascending(name: str, numbers: Iterable[Any]) -> tuple[Any, ...]:
    """Numbers of a field of settings, each once, the least first."""
    return tuple(sorted({*numbers}))


def shard_of(text: str | None) -> tuple[int, int]:
    """The numbers of "i/n"; (0, 1) if left out. Raises ValueError for those that make no sense."""
    if text is None:
        return 0, 1
    place, _, shards = text.partition("/")
    if not (place.isdigit() and shards.isdigit() and int(place) < int(shards)):
        raise ValueError(
            f"--shard is i/n with i from 0 to n - 1, such as 0/4, but got {text!r}; count from 0"
        )
    return int(place), int(shards)


def kept_record(settings: Any) -> dict[str, Any]:
    """Settings as a run folder keeps them: registered values as text, and none that may differ when
    it goes on.
    """
    free = free_fields(settings)
    record = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        registry = field.metadata.get("registry")
        if isinstance(value, tuple):
            value = [registry.as_text(one) if registry else one for one in value]
        elif registry is not None and value is not None:
            value = registry.as_text(value)
        if field.name not in free:
            record[field.name] = value
    return record
