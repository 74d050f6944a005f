"""Which layers, heads, steps and whole maps a trace records."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

Place = tuple[int, int, int]
"""(step, layer, head)"""


def whole(number: Any) -> int | None:
    """A whole number of any kind, numpy's too, as an int; None for anything else."""
    try:
        return None if isinstance(number, bool) else operator.index(number)
    except TypeError:
        return None


def several(given: Any) -> Iterable[Any]:
    """One number or name, or several, as several."""
    return given if isinstance(given, Iterable) and not isinstance(given, str) else (given,)


@dataclass
class Choice:
    """What was asked for. Layers are known by name and number once the first forward has shown them."""

    layers: tuple[int | str, ...] | None = None
    heads: tuple[int, ...] | None = None
    steps: Container[int] | None = None
    maps: tuple[Place, ...] = ()
    known: list[str] = field(default_factory=list)
    """Paths of all attention layers in the order they ran in the first forward; empty before it ended."""

    @classmethod
    def of(
        cls,
        layers: Iterable[int | str] | int | str | None,
        heads: Iterable[int] | int | None,
        steps: Container[int] | None,
        maps: Iterable[Place],
    ) -> Choice:
        """Raises ValueError for what is not a choice at all; layers and heads are held to the model as it runs."""
        if isinstance(steps, str) or not (steps is None or hasattr(steps, "__contains__")):
            raise ValueError(f"steps is a container of step numbers such as range(0, 64, 8) or a set, got {steps!r}")
        places = []
        for place in maps:
            triple = tuple(whole(number) for number in several(place))
            if len(triple) != 3 or None in triple:
                raise ValueError(
                    f"maps are triples of numbers (step, layer, head), got {place!r}: write maps=[(3, 5, 2)]"
                )
            places.append(triple)
        chosen, numbers = (None if given is None else tuple(dict.fromkeys(several(given))) for given in (layers, heads))
        for name, given in (("layers", chosen), ("heads", numbers)):
            if given is not None and not given:
                raise ValueError(f"{name} names at least one, got none: leave it out to record all")
        return cls(chosen, numbers, steps, tuple(places))  # type: ignore[arg-type]

    def has_step(self, number: int) -> bool:
        """Whether this step is recorded."""
        return self.steps is None or number in self.steps

    def has_layer(self, index: int, path: str) -> bool:
        """Whether to measure the layer that runs as number `index`; before the first forward ended, perhaps."""
        return self.layers is None or any(
            _matches(path, wanted) if isinstance(wanted, str) else self._is_number(index, wanted)
            for wanted in self.layers
        )

    def _is_number(self, index: int, wanted: int) -> bool:
        if wanted >= 0:
            return index == wanted
        # Counted from an end that is not known before the first forward got there: until then, any may be meant.
        return not self.known or index == wanted + len(self.known)

    def heads_of(self, layer: str, total: int) -> list[int] | None:
        """The query heads to record in a layer with so many; None for all. Raises ValueError for one that is not."""
        if self.heads is None:
            return None
        return list(dict.fromkeys(_head(head, layer, total) for head in self.heads))

    def maps_of(self, step: int, index: int, layer: str, total_heads: int) -> dict[Place, int]:
        """The maps wanted of the layer that runs as number `index`, as they were asked for, with their heads."""
        return {
            place: _head(place[2], layer, total_heads)
            for place in self.maps
            if place[0] == step and self._is_number(index, place[1])
        }

    def has_maps(self, step: int) -> bool:
        """Whether a map of this step was asked for."""
        return any(place[0] == step for place in self.maps)

    def settle(self, paths: list[str]) -> None:
        """The layers of the first forward. Raises ValueError for a chosen one that is not among them."""
        if self.known:
            return
        total = len(paths)
        asked = [*(self.layers or ()), *(place[1] for place in self.maps)]
        for wanted in asked:
            if isinstance(wanted, str):
                if not any(_matches(path, wanted) for path in paths):
                    near = difflib.get_close_matches(wanted, paths, n=1, cutoff=0.3)
                    hint = f"did you mean {near[0]!r}?" if near else f"the first is {paths[0]!r}"
                    raise ValueError(f"no attention layer is called {wanted!r} among the {total} that ran: {hint}")
            elif not -total <= wanted < total:
                raise ValueError(
                    f"layers are numbered 0 … {total - 1} in the order they run (or from the end, −1 … −{total}), "
                    f"got {wanted}"
                )
        self.known = list(paths)


def _head(head: int, layer: str, total: int) -> int:
    if not -total <= head < total:
        raise ValueError(f"{layer or 'the model'} has the query heads 0 … {total - 1} (or −1 … −{total}), got {head}")
    return int(head) % total


def _matches(path: str, pattern: str) -> bool:
    """Whether a pattern names a layer: its path or the end of it, or a module that holds it; * stands for anything."""
    parts = path.split(".")
    holders = [".".join(parts[: end + 1]) for end in range(len(parts))]
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}") for name in holders)
