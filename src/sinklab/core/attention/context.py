"""Context shared by the code that runs attention and the code that watches it
(`sinklab.core.probing`), so that neither imports the other.

It says whether calls made now are meant to be seen, whether a model is watched, which run the calls
belong to, and which canvas is being evaluated.
"""

# B batch rows, S canvas positions, Q queries
from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor, nn

_OBSERVED: ContextVar[bool | nn.Module] = ContextVar("sinklab_attention_observed", default=True)
_DECODING: ContextVar[object | None] = ContextVar("sinklab_attention_decoding", default=None)
_RUNNING: ContextVar[RunningCanvas | None] = ContextVar("sinklab_attention_running", default=None)
# Ids of the modules in each `watching(…)` block. No context variable: the watcher is a hook on the
# module, in every thread that runs it. No attribute of the module: a copy of it is not watched.
_LOCK = threading.Lock()
_blocks: tuple[frozenset[int], ...] = ()


def module_of(given: Any) -> Any:
    """The model: ``as_module()`` of a wrapper such as `sinklab.load` returns, else `given`."""
    return given.as_module() if hasattr(given, "as_module") else given


AT_ONCE = {"cpu"}
"""Kinds of device whose values are ready when an operation returns; on others, reading a value
waits for a queue.
"""


def reads_wait(device: torch.device) -> bool:
    """Whether reading a value from this device makes the program wait; code that runs at every step
    then avoids it.
    """
    return device.type not in AT_ONCE


NO_FLOAT64 = {"mps"}
"""Kinds of device that have no float64."""


def finest(device: torch.device) -> torch.dtype:
    """float64, or float32 on devices without float64."""
    if device.type in NO_FLOAT64:
        return torch.float32
    return torch.float64


@cache
def on_device(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """int64, copied there once: every such copy waits for a GPU."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, device=device)


@contextmanager
def _during(variable: ContextVar, value: object) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def unobserved(but_of: nn.Module | None = None) -> AbstractContextManager[None]:
    """Hide the attention calls made inside the block from every trace and intervention, except
    those attached to `but_of` or a part of it.

    A sink prefix is run through the layers alone to get its keys and values: that pass is
    bookkeeping of the model, not a step of the text, and editing or recording it would be wrong. An
    encoder's pass is no step of its decoder either: only a trace or edit of the encoder itself (or
    a part of it) sees it.
    """
    return _during(_OBSERVED, but_of or False)


def is_observed(model: nn.Module | None = None) -> bool:
    """Whether an attention call made now is visible to traces and edits of this model: False inside
    `unobserved()`.
    """
    seen = _OBSERVED.get()
    if isinstance(seen, bool):
        return seen
    return any(model is part for part in seen.modules())


@contextmanager
def watching(*models: nn.Module, parts: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Say that the attention calls of a module are read: while the block lasts, it may not leave
    any of them out.

    Holds for every thread that runs the module, and for no other module but those inside it and
    around it. Blocks may overlap in any order, on any modules, and in several threads. `parts`: all
    its modules, if they are known.
    """
    global _blocks
    # Kept until the block ends: an id is a module's own for as long as it lives.
    kept = [*parts, *(part for model in models for part in model.modules())]
    held = frozenset(map(id, kept))
    with _LOCK:
        _blocks = (*_blocks, held)
    try:
        yield
    finally:
        with _LOCK:
            _blocks = tuple(block for block in _blocks if block is not held)


def is_watched(module: nn.Module, times: int = 1) -> bool:
    """Whether so many `watching(…)` blocks are open on this module, on ones that it is part of, or
    on parts of it.

    A decoder that leaves out queries it does not need, or module calls that hooks would see, checks
    this first.
    """
    # Never changed in place: another thread may open or close a block meanwhile.
    blocks = _blocks
    return times <= sum(any(id(part) in block for part in module.modules()) for block in blocks)


def decoding(run: object) -> AbstractContextManager[None]:
    """Say that the model calls inside the block are made for this run: one sequence or batch, from
    its first step on.

    Runs are distinguished by identity. Code that compares successive steps starts afresh when
    another run begins.
    """
    return _during(_DECODING, run)


decoding_run: Callable[[], object | None] = _DECODING.get
"""The run of the innermost `decoding(…)` block of this thread; None outside of one."""


@dataclass(frozen=True, eq=False)
class RunningCanvas:
    """The canvas that a denoiser is evaluating now."""

    ids_BS: Tensor
    """Token ids of the whole canvas, as the model reads them."""
    columns: slice | Tensor | None
    """Canvas positions whose queries run, in the order of the queries: a slice, int64 (Q,), or None
    for all.
    """
    state_BS: Tensor | None = None
    """State of every position (its number in `sinks.STATES`, int8, −1 for padding), if ids
    do not tell it.
    """

    @cached_property
    def columns_Q(self) -> Tensor:
        """`columns` as int64 (Q,) on the device of the ids, in whatever form they were given."""
        device = self.ids_BS.device
        if isinstance(self.columns, Tensor):
            return self.columns.to(device)
        every_S = torch.arange(self.ids_BS.shape[1], device=device)
        return every_S[self.columns or slice(None)]


def running(
    ids_BS: Tensor, columns: slice | Tensor | None = None, state_BS: Tensor | None = None
) -> AbstractContextManager[None]:
    """Say that the model calls inside the block evaluate this canvas, and which of its columns
    become queries.

    Under a cache a model is handed the states of some columns: nothing in its arguments says which
    they are. `state_BS`: the states of positions, from a caller that knows them otherwise than by
    [MASK] and a canvas of this length; if left out, the states announced for the same ids by the
    enclosing block hold.
    """
    outer = _RUNNING.get()
    if state_BS is None and outer is not None and outer.ids_BS is ids_BS:
        state_BS = outer.state_BS
    return _during(_RUNNING, RunningCanvas(ids_BS, columns, state_BS))


running_canvas: Callable[[], RunningCanvas | None] = _RUNNING.get
"""The canvas of the innermost `running(…)` block; None if no denoiser has announced one.

Ask inside an attention call that is watched: a denoiser need not announce others.
"""
