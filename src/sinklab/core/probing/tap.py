"""The tap: sees every attention call of one model, lets interventions rewrite it, then shows it to
observers. The head of backends.py tells the two roads into it.
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

from sinklab.core.attention.context import RunningCanvas, is_observed, watching
from sinklab.core.compat import (
    compiled_module,
    in_backward,
    is_compiled,
    is_divided,
    is_running,
)
from sinklab.core.probing.backends import (
    check_backends,
    compiled_message,
    interface_configs,
    is_of_torch,
    routed,
    with_attention,
)
from sinklab.core.probing.call import NAMES, Call, Listener
from sinklab.core.probing.origin import KeyOrigin, says_more
from sinklab.core.registry import attention_functions, fast_attentions, fast_path

_SDPA = F.scaled_dot_product_attention
_CAUGHT = (_SDPA, F.multi_head_attention_forward)


class Tap(TorchFunctionMode):
    """The tap of a model, one for all its traces and interventions: edits first, then observers,
    however they nest.

    Hooks on this model, and not ModuleTracker's, which are global: those do not say which model's
    forward is running.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.thread = threading.current_thread()
        """The thread that runs the model: hooks hang on the model for all of them, a torch function
        mode is set in one.
        """
        self.listeners: list[Listener] = []
        self.forwards = 0
        self.suspended = 0
        self.ids_BS: Tensor | None = None
        """Token ids that the running forward was given, if they are among its arguments."""
        self._modules = dict(model.named_modules())
        for path, part in self._modules.items():
            if is_compiled(part):
                raise ValueError(compiled_message(path or type(compiled_module(part)).__name__))
        self._stack: list[str] = []
        self.left_alone: dict[str, None] = {}
        """Paths of the modules that attended to another sequence: their calls are not listened
        to."""
        # By path: origin of the keys that the module there reads, if its arguments tell.
        self._origins: dict[str, KeyOrigin] = {}
        self._visible: dict[tuple, Any] = {}
        # Attention calls made in the decoder layers that run now, by the layer's path.
        self._calls_in: dict[str, list[str]] = {}
        # Attention calls of the forward in progress, by module path; None between forwards.
        self._calls: dict[str, int] | None = None
        self._rooted = self._attended = False
        self._catches_sdpa = False
        # Paths that came to their end in it; masks in doubt, with the first layer given one.
        self._ran: set[str] = set()
        self._doubts: dict[int, tuple[str, Tensor]] = {}
        lists = {
            path for path, module in self._modules.items() if isinstance(module, nn.ModuleList)
        }
        self._layers = {path for path in self._modules if path.rpartition(".")[0] in lists}
        """Paths of the decoder layers: the items of every `nn.ModuleList`."""
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
            self.cleanup.enter_context(routed(self._modules, configs, self))
            self._hook(
                {"", *(holder for layer in self._layers for holder in _upwards(layer))}
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
            leaves = {
                path
                for path, module in self._modules.items()
                if is_of_torch(type(module), module._modules)
            }
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
        listener.tap = self
        self.listeners.append(listener)
        if listener.of_states:
            self._hook(self._layers)

    def _is_other_thread(self) -> bool:
        """A backward pass on a GPU has a thread of its own, and its caller waits: it is none."""
        return threading.get_ident() != self.thread.ident and not in_backward()

    def check_thread(self) -> None:
        """Raises ValueError in another thread than the one that watches the model."""
        if self._is_other_thread():
            raise ValueError(
                f"thread {self.thread.name!r} has a trace or intervention open on this "
                f"{type(self.model).__name__} and alone runs it meanwhile, not "
                f"{threading.current_thread().name!r}: open it where the model runs, or give each "
                "thread a copy of its own, made before (copy.deepcopy(model))"
            )

    def run_attention(
        self, path: str, base: str, function: Any, module: nn.Module, *given: Any, **options: Any
    ) -> Any:
        """Run the attention function that the module at this path called, and read its calls or its
        arguments.
        """
        self.check_thread()
        self._stack.append(path)
        try:
            if base == "sdpa" or not self._is_heard(path):
                with self:
                    return function(module, *given, **options)
            kind = attention_functions[base]
            call, edited = self._edited(path, kind.read(module, *given, **options))
            made: tuple[Any, ...] = (module, *given)
            if edited is not call:
                made, options = kind.write(call, edited, *made, **options)
            out, weights = function(*made, **options)
            self._observe(edited, out.transpose(1, 2))
            return out, weights
        finally:
            self._stack.pop()

    def ids_of(self, running: RunningCanvas | None) -> Tensor | None:
        """Token ids of the canvas that a denoiser announced, else those that the running forward
        was given; None if neither is known.
        """
        if running is None:
            return self.ids_BS
        return running.ids_BS

    def count_alike(self, layer: str) -> int:
        """Modules of the class of the one that runs now as `layer`: as many attention layers may be
        expected.
        """
        kind = type(self._modules[layer.split("#")[0]])
        return sum(type(module) is kind for module in self._modules.values())

    def catch_sdpa(self, on: bool) -> None:
        """Be torch's active function mode while the model runs, or not: on in every hook before a
        module, so that layers replayed by a backward pass are met as well.
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
            # A root forward starts afresh, also after one that was interrupted.
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
        # torch calls this also where the hook before the module raised: a refused thread leaves no
        # trace here.
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
            # torch calls the hook with None when the module raised.
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

    def _pass_states(self, calls: list[str], output: Any) -> Any:
        """Show the listeners the output of a decoder layer, the first of a tuple; None if it is
        unchanged.
        """
        states_BQD = output
        if isinstance(output, tuple):
            states_BQD = output[0]
        if not isinstance(states_BQD, Tensor) or states_BQD.dim() != 3:
            return self._refuse_states(
                f"that of {calls[0]} gives no tensor (batch, position, channel)"
            )
        edited_BQD = states_BQD
        for listener in self.listeners:
            edited_BQD = listener.edit_states(calls, edited_BQD)
        if not in_backward():
            for listener in self.listeners:
                listener.observe_states(calls, edited_BQD)
        if edited_BQD is states_BQD:
            return None
        if isinstance(output, tuple):
            return (edited_BQD, *output[1:])
        return edited_BQD

    def _refuse_states(self, fact: str) -> None:
        for needed_by in filter(None, (listener.of_states for listener in self.listeners)):
            raise ValueError(
                f"{needed_by} needs the hidden states that decoder layers give, the items of an "
                f"nn.ModuleList, but {fact}: leave it out for this model"
            )

    def begin(self) -> dict[str, int]:
        """Open a forward, which `flush` ends. Returns its attention calls, none as yet."""
        self._calls = {}
        for listener in self.listeners:
            listener.begin()
        return self._calls

    def flush(self, *, complete: bool | None = None) -> None:
        """End a forward that is still open: layers called one by one, without the model's own
        forward, have no end.

        If `complete` is not given, it came to its end unless a module still runs.
        """
        if self._calls is None:
            return
        if complete is None:
            complete = not self._stack
        called = set(self._calls)
        ran = self._ran
        doubts = list(self._doubts.values())
        self._calls = None
        self._ran = set()
        self._doubts = {}
        self._visible.clear()
        self._calls_in.clear()
        try:
            if complete:
                self._check_doubts(doubts)
                self._check_siblings(called, ran)
        except ValueError:
            complete = False
            raise
        finally:
            for listener in self.listeners:
                if complete:
                    listener.finish()
                else:
                    listener.discard()

    def _check_doubts(self, doubts: list[tuple[str, Tensor]]) -> None:
        """Raise if a mask can be read in two ways: the one thing of a forward that is read back
        from a device.
        """
        if not doubts:
            return
        device = doubts[0][1].device
        flags = torch.stack([flag.to(device) for _, flag in doubts]).tolist()
        if any(flags):
            layer, _ = doubts[flags.index(True)]
            raise ValueError(
                f"forward {self.forwards}, {layer or 'the model'}: the additive mask could block "
                "keys or bias them: it falls suddenly to -100 or less; give -inf, or a boolean "
                "mask, for what is hidden"
            )

    def _check_calls(self) -> None:
        """Raise if a forward attended unseen: those behind it would be taken for others."""
        if self._attended and self._calls is None and is_observed(self.model):
            raise ValueError(
                f"forward {self.forwards} made no attention call that could be seen, as others "
                "did: leave the model (and its attn_implementation) as it is, or open another block"
            )

    def _check_siblings(self, called: set[str], ran: set[str]) -> None:
        """Raise if a layer ran and attended unseen: the numbers of those behind it would be off by
        one.
        """
        kinds = {type(self._modules[path]) for path in called}
        for path in sorted(ran - called - self.left_alone.keys()):
            if type(self._modules[path]) in kinds and not any(
                other.startswith(f"{path}.") for other in called
            ):
                raise ValueError(
                    f"{path} ran and never called torch.nn.functional.scaled_dot_product_attention,"
                    f" as other layers of its class {type(self._modules[path]).__name__} did: "
                    "layers would be numbered without it; give it the same attention, e.g. "
                    'model.set_attn_implementation("sdpa")'
                )

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _CAUGHT and self._stack and self._is_heard(self._stack[-1]):
            if func is _SDPA:
                func = self._attend
            else:
                path = self._stack[-1]
                func = with_attention(func, self._attend, path, self._modules[path])
        return func(*args, **(kwargs or {}))

    def _is_heard(self, path: str) -> bool:
        """Whether listeners are shown the calls of this module; those to another sequence are left
        alone.
        """
        if path in self._origins and not self._origins[path].is_own:
            self.left_alone[path] = None
            return False
        return is_observed(self.model)

    def _attend(self, *args: Any, **kwargs: Any) -> Tensor:
        call, edited = self._edited(self._stack[-1], dict(zip(NAMES, args, strict=False)) | kwargs)
        attention = _SDPA
        if not in_backward() and any(listener.reads_scores for listener in self.listeners):
            attention = fast_path(fast_attentions, edited) or _SDPA
        if edited is call:
            out = attention(*args, **kwargs)
        else:
            out = edited.run(attention)
        self._observe(edited, out)
        return out

    def _edited(self, path: str, given: dict[str, Any]) -> tuple[Call, Call]:
        """The call that the module at this path makes, as it is given and as listeners want it."""
        # Gradient checkpointing replays layers inside the backward pass: they need their edits and
        # are no new forward.
        replay = in_backward()
        layer = path
        if not replay:
            layer = self._numbered(path)
        if path in self._origins:
            self._origins[path].check(layer, given["key"].shape[-2])
        call = Call.of(layer, self._modules[path], given, self._visible, self)
        edited = call
        doubt = call.visibility.doubt
        if doubt is not None and not replay:
            self._doubts.setdefault(id(call.visibility), (layer, doubt))
        holder = next((one for one in _upwards(path) if one in self._layers), None)
        if holder is not None:
            self._calls_in.setdefault(holder, []).append(layer)
        elif not replay:
            # checkpointing may replay the inside of a layer alone
            self._refuse_states(f"{layer or 'the model'} attends outside of one")
        for listener in self.listeners:
            edited = listener.edit(edited)
        return call, edited

    def _observe(self, call: Call, out: Tensor) -> None:
        """Show listeners the call as it was made, and its output."""
        if in_backward():
            return
        for listener in self.listeners:
            listener.observe(call, out)

    def _numbered(self, path: str) -> str:
        if self._calls is not None and not self._rooted and path in self._calls:
            self.flush(complete=True)
        if self._calls is None:
            self._calls = self.begin()
            self._rooted = self._stack[0] == ""
            self._attended = True
        count = self._calls.get(path, 0) + 1
        self._calls[path] = count
        if count == 1:
            return path
        return f"{path}#{count}"


def _upwards(path: str) -> Iterator[str]:
    """The path of a module, and those of the modules that hold it, but for the model's own."""
    while path:
        yield path
        path = path.rpartition(".")[0]


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


# Reentrant: a listener may open a trace when a forward ends.
_LOCK = threading.RLock()
TAPS: dict[int, Tap] = {}
"""By the id of a model: its tap, while somebody listens."""


@contextmanager
def tapped(model: nn.Module, listener: Listener) -> Iterator[Tap]:
    """Hang a listener on the model's tap for the length of the block; the last to leave removes
    every hook.

    Raises ValueError for an object that is not a module, a compiled one, one with divided heads,
    and one that another thread taps.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(f"expected a torch.nn.Module, got {type(model).__name__}: pass the model")
    if is_divided(model):
        raise ValueError(
            "the heads of this model are divided over processes (tensor parallelism), and each "
            'sees its own alone; load it with device_map="auto"'
        )
    with _LOCK:
        tap = TAPS.get(id(model)) or TAPS.setdefault(id(model), Tap(model))
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
