"""Transformers' attention functions under names of ours: the tap's way to the calls of a model that asks for them."""

from __future__ import annotations

import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from functools import cache, partial
from typing import Any

from torch import nn

from sinklab.compat import attention_function, attention_of, register_watched, watch_attention

Inside = Callable[..., Any]
"""(path, attention function, *arguments) -> what it gives: runs the function that the module at this path called."""

# by the id of a module: who is shown its calls, with its path there
_shown: dict[int, tuple[tuple[Inside, str], ...]] = {}
# by the id of a config: how many watch it
_watched: Counter[int] = Counter()
# what a model does besides asking for its attention function: calling one itself, or asking which it is
_OTHERWISE = re.compile(r"scaled_dot_product_attention|_attn_implementation\s*(==|!=|in\b|not\b)")


def met(modules: Mapping[str, nn.Module], inside: Inside) -> Callable[[], None] | None:
    """Show the attention calls of these modules, by path, until what is returned is called.

    None for a model that attends otherwise than by asking transformers for its attention function.
    """
    configs = _configs(modules.values())
    if not configs:
        return None
    for base in {attention_of(config) for config in configs} - {None}:
        register_watched(base, partial(_show, attention_function(base)))
    watch_attention(configs, True)
    _watched.update(map(id, configs))
    asking = {path: module for path, module in modules.items() if "config" in vars(module)}
    for path, module in asking.items():
        _shown[id(module)] = (*_shown.get(id(module), ()), (inside, path))

    def leave() -> None:
        _watched.subtract(map(id, configs))
        watch_attention([config for config in configs if not _watched[id(config)]], False)
        for module in asking.values():
            if not (others := tuple(one for one in _shown.pop(id(module)) if one[0] is not inside)):
                continue
            _shown[id(module)] = others

    return leave


def _show(function: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """An attention function of transformers as a watched model calls it."""
    for inside, path in _shown.get(id(module), ()):
        function = partial(inside, path, function)
    return function(module, *args, **kwargs)


def _configs(modules: Collection[nn.Module]) -> list[Any]:
    """The transformers configs of a model whose attention calls all go by their attention function; else none."""
    own = [vars(module) for module in modules]
    configs = list({id(one["config"]): one["config"] for one in own if "config" in one}.values())
    bases = {attention_of(config) for config in configs} - {None}
    kinds = {(type(module), bool(module._modules)) for module in modules}
    if bases != {"sdpa"} or any("forward" in one for one in own) or not all(_asks(*kind) for kind in kinds):
        return []
    return configs


@cache
def _asks(kind: type[nn.Module], has_parts: bool) -> bool:
    """Whether modules of this class do not attend but by asking for their attention function."""
    if kind.__module__.startswith("torch.nn.modules."):
        return not has_parts or kind.__module__ == "torch.nn.modules.container"
    try:
        return not _OTHERWISE.search(inspect.getsource(sys.modules[kind.__module__]))
    except (OSError, TypeError):
        return False


def no_call_message(model: nn.Module, forwards: int) -> str:
    """Why nothing was seen, and what to set."""
    if forwards == 0:
        return "nothing to read: the model was not run inside the block; call it there (or the module that was passed)"
    kind = attention_of(getattr(model, "config", None))
    known = f" (attn_implementation is {kind!r})" if kind else ""
    return (
        f"the model ran {forwards} times and never called torch.nn.functional.scaled_dot_product_attention{known}: "
        'call model.set_attn_implementation("sdpa"), or load it with transformers\' own '
        'from_pretrained(..., attn_implementation="sdpa")'
    )
