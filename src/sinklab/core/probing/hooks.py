"""Hooks of a tap on the modules of its model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(eq=False)
class TapHook:
    """A tap's hook on one module. In a copy or a pickle of the module it does nothing: that is not
    the tapped one.
    """

    act: Callable[..., Any] | None
    path: str

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        if self.act is None:
            return None
        return self.act(self.path, *given)

    def __getstate__(self) -> dict[str, Any]:
        return {"act": None, "path": self.path}


def decoder_layers(modules: dict[str, nn.Module]) -> set[str]:
    """Paths of the decoder layers: the items of every `nn.ModuleList`."""
    lists = {path for path, module in modules.items() if isinstance(module, nn.ModuleList)}
    return {path for path in modules if path.rpartition(".")[0] in lists}


def upwards(path: str) -> Iterator[str]:
    """The path of a module, and those of the modules that hold it, but for the model's own."""
    while path:
        yield path
        path = path.rpartition(".")[0]
