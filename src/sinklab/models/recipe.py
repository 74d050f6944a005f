"""What a family's reader makes of a published ``config.json``: a config of ours, and where each tensor goes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig

Shapes = Mapping[str, tuple[int, ...]]
"""Tensor names of a checkpoint and their shapes."""


@dataclass(frozen=True)
class Part:
    """One place in the model that a tensor of the checkpoint fills."""

    target: str
    """Name in the model's state dict."""
    take: Callable[[Tensor], Tensor] | None = None
    """What to take from the tensor; None takes all of it."""


Plan = dict[str, tuple[Part, ...]]
"""Tensor name in the checkpoint -> the places it fills."""


@dataclass(frozen=True)
class Recipe:
    """How a checkpoint becomes a model."""

    family: str
    """``llada``, ``mmada``, ``dream``, ``smdm``, ``sinklab``, or the backbone of an autoregressive model."""
    backbone: PreTrainedConfig
    """Config of the Hugging Face decoder."""
    settings: dict[str, Any] | None = None
    """Fields of :class:`DiffusionLMConfig` besides the backbone; None for an autoregressive model."""
    plan: Plan | None = None
    """None when the checkpoint has the model's own names."""
    notes: tuple[str, ...] = field(default=())
    """What was assumed."""


def require(config: Mapping[str, Any], family: str, expected: Mapping[str, tuple]) -> None:
    """Refuse a published config whose values have no counterpart here, by the name of the field.

    Args:
        config: the published ``config.json``.
        family: for the message.
        expected: field -> the values that can be represented; a field that is absent is fine.

    Raises:
        ValueError: for the first field of another value.
    """
    for name, values in expected.items():
        if name in config and config[name] not in values:
            raise ValueError(
                f"this {family} checkpoint has {name} = {config[name]!r}, which sinklab has no counterpart for "
                f"(it reads {' or '.join(map(repr, values))}); load it with the code of its authors"
            )


def field_of(config: Mapping[str, Any], family: str, name: str) -> Any:
    """A field that must be there.

    Raises:
        ValueError: if it is absent, with the near names that are there.
    """
    if config.get(name) is None:
        near = difflib.get_close_matches(name, list(config), n=2)
        hint = f" (it has {' and '.join(map(repr, near))})" if near else ""
        raise ValueError(f"the config.json of a {family} checkpoint needs {name!r}, which is not there{hint}")
    return config[name]
