"""Outputs of decoder layers in a clean pass: a forward over the same batch whose edits begin
further up takes them in place of the layers below.
"""

from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from typing import Any

from torch import nn

from sinklab.core.attention import is_observed


class CleanLayers:
    """Decoder layers of a model (items of an `nn.ModuleList`) and what they gave in a clean pass.

    A layer is left out later only if it ran once and was handed no dictionary, in which some models
    share keys and values between layers: its output is then all that others know of it, as scores
    are taken without a cache.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.modules = dict(model.named_modules())
        self.outputs: dict[str, list[Any]] = {}
        """Outputs by the path of the layer: copies, as a model may change its own in place."""

    @contextmanager
    def kept(self, wanted: bool) -> Iterator[None]:
        """Keep the outputs of the layers in the forward inside, the clean pass, if they are
        wanted.
        """
        with ExitStack() as leave:
            for path, module in self.modules.items():
                if wanted and isinstance(self.modules[path.rpartition(".")[0]], nn.ModuleList):
                    hook = module.register_forward_hook(partial(self._keep, path), with_kwargs=True)
                    leave.callback(hook.remove)
            yield

    def _keep(
        self, path: str, module: nn.Module, args: tuple, named: dict[str, Any], output: Any
    ) -> None:
        shares = any(isinstance(one, MutableMapping) for one in (*args, *named.values()))
        if is_observed(self.model) and not shares:
            self.outputs.setdefault(path, []).append(deepcopy(output))

    @contextmanager
    def without(self, calls: Sequence[str], first: int) -> Iterator[None]:
        """Leave out, in the forward inside, the layers whose attention calls all come before the
        first edited one, by its number in these.
        """
        needed = {path for call in calls[first:] for path in _holders(call)}
        with ExitStack() as leave:
            for path in {path for call in calls[:first] for path in _holders(call)} - needed:
                outputs = self.outputs.get(path, [])
                if len(outputs) == 1:
                    module = self.modules[path]
                    leave.callback(_restore, module, vars(module).get("forward"))
                    module.forward = partial(self._given, outputs[0], module.forward)
            yield

    def _given(self, output: Any, forward: Any, *args: Any, **options: Any) -> Any:
        """What a layer gave in the clean pass; added sinks run by themselves, unobserved."""
        if is_observed(self.model):
            return deepcopy(output)
        return forward(*args, **options)


def _holders(call: str) -> Iterator[str]:
    """Paths of the modules that hold the one that makes an attention call."""
    path = call.partition("#")[0].rpartition(".")[0]
    while path:
        yield path
        path = path.rpartition(".")[0]


def _restore(module: Any, forward: Any) -> None:
    del module.forward
    if forward is not None:
        module.forward = forward
