"""The tap: shows the attention calls of one model to those that listen, edits first.

A forward begins with its first attention call and ends with the model's own return, or with the
next forward where layers are called one by one. In between every call passes here twice: `edited`
asks each listener in turn what the call is to become, `observed` shows all of them the call as it
was made and its output. Whoever needs numbers from the device leaves the request in `reads`: they
come over in one piece when the forward ends. What was not seen cannot be edited or recorded, so
that a forward in which a layer attended unseen is refused.

How calls are found is told in routes.py: its subclass knows which modules run (`_stack`, `_ran`,
`ids_BS`), ends forwards, and calls `edited`, `observed` and what else has no caller here. A fast
decoder of an extra does so by itself.
"""

# B batch, Q queries, S positions, D width of hidden states
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sinklab.core.attention.context import is_observed, reads_wait
from sinklab.core.compat import in_backward
from sinklab.core.instrument.arguments import read_call
from sinklab.core.instrument.call import Call


class Listener:
    """Hears of every forward of a model: it begins with the first attention call and ends by
    `finish` or `discard`.
    """

    tap: Any
    """The `Tap` that it listens to; there once it is `tapped`."""
    exact = True
    """Whether it hears of the model's own forward alone; False: of a fast decoder's as well, whose
    numbers are equal within rounding.
    """
    of_states = ""
    """Feature that needs hidden states here, as errors name it; empty if nothing does."""

    def __getstate__(self) -> dict[str, Any]:
        # a copy listens to no model
        return {**vars(self), "tap": None}

    def begin(self) -> None:
        """A forward begins."""

    def edit(self, call: Call) -> Call:
        """Return the call to make; the same object when nothing is to change."""
        return call

    def observe(self, call: Call, out: Tensor) -> None:
        """Observe the call as it was made, after every edit, and its output (`call.by_head`);
        neither is to be changed.
        """

    def edit_states(self, calls: list[str], states_BQD: Tensor) -> Tensor:
        """The hidden states to leave a decoder layer, in which these attention calls were made; the
        same object when nothing is to change."""
        return states_BQD

    def observe_states(self, calls: list[str], states_BQD: Tensor) -> None:
        """The hidden states as they leave the layer, after every edit; not to be changed."""

    def finish(self) -> None:
        """The forward came to its end."""

    def discard(self) -> None:
        """Forget the observations of a forward that failed."""


class Reads:
    """What is read of a forward from its device: all of it in one piece, when the forward ends, as
    reading a number of a GPU makes the program wait for everything that is queued there.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Nothing is to be read: the forward failed, or begins."""
        self._asked: list[tuple[tuple[Tensor, ...], Callable[..., None]]] = []
        self._checks: list[tuple[Tensor, Callable[[], None]]] = []

    def later(self, use: Callable[..., None], *parts: Tensor) -> None:
        """Have `use` given these tensors, float32 and on the CPU, when the forward ends."""
        self._asked.append((parts, use))

    def check(self, wrong: Tensor, refuse: Callable[[], None], *, at_once: bool) -> None:
        """Have `refuse` raise if the flag is set: now, or later if reading it would wait."""
        if not at_once and reads_wait(wrong.device):
            self._checks.append((wrong, refuse))
        elif bool(wrong):
            refuse()

    def settle(self) -> None:
        """Bring everything over; raise what is to be refused, then hand out what was asked for."""
        asked, checks = self._asked, self._checks
        self.forget()
        found = [part for parts, _ in asked for part in parts]
        found += [wrong for wrong, _ in checks]
        if not found:
            return
        flat = [part.to(found[0].device).flatten().float() for part in found]
        whole = torch.cat(flat).cpu()
        flags = whole[len(whole) - len(checks) :].tolist()
        for is_wrong, (_, refuse) in zip(flags, checks, strict=True):
            if is_wrong:
                refuse()
        there = iter(whole.split([len(part) for part in flat]))
        for parts, use in asked:
            use(*[next(there).view(part.shape) for part in parts])


class Tap:
    """The tap of a model, one for all its traces and edits, however they nest."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.thread = threading.current_thread()
        """The thread that runs the model: hooks hang on the model for all of them, a torch function
        mode is set in one.
        """
        self.listeners: list[Listener] = []
        self.forwards = 0
        """Forwards that the model has returned from."""
        self.suspended = 0
        """Blocks of `InterventionLog.probing` that are open."""
        self.ids_BS: Tensor | None = None
        """Token ids that the running forward was given, if they are among its arguments."""
        self.reads = Reads()
        """What is read of it when it ends."""
        self.prefix: int | None = None
        """Sink columns in front of the keys, which are no columns of the canvas: by the canvas that
        a denoiser announces, none with a cache of transformers, else by the first call, which
        should be a full one. None before.
        """
        self.layers: dict[str, int] = {}
        """Module paths of the attention calls so far, and their numbers, in the order they run."""
        self._modules = dict(model.named_modules())
        lists = {path for path, one in self._modules.items() if isinstance(one, nn.ModuleList)}
        # Paths of the decoder layers: the items of every `nn.ModuleList`.
        self._layers = {path for path in self._modules if path.rpartition(".")[0] in lists}
        # Paths of the modules that run now, the outermost first.
        self._stack: list[str] = []
        # Number of attention calls of the forward in progress, by module path; None between
        # forwards.
        self._calls: dict[str, int] | None = None
        # Whether it is of the model itself, and not of a layer called by hand; and whether any call
        # was seen so far.
        self._rooted = self._attended = False
        # Findings about its masks; calls made in the decoder layers that run now, by the layer's
        # path; paths that came to their end in it.
        self._visible: dict[tuple, Any] = {}
        self._calls_in: dict[str, list[str]] = {}
        self._ran: set[str] = set()

    def add(self, listener: Listener) -> None:
        """Add a listener."""
        listener.tap = self
        self.listeners.append(listener)

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

    def begin(self) -> None:
        """Open a forward, which `flush` ends."""
        self._calls = {}
        for listener in self.listeners:
            listener.begin()

    def call_of(
        self, layer: str, path: str, given: dict[str, Any], shared: dict[tuple, Any]
    ) -> Call:
        """The call that the module at this path makes with these arguments (`read_call`), with the
        number of added sinks in front of its keys. `shared` is what layers find of a mask.
        """
        if not in_backward():
            self.layers.setdefault(layer, len(self.layers))
        call = read_call(layer, self._modules[path], given, shared, self)
        visibility = call.visibility
        if visibility.running is not None:
            self.prefix = call.k_BKSD.shape[2] - visibility.running.ids_BS.shape[1]
        elif self.prefix is None:
            # a full call: its keys that are seen, less the queries that are not padding
            seen_B = (visibility.visible_BS > 0).sum(-1)
            self.prefix = max(int((seen_B - visibility.counted_BQ.sum(-1)).max()), 0)
        return call.within(prefix=self.prefix) if self.prefix else call

    def edited(self, path: str, given: dict[str, Any]) -> tuple[Call, Call]:
        """The call that the module at this path makes, as it is given and as listeners want it."""
        # Gradient checkpointing replays layers inside the backward pass: they need their edits and
        # are no new forward.
        replay = in_backward()
        layer = path
        if not replay:
            layer = self._numbered(path)
        masks = len(self._visible)
        call = self.call_of(layer, path, given, self._visible)
        doubt = call.visibility.doubt
        # once for a mask, in the first layer that is given it
        if doubt is not None and len(self._visible) > masks and not replay:
            self.check(doubt, partial(self._refuse_mask, self.forwards + 1, layer))
        edited = call
        holder = next((one for one in upwards(path) if one in self._layers), None)
        if holder is not None:
            self._calls_in.setdefault(holder, []).append(layer)
        elif not replay:
            # checkpointing may replay the inside of a layer alone
            self._check_states(f"{layer or 'the model'} attends outside of one")
        for listener in self.listeners:
            edited = listener.edit(edited)
        return call, edited

    def observed(self, call: Call, out: Tensor) -> None:
        """Show listeners the call as it was made, and its output."""
        if in_backward():
            return
        for listener in self.listeners:
            listener.observe(call, out)

    def _numbered(self, path: str) -> str:
        if self._calls is not None and not self._rooted and path in self._calls:
            self.flush(complete=True)
        if self._calls is None:
            self.begin()
            # whether the model itself was called, and not a layer of it
            self._rooted = self._stack[0] == ""
            self._attended = True
        calls: Any = self._calls
        count = calls[path] = calls.get(path, 0) + 1
        if count == 1:
            return path
        return f"{path}#{count}"

    def check(self, wrong: Tensor, refuse: Callable[[], None]) -> None:
        """Have `refuse` raise if the flag is set: now, or with whatever else is read when the
        forward ends.
        """
        self.reads.check(wrong, refuse, at_once=self._calls is None)

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
        self._calls = None
        self._ran = set()
        self._visible.clear()
        self._calls_in.clear()
        try:
            if complete:
                self._check_siblings(called, ran)
                for listener in self.listeners:
                    listener.finish()
                self.reads.settle()
        except BaseException:
            complete = False
            raise
        finally:
            self.reads.forget()
            if not complete:
                for listener in self.listeners:
                    listener.discard()

    def _refuse_mask(self, forward: int, layer: str) -> None:
        raise ValueError(
            f"forward {forward}, {layer or 'the model'}: the additive mask could block keys "
            "or bias them: it falls suddenly to -100 or less and has other values beside that and "
            "0; give -inf, or a boolean mask, for what is hidden"
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
        for path in sorted(ran - called):
            if type(self._modules[path]) in kinds and not any(
                other.startswith(f"{path}.") for other in called
            ):
                raise ValueError(
                    f"{path} ran and never called torch.nn.functional.scaled_dot_product_attention,"
                    f" as other layers of its class {type(self._modules[path]).__name__} did: "
                    "layers would be numbered without it; give it the same attention, e.g. "
                    'model.set_attn_implementation("sdpa")'
                )

    def _pass_states(self, calls: list[str], output: Any) -> Any:
        """Show the listeners the output of a decoder layer, the first of a tuple; None if it is
        unchanged.
        """
        states_BQD = output
        if isinstance(output, tuple):
            states_BQD = output[0]
        if not isinstance(states_BQD, Tensor) or states_BQD.dim() != 3:
            return self._check_states(
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

    def _check_states(self, fact: str) -> None:
        needed_by = next(filter(None, (listener.of_states for listener in self.listeners)), None)
        if needed_by:
            raise ValueError(
                f"{needed_by} needs the hidden states that decoder layers give, the items of an "
                f"nn.ModuleList, but {fact}: leave it out for this model"
            )


def upwards(path: str) -> Iterator[str]:
    """The path of a module, and those of the modules that hold it, but for the model's own."""
    while path:
        yield path
        path = path.rpartition(".")[0]
