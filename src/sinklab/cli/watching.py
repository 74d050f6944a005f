"""What the commands that are not yet made by `command` share."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, TypeVar, cast

from sinklab.cli.command import Reading

if TYPE_CHECKING:
    from sinklab.checkpoints.loading import Loaded

Settings = TypeVar("Settings")


def run_settings(kind: type[Settings], given: Any, **changes: Any) -> Settings:
    """Settings as the command line took them, unchecked, made into those of the run, which checks them."""
    fields = dataclasses.fields(cast(Any, kind))
    return kind(**{field.name: getattr(given, field.name) for field in fields} | changes)


def loaded_here(model: str, reading: Reading) -> Loaded:
    """The model."""
    return reading.load(model)
