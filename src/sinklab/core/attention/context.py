"""What code that runs attention and code that watches it tell each other, as neither imports the
other: whether a call is meant to be seen, which run and canvas it belongs to, who is watched.
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
# Ids of the modules in each `watching(…)` block: for every thread, and not for a module's copy.
_LOCK = threading.Lock()
_blocks: tuple[frozenset[int], ...] = ()


def module_of(given: Any) -> Any:
    """The model: ``as_module()`` of a wrapper such as `sinklab.load` returns, else `given`."""
    return given.as_module() if hasattr(given, "as_module") else given


SYNCHRONOUS = {"cpu"}
"""Kinds of device whose values are ready when an operation returns."""


def reads_wait(device: torch.device) -> bool:
    """Whether reading a value from this device makes the program wait for a queue."""
    return device.type not in SYNCHRONOUS


NO_FLOAT64 = {"mps"}
"""Kinds of device that have no float64."""


def widest_float(device: torch.device) -> torch.dtype:
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
    those attached to `but_of` or a part of it: the pass that computes a sink prefix is no step.
    """
    return _during(_OBSERVED, but_of or False)


def is_observed(model: nn.Module | None = None) -> bool:
    """Whether an attention call made now is visible to traces and edits of this model."""
    seen = _OBSERVED.get()
    if isinstance(seen, bool):
        return seen
    return any(model is part for part in seen.modules())


@contextmanager
def watching(*models: nn.Module, parts: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Say that the attention calls of a module are read, so that it may leave none out: in every
    thread, for the module and those inside and around it. `parts`: its modules, if known.
    """
    global _blocks
    # kept, so that no other module gets their ids
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
    """Whether so many `watching(…)` blocks are open on this module, its parts, or its owners."""
    # never changed in place: another thread may open a block meanwhile
    blocks = _blocks
    return times <= sum(any(id(part) in block for part in module.modules()) for block in blocks)


def decoding(run: object) -> AbstractContextManager[None]:
    """Say that the model calls inside the block are made for this run, one sequence or batch: code
    that compares steps starts afresh with another.
    """
    return _during(_DECODING, run)


decoding_run: Callable[[], object | None] = _DECODING.get
"""The run of the innermost `decoding(…)` block of this thread, if any."""


@dataclass(frozen=True, eq=False)
class RunningCanvas:
    """The canvas that a denoiser is evaluating now."""

    ids_BS: Tensor
    """Token ids of the whole canvas."""
    columns: slice | Tensor | None
    """Canvas positions of the queries, in their order: a slice, int64 (Q,), or None for all."""
    state_BS: Tensor | None = None
    """State of every position (its code in `sinks.STATES`, int8), if ids do not tell it."""

    @cached_property
    def columns_Q(self) -> Tensor:
        """`columns` as int64 (Q,) on the device of the ids."""
        device = self.ids_BS.device
        if isinstance(self.columns, Tensor):
            return self.columns.to(device)
        every_S = torch.arange(self.ids_BS.shape[1], device=device)
        return every_S[self.columns or slice(None)]


def running(
    ids_BS: Tensor, columns: slice | Tensor | None = None, state_BS: Tensor | None = None
) -> AbstractContextManager[None]:
    """Say that the model calls inside the block evaluate this canvas, and which of its columns
    become queries. `state_BS`: states that ids do not tell, else those of the enclosing block.
    """
    outer = _RUNNING.get()
    if state_BS is None and outer is not None and outer.ids_BS is ids_BS:
        state_BS = outer.state_BS
    return _during(_RUNNING, RunningCanvas(ids_BS, columns, state_BS))


running_canvas: Callable[[], RunningCanvas | None] = _RUNNING.get
"""The canvas of the innermost `running(…)` block, if any."""
