"""Transformers' attention functions under names of ours: the tap's way to the calls of a model that
asks for them.

A function of ours runs the one that was asked for and shows the call to the taps of the module that
made it. Inside torch's SDPA the tap listens itself; of other functions, those that
`sinklab.core.registry.attention_functions` has, it is shown the inputs and the output.

There are two roads into the tap. A transformers model that asks for its attention function gets one
of ours, which calls `Tap.run_attention`; every other model runs under the tap as a torch function
mode, which meets `scaled_dot_product_attention` in `__torch_function__`. If the function that a
transformers model asked for is SDPA, `run_attention` turns the mode on around it. Both roads end
alike: `_edited` makes the `Call` and asks each listener for its edit, the call is run, and
`_observe` gives listeners the call and its output. Compiled code is refused: it hides its calls.
"""

# B batch, H query heads, Q queries, S keys, D head dim
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from sinklab.core.compat import (
    attention_function,
    attention_of,
    config_of,
    has_own_forward,
    lacks_sdpa,
    register_route,
    route_attention,
    stated,
    with_sdpa_replaced,
)
from sinklab.core.registry import attention_functions

# by the id of a module: the taps that are shown its calls, each with its path there
_taps: dict[int, tuple[tuple[Any, str], ...]] = {}
# by the id of a config: how many watch it
_routed: Counter[int] = Counter()
# ways of a model besides asking for its attention function: calling one itself, having its own,
# asking which it is
_OTHERWISE = re.compile(
    r"scaled_dot_product_attention|AttentionInterface\(|_attn_implementation\s*(==|!=|in\b|not\b)"
)
# packages whose modules attend in their own source, if they do not ask
_KNOWN = ("transformers", "sinklab", "peft")


def interface_configs(modules: Collection[nn.Module]) -> list[Any]:
    """The transformers configs of a model that attends only by asking for its attention function;
    of another, none.
    """
    changed = any(map(has_own_forward, modules))
    kinds: set[tuple[Any, bool]] = {(type(module), bool(module._modules)) for module in modules}
    if changed or not all(_uses_interface_alone(kind, has_parts) for kind, has_parts in kinds):
        return []
    configs = {id(config): config for config in map(config_of, modules) if config is not None}
    return [config for config in configs.values() if attention_of(config) is not None]


def check_backends(model: nn.Module, configs: list[Any]) -> None:
    """Raises ValueError for a model with these configs that attends by a function that is not read
    (FlexAttention, FlashAttention, a kernel from the Hub).
    """
    for base in map(attention_of, configs):
        if base != "sdpa" and base not in attention_functions:
            read = " and ".join(["sdpa", *attention_functions])
            raise ValueError(
                f"{type(model).__name__} attends by {base!r}, and traces and edits read {read}: "
                f"{_remedy(model, 'and use that')}"
            )


def is_of_torch(kind: type[nn.Module], has_parts: object) -> bool:
    """Whether modules of this class are layers of torch that do not attend: linear, norm,
    activation.
    """
    return kind.__module__.startswith("torch.nn.modules.") and not has_parts


@cache
def _uses_interface_alone(kind: Any, has_parts: bool) -> bool:
    """Whether modules of this class do not attend but by asking for their attention function."""
    if is_of_torch(kind, has_parts) or kind.__module__ == "torch.nn.modules.container":
        return True
    if kind.__module__.split(".")[0] not in _KNOWN:
        return False
    try:
        return not _OTHERWISE.search(inspect.getsource(sys.modules[kind.__module__]))
    except (OSError, TypeError):
        return False


@contextmanager
def routed(modules: Mapping[str, nn.Module], configs: list[Any], tap: Any) -> Iterator[None]:
    """Show the attention calls of the modules with these configs, by path, to a tap."""
    for base in {attention_of(config) for config in configs}:
        register_route(base, partial(_route, base, attention_function(base)))
    route_attention(configs, True)
    _routed.update(map(id, configs))
    # an attention has projections
    own = {path: module for path, module in modules.items() if module._modules}
    for path, module in own.items():
        _taps[id(module)] = (*_taps.get(id(module), ()), (tap, path))
    try:
        yield
    finally:
        _routed.subtract(map(id, configs))
        route_attention([config for config in configs if not _routed[id(config)]], False)
        for module in own.values():
            others = tuple(one for one in _taps.pop(id(module)) if one[0] is not tap)
            if others:
                _taps[id(module)] = others


def _route(
    base: str, function: Any, module: nn.Module, q: Any, k: Any, v: Any, mask: Any, **options: Any
) -> Any:
    """An attention function of transformers as a watched model calls it."""
    function = function or attention_functions[base].function_of(type(module))
    if torch.compiler.is_compiling():
        raise ValueError(compiled_message(type(module).__name__))
    for tap, path in _taps.get(id(module), ()):
        function = partial(tap.run_attention, path, base, function)
    return function(module, q, k, v, mask, **options)


def compiled_message(what: str) -> str:
    """Message that refuses a module which is compiled."""
    return (
        f"{what} is compiled, which hides its attention calls: use the module that was compiled "
        "(compiled._orig_mod), or leave the call of compile out"
    )


def with_attention(
    function: Any, attend: Callable[..., Tensor], path: str, module: nn.Module
) -> Callable[..., Any]:
    """The function of `nn.MultiheadAttention` with `attend` in place of its call of SDPA.

    Raises ValueError if torch would not run that function, but for the mode that listens.
    """
    if torch.backends.mha.get_fastpath_enabled() and not (
        module.training or torch.is_grad_enabled()
    ):
        raise ValueError(
            f"{path or 'the model'}: torch has a fast path for nn.MultiheadAttention, which rounds "
            "otherwise and which nobody can listen to: call "
            "torch.backends.mha.set_fastpath_enabled(False), here and for runs to compare"
        )
    return with_sdpa_replaced(function, attend)


def _remedy(model: nn.Module, behind: str) -> str:
    """Advice to set SDPA with its consequence; or the news that this changes nothing."""
    lacking = lacks_sdpa(model)
    if lacking:
        return (
            f"{lacking} has an attention of its own in transformers, and no SDPA that could be set "
            "in its place; there is no recording of this model"
        )
    return f'call model.set_attn_implementation("sdpa"), {behind}'


def no_call_message(tap: Any, forwards: int) -> str:
    """Message that tells why a tap heard nothing in so many forwards, and the setting to change."""
    if forwards == 0:
        return (
            "nothing to read: the model was not run inside the block; call it there (or the "
            "module that was passed)"
        )
    if tap.left_alone:
        return (
            f"the model ran {forwards} times and attended to another sequence alone "
            f"({', '.join(tap.left_alone)}): traces and edits read self-attention; take a model "
            "that has some"
        )
    kind = attention_of(stated(tap.model, "config"))
    known = ""
    if kind:
        known = f" (attn_implementation is {kind!r})"
    behind = (
        'or load it with transformers\' own from_pretrained(..., attn_implementation="sdpa"); '
        "nn.MultiheadAttention calls it with need_weights=False"
    )
    return (
        f"the model ran {forwards} times and never called "
        f"torch.nn.functional.scaled_dot_product_attention{known}: {_remedy(tap.model, behind)}"
    )
