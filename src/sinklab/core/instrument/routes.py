"""How a tap finds the attention calls of a model: two routes, and hooks that tell who runs.

A transformers model that asks for its attention function gets one of ours (backends.py), which
calls `ModelTap.run_attention`. Every other model runs under the tap as a torch function mode, which
meets `scaled_dot_product_attention` in `__torch_function__`. Both end alike: `Tap.edited` makes the
`Call` and asks for its edits, the call is run, and `Tap.observed` shows it. Hooks are on this model
alone, and not global, so that another model's forward is none of its own.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sinklab.core.attention.context import is_observed, watching
from sinklab.core.compat import (
    compiled_module,
    in_backward,
    is_compiled,
    is_divided,
    is_running,
    stated,
)
from sinklab.core.instrument.arguments import NAMES
from sinklab.core.instrument.backends import (
    check_backends,
    compiled_message,
    interface_configs,
    is_of_torch,
    routed,
    with_attention,
)
from sinklab.core.instrument.call import Call
from sinklab.core.instrument.origin import KeyOrigin, says_more
from sinklab.core.instrument.tap import Listener, Tap, upwards
from sinklab.core.registry import attention_functions

_SDPA = F.scaled_dot_product_attention
_CAUGHT = (_SDPA, F.multi_head_attention_forward)


class ModelTap(Tap, TorchFunctionMode):
    """The tap with its hooks on the model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        for path, part in self._modules.items():
            if is_compiled(part):
                raise ValueError(compiled_message(path or type(compiled_module(part)).__name__))
        # By path: origin of the keys that the module there reads, if its arguments tell.
        self._origins: dict[str, KeyOrigin] = {}
        self._catches_sdpa = False
        self._hooked: set[str] = set()
        configs = interface_configs(self._modules.values())
        self.uses_interface = bool(configs)
        """Whether calls are met in transformers' attention functions, not by a mode over all."""
        check_backends(model, configs)
        self.cleanup = ExitStack()
        """Closed when nobody listens any more: the model is itself again."""
        self.cleanup.callback(self.catch_sdpa, False)
        self.cleanup.enter_context(watching(parts=self._modules.values()))
        if configs:
            self.cleanup.enter_context(routed(self._modules, self))
            self._hook(
                {"", *(holder for layer in self._layers for holder in upwards(layer))}
                - self._layers
            )
            for path, part in self._modules.items():
                if part._modules and says_more(type(part)):
                    handle = part.register_forward_pre_hook(
                        TapHook(self._note_origin, path), with_kwargs=True
                    )
                    self.cleanup.callback(handle.remove)
        else:
            # a layer of torch without parts (linear, norm) never attends: a hook is only time
            leaves = {path for path, module in self._modules.items() if is_of_torch(module)}
            self._hook({*self._modules} - leaves | {""})

    def _hook(self, paths: set[str]) -> None:
        for path in paths - self._hooked:
            module = self._modules[path]
            before = module.register_forward_pre_hook(TapHook(self._before, path), with_kwargs=True)
            after = module.register_forward_hook(TapHook(self._after, path), always_call=True)
            for handle in (before, after):
                self.cleanup.callback(handle.remove)
        self._hooked |= paths

    def add(self, listener: Listener) -> None:
        """Add a listener; the decoder layers that it needs are hooked."""
        super().add(listener)
        if listener.of_states:
            self._hook(self._layers)

    def run_attention(
        self, path: str, base: str, function: Any, module: nn.Module, *given: Any, **options: Any
    ) -> Any:
        """Run the attention function that the module at this path called, and read its calls."""
        self.check_thread()
        self._stack.append(path)
        try:
            if base == "sdpa" or not is_observed(self.model):
                with self:
                    return function(module, *given, **options)
            kind = attention_functions[base]
            call, edited = self._edit_call(path, kind.read(module, *given, **options))
            made: tuple[Any, ...] = (module, *given)
            if edited is not call:
                made, options = kind.write(call, edited, *made, **options)
            out, weights = function(*made, **options)
            self.observed(edited, out.transpose(1, 2))
            return out, weights
        finally:
            self._stack.pop()

    def catch_sdpa(self, on: bool) -> None:
        """Be torch's active function mode, or not. Every hook before a module turns it on, for
        layers that a backward pass replays.
        """
        if on and not (self._catches_sdpa or self.uses_interface):
            self.__enter__()
            self._catches_sdpa = True
        elif self._catches_sdpa and not on:
            self.__exit__(None, None, None)
            self._catches_sdpa = False

    def _note_origin(self, path: str, args: tuple, kwargs: dict[str, Any]) -> None:
        """Keep the origin of the keys that a module reads, from its arguments."""
        module = self._modules[path]
        if says_more(type(module)):
            self._origins[path] = KeyOrigin.of(module, args, kwargs)

    def _before(self, path: str, args: tuple, kwargs: dict[str, Any]) -> None:
        self.check_thread()
        self._note_origin(path, args, kwargs)
        if path == "":
            if self._stack and is_running(self._modules[""]):
                raise ValueError(
                    f"a forward of {type(self.model).__name__} runs inside another of its "
                    "forwards: whose layers are which is not told there; trace or edit a part that "
                    "runs once (model.encoder), or take the inner run out"
                )
            self.flush()
            self._stack.clear()
        if not self._stack:
            if torch.jit.is_tracing():
                raise ValueError(
                    "torch.jit.trace would keep what a trace or edit does in the forward: call it "
                    "outside of their block"
                )
            # `input_ids`, or the first argument if it looks like ids
            ids: Any = kwargs.get("input_ids", next(iter(args), None))
            self.ids_BS = None
            if (
                isinstance(ids, Tensor)
                and ids.dim() == 2
                # neither fractions nor flags are ids
                and not (ids.is_floating_point() or ids.dtype == torch.bool)
            ):
                self.ids_BS = ids
        self._stack.append(path)
        self.catch_sdpa(True)

    def _after(self, path: str, args: tuple, output: object) -> Any:
        # torch calls this even if the hook before the module refused the thread
        if self._is_other_thread():
            return None
        calls = self._calls_in.pop(path, None)
        edited = None
        if calls and output is not None:
            edited = self._pass_states(calls, output)
        while self._stack and self._stack.pop() != path:
            pass
        if output is not None and not in_backward():
            self._ran.add(path)
        if not self._stack:
            self.catch_sdpa(False)
            # None: the module raised
            if output is None:
                self.flush(complete=False)
        if path == "":
            self.forwards += 1
            if output is not None:
                self._check_calls()
            self.flush(complete=True)
            # which hold caches
            self._origins.clear()
        return edited

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _CAUGHT and self._stack and is_observed(self.model):
            if func is _SDPA:
                func = self._attend
            else:
                path = self._stack[-1]
                func = with_attention(func, self._attend, path, self._modules[path])
        return func(*args, **(kwargs or {}))

    def _attend(self, *args: Any, **kwargs: Any) -> Tensor:
        call, edited = self._edit_call(
            self._stack[-1], dict(zip(NAMES, args, strict=False)) | kwargs
        )
        if edited is call:
            out = _SDPA(*args, **kwargs)
        else:
            out = run_call(edited, _SDPA)
        self.observed(edited, out)
        return out

    def _edit_call(self, path: str, given: dict[str, Any]) -> tuple[Call, Call]:
        if path in self._origins:
            self._origins[path].check(path, given["key"].shape[-2])
            if self.prefix is None and stated(self._origins[path].cache, "layers") is not None:
                # a cache of transformers holds the text, whose beginning may have run before
                self.prefix = 0
        return self.edited(path, given)


def run_call(call: Call, function: Callable[..., Tensor]) -> Tensor:
    """Make the call, and give the output the layout that the model expects."""
    out_BHQD = function(
        call.q_BHQD,
        call.k_BKSD,
        call.v_BKSD,
        attn_mask=call.mask,
        dropout_p=call.dropout_p,
        is_causal=call.is_causal,
        scale=call.scale,
        enable_gqa=call.q_BHQD.shape[1] != call.k_BKSD.shape[1],
    )
    return out_BHQD.reshape(*call.output_shape, out_BHQD.shape[-1])


@dataclass(eq=False)
class TapHook:
    """A tap's hook on one module. In a copy or pickle of the module it does nothing."""

    act: Callable[..., Any] | None
    path: str

    def __call__(self, module: nn.Module, *given: Any) -> Any:
        if self.act is None:
            return None
        return self.act(self.path, *given)

    def __getstate__(self) -> dict[str, Any]:
        return {"act": None, "path": self.path}


# Reentrant: a listener may open a trace when a forward ends.
_LOCK = threading.RLock()
TAPS: dict[int, ModelTap] = {}
"""By the id of a model: its tap, while somebody listens."""


@contextmanager
def tapped(model: nn.Module, listener: Listener) -> Iterator[ModelTap]:
    """Hang a listener on the model's tap for the length of the block; the last to leave removes
    every hook. Raises ValueError for a model that cannot be tapped.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a torch.nn.Module, got {type(model).__name__}: pass the model")
    if is_divided(model):
        raise ValueError(
            "the heads of this model are divided over processes (tensor parallelism), and each "
            'sees its own alone; load it with device_map="auto"'
        )
    with _LOCK:
        tap = TAPS.get(id(model)) or TAPS.setdefault(id(model), ModelTap(model))
    tap.check_thread()
    try:
        tap.flush()
        tap.add(listener)
        yield tap
    finally:
        try:
            tap.flush()
        finally:
            with _LOCK:
                tap.listeners = [one for one in tap.listeners if one is not listener]
                if not tap.listeners:
                    del TAPS[id(model)]
                    tap.cleanup.close()
