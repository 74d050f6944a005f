"""Where an edit applies: layers by number or module path, query heads by number, as `trace` chooses them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from sinklab.probing.choice import Choice, several, whole
from sinklab.probing.log import InterventionLog


def whole_numbers(name: str, given: Any, *, least: int | None = 0) -> tuple[int, ...]:
    """`given`, one number or several, as a tuple. Raises ValueError for what is none, and for numbers below `least`."""
    found = [whole(number) for number in several(given)]
    numbers = tuple(number for number in found if number is not None)
    if len(numbers) < len(found):
        raise ValueError(f"{name}: whole numbers are expected, got {given!r}: write a tuple such as (0, 3)")
    if least is not None and numbers and min(numbers) < least:
        raise ValueError(f"{name}: numbers count from {least}, got {min(numbers)}: leave out what lies before")
    return numbers


def layer_names(given: Any) -> tuple[int | str, ...] | None:
    """`layers` of an edit as a tuple; None means all. Raises ValueError for what is neither number nor path."""
    if given is None:
        return None
    found = [one if isinstance(one, str) else whole(one) for one in several(given)]
    layers = tuple(one for one in found if one is not None)
    if not layers or len(layers) < len(found):
        raise ValueError(
            f"layers are numbers in the order of execution (-1 is the last) or module paths, got {given!r}: write a "
            'tuple such as (0, -1) or ("layers.3",); None means all'
        )
    return layers


def head_numbers(given: Any) -> tuple[int, ...] | None:
    """`heads` of an edit as a tuple; None means all. Raises ValueError for what is no number, and for no head."""
    if given is None:
        return None
    heads = whole_numbers("heads", given, least=None)
    if not heads:
        raise ValueError("heads names at least one query head, got none: None means all")
    return tuple(dict.fromkeys(heads))


class Scope:
    """The layers and heads of one edit, held to the model as it runs."""

    def __init__(self, label: str, layers: tuple[int | str, ...] | None, heads: tuple[int, ...] | None) -> None:
        self.label = label
        self.asked = Choice.of(layers, heads, None, ())
        self.choice = self.asked

    def covers(self, layer: str, log: InterventionLog) -> bool:
        """Whether the edit applies to this layer. Raises ValueError for a negative number while nobody can count."""
        if self.choice is self.asked and any(isinstance(one, int) and one < 0 for one in self.asked.layers or ()):
            self.choice = replace(self.asked, layers=tuple(self._counted(one, log) for one in self.asked.layers or ()))
        return self.choice.has_layer(log.layers[layer], layer)

    def _counted(self, layer: int | str, log: InterventionLog) -> int | str:
        if isinstance(layer, str) or layer >= 0:
            return layer
        if log.layer_count is None:
            raise ValueError(
                f"{self.label}: layer {layer} counts from the last, but how many there are is known only after a "
                "forward (the model has no config.num_hidden_layers): count from the first, or give module paths"
            )
        # One that lies before the first stays negative, for `check` to refuse.
        return layer + log.layer_count

    def check(self, log: InterventionLog) -> None:
        """After a whole forward. Raises ValueError for layers that are not there."""
        self.asked.settle(list(log.layers))

    def of_heads(self, layer: str, heads: int) -> list[int]:
        """The query heads to edit in a layer that has so many, rising. Raises ValueError for one that is not there."""
        chosen = self.choice.heads_of(layer, heads)
        return list(range(heads)) if chosen is None else sorted(set(chosen))


def count_layers(model: nn.Module) -> int | None:
    """The number of layers the model's config names; None where it names none."""
    for module in model.modules():
        number = getattr(getattr(module, "config", None), "num_hidden_layers", None)
        if isinstance(number, int):
            return number
    return None
