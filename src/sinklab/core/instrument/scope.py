"""The choice of layers, heads, steps and maps of a trace, or an intervention."""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from sinklab.core.errors import as_int, near

MapKey = tuple[int, int, int]
"""(step, layer, head)"""


def as_iterable(given: Any) -> Iterable[Any]:
    """One number or name, or several, as several."""
    if isinstance(given, Iterable) and not isinstance(given, str):
        return given
    return (given,)


def chosen(name: str, given: Any) -> tuple[Any, ...] | None:
    """Argument "layers" or "heads" as a tuple, each once; None: all. Raises ValueError for none."""
    if given is None:
        return None
    found: dict[Any, None] = {}
    for one in as_iterable(given):
        read: Any = as_int(one)
        if name == "layers" and isinstance(one, str):
            read = one
        if read is None:
            raise ValueError(
                f"{name} are numbers (of layers in the order of execution, -1 is the last, or "
                f"module paths; of query heads), got {given!r}: write a tuple such as (0, 3); "
                "None means all"
            )
        found[read] = None
    if not found:
        raise ValueError(f"{name} names at least one, got none: leave it out (None) for all")
    return tuple(found)


@dataclass
class RecordingScope:
    """Choice of layers, heads, steps and maps, checked as the model runs. Raises ValueError for
    values that are no choice.
    """

    layers: Any = None
    """Numbers and names, one or several; None for all."""
    heads: Any = None
    """Numbers of query heads, likewise."""
    steps: Container[int] | None = None
    maps: Iterable[MapKey] = ()
    total: int | None = None
    """Number of attention layers, from which negative numbers count, if it is known."""
    known: list[str] = field(default_factory=list)
    """Paths of all attention layers in the order they run, once a forward has ended."""

    def __post_init__(self) -> None:
        steps = self.steps
        if isinstance(steps, str) or not (steps is None or isinstance(steps, Container)):
            raise ValueError(
                "steps is a container of step numbers such as range(0, 64, 8) or a set, got "
                f"{steps!r}"
            )
        self.maps = [_map_key(key) for key in self.maps]
        self.layers = chosen("layers", self.layers)
        self.heads = chosen("heads", self.heads)

    def has_layer(self, index: int, path: str) -> bool:
        """Whether the layer that runs as number `index` is chosen; see `is_layer`."""
        return self.layers is None or any(self.is_layer(index, path, one) for one in self.layers)

    def is_layer(self, index: int, path: str, wanted: int | str) -> bool:
        """Whether a name or number means this layer. A negative number may mean any until the
        first forward ends.
        """
        if isinstance(wanted, str):
            return _is_named(path, wanted)
        if wanted >= 0:
            return index == wanted
        return self.total is None or index == wanted + self.total

    def chosen_layers(self) -> dict[str, int]:
        """Paths and numbers of the chosen layers."""
        return {path: index for index, path in enumerate(self.known) if self.has_layer(index, path)}

    def heads_of(self, layer: str, total: int) -> list[int] | None:
        """The chosen query heads of a layer; None for all. Raises ValueError for an absent one."""
        if self.heads is None:
            return None
        return list(dict.fromkeys(_head(head, layer, total) for head in self.heads))

    def maps_of(self, step: int, index: int, layer: str, total_heads: int) -> dict[MapKey, int]:
        """The maps to keep of this layer, by key as given, with their heads."""
        return {
            key: _head(key[2], layer, total_heads)
            for key in self.maps
            if key[0] == step and self.is_layer(index, layer, key[1])
        }

    def check_layers(self, paths: Sequence[str]) -> None:
        """Note the layers so far. Raises ValueError if a chosen one is not among them."""
        total = len(paths)
        if self.total is None:
            self.total = total
        for wanted in [*(self.layers or ()), *(key[1] for key in self.maps)]:
            if isinstance(wanted, str):
                if not any(_is_named(path, wanted) for path in paths):
                    hint = near(wanted, paths) or f"the first is {paths[0]!r}"
                    raise ValueError(
                        f"no attention layer is called {wanted!r} among the {total} that ran: "
                        f"{hint}"
                    )
            elif wanted < 0 and self.total != total:
                raise ValueError(
                    f"layer {wanted} counts from the last of {self.total} layers, but {total} "
                    "attended (in a hybrid model others do something else): count from the first, "
                    f"0 … {total - 1}, or give module paths"
                )
            elif not -total <= wanted < total:
                raise ValueError(
                    f"layers are numbered 0 … {total - 1} in the order they run (or from the end, "
                    f"−1 … −{total}), got {wanted}"
                )
        self.known = list(paths)


def _map_key(given: Any) -> MapKey:
    numbers = [as_int(number) for number in as_iterable(given)]
    if len(numbers) != 3 or None in numbers:
        raise ValueError(
            f"maps are triples of numbers (step, layer, head), got {given!r}: write maps=[(3, 5, "
            "2)]"
        )
    return tuple(numbers)  # type: ignore[return-value]


def _head(head: int, layer: str, total: int) -> int:
    if not -total <= head < total:
        raise ValueError(
            f"{layer or 'the model'} has the query heads 0 … {total - 1} (or −1 … −{total}), got "
            f"{head}"
        )
    return int(head) % total


def _is_named(path: str, name: str) -> bool:
    """Whether a name is a layer's path, or whole parts of it."""
    return f".{name}." in f".{path}."
