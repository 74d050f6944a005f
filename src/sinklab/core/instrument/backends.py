"""The two routes by which a tap meets the attention calls of a model, and the models that take
neither.

A model of transformers asks for its attention function at every call. While it is watched,
`Tap.run_attention` runs the function asked for. Every other model runs under the tap as a torch
function mode, which meets `scaled_dot_product_attention` among all operations, and takes time.
"""

# H query heads, Q queries, S keys, D head dim
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sinklab.core.compat import (
    attention_of,
    declares_interface,
    lacks_sdpa,
    replace_sdpa,
    stated,
    wrap_attention,
)
from sinklab.core.registry import attention_functions

# by the id of a module: the taps that are shown its calls, each with its path there
_taps: dict[int, tuple[tuple[Any, str], ...]] = {}
_KNOWN = ("transformers", "sinklab", "peft")
"""Packages whose modules attend as their model declares."""


def interface_configs(modules: Collection[nn.Module]) -> list[Any]:
    """The transformers configs of a model that always asks for its attention function, else
    none. A function other than SDPA is met in no other way.
    """
    own = [vars(module) for module in modules]
    if any("forward" in one for one in own) or not all(map(_is_known, modules)):
        return []
    found = {id(config): config for config in (one.get("config") for one in own)}
    configs = [config for config in found.values() if attention_of(config) is not None]
    by_sdpa = any(attention_of(config) == "sdpa" for config in configs)
    if by_sdpa and not declares_interface(modules):
        return []
    return configs


def check_backends(model: nn.Module, configs: list[Any]) -> None:
    """Raises ValueError for a model that attends by a function that is not read, such as
    FlexAttention.
    """
    for base in map(attention_of, configs):
        if base != "sdpa" and base not in attention_functions:
            read = " and ".join(["sdpa", *attention_functions])
            raise ValueError(
                f"{type(model).__name__} attends by {base!r}, and traces and edits read {read}: "
                f"{_remedy(model)}"
            )


def is_of_torch(module: nn.Module) -> bool:
    """Whether this is a layer of torch that does not attend: linear, norm, activation."""
    return type(module).__module__.startswith("torch.nn.modules.") and not module._modules


def _is_known(module: nn.Module) -> bool:
    home = type(module).__module__
    is_list = home == "torch.nn.modules.container"
    return is_list or is_of_torch(module) or home.split(".")[0] in _KNOWN


@contextmanager
def routed(modules: Mapping[str, nn.Module], tap: Any) -> Iterator[None]:
    """Show a tap the calls of the attention functions that these modules, by path, ask for."""
    if not _taps:
        wrap_attention(_asked)
    # an attention has projections
    own = {path: module for path, module in modules.items() if module._modules}
    for path, module in own.items():
        _taps[id(module)] = (*_taps.get(id(module), ()), (tap, path))
    try:
        yield
    finally:
        for module in own.values():
            others = tuple(one for one in _taps.pop(id(module)) if one[0] is not tap)
            if others:
                _taps[id(module)] = others
        if not _taps:
            wrap_attention(None)


def _asked(base: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The attention function that was asked for, heard by the taps of its module."""
    if base != "sdpa" and base not in attention_functions:
        return function
    return partial(_heard, base, function)


def _heard(base: str, function: Any, module: nn.Module, *given: Any, **options: Any) -> Any:
    taps = _taps.get(id(module), ())
    if taps and torch.compiler.is_compiling():
        raise ValueError(compiled_message(type(module).__name__))
    for tap, path in taps:
        function = partial(tap.run_attention, path, base, function)
    return function(module, *given, **options)


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

    Raises ValueError if torch would run its fast path when nobody listens.
    """
    if torch.backends.mha.get_fastpath_enabled() and not (
        module.training or torch.is_grad_enabled()
    ):
        raise ValueError(
            f"{path or 'the model'}: torch has a fast path for nn.MultiheadAttention, which rounds "
            "otherwise and which nobody can listen to: call "
            "torch.backends.mha.set_fastpath_enabled(False), here and for runs to compare"
        )
    return replace_sdpa(function, attend)


def _remedy(model: nn.Module) -> str:
    """Advice to set SDPA, if there is one."""
    lacking = lacks_sdpa(model)
    if lacking:
        return (
            f"{lacking} has an attention of its own in transformers, and no SDPA that could be set "
            "in its place; there is no recording of this model"
        )
    return 'call model.set_attn_implementation("sdpa")'


def no_call_message(tap: Any, forwards: int) -> str:
    """Why a tap heard nothing in so many forwards, and the setting to change."""
    if forwards == 0:
        return (
            "nothing to read: the model was not run inside the block; call it there (or the "
            "module that was passed)"
        )
    kind = attention_of(stated(tap.model, "config"))
    known = ""
    if kind:
        known = f" (attn_implementation is {kind!r})"
    return (
        f"the model ran {forwards} times and never called "
        f"torch.nn.functional.scaled_dot_product_attention{known}: {_remedy(tap.model)} "
        "(nn.MultiheadAttention calls it with need_weights=False)"
    )
